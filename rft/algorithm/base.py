"""What an algorithm is made of: pure functions over token tensors, each with its own `Args`.

Nothing here knows processes, buffers or configuration.  Denominators come in, so cutting a batch
differently gives the same gradient: a micro-batch's losses are *sums* divided by totals of the
whole step, and the parts add up.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from rft.algorithm.args import AggMode
from rft.plugins import kind
from rft.types.completion import Credit
from rft.types.credit import ScoredRow
from rft.types.ports import GroupStats

if TYPE_CHECKING:
    import torch

# those that choose among the runs of a step: fn(x, args) -> numbers of the drawn ones
sample_strategy = kind("sample_strategy")
policy_loss = kind("policy_loss_fn")
policy_extra = kind("policy_extra")  # what the policy loss of the same name reads of the whole step
KEEP = "keep"  # of what a policy_extra returns: tokens where it is 0 leave the loss
kl_penalty = kind("kl_penalty_fn")  # fn(x, args) -> the KL of each row's tokens, list of [L_i]
kl_loss = kind("kl_loss_fn")
entropy_loss = kind("entropy_loss_fn")


# ---------------------------------------------------------------- which parts an algorithm is made
# of

Data = Literal["chats", "texts", "pairs", "labels"]


@dataclass(kw_only=True)
class AlgorithmDefaults:
    """The parts of one algorithm.  Arguments left out have the defaults of the part's own `Args`."""

    name: str
    doc: str
    advantage_fn: str = "grpo"
    policy_loss_fn: str = "ppo"
    kl_loss_fn: str = "none"
    entropy_loss_fn: str = "default"
    loss_agg_mode: AggMode = "token-mean"
    kl_penalty_fn: str = "none"
    sample_strategy: str = "default"
    # runs of each task where the configuration names none; a group of one has no advantage
    repeat_times: int = 8
    advantage_fn_args: Mapping[str, Any] = field(default_factory=dict)
    policy_loss_fn_args: Mapping[str, Any] = field(default_factory=dict)
    kl_loss_fn_args: Mapping[str, Any] = field(default_factory=dict)
    entropy_loss_fn_args: Mapping[str, Any] = field(default_factory=dict)
    kl_penalty_fn_args: Mapping[str, Any] = field(default_factory=dict)
    sample_strategy_args: Mapping[str, Any] = field(default_factory=dict)
    # the rows of a data set that it trains on; None: what the policy samples
    data: Data | None = None


def define_algorithm(name: str, doc: str, **parts: Any) -> AlgorithmDefaults:
    """Registers an algorithm under `name`: `define_algorithm("mine", "What it is.",
    advantage_fn="grpo", policy_loss_fn="mine")`.
    """
    defaults = AlgorithmDefaults(name=name, doc=doc, **parts)
    defaults.__module__ = sys._getframe(1).f_globals["__name__"]  # the file that registers it
    return kind("algorithm")(name)(defaults)


class BufferStrategy:
    """A sample strategy that the buffer carries out: the rows of a step have been chosen when they
    arrive.
    """


# ---------------------------------------------------------------- the whole step, before its losses


@dataclass(frozen=True, kw_only=True)
class StepRow:
    """One sequence of a train step.  L = its trained tokens; arrays are float32 [L] in the order of
    the tokens.

    Those that are None were not asked for (see `Args.before`), or the row has none.
    """

    group: str  # text form of its group: the runs of one task
    run: int  # number in the group
    step: int  # number in the run
    reward: float
    credit: Credit = "run"  # whose reward it is, see rft.types.credit
    reward_parts: Mapping[str, float] = field(default_factory=dict)  # by name
    logprobs: np.ndarray  # of the policy that sampled
    token_rewards: np.ndarray | None = None
    old: np.ndarray | None = None
    ref: np.ndarray | None = None
    entropy: np.ndarray | None = None
    sum_squares: np.ndarray | None = None
    discriminator_mean: np.ndarray | None = None
    values: np.ndarray | None = None
    teacher: np.ndarray | None = None  # log-probs of a teacher model
    # of the off-policy correction, for parts that read them before it is applied
    weights: np.ndarray | None = None
    is_expert: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)

    @property
    def length(self) -> int:
        return len(self.logprobs)

    @property
    def scored(self) -> ScoredRow:
        """The row as its group's statistics take it."""
        return ScoredRow(
            self.reward, self.run, self.step, self.length, self.credit, self.reward_parts
        )

    @property
    def rewards(self) -> np.ndarray:
        """float64 [L]: the rewards of the tokens; where the row has none, its reward on the last
        trained token.
        """
        if self.token_rewards is not None:
            return self.token_rewards.astype(np.float64)
        rewards = np.zeros(self.length)
        rewards[-1] = self.reward
        return rewards


@dataclass(frozen=True, kw_only=True)
class StepInputs:
    """All rows of a train step, on the host.  `groups` are the statistics that came with the lease,
    by group.

    An advantage and a sample strategy see each run as one row (`rft.algorithm.runs`), and
    statistics of runs.

    `keep`, bool [L_i], are the tokens that count: those that no off-policy correction rejects, and
    for extras of losses that the advantage keeps, too; None = all.  `bypass`: the losses' ratio is
    taken against the policy that sampled, else against the one before the step.
    """

    rows: Sequence[StepRow]
    groups: Mapping[str, GroupStats]
    step: int = 1
    seed: int = 0
    keep: Sequence[np.ndarray] | None = None
    bypass: bool = True

    @property
    def rewards(self) -> np.ndarray:
        """float64 [S]."""
        return np.array([r.reward for r in self.rows], np.float64)

    @property
    def counted_rows(self) -> np.ndarray:
        """bool [S]: of which a token counts."""
        if self.keep is None:
            return np.ones(len(self.rows), np.bool_)
        return np.array([keep.any() for keep in self.keep], np.bool_)

    def stats(self, row: StepRow) -> GroupStats:
        return self.groups[row.group]

    @property
    def counted(self) -> np.ndarray:
        """bool [N], `keep` of all rows, one after the other."""
        masks = [np.ones(r.length, np.bool_) for r in self.rows] if self.keep is None else self.keep
        return np.concatenate([np.zeros(0, np.bool_), *masks])

    def current(self, row: StepRow) -> np.ndarray:
        """float64 [L]: log-probs of the policy before the step, which a part has to ask for with
        `Args.before`.
        """
        assert row.old is not None, "`before` asks for it"
        return row.old.astype(np.float64)

    def log_ratio(self, row: StepRow) -> np.ndarray:
        """float64 [L]: log of the losses' ratio before the step."""
        current = self.current(row)
        ratio: np.ndarray = current - (row.logprobs if self.bypass else current)
        return ratio

    def split(self, values: np.ndarray) -> list[np.ndarray]:
        """One array per row from `values`, [N]."""
        return np.split(values, np.cumsum([r.length for r in self.rows])[:-1]) if self.rows else []


@dataclass(frozen=True, kw_only=True)
class Advantages:
    """Per trained token, float32 [L_i] for each of the S rows.  `returns` are what a critic learns.

    Tokens that are not in `keep`, bool [L_i], leave the loss and its denominators.
    """

    values: Sequence[np.ndarray]
    returns: Sequence[np.ndarray] | None = None
    keep: Sequence[np.ndarray] | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PreparedStep:
    """What a step's losses read that depends on all of its rows.  Lists have one float32 or bool
    [L_i] per row.

    `weights` multiply token losses; tokens that are not in `keep` leave the loss and its
    denominators.  `extra` goes into `LossInputs.extra` under the same names.  `selected`: the lists
    are of these rows, by number, some perhaps several times or never; None = all rows once, in
    order.
    """

    advantages: Sequence[np.ndarray]
    selected: Sequence[int] | None = None
    returns: Sequence[np.ndarray] | None = None
    weights: Sequence[np.ndarray] | None = None
    keep: Sequence[np.ndarray] | None = None
    extra: Mapping[str, Sequence[np.ndarray]] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    # float64 [L_i], after a KL penalty; None = as they came
    rewards: Sequence[np.ndarray] | None = None
    kl: float | None = None  # of the KL penalty: mean over rows of their mean, in nats per token


# ---------------------------------------------------------------- losses of one micro-batch


@dataclass(frozen=True)
class Denominators:
    """Totals over the whole train step (all micro-batches, all ranks)."""

    tokens: float  # sum of the loss mask
    rows: float  # rows with at least one unmasked token
    max_response_tokens: int  # K of seq-mean-token-sum-norm
    expert_tokens: float = 0.0  # those of an expert's rows among them
    expert_rows: float = 0.0
    num_runs: float | None = None  # runs with at least one unmasked token; None: each row is one
    expert_runs: float = 0.0
    num_groups: float | None = None  # groups with at least one unmasked token; None: as runs
    expert_groups: float = 0.0

    @property
    def groups(self) -> float:
        return self.runs if self.num_groups is None else self.num_groups

    @property
    def runs(self) -> float:
        return self.rows if self.num_runs is None else self.num_runs


@dataclass(frozen=True, kw_only=True)
class TokenRows:
    """The tokens of one micro-batch in packed form.  N = number of response tokens in it, S =
    number of sequences.

    `row` is int64 [N], the sequence each token belongs to (0..S-1), `mask` bool [N] (False tokens
    never count, whatever they hold). `run_tokens`, float32 [N], are the unmasked tokens of the
    whole run of each token, `group_tokens` those of its group; None: its row is the run, its run
    the group.  Invariant: all tokens of a sequence are in
    the same micro-batch, where per-sequence statistics are taken; those of a run need not be.
    """

    mask: torch.Tensor
    row: torch.Tensor
    num_rows: int
    denominators: Denominators
    loss_agg_mode: AggMode = "token-mean"  # of policies set by `Algorithm.loss` from the settings
    run_tokens: torch.Tensor | None = None
    group_tokens: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class LossInputs(TokenRows):
    """What the losses of a policy read.  Tensors are float32 [N]; `logprobs` carries gradient, and
    nothing else but `entropy` and `top_logprobs` does.
    """

    logprobs: torch.Tensor
    old_logprobs: torch.Tensor
    advantages: torch.Tensor
    ref_logprobs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    # float32 [N, k + 1] of the teacher's k most likely tokens, and last of all others together:
    # the policy's, with gradient, and the teacher's
    top_logprobs: torch.Tensor | None = None
    teacher_top_logprobs: torch.Tensor | None = None
    rollout_logprobs: torch.Tensor | None = None
    weights: torch.Tensor | None = None  # of token losses, from an off-policy correction; None = 1
    is_expert: torch.Tensor | None = None  # bool [N]
    # float32 [N] each, from the loss's `policy_extra`
    extra: Mapping[str, torch.Tensor] = field(default_factory=dict)
    step: int = 1  # the train step
    # factors of terms in this step by the names of `needs.controllers`; without: the argument's
    factors: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class LossOutput:
    """`loss` is a scalar to call backward on.  `sums` are masked sums by metric name.

    Sums add over micro-batches and ranks; divided by `denominators.tokens` they are the metric.
    Losses among them are scaled so that this gives the loss itself, whatever the aggregation mode.
    `maxima` combine by max.  All are detached scalars.
    """

    loss: torch.Tensor
    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    maxima: dict[str, torch.Tensor] = field(default_factory=dict)
