"""Published names find their place in a model of vLLM's, also where its own loading renames or merges them."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from rft.engine.vllm_layout import place


class Layer(nn.Module):
    """As vLLM has a layer of Mamba, and of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.A = nn.Parameter(torch.zeros(4))
        self.qkv_proj = nn.Linear(4, 12, bias=False)


class Served(nn.Module):
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer()])


def test_names_that_a_model_changes_while_it_loads() -> None:
    given = {"layers.0.A_log": torch.ones(4), **{f"layers.0.{n}_proj.weight": torch.ones(4, 4) for n in "qkv"}}
    published, unexpected = place(Served(), given)
    assert published["layers.0.A"][None] is given["layers.0.A_log"] and set(published["layers.0.qkv_proj.weight"]) == set("qkv")
    assert unexpected == ()


def test_a_name_that_belongs_nowhere_is_told() -> None:
    assert place(Served(), {"layers.0.B_log": torch.ones(4)})[1] == ("layers.0.B_log",)
