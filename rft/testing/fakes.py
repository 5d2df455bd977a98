"""Models for tests of workflows: scripted answers, injected failures, recordings.

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
from rft.types.completion import Completion, TokenScores
from rft.types.ids import ExperienceId
from rft.types.ports import ChatModel, GenerateRequest, ScoreRow

Messages = list[dict[str, Any]]


class ModelCalls(msgspec.Struct, frozen=True):
    """An answer that calls tools: the calls that a parser would extract, and the remaining text."""

    tool_calls: tuple[dict[str, Any], ...]
    text: str = ""


Said = str | ModelCalls | Exception
Answer = Said | Callable[[Messages], Said]


def tool_call(*names: str, text: str = "", **arguments: Any) -> ModelCalls:
    """Return an answer that calls tool NAME with these arguments: ScriptedModel(tool_call("search",
    query="rft"), "It is ...").

    Several names call each tool with the same arguments.
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
    """Answers in order; each answer is a text, `tool_call(...)`, a function of the messages, or an
    exception to raise.

    `answer` is called when the list is used up; without it another call raises EngineFailed.
    `per_run` gives every run of a task its own list.  `scores` are the results of `classify`: one
    list for every call, or a function of the messages.  `calls` are the requests so far, `unused`
    the remaining answers.
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
        self._per_run = None if per_run is None else [deque(answers) for answers in per_run]
        self._else = answer
        self._scores = scores

    @property
    def unused(self) -> list[Answer]:
        return [*self._queue, *(a for run in self._per_run or () for a in run)]

    def will_say(self, *texts: Answer) -> None:
        """Queue further answers."""
        self._queue.extend(texts)

    async def classify(self, messages: Sequence[dict[str, Any]]) -> list[float]:
        if self._scores is None:
            return await super().classify(messages)
        scores = self._scores(list(messages)) if callable(self._scores) else self._scores
        return [float(v) for v in scores]

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
        answer: Answer | None = queue.popleft() if queue else self._else
        if answer is None:
            last = str(request.messages[-1]["content"])[:200] if request.messages else ""
            raise EngineFailed(
                f"the script{whose} is over after {len(self.calls) - 1} calls, and the workflow "
                f"asks again: {last!r}.  "
                "Give ScriptedModel more answers, or answer=function"
            )
        reply = answer([dict(m) for m in request.messages]) if callable(answer) else answer
        if isinstance(reply, Exception):
            raise reply
        return reply if isinstance(reply, str) else _Text(reply)

    async def _write(self, request: GenerateRequest, prompt: np.ndarray, text: str) -> Completion:
        c = await super()._write(request, prompt, text)
        if not isinstance(text, _Text) or c.finish_reason == "length":
            return c
        name = request.request_id or str(len(self.calls))
        calls = tuple({**call, "id": f"{call['id']}_{name}"} for call in text.calls.tool_calls)
        return msgspec.structs.replace(c, text=text.calls.text, tool_calls=calls)


class _Text(str):
    """The text of an answer that calls tools, in the format of Hermes models."""

    calls: ModelCalls

    def __new__(cls, calls: ModelCalls) -> _Text:
        text = super().__new__(cls, calls.text + "".join(map(_hermes, calls.tool_calls)))
        text.calls = calls
        return text


def _hermes(call: Mapping[str, Any]) -> str:
    function = call["function"]
    body = json.dumps({"name": function["name"], "arguments": json.loads(function["arguments"])})
    return f"<tool_call>\n{body}\n</tool_call>"


class FlakyModel:
    """Wraps `model` and injects failures at the calls with these numbers, counted from 0 over all
    methods.

    `fail`: the call raises (ConnectionError, or the given exception).  `hang`: the call never ends;
    only the deadline of its run ends it.  `truncate`: the answer ends after this many tokens, with
    finish reason "length".
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
        self.requests = 0

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        number = await self._trouble()
        if (most := self._truncate.get(number)) is not None:
            s = request.sampling
            short = msgspec.structs.replace(
                s, max_tokens=min(most, s.max_tokens), min_tokens=min(s.min_tokens, most)
            )
            request = msgspec.structs.replace(request, sampling=short)
        return await self.model.generate(request)

    async def score(self, row: ScoreRow) -> TokenScores:
        await self._trouble()
        return await self.model.score(row)

    async def classify(self, messages: Sequence[dict[str, Any]]) -> list[float]:
        await self._trouble()
        return await self.model.classify(messages)

    async def _trouble(self) -> int:
        number = self.requests
        self.requests = self.requests + 1
        if number in self._hang:
            await asyncio.get_running_loop().create_future()
        if number in self._fail:
            raise self._fail[number] or ConnectionError(f"FlakyModel: call {number} was to fail")
        return number


# ---------------------------------------------------------------- recordings

# of a cassette: one readable, reviewable JSON file with all messages and answers
FORMAT = 1
Record = Literal["once", "none", "all"]
Start = Callable[[], Coroutine[Any, Any, ChatModel]]


@runtime_checkable
class Asked(ChatModel, Protocol):
    """Distinguishes a model from a function that starts one."""


class CassetteMiss(LookupError):
    """The cassette has no answer for a request."""


class RecordedModel:
    """Plays the cassette `path`; `model` is called for recording: a model, or an async function
    that starts one.

    record="once": record everything if the file is missing, else only play.  "none": only play.
    "all": record everything and rewrite the file.  Equal requests are answered in recorded order;
    any other request raises CassetteMiss.  Keep secrets out of prompts.
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
        """Number of recorded answers that were not played."""
        return 0 if self.recording else len(self._calls) - sum(self._played.values())

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        encoded = _encode(msgspec.structs.replace(request, request_id=""))
        for name in ("choices", "strict_template_args"):  # missing in older recordings
            if not encoded[name]:
                del encoded[name]
        answer = await self._ask("generate", encoded, lambda m: m.generate(request))
        return msgspec.convert(answer, list[Completion], dec_hook=_array)

    async def score(self, row: ScoreRow) -> TokenScores:
        answer = await self._ask("score", _encode(row), lambda m: m.score(row))
        return msgspec.convert(answer, TokenScores, dec_hook=_array)

    async def classify(self, messages: Sequence[dict[str, Any]]) -> list[float]:
        answer = await self._ask(
            "classify", {"messages": _encode(list(messages))}, lambda m: m.classify(messages)
        )
        return [float(v) for v in answer]

    async def _ask(
        self, method: str, request: Any, ask: Callable[[ChatModel], Awaitable[Any]]
    ) -> Any:
        key = xxhash.xxh3_128_hexdigest(json.dumps([method, request], sort_keys=True).encode())
        if self.recording:
            answer = _encode(await ask(await self._real()))
            self._calls.append({"method": method, "key": key, "request": request, "answer": answer})
            self._write()
            return answer
        number = self._played[key]
        if number >= len(self._answers[key]):
            raise CassetteMiss(self._miss(method, request, number))
        self._played[key] += 1
        return self._answers[key][number]

    async def _real(self) -> ChatModel:
        """Return the model; concurrent runs start it once."""
        if self._started is None:
            if isinstance(self._model, Asked):
                return self._model
            assert self._model is not None, "checked when it was made"
            self._started = asyncio.ensure_future(self._model())
        return await asyncio.shield(self._started)

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, _text({"format": FORMAT, "calls": self._calls}), mode=0o666)

    def _miss(self, method: str, request: Any, number: int) -> str:
        what = f"{self.path} has no answer for this {method} request"
        if number:
            return (
                f"{what}: it was recorded {number} time(s) and is asked again.  Record the "
                f'cassette again (record="all")'
            )
        recorded = [_text(c["request"]) for c in self._calls if c["method"] == method]
        text = _text(request)
        difference = "nothing like it was recorded"
        for nearest in difflib.get_close_matches(text, recorded, n=1, cutoff=0.0):
            lines = difflib.unified_diff(
                nearest.splitlines(), text.splitlines(), "recorded", "asked", "", "", 1, ""
            )
            difference = "\n".join(list(lines)[:40]) or difference
        return (
            f'{what}.  Record the cassette again (record="all"), or correct the workflow.  '
            f"Against the nearest one:\n{difference}"
        )


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        cassette = json.loads(path.read_text(encoding="utf-8"))
        if cassette["format"] != FORMAT:
            raise ValueError(f"format {cassette['format']}, this version reads {FORMAT}")
        return [
            {n: c[n] for n in ("method", "key", "request", "answer")} for c in cassette["calls"]
        ]
    except (ValueError, KeyError, TypeError) as e:
        raise ValueError(
            f"{path} is not a cassette: {e!r}; delete it and record it again"
        ) from None


def _encode(value: Any) -> Any:
    """Convert to JSON values; an array becomes {dtype, values} with every float in full precision."""
    return json.loads(msgspec.json.encode(value, enc_hook=_written))


def _written(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return {"dtype": str(value.dtype), "values": value.tolist()}
    raise TypeError(f"{type(value).__name__} cannot be written to a cassette")


def _array(kind: type, value: Any) -> Any:
    assert kind is np.ndarray, kind
    if value["dtype"] not in ("int32", "float32"):
        raise ValueError(f"dtype {value['dtype']!r} in a cassette")
    return np.array(value["values"], value["dtype"])


def _text(value: Any) -> str:
    """Format JSON with one line per entry, but arrays of numbers in one line, for readers and
    diffs.
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
