"""Bases of the arguments of algorithm parts: what a part declares about itself.  Imports no torch."""

from __future__ import annotations

from typing import ClassVar, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

Computed = Literal["old", "ref", "entropy", "sum_squares", "discriminator_mean", "values"]
"""What a forward pass over the rows of a step gives, per trained token: log-probs of the policy
before the step and of the reference model, entropy H, over the vocabulary the sum of p^2 and that
of p^2 (H + log p), the critic's values.
"""
AggMode = Literal[
    "token-mean",
    "token-sum",
    "run-mean",
    "prompt-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
]

Rejection = Literal[
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k1",
    "seq_max_k2",
    "seq_max_k3",
]

"""Statistics by which `algorithm.rollout_correction` rejects tokens or sequences."""
AGG_MODES: tuple[str, ...] = get_args(AggMode)
Sampled = Literal["all", "own", "none"]
"""Which rows must come with log-probs of the policy that sampled them: all, all but an expert's, or
none.
"""


class Args(BaseModel):
    """Base of all arguments: unknown keys, wrong types, NaN and infinity are errors, and nothing
    changes afterwards.

    `before` names what the part reads that has to be computed before the step, `reference` says
    that a loss reads the reference model's log-probs.  Nothing else is computed.  `reads` says what
    a workflow has to write into its experiences for the part. `baseline` says that it reads the
    reward of a greedy run of the task, which the explorer plays.  Of an advantage, `in_groups` says
    that runs of a task are compared with each other, so that a group of one has none, and
    `compares_rows` that it sees the rows of a run, each a step of it; others see runs. Of a policy
    loss, `samples` says which rows need a sampler's log-probs, `pairs` that rows come in pairs,
    `labels` that rows have labels,
    `agg_mode` the aggregation it is defined with, and `fixed_agg` that it knows no other.
    """

    before: ClassVar[frozenset[Computed]] = frozenset()
    reference: ClassVar[bool] = False
    reads: ClassVar[str] = ""
    baseline: ClassVar[bool] = False
    samples: ClassVar[Sampled] = "all"
    pairs: ClassVar[bool] = False
    labels: ClassVar[bool] = False
    agg_mode: ClassVar[AggMode | None] = None
    fixed_agg: ClassVar[bool] = False
    in_groups: ClassVar[bool] = True
    compares_rows: ClassVar[bool] = False

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @property
    def wants(self) -> tuple[str, ...]:
        """Fields that every experience must have, which a workflow or operator declares by `gives`:
        "info.NAME" or a field's name.
        """
        return ()

    @property
    def reward_parts(self) -> tuple[str, ...] | None:
        """Parts of the reward that an advantage reads in place of the reward; (): whichever there
        are; None: the reward itself.
        """
        return None

    @property
    def whole_groups(self) -> bool:
        """Whether rows are compared by what only the rows themselves hold, so that a step must have
        all rows of a group.
        """
        return False

    @property
    def teacher_top(self) -> int:
        """Of a policy loss: how many of the teacher's most likely tokens it reads at each token."""
        return 0

    @property
    def zero_without_advantage(self) -> bool:
        """Whether the loss of a row whose advantages are all 0 is exactly 0, with gradient 0, so
        that it need not be computed.
        """
        return False


class NoArgs(Args):
    """For parts that take no arguments."""


class AloneArgs(Args):
    """For advantages that compare no runs and take no arguments."""

    in_groups: ClassVar[bool] = False


def declared(args: object) -> Args:
    """What `args` declare; a plugin's own model that does not derive from `Args` declares nothing."""
    return args if isinstance(args, Args) else NoArgs()


class GradientArgs(Args):
    """For losses that are a multiple of the advantage, token by token."""

    @property
    def zero_without_advantage(self) -> bool:
        return True


class ClippedArgs(Args):
    """For losses that clip a ratio."""

    clip_range: float = Field(
        0.2, ge=0, le=1, description="both clip bounds, where the two below are null"
    )
    clip_range_low: float | None = Field(
        None, ge=0, le=1, description="the ratio is clipped at 1 - clip_range_low"
    )
    clip_range_high: float | None = Field(
        None, ge=0, description="the ratio is clipped at 1 + clip_range_high"
    )

    @property
    def low(self) -> float:
        return self.clip_range if self.clip_range_low is None else self.clip_range_low

    @property
    def high(self) -> float:
        return self.clip_range if self.clip_range_high is None else self.clip_range_high


EPSILON = "added to the standard deviation before dividing"
