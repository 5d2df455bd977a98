"""What ranks add up."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from rft.trainer.model import sharding
from rft.trainer.settings import LearnerSettings


class _Layer(nn.Module):
    """Experts in modules of their own, as the code that comes with some models has them."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor, chosen: Sequence[int]) -> torch.Tensor:
        for i in chosen:
            x = x + self.experts[i](x)
        return x


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = _Layer()
        self.tower = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, chosen: Sequence[int]) -> torch.Tensor:
        out: torch.Tensor = self.layer(x, chosen)
        return out


def test_ranks_add_gradients_of_all_experts_of_a_layer_also_of_those_that_one_of_them_does_not_use() -> (
    None
):
    """FSDP2 adds what has a gradient, one behind the other: else an expert of one rank is added to
    another one of the next rank.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        model = _Model()
        sharding.shard(model, LearnerSettings(model_path="", world_size=2), [model.layer])
        model(torch.ones(1, 4), (0, 2)).sum().backward()
        assert {name for name, p in model.named_parameters() if p.grad is not None} == {
            f"layer.experts.{i}.weight" for i in range(3)
        }
    finally:
        dist.destroy_process_group()
