"""Divide the rows of a train step into micro-batches for every rank.  Depends on lengths and token
ids, not on models or torch.

Invariant: a micro-batch exceeds the token budget only if it is a single row or pair; every rank gets
the same number of micro-batches (empty ones if it has fewer rows), and each row is in exactly one
micro-batch.  The gradient does not depend on the division, because the losses' denominators are of
the whole step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from msgspec import Struct

from rft.trainer.rows.prefix import shared_length
from rft.types import experts
from rft.types.images import ImagePlace
from rft.types.row_layout import AskedLayout


class RowImage(Struct, frozen=True, gc=False):
    """An image in a row: its place among the tokens, and its file."""

    place: ImagePlace
    data: bytes


class TrainRow(Struct, frozen=True, kw_only=True):
    """One sequence for the learner: T tokens, L of them trained.

    `logprobs` and `temperatures` are valid only where `loss_mask` is True. Arrays [L] follow the
    order of the trained tokens; None: absent.  Rows of one `group` share a prompt; the two rows of
    the same non-empty `pair`, chosen then rejected, are adjacent and stay in one micro-batch.
    """

    tokens: np.ndarray  # int32 [T]
    loss_mask: np.ndarray  # bool [T]; never True at token 0, which nothing predicts
    logprobs: np.ndarray  # float32 [T], of the sampling policy
    temperatures: np.ndarray | float  # float32 [T], or a scalar for all tokens
    advantages: np.ndarray | None = None  # float32 [L]; None = 0
    old: np.ndarray | None = None  # float32 [L], log-probs of the policy before the step
    ref: np.ndarray | None = None  # float32 [L], log-probs of the reference model
    values: np.ndarray | None = None  # float32 [L], the critic's predictions before the step
    returns: np.ndarray | None = None  # float32 [L], targets of the critic
    weights: np.ndarray | None = None  # float32 [L], weights of the token losses
    keep: np.ndarray | None = None  # bool [L], tokens in the loss; None = all
    # of the teacher: int32 [L, k] its most likely tokens, float16 [L, k + 1] their log-probs
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
    extra: dict[str, np.ndarray] = {}  # float32 [L] each, by the policy loss's names
    run: int = 0  # number of its run in the step
    run_tokens: int | None = None  # counted tokens of that run; None: those of the row
    group_tokens: int | None = None  # counted tokens of its group
    # [P, layers, experts], MoE experts of the first P positions; see rft.types.experts
    experts: np.ndarray | None = None
    images: tuple[RowImage, ...] = ()  # in the order of their places
    is_expert: bool = False  # a demonstration, not MoE
    group: str = ""
    pair: str = ""

    @property
    def shown(self) -> tuple[RowImage, ...]:
        """Return the images among `inputs`."""
        return tuple(i for i in self.images if i.place.start < len(self.inputs))

    @property
    def marked(self) -> np.ndarray:
        """Return `inputs` combined with the experts (MoE routing) of each position and the image at
        it: two rows share positions only where all are equal.
        """
        inputs = self.inputs
        if self.experts is not None:
            inputs = experts.marked(inputs, self.experts)
        if shown := self.shown:
            inputs = inputs.astype(np.int64)  # a copy
        for image in shown:
            place = image.place
            inputs[place.start : place.start + place.length] ^= int(place.sha256[:7], 16) << 32
        return inputs

    @property
    def inputs(self) -> np.ndarray:
        """Return the tokens that the model reads, int32 [< T]: all before the last trained token."""
        if len(self.loss_mask) and self.loss_mask.item(-1):  # the common case
            return self.tokens[:-1]
        last = len(self.loss_mask) - 1 - int(self.loss_mask[::-1].argmax())
        if not self.loss_mask[last]:
            raise ValueError("no token of this row is trained")
        return self.tokens[:last]

    @property
    def counted(self) -> int:
        """Return the number of trained tokens in the loss."""
        return int(np.count_nonzero(self.loss_mask if self.keep is None else self.keep))


class RankBatch(Struct, frozen=True, kw_only=True):
    """Work of one rank in train step `step`, with the denominators of the whole step."""

    step: int
    micro_batches: tuple[tuple[TrainRow, ...], ...]
    tokens: float  # trained tokens of the step, including skipped zero-advantage rows
    rows: float
    positions: float = 0.0  # positions that the model reads, over the computed rows of all ranks
    factors: dict[str, float] = {}  # see `LossInputs.factors`
    expert_tokens: float = 0.0  # trained tokens in demonstrations (`is_expert`)
    expert_rows: float = 0.0
    num_runs: float | None = None  # runs with a counted token; None: each row is a run
    expert_runs: float = 0.0
    num_groups: float | None = None  # groups with a counted token; None: each run is a group
    expert_groups: float = 0.0
    ref_given: bool = False  # rows have `ref`, so no rank computes it, not even a rank without rows


@dataclass(frozen=True)
class Budget:
    """Limit of one micro-batch: `tokens` computed positions, or `rows` rows."""

    tokens: int
    layout: AskedLayout = "auto"  # "auto" is taken for "shared"
    rows: int | None = None  # fixed micro-batches
    images: AskedLayout = "padded"  # of a step with images
    # give sets of rows to ranks by cost; False: in their order, about equally many rows to each
    balance: bool = True

    def cost(self, inputs: Sequence[np.ndarray]) -> int:
        """Return how many positions the model computes for rows with these `inputs`.

        "shared": distinct prefixes; "packed": all positions; "padded": the padded rectangle.
        """
        if self.layout == "packed":
            return sum(map(len, inputs))
        if self.shares_prompts:
            return shared_length(inputs)
        return len(inputs) * max(map(len, inputs))

    @property
    def shares_prompts(self) -> bool:
        """Return whether common prefixes of rows are computed once."""
        return self.layout in ("auto", "shared")


Inputs = Sequence[np.ndarray]  # int32 [< T] of each row, the tokens that the model reads


@dataclass
class _Bin:
    rows: list[int] = field(default_factory=list)
    cost: int = 0
    width: int = 0


def plan(rows: Sequence[TrainRow], world_size: int, budget: Budget) -> list[list[list[int]]]:
    """Return the micro-batches of each rank, as indexes into `rows`.

    Rows that stay together are a set: the pairs; if prompts are shared the groups, cut to the
    budget and so that no rank is idle; else single rows.  Each set, the largest first, goes to the
    rank with the fewest tokens (unless `Budget.balance` is off); within a rank the sets are packed
    into the budget, first-fit decreasing.  A row or pair that exceeds the budget gets its own
    micro-batch.  Micro-batches of a fixed number of rows keep the order of the rows, see `spread`.
    """
    if any(row.images for row in rows):
        budget = replace(budget, layout=budget.images)
    if budget.rows is not None:
        pairs = _pairs(rows) if any(row.pair for row in rows) else []
        return spread(len(rows), world_size, budget.rows, 2 if pairs else 1)
    inputs = [row.marked if budget.shares_prompts else row.inputs for row in rows]
    sets = _sets(rows, inputs, world_size, budget)
    ranks = _by_rank(sets, world_size, len(rows), budget)
    packed = [_first_fit(of_rank, inputs, budget) for of_rank in ranks]
    count = max(map(len, packed), default=0)
    return [micros + [[] for _ in range(count - len(micros))] for micros in packed]


def _by_rank(
    sets: list[tuple[list[int], int]], world_size: int, count: int, budget: Budget
) -> list[list[tuple[list[int], int]]]:
    """Return each rank's sets, the largest first, which packs well."""
    ranks: list[list[tuple[list[int], int]]] = [[] for _ in range(world_size)]
    load = [0] * world_size
    if budget.balance:
        sets = sorted(sets, key=lambda s: -s[1])
    before = 0
    for members, cost in sets:
        rank = load.index(min(load)) if budget.balance else before * world_size // count
        ranks[rank].append((members, cost))
        load[rank] += cost
        before += len(members)
    return [sorted(of_rank, key=lambda s: -s[1]) for of_rank in ranks]


def spread(count: int, world_size: int, size: int, unit: int = 1) -> list[list[list[int]]]:
    """Divide `count` rows into micro-batches of `size` rows for `world_size` ranks, in their order.

    The last micro-batch is smaller; every `unit` consecutive rows stay together.
    """
    each = -(-count // (world_size * unit)) * unit
    size = max(unit, size - size % unit)
    shares = [range(rank * each, min((rank + 1) * each, count)) for rank in range(world_size)]
    return [[list(share[at : at + size]) for at in range(0, each, size)] for share in shares]


def _sets(
    rows: Sequence[TrainRow], inputs: Inputs, world_size: int, budget: Budget
) -> list[tuple[list[int], int]]:
    """Return the sets of rows that stay together, with their cost."""
    if any(row.pair for row in rows):
        return [(pair, budget.cost([inputs[i] for i in pair])) for pair in _pairs(rows)]
    if not budget.shares_prompts:
        return [([i], len(tokens)) for i, tokens in enumerate(inputs)]
    groups: dict[str, list[int]] = defaultdict(list)
    for i, row in enumerate(rows):
        groups[row.group].append(i)
    # fewer groups than ranks: cut each group, or ranks would idle
    pieces = -(-world_size // max(1, len(groups)))
    sets = []
    for members in groups.values():
        for piece in np.array_split(members, min(pieces, len(members))):
            sets += _within(piece.tolist(), inputs, budget)
    return sets


def _pairs(rows: Sequence[TrainRow]) -> list[list[int]]:
    """Return the pairs of adjacent row indexes; losses read them as (chosen, rejected).

    Raises ValueError unless the two rows of each pair are adjacent.
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
    sets: list[tuple[list[int], int]], inputs: Inputs, budget: Budget
) -> list[list[int]]:
    bins: list[_Bin] = []
    grown: Callable[[_Bin, list[int], int], int] = (
        partial(_rectangle, inputs) if budget.layout == "padded" else _sum
    )
    for members, cost in sets:
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
