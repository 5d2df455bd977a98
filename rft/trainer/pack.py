"""Cuts a train step into micro-batches for every rank.  Torch-free; knows lengths and token ids,
not models.

Invariant: no micro-batch costs more than the token budget, every rank gets the same number of
micro-batches (empty ones where it has fewer rows), and each row is in exactly one.  The gradient
does not depend on the cut, because the losses' denominators are global.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from msgspec import Struct

from rft.trainer.prefix import shared_length
from rft.types import experts
from rft.types.row_layout import AskedLayout


class TrainRow(Struct, frozen=True, kw_only=True):
    """One sequence as the learner sees it: T tokens, L of them trained.  `logprobs` and
    `temperatures` count where `loss_mask` is True.

    Arrays [L] are in the order of the trained tokens; None: not there.  `group` tells which rows
    share a prompt; the two rows of the same non-empty `pair`, chosen and rejected, follow each
    other and stay in one micro-batch.
    """

    tokens: np.ndarray  # int32 [T]
    loss_mask: np.ndarray  # bool [T]; never True at token 0, which nothing predicts
    logprobs: np.ndarray  # float32 [T], of the policy that sampled them
    temperatures: np.ndarray | float  # float32 [T], or one for all tokens
    advantages: np.ndarray | None = None  # float32 [L]; None = 0
    old: np.ndarray | None = None  # float32 [L], log-probs of the policy as it was before the step
    ref: np.ndarray | None = None  # float32 [L], log-probs of the reference model
    values: np.ndarray | None = None  # float32 [L], the critic's before the step
    returns: np.ndarray | None = None  # float32 [L], what the critic learns
    weights: np.ndarray | None = None  # float32 [L], of the token losses
    keep: np.ndarray | None = None  # bool [L], tokens that count; None = all
    extra: dict[str, np.ndarray] = {}  # float32 [L] each, by the name that the policy loss gave it
    run: int = 0  # number of its run in the step
    run_tokens: int | None = None  # tokens of that run that count; None: those of the row
    # [P, layers, experts] that its first positions go through, see rft.types.experts
    experts: np.ndarray | None = None
    is_expert: bool = False
    group: str = ""
    pair: str = ""

    @property
    def marked(self) -> np.ndarray:
        """`inputs`, distinguished by their experts too: rows share positions where both are the
        same.
        """
        return self.inputs if self.experts is None else experts.marked(self.inputs, self.experts)

    @property
    def inputs(self) -> np.ndarray:
        """What the model has to read, int32 [< T]: all before the last trained token."""
        if len(self.loss_mask) and self.loss_mask.item(-1):  # mostly so
            return self.tokens[:-1]
        last = len(self.loss_mask) - 1 - int(self.loss_mask[::-1].argmax())
        if not self.loss_mask[last]:
            raise ValueError("no token of this row is trained")
        return self.tokens[:last]

    @property
    def counted(self) -> int:
        """Trained tokens that count in the loss."""
        return int(np.count_nonzero(self.loss_mask if self.keep is None else self.keep))


class RankBatch(Struct, frozen=True, kw_only=True):
    """What one rank computes in train step `step`, with the denominators of the whole step."""

    step: int
    micro_batches: tuple[tuple[TrainRow, ...], ...]
    tokens: float  # trained tokens of the step, rows left out as zero-advantage included
    rows: float
    positions: float = 0.0  # that models read, of the rows that are computed
    kl_coef: float | None = None  # factor of the KL loss in this step; None = the argument's
    expert_tokens: float = 0.0  # those of an expert's rows among them
    expert_rows: float = 0.0
    num_runs: float | None = None  # that have a token that counts; None: each row is one
    expert_runs: float = 0.0
    ref_given: bool = False  # rows have `ref`, so no rank computes it, one without rows neither


@dataclass(frozen=True)
class Budget:
    """How much one micro-batch may hold: `tokens` computed positions, or `rows` rows."""

    tokens: int
    layout: AskedLayout = "auto"  # not yet chosen: as shared
    rows: int | None = None  # fixed micro-batches
    # units are dealt over ranks by their cost; False: in their order, as many rows to each as can
    # be
    balance: bool = True

    def cost(self, inputs: Sequence[np.ndarray]) -> int:
        """Positions the model computes for rows that it reads as `inputs`: distinct prefixes, all
        of them, or the padded rectangle.
        """
        if self.layout == "packed":
            return sum(map(len, inputs))
        return shared_length(inputs) if self.shares else len(inputs) * max(map(len, inputs))

    @property
    def shares(self) -> bool:
        """Whether what rows have in common is computed once."""
        return self.layout in ("auto", "shared")


Inputs = Sequence[np.ndarray]  # of each row int32 [L], what the model reads


@dataclass
class _Bin:
    rows: list[int] = field(default_factory=list)
    cost: int = 0
    width: int = 0


def plan(rows: Sequence[TrainRow], world_size: int, budget: Budget) -> list[list[list[int]]]:
    """For each rank its micro-batches, as indexes into `rows`.

    Groups stay together where their prompt is shared, pairs always, and are dealt over ranks by
    tokens, heaviest first (else see `Budget.balance`).  Inside a rank they are packed first-fit
    decreasing within the budget; a row or pair that exceeds it has a micro-batch of its own.  Fixed
    micro-batches take the rows in their order, see `spread`.
    """
    if budget.rows is not None:
        pairs = _pairs(rows) if any(row.pair for row in rows) else []
        return spread(len(rows), world_size, budget.rows, 2 if pairs else 1)
    inputs = [row.marked if budget.shares else row.inputs for row in rows]
    ranks = _dealt(_units(rows, inputs, world_size, budget), world_size, len(rows), budget)
    packed = [_first_fit(mine, inputs, budget) for mine in ranks]
    count = max(map(len, packed), default=0)
    return [mine + [[] for _ in range(count - len(mine))] for mine in packed]


def _dealt(
    units: list[tuple[list[int], int]], world_size: int, count: int, budget: Budget
) -> list[list[tuple[list[int], int]]]:
    """Each rank's units, the heaviest first, so that they pack well."""
    ranks: list[list[tuple[list[int], int]]] = [[] for _ in range(world_size)]
    load = [0] * world_size
    if budget.balance:
        units = sorted(units, key=lambda u: -u[1])
    before = 0
    for unit in units:
        rank = load.index(min(load)) if budget.balance else before * world_size // count
        ranks[rank].append(unit)
        load[rank] += unit[1]
        before += len(unit[0])
    return [sorted(mine, key=lambda u: -u[1]) for mine in ranks]


def spread(count: int, world_size: int, size: int, unit: int = 1) -> list[list[list[int]]]:
    """For each rank its micro-batches of `size` of `count` rows, the last one with what is left;
    `unit` rows are never parted.
    """
    each = -(-count // (world_size * unit)) * unit
    size = max(unit, size - size % unit)
    shares = [range(rank * each, min((rank + 1) * each, count)) for rank in range(world_size)]
    return [[list(share[at : at + size]) for at in range(0, each, size)] for share in shares]


def _units(
    rows: Sequence[TrainRow], inputs: Inputs, world_size: int, budget: Budget
) -> list[tuple[list[int], int]]:
    """Sets of rows that stay together, with their cost."""
    if any(row.pair for row in rows):
        return [(pair, budget.cost([inputs[i] for i in pair])) for pair in _pairs(rows)]
    if not budget.shares:
        return [([i], len(tokens)) for i, tokens in enumerate(inputs)]
    groups: dict[str, list[int]] = defaultdict(list)
    for i, row in enumerate(rows):
        groups[row.group].append(i)
    # fewer groups than ranks: cut each, or ranks would idle
    pieces = -(-world_size // max(1, len(groups)))
    made = []
    for members in groups.values():
        for piece in np.array_split(members, min(pieces, len(members))):
            made += _within(piece.tolist(), inputs, budget)
    return made


def _pairs(rows: Sequence[TrainRow]) -> list[list[int]]:
    """Raises ValueError unless the rows of each pair follow each other: losses read them as chosen,
    rejected.
    """
    pairs = [[i, i + 1] for i in range(0, len(rows), 2)]
    for i, j in pairs:
        if j == len(rows) or not rows[i].pair or rows[i].pair != rows[j].pair:
            raise ValueError(f"row {i} of pair {rows[i].pair!r} is not followed by the other one")
    return pairs


def _within(members: list[int], inputs: Inputs, budget: Budget) -> list[tuple[list[int], int]]:
    cost = budget.cost([inputs[i] for i in members])
    if cost <= budget.tokens or len(members) == 1:
        return [(members, cost)]
    half = len(members) // 2
    return _within(members[:half], inputs, budget) + _within(members[half:], inputs, budget)


def _first_fit(
    units: list[tuple[list[int], int]], inputs: Inputs, budget: Budget
) -> list[list[int]]:
    bins: list[_Bin] = []
    grown: Callable[[_Bin, list[int], int], int] = (
        partial(_rectangle, inputs) if budget.layout == "padded" else _sum
    )
    for members, cost in units:
        for bin in bins:
            if (size := grown(bin, members, cost)) <= budget.tokens:
                break
        else:
            bins.append(bin := _Bin())
            size = grown(bin, members, cost)
        bin.cost, bin.width = size, max(bin.width, *(len(inputs[i]) for i in members))
        bin.rows += members
    return [sorted(b.rows) for b in bins]


def _sum(bin: _Bin, members: list[int], cost: int) -> int:
    return bin.cost + cost


def _rectangle(inputs: Inputs, bin: _Bin, members: list[int], cost: int) -> int:
    return (len(bin.rows) + len(members)) * max(bin.width, *(len(inputs[i]) for i in members))
