"""Judges that are ready to use: rubric, reference, pairwise and group-relative.
docs/howto/judge.md shows each.

explorer.auxiliary_models: [{name: judge, model_path: ...}]
buffer.explorer_input.taskset: {default_reward_fn_type: rubric_judge, reward_fn_args: {judge: judge,
criteria: {correct: 2, clear: 1}}}
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import random
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, Field, field_validator

from rft.reward.base import RewardResult, reward
from rft.reward.delimiters import PromptDelimiters, Scale, WordChoice
from rft.reward.judge_args import JudgeArgs
from rft.reward.judge_base import REPEAT, Judge, JudgeCase
from rft.types.completion import Score, Transcript
from rft.types.task import Task


class RubricArgs(JudgeArgs):
    """`criteria`: weights by name; `describe`: what a name means.  `rubric_key`: column with a
    row's own list of {criterion, points}.
    """

    criteria: dict[str, float] = Field({"quality": 1.0}, min_length=1)
    describe: dict[str, str] = Field(default_factory=dict)
    rubric_key: str | None = None
    instruction: str = "Judge how good the answer is by each criterion."

    @field_validator("criteria")
    @classmethod
    def _weighed(cls, given: dict[str, float]) -> dict[str, float]:
        if "key" in given or any(w < 0 for w in given.values()) or not any(given.values()):
            raise ValueError(
                "weights must not be negative, not all 0, and no criterion may be called key"
            )
        return given


FAULT = " (a fault: 1 if the answer does not have it at all, 10 if it fully has it)"


@reward("rubric_judge")
class RubricJudge(Judge):
    """1 to 10 by each criterion; the reward is the weighted mean of the tenths, 0.1 to 1.0, and
    every criterion is a part.

    A row's criterion may have negative points: a fault, of which 1 says not at all and 10 fully.
    Formula: reward = max(0.1, (sum of w x n/10 where w > 0  -  sum of |w| x (n - 1)/9 where w < 0)
    / sum of w where w > 0) so that a fault that is not there costs nothing.  A row without positive
    points is unscored.
    """

    Args = RubricArgs

    async def __call__(self, task: Task, transcript: Transcript) -> RewardResult:
        if not any(weight > 0 for weight, _ in self._criteria(task).values()):
            self.metrics.unscored += 1
            return Score(value=None, reason=f"no criterion of row {task.index} has positive points")
        return await super().__call__(task, transcript)

    def prompt(self, case: JudgeCase, delimit: PromptDelimiters) -> str:
        criteria = self._criteria(case.task)
        listed = "\n".join(
            f"- {name}" + (FAULT if weight < 0 else "") + (f": {says}" if says else "")
            for name, (weight, says) in criteria.items()
        )
        return (
            f"{self.args.instruction}  1 is worst, 10 is "
            f"best.\n\nCriteria:\n{listed}\n\n{delimit('question', case.question)}\n\n"
            f"{delimit('answer', case.answer)}\n\n{delimit.ask(**dict.fromkeys(criteria, self.scale))}"
        )

    def value(self, verdict: dict[str, Any], case: JudgeCase) -> RewardResult:
        weights = {name: weight for name, (weight, _) in self._criteria(case.task).items()}
        parts = {name: self.scale.value(number) for name, number in verdict.items()}
        low = self.scale.low
        high = self.scale.high
        earned = math.fsum(
            w * (parts[n] if w > 0 else (verdict[n] - low) / (high - low))
            for n, w in weights.items()
        )
        return Score(
            value=max(self.scale.lowest, earned / math.fsum(w for w in weights.values() if w > 0)),
            parts=parts,
        )

    def _criteria(self, task: Task) -> dict[str, tuple[float, str]]:
        """name -> (weight, meaning)."""
        if (column := self.args.rubric_key) is None:
            return {
                name: (weight, self.args.describe.get(name, ""))
                for name, weight in self.args.criteria.items()
            }
        rows = task.row.get(column)
        if not isinstance(rows, list) or not rows:
            raise ValueError(f"row {task.index} has no list of criteria in column {column!r}")
        return {
            f"criterion {i}": _of_row(r, f"criterion {i} of row {task.index}")
            for i, r in enumerate(rows, 1)
        }


def _of_row(given: Any, where: str) -> tuple[float, str]:
    """(points, text) of one criterion of a row.  Raises ValueError."""
    if not isinstance(given, dict):
        raise ValueError(f"{where} is {given!r:.80}; write {{criterion: TEXT, points: NUMBER}}")
    points: Any = given.get("points", given.get("weight", 1))
    says = str(given.get("criterion", given.get("description", "")))
    try:
        number = float(points)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{where}: its points are {points!r:.80}, not a number")
    return number, says


class ReferenceArgs(JudgeArgs):
    instruction: str = (
        "Is the final result of the answer the same as the reference's?  Other words and forms of "
        "the same result are right.  "
        "An answer without a final result, or with several different ones, is wrong."
    )


@reward("reference_judge")
class ReferenceJudge(Judge):
    """1 if the answer agrees with the row's gold answer, else 0."""

    Args: ClassVar[type[BaseModel]] = ReferenceArgs
    scale = Scale(0, 1)

    async def __call__(self, task: Task, transcript: Transcript) -> RewardResult:
        if task.truth is None:
            return Score(value=None, reason="the row has no reference answer")
        return await super().__call__(task, transcript)

    def prompt(self, case: JudgeCase, delimit: PromptDelimiters) -> str:
        return (
            f"{self.args.instruction}\n\n{delimit('question', case.question)}\n\n{delimit('reference', text_of(case.task.truth))}\n\n"
            f"{delimit('answer', case.answer)}\n\n{delimit.ask(correct=WordChoice(('yes', 'no')))}"
        )

    def value(self, verdict: dict[str, Any], case: JudgeCase) -> RewardResult:
        return float(verdict["correct"] == "yes")


class PairwiseArgs(JudgeArgs):
    """`against`: the row's reference answer, or the group's other answers: each meets the next
    `opponents` of them in turn.
    """

    against: Literal["reference", "group"] = "reference"
    opponents: int = Field(1, ge=1)
    instruction: str = "Which answer to the question is better?  Length and order do not matter."


@reward("pairwise_judge")
class PairwiseJudge(Judge):
    """1 for the better answer, 0 for the other, 0.5 for a tie; every pair is judged in both orders
    and the two are averaged.
    """

    Args = PairwiseArgs
    scale = Scale(0, 1, whole=False)
    words = WordChoice(("first", "second", "tie"))

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.whole_group = self.args.against == "group"

    async def __call__(self, task: Task, given: Any) -> Any:
        if self.whole_group:
            return await self._among(task, given)
        case = JudgeCase.of(task, given)
        if (known := self.without_asking(case)) is not None:
            return known
        if task.truth is None:
            return Score(value=None, reason="the row has no reference answer")
        value, why = await self._meet(case.question, case.answer, text_of(task.truth))
        return Score(value=value, reason=why)

    async def _among(self, task: Task, transcripts: Sequence[Transcript]) -> list[Score]:
        """Mean over an answer's comparisons; an empty answer is compared with none."""
        cases = [JudgeCase.of(task, t) for t in transcripts]
        known = [self.without_asking(c) for c in cases]
        there = [i for i, k in enumerate(known) if k is None]
        steps = range(1, min(self.args.opponents, len(there) - 1) + 1)
        pairs = {(there[i], there[(i + s) % len(there)]) for i in range(len(there)) for s in steps}
        pairs = {(min(p), max(p)) for p in pairs}
        met = await asyncio.gather(
            *(
                self._meet(cases[i].question, cases[i].answer, cases[j].answer)
                for i, j in sorted(pairs)
            )
        )
        won: dict[int, list[float]] = {i: [] for i in there}
        for (i, j), (value, _) in zip(sorted(pairs), met, strict=True):
            if value is not None:
                won[i].append(value)
                won[j].append(1 - value)
        why = next((w for _, w in met if w), "there is no other answer to compare with")
        return [
            k
            if k is not None
            else Score(
                value=math.fsum(won[i]) / len(won[i]) if won[i] else None,
                reason="" if won[i] else why,
            )
            for i, k in enumerate(known)
        ]

    async def _meet(self, question: str, one: str, other: str) -> tuple[float | None, str]:
        """How far `one` is better than `other`, or None and why."""
        if one.strip() == other.strip():
            return 0.5, ""
        orders = await asyncio.gather(
            self._compare(question, one, other), self._compare(question, other, one)
        )
        if (unread := next((o.why for o in orders if o.verdict is None), None)) is not None:
            return None, unread
        points = {"first": 1.0, "tie": 0.5, "second": 0.0}
        ahead, behind = (points[o.verdict["better"]] for o in orders if o.verdict is not None)
        self.metrics.pairs += 1
        self.metrics.order_flips += ahead != 1 - behind
        return (ahead + 1 - behind) / 2, ""

    async def _compare(self, question: str, first: str, second: str) -> Any:
        def write(delimit: PromptDelimiters, one: str, other: str) -> str:
            return (
                f"{self.args.instruction}\n\n{delimit('question', question)}\n\n{delimit('first', one)}\n\n{delimit('second', other)}\n\n"
                f"{delimit.ask(better=self.words)}"
            )

        return await self.ask(write, first, second)


class RulerArgs(JudgeArgs):
    """`rubric`: what makes an answer good."""

    rubric: str = (
        "An answer that reaches the goal of its task is better than one that does not; "
        "of two that do, the one with less detour."
    )


@reward("ruler_judge")
class RulerJudge(Judge):
    """All answers to a task in one question, each scored from 0 to 1 beside the others.

    Their order is shuffled; equal ones are shown once.

    Method of OpenPipe ART's RULER (relative scores need no absolute scale, and a group's advantages
    use nothing else).
    """

    Args = RulerArgs
    scale = Scale(0, 1, whole=False)
    whole_group = True

    async def __call__(self, task: Task, transcripts: Any) -> Any:
        cases = [JudgeCase.of(task, t) for t in transcripts]
        known = [self.without_asking(c) for c in cases]
        texts = sorted({c.answer.strip() for c, k in zip(cases, known, strict=True) if k is None})
        order = hashlib.blake2b(
            json.dumps([texts, REPEAT.get()]).encode("utf-8", "surrogatepass"), digest_size=8
        ).digest()
        random.Random(order).shuffle(texts)
        names = {text: f"answer {i}" for i, text in enumerate(texts, 1)}

        def write(delimit: PromptDelimiters, *given: str) -> str:
            shown = "\n\n".join(
                delimit(name, text) for name, text in zip(names.values(), given, strict=True)
            )
            return (
                "Score every answer to the question from 0 (worst) to 1 (best), each beside the "
                "others.  Use the range: small "
                f"differences count.\n{self.args.rubric}\n\n{delimit('question', cases[0].question)}\n\n{shown}\n\n"
                f"{delimit.ask(**dict.fromkeys(names.values(), self.scale))}"
            )

        verdict = None
        why = ""
        if texts:
            found = await self.ask(write, *texts)
            verdict = found.verdict
            why = found.why
        return [
            k
            if k is not None
            else Score(
                value=None if verdict is None else verdict[names[c.answer.strip()]], reason=why
            )
            for c, k in zip(cases, known, strict=True)
        ]


def text_of(truth: Any) -> str:
    """A gold answer as a text; of {"target": ...} the target."""
    while isinstance(truth, dict) and "target" in truth:
        truth = truth["target"]
    return (
        json.dumps(truth, ensure_ascii=False, default=str)
        if isinstance(truth, dict | list)
        else str(truth)
    )
