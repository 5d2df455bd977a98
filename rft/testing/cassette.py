"""A real model's answers, recorded once and played back: tests that need neither the model nor a server.

A cassette is one JSON file that can be read and reviewed.  It holds messages and answers as they were, so keep secrets out of prompts.
Invariant: an answer is played only for a request that is equal in everything but its id; any other raises CassetteMiss.
"""

from __future__ import annotations

import asyncio
import difflib
import json
import os
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import msgspec
import numpy as np
import xxhash

from rft.types.completion import Completion
from rft.types.ports import ChatModel, GenerateRequest, ScoreRow

FORMAT = 1
Record = Literal["once", "none", "all"]
Start = Callable[[], Coroutine[Any, Any, ChatModel]]


@runtime_checkable
class Asked(ChatModel, Protocol):
    """A model, as told from a function that starts one."""


class CassetteMiss(LookupError):
    """A request that the cassette has no answer for."""


class RecordedModel:
    """Plays `path`.  `model` is asked where something is to be recorded: a model, or an async function that starts one.

    record="once": everything is recorded if the file is not there yet, else it is played and nothing is asked.  "none": only played.
    "all": everything is asked and the file is written anew.  Equal requests are answered in the order in which they were recorded.
    """

    def __init__(self, path: str | Path, model: ChatModel | Start | None = None, *, record: Record = "once") -> None:
        if record not in ("once", "none", "all"):
            raise ValueError(f"record={record!r}: write once, none or all")
        self.path = Path(path)
        self.recording = record == "all" or (record == "once" and not self.path.exists())
        if self.recording and model is None:
            raise ValueError(f"{self.path} is to be recorded, but there is no model to ask; give RecordedModel(path, model)")
        if not self.recording and not self.path.exists():
            raise FileNotFoundError(f'cassette {self.path} does not exist; record it once with record="once" and a model')
        self._model = model
        self._started: asyncio.Future[ChatModel] | None = None
        self._calls: list[dict[str, Any]] = [] if self.recording else _read(self.path)
        self._played: defaultdict[str, int] = defaultdict(int)
        self._answers: defaultdict[str, list[Any]] = defaultdict(list)
        for call in self._calls:
            self._answers[call["key"]].append(call["answer"])

    @property
    def unused(self) -> int:
        """How many recorded answers were not played."""
        return 0 if self.recording else len(self._calls) - sum(self._played.values())

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        asked = _plain(msgspec.structs.replace(request, request_id=""))
        if not request.choices:  # as those were recorded that did not know them
            del asked["choices"]
        answer = await self._ask("generate", asked, lambda m: m.generate(request))
        return msgspec.convert(answer, list[Completion], dec_hook=_array)

    async def logprobs(self, row: ScoreRow) -> np.ndarray:
        answer = await self._ask("logprobs", _plain(row), lambda m: m.logprobs(row))
        found: np.ndarray = _array(np.ndarray, answer)
        return found

    async def classify(self, messages: Sequence[dict[str, Any]]) -> list[float]:
        answer = await self._ask("classify", {"messages": _plain(list(messages))}, lambda m: m.classify(messages))
        return [float(v) for v in answer]

    async def _ask(self, method: str, asked: Any, ask: Callable[[ChatModel], Awaitable[Any]]) -> Any:
        key = _key(method, asked)
        if self.recording:
            answer = _plain(await ask(await self._real()))
            self._calls.append({"method": method, "key": key, "request": asked, "answer": answer})
            self._write()
            return answer
        number = self._played[key]
        if number >= len(self._answers[key]):
            raise CassetteMiss(self._miss(method, asked, number))
        self._played[key] += 1
        return self._answers[key][number]

    async def _real(self) -> ChatModel:
        """The model; runs that ask at the same time start it once."""
        if self._started is None:
            if isinstance(self._model, Asked):
                return self._model
            assert self._model is not None, "checked when it was made"
            self._started = asyncio.ensure_future(self._model())
        return await asyncio.shield(self._started)

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_name(f".{self.path.name}.new")
        new.write_text(_text({"format": FORMAT, "calls": self._calls}), encoding="utf-8")
        os.replace(new, self.path)

    def _miss(self, method: str, asked: Any, number: int) -> str:
        what = f"{self.path} has no answer for this {method} request"
        if number:
            return f'{what}: it was recorded {number} time(s) and is asked once more.  Record the cassette anew (record="all")'
        others = [_text(c["request"]) for c in self._calls if c["method"] == method]
        near = difflib.get_close_matches(mine := _text(asked), others, n=1, cutoff=0.0)
        differs = (
            difflib.unified_diff(near[0].splitlines(), mine.splitlines(), "recorded", "asked", "", "", 1, "") if near else ()
        )
        told = "\n".join(list(differs)[:40]) or "nothing like it was recorded"
        return f'{what}.  Record the cassette anew (record="all"), or correct the workflow.  Against the nearest one:\n{told}'


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        if held["format"] != FORMAT:
            raise ValueError(f"format {held['format']}, this version reads {FORMAT}")
        return [{n: c[n] for n in ("method", "key", "request", "answer")} for c in held["calls"]]
    except (ValueError, KeyError, TypeError) as e:
        raise ValueError(f"{path} is not a cassette: {e!r}; delete it and record it anew") from None


def _key(method: str, asked: Any) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps([method, asked], sort_keys=True).encode())


def _plain(value: Any) -> Any:
    """JSON values; an array is {dtype, values}, each float in full."""
    return json.loads(msgspec.json.encode(value, enc_hook=_written))


def _written(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return {"dtype": str(value.dtype), "values": value.tolist()}
    raise TypeError(f"{type(value).__name__} cannot be written to a cassette")


def _array(wanted: type, value: Any) -> Any:
    assert wanted is np.ndarray, wanted
    if value["dtype"] not in ("int32", "float32"):
        raise ValueError(f"dtype {value['dtype']!r} in a cassette")
    return np.array(value["values"], value["dtype"])


def _text(value: Any) -> str:
    """JSON with a line for each entry, but arrays of numbers in one line: for people, and for what shows differences."""

    def lines(v: Any, indent: str) -> str:
        deeper = indent + " "
        if isinstance(v, dict) and v:
            return "{\n" + ",\n".join(f"{deeper}{_json(k)}: {lines(x, deeper)}" for k, x in v.items()) + f"\n{indent}}}"
        if isinstance(v, list) and any(isinstance(x, dict | list | str) for x in v):
            return "[\n" + ",\n".join(deeper + lines(x, deeper) for x in v) + f"\n{indent}]"
        return _json(v)

    return lines(value, "")


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
