"""Models for tests of workflows: one that says what it is told, one that fails where it is told.

Both fulfil `rft.types.ports.ChatModel`, as the policy or as an auxiliary model.  No torch.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from rft.engine.settings import EngineSettings
from rft.errors import EngineFailed
from rft.testing.scripted import ScriptedEngine
from rft.types.completion import Completion
from rft.types.ids import ExperienceId
from rft.types.ports import ChatModel, GenerateRequest, ScoreRow

Messages = list[dict[str, Any]]


class Calls(msgspec.Struct, frozen=True):
    """An answer that calls tools: what a tool-call parser would have found in it, and the text beside."""

    tool_calls: tuple[dict[str, Any], ...]
    text: str = ""


Said = str | Calls | Exception
Answer = Said | Callable[[Messages], Said]


def tool_call(*names: str, text: str = "", **arguments: Any) -> Calls:
    """The answer that calls tool NAME with these arguments: ScriptedModel(tool_call("search", query="rft"), "It is ...").

    Several names call each with the same arguments.
    """
    calls = tuple(
        {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for i, name in enumerate(names)
    )
    return Calls(calls, text)


class ScriptedModel(ScriptedEngine):
    """Answers in order; each is a text, `tool_call(...)`, a function of the messages, or an exception that the call raises.

    `answer` is asked when the list is used up; without it another call raises EngineFailed.  `per_run` gives every run of a task a
    list of its own.  `scores` are what `classify` gives back: one list for every call, or a function of the messages.
    `calls` are the requests so far, `unused` the answers that are left.
    """

    def __init__(
        self,
        *answers: Answer,
        answer: Callable[[Messages], Said] | None = None,
        per_run: Sequence[Sequence[Answer]] | None = None,
        scores: Sequence[float] | Callable[[Messages], Sequence[float]] | None = None,
    ) -> None:
        super().__init__(settings=EngineSettings(engine_type="scripted", name="scripted-0", max_model_len=1 << 24))
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
        queue, whose = self._queue, ""
        if self._per_run is not None:
            run = ExperienceId.parse(request.request_id.rpartition("-")[0]).run
            if run >= len(self._per_run):
                raise EngineFailed(f"the script has answers for {len(self._per_run)} runs; this is run {run}")
            queue, whose = self._per_run[run], f" of run {run}"
        given: Answer | None = queue.popleft() if queue else self._else
        if given is None:
            last = str(request.messages[-1]["content"])[:200] if request.messages else ""
            raise EngineFailed(
                f"the script{whose} is over after {len(self.calls) - 1} calls, and the workflow asks once more: {last!r}.  "
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

    said: Calls

    def __new__(cls, said: Calls) -> _Text:
        made = super().__new__(cls, said.text + "".join(map(_hermes, said.tool_calls)))
        made.said = said
        return made


def _hermes(call: Mapping[str, Any]) -> str:
    function = call["function"]
    body = json.dumps({"name": function["name"], "arguments": json.loads(function["arguments"])})
    return f"<tool_call>\n{body}\n</tool_call>"


class FlakyModel:
    """A model that goes wrong at given calls, counted from 0 over everything that it is asked; else it is `model`.

    `fail`: the call raises (a ConnectionError, or the exception given for it).  `hang`: the call never ends; only the deadline of its
    run ends it.  `truncate`: the answer ends after so many tokens, with finish reason "length".
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
            short = msgspec.structs.replace(s, max_tokens=min(most, s.max_tokens), min_tokens=min(s.min_tokens, most))
            request = msgspec.structs.replace(request, sampling=short)
        return await self.model.generate(request)

    async def logprobs(self, row: ScoreRow) -> np.ndarray:
        await self._trouble()
        return await self.model.logprobs(row)

    async def classify(self, messages: Sequence[dict[str, Any]]) -> list[float]:
        await self._trouble()
        return await self.model.classify(messages)

    async def _trouble(self) -> int:
        number, self.asked = self.asked, self.asked + 1
        if number in self._hang:
            await asyncio.get_running_loop().create_future()
        if number in self._fail:
            raise self._fail[number] or ConnectionError(f"FlakyModel: call {number} was to fail")
        return number
