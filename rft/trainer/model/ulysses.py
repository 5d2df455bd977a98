"""Sequence parallelism: ranks share the positions of one micro-batch, and exchange heads for
positions around attention (Ulysses, arXiv:2309.14509).

Every rank of a group gets the same micro-batch and computes an equal slice of its packed positions.
Around attention, heads are distributed and positions gathered, so each rank attends over all
positions with its share of the heads, and prefix trees work as on one rank.  Log-probs are gathered
at the end: every rank gets those of all tokens and computes the same loss, and receives the
gradient of its own tokens. Depends on layouts and process groups, not on losses. Invariant:
gradients summed over all ranks equal the gradient of a single rank that computes everything.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from rft.errors import ConfigError
from rft.trainer.model import attention
from rft.trainer.model.attention import Layout
from rft.trainer.model.batch import MicroBatch
from rft.trainer.model.upload import upload
from rft.trainer.settings import LearnerSettings

_KEY = "trainer.ulysses_sequence_parallel_size"


@dataclass(frozen=True)
class Share:
    """This rank's part of a micro-batch, and how the results of the group are combined."""

    # inputs and tokens of this rank; at least one token, without effect if `indices` is empty
    batch: MicroBatch
    indices: torch.Tensor  # int64 [n], this rank's tokens among the N
    order: torch.Tensor  # int64 [N], index of token i in the gathered [size * widest]
    widest: int
    group: Any
    size: int

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Return float32 [N] of all tokens from each rank's own results."""
        gathered: torch.Tensor = _Gather.apply(values[: len(self.indices)], self)
        return gathered

    def add(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' results for their own positions."""
        summed: torch.Tensor = _Add.apply(values, self.group)
        return summed


@dataclass(frozen=True)
class Spread:
    """A `Layout` of all positions, which `size` ranks share."""

    layout: Layout
    length: int  # positions without padding
    group: Any
    size: int


class SequenceGroup:
    """The ranks that share micro-batches with this rank."""

    def __init__(self, group: Any, size: int) -> None:
        self.group = group
        self.size = size
        self.rank = dist.get_rank(group)

    def share(self, batch: MicroBatch) -> Share:
        """Return this rank's slice of `batch`."""
        assert isinstance(batch.tree, Layout), "positions are shared in the packed layout"
        length = batch.input_ids.shape[1]
        width = -(-length // self.size)
        begin = self.rank * width
        pad = self.size * width - length
        ids, positions = (
            F.pad(x, (0, pad))[:, begin : begin + width]
            for x in (batch.input_ids, batch.position_ids)
        )
        # on the host: the device would be waited for
        holder = batch.places // width  # rank of each token's position
        widest = int(np.bincount(holder).max(initial=0))
        gathered = holder * widest
        for rank in range(self.size):
            gathered[holder == rank] += np.arange((holder == rank).sum())
        order = upload(gathered, batch.predict.device)
        indices = upload((holder == self.rank).nonzero()[0], batch.predict.device)
        some = indices if len(indices) else indices.new_zeros(1)
        predict = batch.predict[some] - begin if len(indices) else indices.new_zeros(1)
        local = replace(
            batch,
            input_ids=ids,
            position_ids=positions,
            tree=Spread(batch.tree, length, self.group, self.size),
            predict=predict,
            targets=batch.targets[some],
            temperatures=None if batch.temperatures is None else batch.temperatures[some],
            top_ids=None if batch.top_ids is None else batch.top_ids[some],
            counts=None
            if batch.counts is None
            else F.pad(batch.counts, (0, pad))[begin : begin + width],
            experts=None
            if batch.experts is None
            else F.pad(batch.experts, (0, 0, 0, 0, 0, pad), value=-1)[begin : begin + width],
        )
        return Share(local, indices, order, widest, self.group, self.size)


def group(settings: LearnerSettings) -> SequenceGroup | None:
    """Return the group of this rank; None if each rank has its own micro-batches.  Collective."""
    size = settings.sequence_parallel
    if size == 1:
        return None
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(
        settings.device, (settings.world_size // size, size), mesh_dim_names=("data", "sequence")
    )
    return SequenceGroup(mesh["sequence"].get_group(), size)


def key_copies(heads: int, keys: int, size: int) -> int:
    """Return how often each key head is repeated to give `size` ranks equal shares.

    Raises ConfigError if the heads cannot be dealt.
    """
    copies = size // gcd(keys, size)
    if heads % size or heads % (keys * copies):
        raise ConfigError(
            f"{heads} attention heads over {keys} key heads cannot be dealt to {size} ranks",
            key=_KEY,
            given=size,
        )
    return copies


def attend(
    over_tree: Any,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    tree: Spread | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Return [1, t, H, E] from query [1, H, t, D], key [1, K, t, D] and value [1, K, t, E] over
    this rank's t positions.

    `over_tree` attends over all positions.
    """
    if tree is None:
        # raises the right error
        return attention.attend(module, query, key, value, attention_mask, **options)
    size = tree.size
    copies = key_copies(query.shape[1], key.shape[1], size)
    if copies > 1:
        key = key.repeat_interleave(copies, 1)
        value = value.repeat_interleave(copies, 1)
    q, k, v = (_positions(x, tree) for x in (query, key, value))
    if options.get("s_aux") is not None:
        options["s_aux"] = options["s_aux"].chunk(size)[dist.get_rank(tree.group)]
    out, _ = over_tree(module, q, k, v, attention_mask, tree=tree.layout, **options)
    width = query.shape[2]
    heads = F.pad(out[0], (0, 0, 0, 0, 0, size * width - tree.length)).view(
        size, width, *out.shape[2:]
    )
    return _exchange(heads, tree.group).transpose(0, 1).reshape(
        1, width, query.shape[1], value.shape[3]
    ), None


def _positions(x: torch.Tensor, tree: Spread) -> torch.Tensor:
    """Exchange [1, H, t, D] of all heads for [1, H / size, T, D] of all positions."""
    _, heads, width, dim = x.shape
    got = _exchange(x[0].view(tree.size, heads // tree.size, width, dim), tree.group)
    return got.transpose(0, 1).reshape(1, heads // tree.size, tree.size * width, dim)[
        :, :, : tree.length
    ]


def _exchange(x: torch.Tensor, group: Any) -> torch.Tensor:
    """Send x[r] to rank r; return what each rank sent, out[r] from rank r."""
    out: torch.Tensor = _AllToAll.apply(x, group)
    return out


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _AllToAll.forward(ctx, grads[0], ctx.group), None


class _Gather(torch.autograd.Function):
    """Gather values of all ranks.  Every rank computes the same loss from them, so its gradient is
    that of its own values, without a reduction.
    """

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, share: Share) -> torch.Tensor:
        ctx.indices = share.indices
        more = (0, 0) * (values.dim() - 1)
        padded = F.pad(values, (*more, 0, share.widest - len(values)))
        parts = [torch.empty_like(padded) for _ in range(share.size)]
        dist.all_gather(parts, padded, group=share.group)
        return torch.cat(parts).index_select(0, share.order)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0].index_select(0, ctx.indices), None


class _Add(torch.autograd.Function):
    """Sum values over ranks.  The gradient is passed on without a reduction, see `_Gather`."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: Any) -> torch.Tensor:
        out = values.clone()
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None
