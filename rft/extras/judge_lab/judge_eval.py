"""How far a judge can be trusted: its scores beside labels of people or of a rule.  What `rft judge
report` computes.

Measures, over rows that have both numbers (a verdict is "good" from `threshold` on, a label from
`label_threshold` on):

    accuracy, kappa      verdict and label agree; Cohen's kappa takes off what chance alone gives
    auc                  a good answer is scored higher than a bad one (ties count half)
    pearson, spearman    of score and label
    bias                 mean of score - label
    length_bias          correlation of score - label with the answer's length in characters: 0 = length buys nothing
    self_consistency     rows whose verdict is the same in every repeat; repeat_std: mean deviation of their scores
    position_bias        pairwise judges: pairs whose verdict changed with the order

Depends on no judge and no model.  Invariant: what was not scored is counted, and enters no other
number.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean, pstdev
from typing import Any

import numpy as np

from rft.errors import ConfigError
from rft.explorer.stored import scored_or_not, transcript
from rft.reward.base import Reward
from rft.reward.judge_base import REPEAT
from rft.types.completion import Score
from rft.types.task import Task

log = logging.getLogger(__name__)
PARTS = ("accuracy", "kappa", "auc", "pearson", "spearman", "bias", "length_bias")


@dataclass(frozen=True)
class Labelled:
    """One answer.  `values`: the judge's score in each repeat, None = unscored.  `step`: train step
    of the weights that wrote it.
    """

    length: int
    values: tuple[float | None, ...]
    label: float | None = None
    step: int | None = None


async def scores(
    reward: Reward,
    answers: Sequence[tuple[Task, str]],
    *,
    repeats: int = 1,
    max_concurrent: int = 64,
    timeout_s: float = 600.0,
) -> list[tuple[float | None, ...]]:
    """For each answer the values of `repeats` calls, asked again each time; answers to one task are
    adjacent for a reward of groups.

    Raises RftError (a model is gone, a budget is used up); what else a reward raises leaves an
    answer unscored.
    """
    room = asyncio.Semaphore(max_concurrent)
    grouped = reward.whole_group
    groups = [
        list(g)
        for _, g in groupby(answers, key=lambda a: (a[0].taskset, a[0].index) if grouped else id(a))
    ]

    async def ask(group: list[tuple[Task, str]], repeat: int) -> list[float | None]:
        REPEAT.set(repeat)  # this task's own context
        task = group[0][0]
        async with room:
            scores = await scored_or_not(
                reward, task, [transcript(task, text) for _, text in group], timeout_s
            )
        if (e := next((s for s in scores if isinstance(s, Exception)), None)) is not None:
            log.warning(
                "row %d of %s is unscored: %s: %s", task.index, task.taskset, type(e).__name__, e
            )
        return [s.value if isinstance(s, Score) else None for s in scores]

    columns = []
    for repeat in range(repeats):
        done = await asyncio.gather(*(asyncio.ensure_future(ask(g, repeat)) for g in groups))
        columns.append([v for values in done for v in values])
    return list(zip(*columns, strict=True))


def report(
    rows: Sequence[Labelled],
    *,
    threshold: float = 0.5,
    label_threshold: float | None = None,
    counted: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """All numbers; None where they are not defined.  `counted`: how the judge's metrics grew
    meanwhile.
    """
    middle = _middle(rows) if label_threshold is None else label_threshold
    scored = [(v, float(r.length)) for r in rows if (v := _first(r)) is not None]
    out: dict[str, Any] = {
        "answers": len(rows),
        "unscored": len(rows) - len(scored),
        "labelled": sum(r.label is not None for r in rows),
        "mean_score": _mean([v for v, _ in scored]),
        "threshold": threshold,
        "label_threshold": middle,
    }
    out |= agreement(rows, threshold, middle) if middle is not None else dict.fromkeys(PARTS)
    out["length_correlation"] = _pearson(*np.array(scored).reshape(-1, 2).T)
    out |= consistency(rows, threshold)
    pairs, flips = (dict(counted or {}).get(name, 0.0) for name in ("pairs", "order_flips"))
    out["position_bias"] = flips / pairs if pairs else None
    out["drift"] = drift(rows, threshold, middle)
    return out


def agreement(rows: Sequence[Labelled], threshold: float, middle: float) -> dict[str, float | None]:
    both = [
        (v, r.label, float(r.length))
        for r in rows
        if (v := _first(r)) is not None and r.label is not None
    ]
    if not both:
        return dict.fromkeys(PARTS)
    values, labels, lengths = (np.array(c) for c in zip(*both, strict=True))
    accepted = values >= threshold
    true = labels >= middle
    same = float(np.mean(accepted == true))
    chance = float(accepted.mean() * true.mean() + (1 - accepted.mean()) * (1 - true.mean()))
    return {
        "accuracy": same,
        "kappa": None if chance >= 1 else (same - chance) / (1 - chance),
        "auc": auc(values, true),
        "pearson": _pearson(values, labels),
        "spearman": _pearson(ranks(values), ranks(labels)),
        "bias": float(np.mean(values - labels)),
        "length_bias": _pearson(values - labels, lengths),
    }


def consistency(rows: Sequence[Labelled], threshold: float) -> dict[str, float | None]:
    several = [v for r in rows if len(v := [x for x in r.values if x is not None]) > 1]
    return {
        "self_consistency": _mean([float(len({x >= threshold for x in v}) == 1) for v in several]),
        "repeat_std": _mean([pstdev(v) for v in several]),
    }


def drift(rows: Sequence[Labelled], threshold: float, middle: float | None) -> list[dict[str, Any]]:
    """By train step of the weights: a judge whose mean rises while the labels' does not is being
    played.
    """
    steps: defaultdict[int, list[Labelled]] = defaultdict(list)
    for r in rows:
        if r.step is not None:
            steps[r.step].append(r)
    return [
        {
            "step": step,
            "answers": len(step_rows),
            "unscored": sum(_first(r) is None for r in step_rows),
            "mean_score": _mean([v for r in step_rows if (v := _first(r)) is not None]),
            "mean_label": _mean([r.label for r in step_rows if r.label is not None]),
            "mean_length": fmean(r.length for r in step_rows),
            **{
                n: (agreement(step_rows, threshold, middle)[n] if middle is not None else None)
                for n in ("accuracy", "bias")
            },
        }
        for step, step_rows in sorted(steps.items())
    ]


def auc(values: np.ndarray, good: np.ndarray) -> float | None:
    """Probability that a good one has the higher value; values [N], good [N] bool."""
    n = int(good.sum())
    m = int((~good).sum())
    if not n or not m:
        return None
    return float((ranks(values)[good].sum() - n * (n + 1) / 2) / (n * m))


def ranks(values: np.ndarray) -> np.ndarray:
    """From 1; equal ones share their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    shared: np.ndarray = (last - (counts - 1) / 2)[inverse]
    return shared


def number(label: object) -> float:
    """A label as a number: yes/no, true/false, good/bad, or a number.  Raises ConfigError for
    anything else.
    """
    word: Any = label.strip().lower() if isinstance(label, str) else label
    with suppress(TypeError, ValueError):
        if math.isfinite(value := float(_WORDS.get(word, word))):
            return value
    raise ConfigError(
        f"{label!r:.60} is no label; use a number, or {', '.join(_WORDS)}",
        key="--label-key",
        given=label,
    )


_WORDS = {
    "yes": 1.0,
    "no": 0.0,
    "true": 1.0,
    "false": 0.0,
    "good": 1.0,
    "bad": 0.0,
    "correct": 1.0,
    "incorrect": 0.0,
}


def _first(row: Labelled) -> float | None:
    return row.values[0] if row.values else None


def _middle(rows: Sequence[Labelled]) -> float | None:
    """The middle of the labels' range; 0.5 where it lies in [0, 1]."""
    labels = [r.label for r in rows if r.label is not None]
    if not labels:
        return None
    return 0.5 if min(labels) >= 0 and max(labels) <= 1 else (min(labels) + max(labels)) / 2


def _pearson(a: np.ndarray, b: np.ndarray) -> float | None:
    if len(a) < 2 or np.ptp(a) < 1e-12 or np.ptp(b) < 1e-12:
        return None
    return float(np.corrcoef(a, b)[0, 1])


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None
