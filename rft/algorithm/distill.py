"""Advantages from a teacher's log-probs of the student's own tokens.

Depends on no rewards.  Log-probs are of the distribution the student sampled from: with a teacher
that reports those at temperature 1, the student has to sample at 1.  Invariant: where teacher and
student agree on a token, its advantage is 0.
"""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
from pydantic import Field

from rft.algorithm.args import AloneArgs
from rft.algorithm.base import StepInputs, StepRow, define_algorithm
from rft.algorithm.runs import advantage

_LIMIT = 20.0  # of a log ratio before the exponential


class _Taught(AloneArgs):
    reads: ClassVar[str] = "the teacher's log-probs of every experience (teacher_logprobs)"

    @property
    def wants(self) -> tuple[str, ...]:
        return ("teacher_logprobs",)


class OnPolicyDistillArgs(_Taught):
    """Teacher's log-prob less the student's, per token."""

    kl_coef: float = Field(1.0, ge=0, description="factor of the advantage")


class JsdArgs(_Taught):
    """Generalised Jensen-Shannon divergence between teacher and student, per sampled token
    (arXiv:2306.13649).
    """

    lambda_coef: float = Field(
        0.5, ge=0, le=1, description="weight of the teacher in the mixture; 0 and 1 are the two KLs"
    )
    kl_coef: float = Field(1.0, ge=0, description="factor of the advantage")
    temperature: float = Field(1.0, gt=0, description="divides both log-probs")


@advantage("on_policy_distill", args=OnPolicyDistillArgs)
def on_policy_distill(x: StepInputs, args: OnPolicyDistillArgs) -> list[np.ndarray]:
    """A = kl_coef (teacher - student), whose policy gradient is that of -KL(student || teacher).
    float32 [L_i] per row.

    student: the sampler's log-probs.  Raises ValueError for a row without a teacher's.
    """
    return [
        (args.kl_coef * (teacher - student)).astype(np.float32)
        for teacher, student in map(_both, x.rows)
    ]


@advantage("jsd", args=JsdArgs)
def jsd(x: StepInputs, args: JsdArgs) -> list[np.ndarray]:
    """With s, t the log-probs of student and teacher / temperature and b = lambda_coef, A = kl_coef
    times

        0 < b < 1:   (1 - b) (m - s),   m = log((1 - b) e^s + b e^t)
        b = 0:       t - s
        b = 1:       e^min(t - s, 20) - 1

    At temperature 1 the policy gradient is exactly that of -(b KL(teacher || M) + (1 - b)
    KL(student || M)) with the mixture M = (1 - b) student + b teacher, at 0 of -KL(student ||
    teacher), at 1 of -KL(teacher || student).  The ends are named so by users, and are not the
    limits of what lies between them: near 0 the divergence goes to b KL(teacher || student), near 1
    to (1 - b) KL(student
    || teacher).  float32 [L_i] per row.  Generalised Jensen-Shannon
    divergence, arXiv:2306.13649.  Raises ValueError for a row without a teacher's log-probs.
    """

    def row_score(teacher: np.ndarray, student: np.ndarray) -> np.ndarray:
        b = args.lambda_coef
        t = teacher / args.temperature
        s = student / args.temperature
        if b == 0:
            score = t - s
        elif b == 1:
            score = np.expm1(np.minimum(t - s, _LIMIT))
        else:
            score = (1 - b) * (np.logaddexp(math.log1p(-b) + s, math.log(b) + t) - s)
        advantage: np.ndarray = (args.kl_coef * score).astype(np.float32)
        return advantage

    return [row_score(teacher, student) for teacher, student in map(_both, x.rows)]


def _both(row: StepRow) -> tuple[np.ndarray, np.ndarray]:
    """float64 [L]: log-probs of teacher and student."""
    if row.teacher is None:
        raise ValueError(
            f"group {row.group}, run {row.run}: distillation needs the teacher's log-probs of the "
            f"row; use a workflow that asks an "
            "auxiliary model for them (Experience.teacher_logprobs)"
        )
    return row.teacher.astype(np.float64), row.logprobs.astype(np.float64)


define_algorithm(
    "on_policy_distill",
    "A teacher's log-probs as advantages.",
    advantage_fn="on_policy_distill",
    entropy_loss_fn="none",
)
define_algorithm(
    "jsd",
    "Distillation by Jensen-Shannon divergence (arXiv:2306.13649).",
    advantage_fn="jsd",
    entropy_loss_fn="none",
)
