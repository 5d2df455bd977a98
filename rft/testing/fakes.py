"""Models for tests of workflows: one that says what it is told, one that fails where it is told,
one that plays a recording.

All fulfil `rft.types.ports.ChatModel`, as the policy or as an auxiliary model.  No torch.
"""

from __future__ import annotations

import asyncio
import difflib
import json
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import msgspec
import numpy as np
import xxhash

from rft.engine.scripted import ScriptedEngine
from rft.engine.settings import EngineSettings
from rft.errors import EngineFailed
from rft.files.disk import write_whole
from rft.types.completion import Completion
from rft.types.ids import ExperienceId
from rft.types.ports import ChatModel, GenerateRequest, ScoreRow

Messages = list[dict[str, Any]]


class ModelCalls(msgspec.Struct, frozen=True):
    """An answer that calls tools: what a tool-call parser would have found in it, and the text
    beside.
    """

    tool_calls: tuple[dict[str, Any], ...]
    text: str = ""


Said = str | ModelCalls | Exception
Answer = Said | Callable[[Messages], Said]


def tool_call(*names: str, text: str = "", **arguments: Any) -> ModelCalls:
    """The answer that calls tool NAME with these arguments: ScriptedModel(tool_call("search",
    query="rft"), "It is ...").

    Several names call each with the same arguments.
    """
    calls = tuple(
        {
            "id": f"call_{i}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments)},
        }
        for i, name in enumerate(names)
    )
    return ModelCalls(calls, text)


class ScriptedModel(ScriptedEngine):
    """Answers in order; each is a text, `tool_call(...)`, a function of the messages, or an
    exception that the call raises.

    `answer` is asked when the list is used up; without it another call raises EngineFailed.
    `per_run` gives every run of a task its own list.  `scores` are what `classify` returns: one
    list for every call, or a function of the messages. `calls` are the requests so far, `unused`
    the answers that are left.
    """

    def __init__(
        self,
        *answers: Answer,
        answer: Callable[[Messages], Said] | None = None,
        per_run: Sequence[Sequence[Answer]] | None = None,
        scores: Sequence[float] | Callable[[Messages], Sequence[float]] | None = None,
    ) -> None:
        super().__init__(
            settings=EngineSettings(
                engine_type="scripted", name="scripted-0", max_model_len=1 << 24
            )
        )
        if per_run is not None and answers:
            raise ValueError("give the answers of all runs, or per_run, not both")
        self._queue: deque[Answer] = deque(answers)
        self._per_run = None if per_run is None else [deque(one) for one in per_run]
        self._else = answer
        self._scores = scores

    @property
    def unused(self) -> list[Answer]:
        return [*self._queue, *(a for run in self._per_run or () for a in run)]

    def will_say(self, *texts: Answer) -> None:
        """Further answers, after those that are queued."""
        self._queue.extend(texts)

    async def classify(self, messages: Sequence[dict[str, Any]]) -> list[float]:
        if self._scores is None:
            return await super().classify(messages)
        found = self._scores(list(messages)) if callable(self._scores) else self._scores
        return [float(v) for v in found]

    def _next(self, request: GenerateRequest) -> str:
        queue = self._queue
        whose = ""
        if self._per_run is not None:
            run = ExperienceId.parse(request.request_id.rpartition("-")[0]).run
            if run >= len(self._per_run):
                raise EngineFailed(
                    f"the script has answers for {len(self._per_run)} runs; this is run {run}"
                )
            queue = self._per_run[run]
            whose = f" of run {run}"
        given: Answer | None = queue.popleft() if queue else self._else
        if given is None:
            last = str(request.messages[-1]["content"])[:200] if request.messages else ""
            raise EngineFailed(
                f"the script{whose} is over after {len(self.calls) - 1} calls, and the workflow "
                f"asks again: {last!r}.  "
                "Give ScriptedModel more answers, or answer=function"
            )
        said = given([dict(m) for m in request.messages]) if callable(given) else given
        if isinstance(said, Exception):
            raise said
        return said if isinstance(said, str) else _Text(said)

    async def _write(self, request: GenerateRequest, prompt: np.ndarray, text: str) -> Completion:
        c = await super()._write(request, prompt, text)
        if not isinstance(text, _Text) or c.finish_reason == "length":
            return c
        name = request.request_id or str(len(self.calls))
        calls = tuple({**call, "id": f"{call['id']}_{name}"} for call in text.said.tool_calls)
        return msgspec.structs.replace(c, text=text.said.text, tool_calls=calls)


class _Text(str):
    """The text of an answer that calls tools, as models of the Hermes family write it."""

    said: ModelCalls

    def __new__(cls, said: ModelCalls) -> _Text:
        made = super().__new__(cls, said.text + "".join(map(_hermes, said.tool_calls)))
        made.said = said
        return made


def _hermes(call: Mapping[str, Any]) -> str:
    function = call["function"]
    body = json.dumps({"name": function["name"], "arguments": json.loads(function["arguments"])})
    return f"<tool_call>\n{body}\n</tool_call>"


class FlakyModel:
    """A model that goes wrong at given calls, counted from 0 over everything that it is asked; else
    it is `model`.

    `fail`: the call raises (a ConnectionError, or the exception given for it).  `hang`: the call
    never ends; only the deadline of its run ends it.  `truncate`: the answer ends after this many
    tokens, with finish reason "length".
    """

    def __init__(
        self,
        model: ChatModel,
        *,
        fail: Iterable[int] | Mapping[int, Exception] = (),
        hang: Iterable[int] = (),
        truncate: Mapping[int, int] | None = None,
    ) -> None:
        self.model = model
        self._fail = dict(fail) if isinstance(fail, Mapping) else dict.fromkeys(fail)
        self._hang = frozenset(hang)
        self._truncate = dict(truncate or {})
        self.asked = 0

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        number = await self._trouble()
        if (most := self._truncate.get(number)) is not None:
            s = request.sampling
            short = msgspec.structs.replace(
                s, max_tokens=min(most, s.max_tokens), min_tokens=min(s.min_tokens, most)
            )
            request = msgspec.structs.replace(request, sampling=short)
        return await self.model.generate(request)

    async def logprobs(self, row: ScoreRow) -> np.ndarray:
        await self._trouble()
        return await self.model.logprobs(row)

    async def classify(self, messages: Sequence[dict[str, Any]]) -> list[float]:
        await self._trouble()
        return await self.model.classify(messages)

    async def _trouble(self) -> int:
        number = self.asked
        self.asked = self.asked + 1
        if number in self._hang:
            await asyncio.get_running_loop().create_future()
        if number in self._fail:
            raise self._fail[number] or ConnectionError(f"FlakyModel: call {number} was to fail")
        return number


# ---------------------------------------------------------------- recordings

# of a cassette: one JSON file that can be read and reviewed, messages and answers as they were
FORMAT = 1
Record = Literal["once", "none", "all"]
Start = Callable[[], Coroutine[Any, Any, ChatModel]]


@runtime_checkable
class Asked(ChatModel, Protocol):
    """A model, as told from a function that starts one."""


class CassetteMiss(LookupError):
    """A request that the cassette has no answer for."""


class RecordedModel:
    """Plays the cassette `path`.  `model` is asked where something is to be recorded: a model, or
    an async function that starts one.

    record="once": everything is recorded if the file is not there yet, else it is played and
    nothing is asked.  "none": only played. "all": everything is asked and the file is written anew.
     Equal requests are answered in the order in which they were recorded; any other raises
     CassetteMiss.  Keep secrets out of prompts.
    """

    def __init__(
        self, path: str | Path, model: ChatModel | Start | None = None, *, record: Record = "once"
    ) -> None:
        if record not in ("once", "none", "all"):
            raise ValueError(f"record={record!r}: write once, none or all")
        self.path = Path(path)
        self.recording = record == "all" or (record == "once" and not self.path.exists())
        if self.recording and model is None:
            raise ValueError(
                f"{self.path} is to be recorded, but there is no model to ask; give "
                f"RecordedModel(path, model)"
            )
        if not self.recording and not self.path.exists():
            raise FileNotFoundError(
                f'cassette {self.path} does not exist; record it once with record="once" and a '
                f"model"
            )
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
        for name in ("choices", "strict_template_args"):  # older recordings do not have them
            if not asked[name]:
                del asked[name]
        answer = await self._ask("generate", asked, lambda m: m.generate(request))
        return msgspec.convert(answer, list[Completion], dec_hook=_array)

    async def logprobs(self, row: ScoreRow) -> np.ndarray:
        answer = await self._ask("logprobs", _plain(row), lambda m: m.logprobs(row))
        found: np.ndarray = _array(np.ndarray, answer)
        return found

    async def classify(self, messages: Sequence[dict[str, Any]]) -> list[float]:
        answer = await self._ask(
            "classify", {"messages": _plain(list(messages))}, lambda m: m.classify(messages)
        )
        return [float(v) for v in answer]

    async def _ask(
        self, method: str, asked: Any, ask: Callable[[ChatModel], Awaitable[Any]]
    ) -> Any:
        key = xxhash.xxh3_128_hexdigest(json.dumps([method, asked], sort_keys=True).encode())
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
        write_whole(self.path, _text({"format": FORMAT, "calls": self._calls}), mode=0o666)

    def _miss(self, method: str, asked: Any, number: int) -> str:
        what = f"{self.path} has no answer for this {method} request"
        if number:
            return (
                f"{what}: it was recorded {number} time(s) and is asked again.  Record the "
                f'cassette again (record="all")'
            )
        others = [_text(c["request"]) for c in self._calls if c["method"] == method]
        near = difflib.get_close_matches(mine := _text(asked), others, n=1, cutoff=0.0)
        differs = (
            difflib.unified_diff(
                near[0].splitlines(), mine.splitlines(), "recorded", "asked", "", "", 1, ""
            )
            if near
            else ()
        )
        told = "\n".join(list(differs)[:40]) or "nothing like it was recorded"
        return (
            f'{what}.  Record the cassette again (record="all"), or correct the workflow.  '
            f"Against the nearest one:\n{told}"
        )


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        if held["format"] != FORMAT:
            raise ValueError(f"format {held['format']}, this version reads {FORMAT}")
        return [{n: c[n] for n in ("method", "key", "request", "answer")} for c in held["calls"]]
    except (ValueError, KeyError, TypeError) as e:
        raise ValueError(
            f"{path} is not a cassette: {e!r}; delete it and record it again"
        ) from None


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
    """JSON with a line for each entry, but arrays of numbers in one line: for people, and for what
    shows differences.
    """

    def lines(v: Any, indent: str) -> str:
        deeper = indent + " "
        if isinstance(v, dict) and v:
            return (
                "{\n"
                + ",\n".join(f"{deeper}{_json(k)}: {lines(x, deeper)}" for k, x in v.items())
                + f"\n{indent}}}"
            )
        if isinstance(v, list) and any(isinstance(x, dict | list | str) for x in v):
            return "[\n" + ",\n".join(deeper + lines(x, deeper) for x in v) + f"\n{indent}]"
        return _json(v)

    return lines(value, "")


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
