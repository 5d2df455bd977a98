"""Advantages from a teacher's log-probs of the student's own tokens.

Knows no rewards.  Log-probs are of the distribution the student sampled from: with a teacher that reports those at temperature 1,
the student has to sample at 1.  Invariant: where teacher and student agree on a token, its advantage is 0.
"""

from __future__ import annotations

import math

import numpy as np

from rft.algorithm.advantage_args import JsdArgs, OnPolicyDistillArgs
from rft.algorithm.base import StepInputs, StepRow, advantage


@advantage("on_policy_distill", args=OnPolicyDistillArgs)
def on_policy_distill(x: StepInputs, args: OnPolicyDistillArgs) -> list[np.ndarray]:
    """A = kl_coef (teacher - student), whose policy gradient is that of -KL(student || teacher).  float32 [L_i] per row.

    student: the sampler's log-probs.  Raises ValueError for a row without a teacher's.
    """
    return [(args.kl_coef * (teacher - student)).astype(np.float32) for teacher, student in map(_both, x.rows)]


@advantage("jsd", args=JsdArgs)
def jsd(x: StepInputs, args: JsdArgs) -> list[np.ndarray]:
    """A = -kl_coef J of each sampled token, with s, t the log-probs of student and teacher / temperature and b = lambda_coef:

        m = log((1 - b) e^s + b e^t),   J = b (t - m) + (1 - b) (s - m);   b = 0: J = s - t;   b = 1: J = t - s.

    float32 [L_i] per row.  Generalised Jensen-Shannon divergence, arXiv:2306.13649.  Raises ValueError for a row without a teacher's
    log-probs.
    """

    def one(teacher: np.ndarray, student: np.ndarray) -> np.ndarray:
        b, t, s = args.lambda_coef, teacher / args.temperature, student / args.temperature
        if b in (0.0, 1.0):
            divergence = s - t if b == 0 else t - s
        else:
            m = np.logaddexp(math.log1p(-b) + s, math.log(b) + t)
            divergence = b * (t - m) + (1 - b) * (s - m)
        given: np.ndarray = (-args.kl_coef * divergence).astype(np.float32)
        return given

    return [one(teacher, student) for teacher, student in map(_both, x.rows)]


def _both(row: StepRow) -> tuple[np.ndarray, np.ndarray]:
    """float64 [L]: log-probs of teacher and student."""
    if row.teacher is None:
        raise ValueError(
            f"group {row.group}, run {row.run}: distillation needs the teacher's log-probs of the row; use a workflow that asks an "
            "auxiliary model for them (Experience.teacher_logprobs)"
        )
    return row.teacher.astype(np.float64), row.logprobs.astype(np.float64)
