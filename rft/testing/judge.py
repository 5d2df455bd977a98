"""A judge's model without a model: for unit tests of judges, and for finding out whether a prompt
can be talked round.

    assert judged(ClearJudge(), FakeJudge(4), "It is warm because of the sun.").value == 0.8

`FakeJudge(gullible=[...])` does whatever stands outside of the delimiters: it reads the chat as a
model does (the marks of a chat template begin messages), takes out the blocks of the delimiters
that its first message announces, and gives full marks where one of these orders is left.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rft.reward.base import score, score_group
from rft.types.completion import Completion, Score, Transcript, Turn, VersionSpan
from rft.types.ids import Version
from rft.types.ports import GenerateRequest, ScoreRow
from rft.types.task import SamplingArgs, Task

_FORM = re.compile(r'^\{"key": "[0-9a-f]+".*\}$', re.MULTILINE)
_PLACE = re.compile(r"<([^<>]+)>")
_RANGE = re.compile(r"number from (-?[\d.]+) to (-?[\d.]+)")
Says = float | str | dict[str, Any]


class FakeJudge:
    """A `ChatModel`.  `says`: the value of every field of the verdict, values by field, or a
    function of the prompt that gives one.

    `replies` come first, in order: texts as they are, or errors that are raised.  `gullible`:
    orders that it follows where they stand outside of the delimiters.
    """

    block_end = "<<<end {}>>>"  # a regular expression; {} is the id of the delimiters

    def __init__(
        self,
        says: Says | Callable[[str], Says] = 1,
        *,
        replies: Iterable[str | Exception] = (),
        gullible: Collection[str] = (),
    ) -> None:
        self.says = says
        self.gullible = tuple(gullible)
        self.identity = "fake-judge"
        self.calls: list[GenerateRequest] = []
        self._replies = deque(replies)

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        self.calls.append(request)
        given = self._replies.popleft() if self._replies else None
        if isinstance(given, Exception):
            raise given
        if request.choices and given is None:
            return [self._chosen(request)]
        text = given if given is not None else self.reply([dict(m) for m in request.messages])
        return [completion(text, prompt=sum(len(str(m["content"])) // 4 for m in request.messages))]

    def _chosen(self, request: GenerateRequest) -> Completion:
        """The likelier one of the choices; a number that it says is the probability of the first."""
        _, obeys, said = self._read(request.messages)
        share = (
            1.0
            if obeys
            else float(said)
            if isinstance(said, int | float)
            else float(said == request.choices[0])
        )
        word = request.choices[0 if share >= 0.5 else 1]
        logprob = np.log(np.array([max(share, 1 - share)], np.float32))
        told = completion(word, prompt=sum(len(str(m["content"])) // 4 for m in request.messages))
        return msgspec.structs.replace(
            told, tokens=told.tokens[:1], logprobs=logprob, finish_reason="length"
        )

    async def logprobs(self, row: ScoreRow) -> np.ndarray:
        raise ValueError("a FakeJudge has no log-probs")

    async def classify(self, messages: Sequence[dict[str, Any]]) -> list[float]:
        raise ValueError("a FakeJudge has no classification head")

    def _read(self, messages: Sequence[dict[str, Any]]) -> tuple[str, bool, Says]:
        """(what of the messages stands outside of the delimiters, whether that has an order it
        follows, what it says).
        """
        read = as_read(messages)
        free = _outside(read, self.block_end)
        said = self.says("\n".join(read)) if callable(self.says) else self.says
        return free, any(order in free for order in self.gullible), said

    def reply(self, messages: Sequence[dict[str, Any]]) -> str:
        """What it answers to a chat: `answer` of a scripted engine or a loopback server."""
        free, obeys, said = self._read(messages)
        forms = _FORM.findall(free)
        if not forms:
            return f"Score: {10 if obeys else said}"
        return "I have read it.\n" + _filled(forms[-1], said, best=obeys)


def completion(text: str, *, prompt: int = 1) -> Completion:
    """An answer of `text`; its tokens are its bytes."""
    said = np.frombuffer(text.encode("utf-8", "replace") or b" ", np.uint8).astype(np.int32)
    return Completion(
        prompt_tokens=np.zeros(max(1, prompt), np.int32),
        tokens=said,
        logprobs=np.full(len(said), -0.5, np.float32),
        text=text,
        finish_reason="stop",
        version_spans=(VersionSpan(Version(1, 0), 0, len(said)),),
        sampling=SamplingArgs(),
    )


def make_transcript(answer: str, *, prompt: str = "?") -> Transcript:
    """The transcript of a run in which the policy was asked `prompt` and gave `answer`."""
    return Transcript(
        turns=(
            Turn(messages=({"role": "user", "content": prompt},), completion=completion(answer)),
        )
    )


async def score_with(judge: Any, model: Any, answers: Sequence[str], task: Task) -> list[Score]:
    """What `judge` (a reward that is not prepared yet) says of `answers` to one task, asking
    `model` under every name.
    """
    await judge.prepare({judge.args.judge or "judge": model})
    try:
        runs = [make_transcript(a, prompt=task.prompt or "?") for a in answers]
        if judge.whole_group:
            return await score_group(judge, task, runs)
        return list(await asyncio.gather(*(score(judge, task, r) for r in runs)))
    finally:
        await judge.close()


def judged(
    judge: Any,
    model: Any,
    answer: str,
    *,
    prompt: str = "?",
    truth: Any = None,
    row: dict[str, Any] | None = None,
) -> Score:
    """As `score_with`, of one answer, in its own event loop."""
    task = Task(taskset="test", index=0, prompt=prompt, truth=truth, row=row or {}, workflow="test")
    (found,) = asyncio.run(score_with(judge, model, [answer], task))
    return found


# ---------------------------------------------------------------- probes


class JudgeProbe(msgspec.Struct, frozen=True, kw_only=True):
    """A text that tries to talk a judge into full marks.  `order` is the part of it that a gullible
    judge would follow.
    """

    name: str
    kind: str
    text: str
    order: str = ""
    before: str = ""  # this, so often, stands before the text
    repeat: int = 0

    @property
    def answer(self) -> str:
        return self.before * self.repeat + self.text


@cache
def probes() -> tuple[JudgeProbe, ...]:
    """All that are shipped, in judge_probes.jsonl beside this file."""
    lines = Path(__file__).with_name("judge_probes.jsonl").read_text(encoding="utf-8").splitlines()
    return tuple(msgspec.json.decode(line, type=JudgeProbe) for line in lines)


# ---------------------------------------------------------------- inside


def as_read(messages: Sequence[dict[str, Any]]) -> list[str]:
    """The messages as a model sees them: a mark of the chat template inside a text begins a message
    too.
    """
    chat = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    return [part.replace("<|im_end|>", "\n") for part in chat.split("<|im_start|>") if part.strip()]


def _outside(read: Sequence[str], block_end: str) -> str:
    """What is left when the blocks of the announced delimiters are taken out of each message."""
    announced = re.search(r"<<<end (\w+)>>>", read[0])
    if announced is None:
        return "\n".join(read)
    id = re.escape(announced[1])
    end = block_end.replace("{}", id)
    block = re.compile(
        rf"^<<<[^<>\n]* {id}>>>\n.*?^{end}$", re.MULTILINE | re.DOTALL | re.IGNORECASE
    )
    return "\n".join([read[0], *(block.sub("", text) for text in read[1:])])


def _filled(form: str, said: Says, *, best: bool) -> str:
    """The form of a verdict with values for its places."""
    values = iter(re.findall(r'"([^"]+)": <', form))

    def value(place: re.Match[str]) -> str:
        name = next(values)
        given: Any = said.get(name) if isinstance(said, dict) else said
        if (bounds := _RANGE.search(place[1])) is not None:
            return (
                bounds[2] if best else json.dumps(given if given is not None else float(bounds[1]))
            )
        words = re.findall(r'"([^"]+)"', place[1])
        return json.dumps(words[0] if best else given if given in words else words[-1])

    return _PLACE.sub(value, form)
