"""Ready-made judges: rubric, reference, pairwise and group-relative.  docs/howto/judge.md shows
each.

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
    """`criteria`: weights by name; `describe`: meaning of a name.  `rubric_key`: column with a
    row's own list of {criterion, points}.
    """

    criteria: dict[str, float] = Field({"quality": 1.0}, min_length=1)
    describe: dict[str, str] = Field(default_factory=dict)
    rubric_key: str | None = None
    instruction: str = "Judge how good the answer is by each criterion."

    @field_validator("criteria")
    @classmethod
    def _weighed(cls, weights: dict[str, float]) -> dict[str, float]:
        if "key" in weights or any(w < 0 for w in weights.values()) or not any(weights.values()):
            raise ValueError(
                "weights must not be negative, not all 0, and no criterion may be called key"
            )
        return weights


FAULT = " (a fault: 1 if the answer does not have it at all, 10 if it fully has it)"


@reward("rubric_judge")
class RubricJudge(Judge):
    """Weighted mean of scores 1 to 10 by each criterion, divided by 10: 0.1 to 1.0.

    Every criterion is a part.  A row's criterion with negative points is a fault, scored 1 if
    absent and 10 if fully present.  A row without positive points is unscored.

    reward = max(0.1, (sum of w x n/10 where w > 0  -  sum of |w| x (n - 1)/9 where w < 0) / sum of
    w where w > 0), so that an absent fault costs nothing.
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
            f"- {name}" + (FAULT if weight < 0 else "") + (f": {meaning}" if meaning else "")
            for name, (weight, meaning) in criteria.items()
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
        """Return name -> (weight, meaning)."""
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


def _of_row(row: Any, where: str) -> tuple[float, str]:
    """Return (points, text) of one criterion of a row.  Raises ValueError."""
    if not isinstance(row, dict):
        raise ValueError(f"{where} is {row!r:.80}; write {{criterion: TEXT, points: NUMBER}}")
    points: Any = row.get("points", row.get("weight", 1))
    meaning = str(row.get("criterion", row.get("description", "")))
    try:
        number = float(points)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{where}: its points are {points!r:.80}, not a number")
    return number, meaning


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
    """`against`: the row's reference answer, or the group's other answers, of which each answer
    meets the next `opponents`.
    """

    against: Literal["reference", "group"] = "reference"
    opponents: int = Field(1, ge=1)
    instruction: str = "Which answer to the question is better?  Length and order do not matter."


@reward("pairwise_judge")
class PairwiseJudge(Judge):
    """1 for the better answer, 0 for the other, 0.5 for a tie.

    Every pair is judged in both orders, and the two results are averaged.
    """

    Args = PairwiseArgs
    scale = Scale(0, 1, integer=False)
    words = WordChoice(("first", "second", "tie"))

    def __init__(self, **args: Any) -> None:
        super().__init__(**args)
        self.whole_group = self.args.against == "group"

    async def __call__(self, task: Task, transcript: Any) -> Any:
        if self.whole_group:
            return await self._among(task, transcript)
        case = JudgeCase.from_transcript(task, transcript)
        if (score := self.without_asking(case)) is not None:
            return score
        if task.truth is None:
            return Score(value=None, reason="the row has no reference answer")
        value, reason = await self._meet(case, text_of(task.truth))
        return Score(value=value, reason=reason)

    async def _among(self, task: Task, transcripts: Sequence[Transcript]) -> list[Score]:
        """Return the mean over each answer's comparisons; an empty answer is not compared."""
        cases = [JudgeCase.from_transcript(task, t) for t in transcripts]
        scores = [self.without_asking(c) for c in cases]
        shown = [i for i, k in enumerate(scores) if k is None]
        steps = range(1, min(self.args.opponents, len(shown) - 1) + 1)
        pairs = {(shown[i], shown[(i + s) % len(shown)]) for i in range(len(shown)) for s in steps}
        pairs = {(min(p), max(p)) for p in pairs}
        met = await asyncio.gather(
            *(self._meet(cases[i], cases[j].answer) for i, j in sorted(pairs))
        )
        won: dict[int, list[float]] = {i: [] for i in shown}
        for (i, j), (value, _) in zip(sorted(pairs), met, strict=True):
            if value is not None:
                won[i].append(value)
                won[j].append(1 - value)
        reason = next((w for _, w in met if w), "there is no other answer to compare with")
        return [
            k
            if k is not None
            else Score(
                value=math.fsum(won[i]) / len(won[i]) if won[i] else None,
                reason="" if won[i] else reason,
            )
            for i, k in enumerate(scores)
        ]

    async def _meet(self, case: JudgeCase, other: str) -> tuple[float | None, str]:
        """Return how much better the answer is than `other` (0 to 1), or None and the reason."""
        answer = case.answer
        if answer.strip() == other.strip():
            return 0.5, ""
        orders = await asyncio.gather(
            self._compare(case, answer, other), self._compare(case, other, answer)
        )
        if (unread := next((o.reason for o in orders if o.verdict is None), None)) is not None:
            return None, unread
        points = {"first": 1.0, "tie": 0.5, "second": 0.0}
        ahead, behind = (points[o.verdict["better"]] for o in orders if o.verdict is not None)
        self.metrics.pairs += 1
        self.metrics.order_flips += ahead != 1 - behind
        return (ahead + 1 - behind) / 2, ""

    async def _compare(self, case: JudgeCase, first: str, second: str) -> Any:
        def write(delimit: PromptDelimiters, answer: str, other: str) -> str:
            return (
                f"{self.args.instruction}\n\n{delimit('question', case.question)}\n\n{delimit('first', answer)}\n\n"
                f"{delimit('second', other)}\n\n"
                f"{delimit.ask(better=self.words)}"
            )

        return await self.ask(write, first, second, images=self.images(case))


class RulerArgs(JudgeArgs):
    """`rubric`: description of a good answer."""

    rubric: str = (
        "An answer that reaches the goal of its task is better than one that does not; "
        "of two that do, the one with less detour."
    )


@reward("ruler_judge")
class RulerJudge(Judge):
    """Scores all answers to a task in one question, each from 0 to 1 relative to the others.

    The order is shuffled; equal answers are shown once.

    Method of OpenPipe ART's RULER (relative scores need no absolute scale, and a group's advantages
    use nothing else).
    """

    Args = RulerArgs
    scale = Scale(0, 1, integer=False)
    whole_group = True

    async def __call__(self, task: Task, transcripts: Any) -> Any:
        cases = [JudgeCase.from_transcript(task, t) for t in transcripts]
        scores = [self.without_asking(c) for c in cases]
        texts = sorted({c.answer.strip() for c, k in zip(cases, scores, strict=True) if k is None})
        order = hashlib.blake2b(
            json.dumps([texts, REPEAT.get()]).encode("utf-8", "surrogatepass"), digest_size=8
        ).digest()
        random.Random(order).shuffle(texts)
        names = {text: f"answer {i}" for i, text in enumerate(texts, 1)}

        def write(delimit: PromptDelimiters, *answers: str) -> str:
            shown = "\n\n".join(
                delimit(name, text) for name, text in zip(names.values(), answers, strict=True)
            )
            return (
                "Score every answer to the question from 0 (worst) to 1 (best), each beside the "
                "others.  Use the range: small "
                f"differences count.\n{self.args.rubric}\n\n{delimit('question', cases[0].question)}\n\n{shown}\n\n"
                f"{delimit.ask(**dict.fromkeys(names.values(), self.scale))}"
            )

        verdict = None
        reason = ""
        if texts:
            reading = await self.ask(write, *texts, images=self.images(cases[0]))
            verdict = reading.verdict
            reason = reading.reason
        return [
            k
            if k is not None
            else Score(
                value=None if verdict is None else verdict[names[c.answer.strip()]], reason=reason
            )
            for c, k in zip(cases, scores, strict=True)
        ]


def text_of(truth: Any) -> str:
    """Convert a gold answer to text; {"target": ...} to the target's."""
    while isinstance(truth, dict) and "target" in truth:
        truth = truth["target"]
    return (
        json.dumps(truth, ensure_ascii=False, default=str)
        if isinstance(truth, dict | list)
        else str(truth)
    )
