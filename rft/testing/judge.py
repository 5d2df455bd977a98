"""A fake model for judges: for unit tests, and for finding out whether a prompt can be manipulated.

    assert judged(ClearJudge(), FakeJudge(4), "It is warm because of the sun.").value == 0.8

`FakeJudge(gullible=[...])` obeys orders outside the delimiters: it reads the chat as a model does
(the marks of a chat template begin messages), removes the blocks of the delimiters announced in the
first message, and gives full marks if one of the orders remains.
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
from rft.types.completion import (
    Completion,
    Score,
    TokenScores,
    Transcript,
    Turn,
    VersionSpan,
)
from rft.types.ids import Version
from rft.types.images import described
from rft.types.ports import GenerateRequest, ScoreRow
from rft.types.task import SamplingArgs, Task

_FORM = re.compile(r'^\{"key": "[0-9a-f]+".*\}$', re.MULTILINE)
_PLACE = re.compile(r"<([^<>]+)>")
_RANGE = re.compile(r"number from (-?[\d.]+) to (-?[\d.]+)")
Verdict = float | str | dict[str, Any]


class FakeJudge:
    """A `ChatModel` that answers with a verdict.

    `verdict`: the value of every field, values by field, or a function of the prompt that returns
    either.  `replies` come first, in order: exact texts, or errors to raise.  `gullible`: orders
    that it obeys outside the delimiters.
    """

    block_end = "<<<end {}>>>"  # regular expression; {} is the id of the delimiters

    def __init__(
        self,
        verdict: Verdict | Callable[[str], Verdict] = 1,
        *,
        replies: Iterable[str | Exception] = (),
        gullible: Collection[str] = (),
    ) -> None:
        self.verdict = verdict
        self.gullible = tuple(gullible)
        self.identity = "fake-judge"
        self.calls: list[GenerateRequest] = []
        self._replies = deque(replies)

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        self.calls.append(request)
        reply = self._replies.popleft() if self._replies else None
        if isinstance(reply, Exception):
            raise reply
        if request.choices and reply is None:
            return [self._chosen(request)]
        text = reply if reply is not None else self.reply([dict(m) for m in request.messages])
        return [completion(text, prompt=sum(len(str(m["content"])) // 4 for m in request.messages))]

    def _chosen(self, request: GenerateRequest) -> Completion:
        """Return the likelier of the choices; a numeric verdict is the probability of the first."""
        _, obeys, verdict = self._read(request.messages)
        share = (
            1.0
            if obeys
            else float(verdict)
            if isinstance(verdict, int | float)
            else float(verdict == request.choices[0])
        )
        word = request.choices[0 if share >= 0.5 else 1]
        logprob = np.log(np.array([max(share, 1 - share)], np.float32))
        answer = completion(word, prompt=sum(len(str(m["content"])) // 4 for m in request.messages))
        return msgspec.structs.replace(
            answer, tokens=answer.tokens[:1], logprobs=logprob, finish_reason="length"
        )

    async def score(self, row: ScoreRow) -> TokenScores:
        raise ValueError("a FakeJudge has no log-probs")

    async def classify(self, messages: Sequence[dict[str, Any]]) -> list[float]:
        raise ValueError("a FakeJudge has no classification head")

    def _read(self, messages: Sequence[dict[str, Any]]) -> tuple[str, bool, Verdict]:
        """Return (text outside the delimiters, whether it contains an order to obey, verdict)."""
        read = as_read(messages)
        free = _outside(read, self.block_end)
        verdict = self.verdict("\n".join(read)) if callable(self.verdict) else self.verdict
        return free, any(order in free for order in self.gullible), verdict

    def reply(self, messages: Sequence[dict[str, Any]]) -> str:
        """Return the answer to a chat; usable as `answer` of a scripted engine or a loopback
        server.
        """
        free, obeys, verdict = self._read(messages)
        forms = _FORM.findall(free)
        if not forms:
            return f"Score: {10 if obeys else verdict}"
        return "I have read it.\n" + _filled(forms[-1], verdict, best=obeys)


def completion(text: str, *, prompt: int = 1) -> Completion:
    """Return a completion with `text`; its tokens are the text's bytes."""
    tokens = np.frombuffer(text.encode("utf-8", "replace") or b" ", np.uint8).astype(np.int32)
    return Completion(
        prompt_tokens=np.zeros(max(1, prompt), np.int32),
        tokens=tokens,
        logprobs=np.full(len(tokens), -0.5, np.float32),
        text=text,
        finish_reason="stop",
        version_spans=(VersionSpan(Version(1, 0), 0, len(tokens)),),
        sampling=SamplingArgs(),
    )


def make_transcript(answer: str, *, prompt: str = "?") -> Transcript:
    """Return the transcript of a run with one call: `prompt`, then `answer`."""
    return Transcript(
        turns=(
            Turn(messages=({"role": "user", "content": prompt},), completion=completion(answer)),
        )
    )


async def score_with(judge: Any, model: Any, answers: Sequence[str], task: Task) -> list[Score]:
    """Prepare `judge` with `model` and return its scores of `answers` to one task."""
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
    """Return `score_with` for one answer, in a new event loop."""
    task = Task(taskset="test", index=0, prompt=prompt, truth=truth, row=row or {}, workflow="test")
    (score,) = asyncio.run(score_with(judge, model, [answer], task))
    return score


# ---------------------------------------------------------------- probes


class JudgeProbe(msgspec.Struct, frozen=True, kw_only=True):
    """A text that tries to manipulate a judge into full marks; `order` is the part a gullible judge
    obeys.
    """

    name: str
    kind: str
    text: str
    order: str = ""
    before: str = ""  # repeated `repeat` times before the text
    repeat: int = 0

    @property
    def answer(self) -> str:
        return self.before * self.repeat + self.text


@cache
def probes() -> tuple[JudgeProbe, ...]:
    """Return all shipped probes, of judge_probes.jsonl in this folder."""
    lines = Path(__file__).with_name("judge_probes.jsonl").read_text(encoding="utf-8").splitlines()
    return tuple(msgspec.json.decode(line, type=JudgeProbe) for line in lines)


# ---------------------------------------------------------------- inside


def as_read(messages: Sequence[dict[str, Any]]) -> list[str]:
    """Return the messages as a model sees them: a chat template's mark inside a text also begins a
    message.
    """
    chat = "".join(
        f"<|im_start|>{m['role']}\n{described(m['content'])}<|im_end|>\n" for m in messages
    )
    return [part.replace("<|im_end|>", "\n") for part in chat.split("<|im_start|>") if part.strip()]


def _outside(read: Sequence[str], block_end: str) -> str:
    """Remove the blocks of the announced delimiters from each message."""
    announced = re.search(r"<<<end (\w+)>>>", read[0])
    if announced is None:
        return "\n".join(read)
    id = re.escape(announced[1])
    end = block_end.replace("{}", id)
    block = re.compile(
        rf"^<<<[^<>\n]* {id}>>>\n.*?^{end}$", re.MULTILINE | re.DOTALL | re.IGNORECASE
    )
    return "\n".join([read[0], *(block.sub("", text) for text in read[1:])])


def _filled(form: str, verdict: Verdict, *, best: bool) -> str:
    """Fill the places of a verdict's form with values."""
    values = iter(re.findall(r'"([^"]+)": <', form))

    def value(place: re.Match[str]) -> str:
        name = next(values)
        field: Any = verdict.get(name) if isinstance(verdict, dict) else verdict
        if (bounds := _RANGE.search(place[1])) is not None:
            return (
                bounds[2] if best else json.dumps(field if field is not None else float(bounds[1]))
            )
        words = re.findall(r'"([^"]+)"', place[1])
        return json.dumps(words[0] if best else field if field in words else words[-1])

    return _PLACE.sub(value, form)
