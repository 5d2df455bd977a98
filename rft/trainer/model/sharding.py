"""Let ranks meet and shard a model over them with FSDP2.

Depends on process groups, meshes and FSDP2, not on the model's computation.  Invariant: gradients
are summed over all ranks and never averaged, because losses are local sums over the totals of the
whole step.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rft.errors import ConfigError, SetupError
from rft.trainer.settings import LearnerSettings

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def storage_device(settings: LearnerSettings) -> str:
    """Return the device that stores parameters between uses."""
    return "cpu" if settings.offload_policy else settings.device


def join(settings: LearnerSettings, rank: int, rendezvous: str | None) -> None:
    """Join the process group through the file `rendezvous`.

    NCCL on GPUs; gloo on CPU, over the loopback or GLOO_SOCKET_IFNAME.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # offloaded tensors are reduced on the host
    backend = "cpu:gloo,cuda:nccl" if settings.device == "cuda" else "gloo"
    if settings.world_size == 1:
        store: Any = dist.HashStore()  # type: ignore[attr-defined]
    elif rendezvous is None:
        raise SetupError(
            f"{settings.world_size} ranks need a rendezvous file that all of them can open"
        )
    else:
        store = dist.FileStore(rendezvous, settings.world_size)  # type: ignore[attr-defined]
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=settings.world_size, timeout=COLLECTIVE_TIMEOUT
    )


def shard(
    model: nn.Module,
    settings: LearnerSettings,
    blocks: Sequence[nn.Module],
    exact: Sequence[str] = (),
) -> None:
    """Shard `model` over the ranks: each of `blocks` is gathered separately, the rest together.

    `exact` modules stay float32.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        FSDPModule,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
    )

    if settings.dtype == "float16":
        raise ConfigError(
            "float16 needs loss scaling, which the trainer does not have; use bfloat16",
            key="trainer.param_dtype",
        )
    world = settings.world_size
    size = settings.fsdp_size
    if size in (-1, world):
        mesh = init_device_mesh(settings.device, (world,))
    elif world % size:
        raise ConfigError(
            f"{size} does not divide the {world} ranks", key="trainer.fsdp_size", given=size
        )
    else:
        mesh = init_device_mesh(
            settings.device, (world // size, size), mesh_dim_names=("copy", "shard")
        )
    low = DTYPES[settings.dtype]
    mixed = (
        MixedPrecisionPolicy()
        if low == torch.float32
        else MixedPrecisionPolicy(low, DTYPES[settings.reduce_dtype])
    )
    host = (
        CPUOffloadPolicy(pin_memory=settings.device == "cuda")
        if settings.offload_policy
        else OffloadPolicy()
    )
    again = settings.reshard_after_forward
    for block in blocks:
        fsdp = fully_shard(
            block, mesh=mesh, reshard_after_forward=again, mp_policy=mixed, offload_policy=host
        )
        # a rank may not use some expert, but all ranks must reduce the same tensors
        fsdp.set_reduce_scatter_unused_params(True)
    for name in exact:
        fully_shard(model.get_submodule(name), mesh=mesh, offload_policy=host)
    root = fully_shard(model, mesh=mesh, mp_policy=mixed, offload_policy=host)
    if settings.train_vision:  # a rank may have no image
        root.set_reduce_scatter_unused_params(True)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
    if settings.forward_prefetch:
        for block, following in pairwise(blocks):
            assert isinstance(block, FSDPModule) and isinstance(following, FSDPModule)
            block.set_modules_to_forward_prefetch([following])
