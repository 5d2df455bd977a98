"""Published names find their place in a model of vLLM's, also where its own loading renames or
merges them.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from rft.engine import vllm_layout
from rft.engine.vllm_layout import place, probe


class Layer(nn.Module):
    """As vLLM has a layer of Mamba, and of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.A = nn.Parameter(torch.zeros(4))
        self.qkv_proj = nn.Linear(4, 12, bias=False)


class Served(nn.Module):
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"]
    }

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer()])


def test_names_that_a_model_changes_while_it_loads() -> None:
    given = {
        "layers.0.A_log": torch.ones(4),
        **{f"layers.0.{n}_proj.weight": torch.ones(4, 4) for n in "qkv"},
    }
    published, unexpected = place(Served(), given)
    assert published["layers.0.A"][None] is given["layers.0.A_log"] and set(
        published["layers.0.qkv_proj.weight"]
    ) == set("qkv")
    assert unexpected == ()


class Delta(nn.Module):
    """As vLLM has a layer of Qwen3.5: four outputs in one, of which the checkpoint has three in one
    tensor.
    """

    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {
        "in_proj_qkvz": ["in_proj_qkv", "in_proj_z"]
    }

    def __init__(self) -> None:
        super().__init__()
        self.in_proj_qkvz = nn.Linear(4, 12, bias=False)
        self.in_proj_qkvz.output_sizes = [2, 2, 4, 4]  # type: ignore[assignment]


def test_a_tensor_that_holds_several_outputs() -> None:
    qkv = torch.randn(8, 4)
    z = torch.randn(4, 4)
    published, unexpected = place(Delta(), {"in_proj_z.weight": z, "in_proj_qkv.weight": qkv})
    parts = published["in_proj_qkvz.weight"]
    assert (
        list(parts) == [0, 1, 2, 3]
        and [len(p) for p in parts.values()] == [2, 2, 4, 4]
        and unexpected == ()
    )
    assert torch.equal(torch.cat([*parts.values()]), torch.cat([qkv, z]))
    alone, _ = place(Delta(), {"in_proj_z.weight": z})
    assert list(alone["in_proj_qkvz.weight"]) == [1], "what is missing is told by `absent`"


def test_a_name_that_belongs_nowhere_is_told() -> None:
    assert place(Served(), {"layers.0.B_log": torch.ones(4)})[1] == ("layers.0.B_log",)


class Router(nn.Module):
    """As vLLM has those of GLM-4.5 and MiniMax: its weight is float32 in a model of bfloat16."""

    input_size = 4
    params_dtype = torch.float32

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4).bfloat16().float())
        self.quant_method: Any = SimpleNamespace(
            apply=lambda module, x, bias: nn.functional.linear(x, module.weight, bias)
        )


@pytest.mark.e2e
@pytest.mark.filterwarnings("ignore")  # of what vLLM imports
def test_a_layer_is_probed_in_the_type_of_its_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.ModuleDict({"gate": Router()})
    monkeypatch.setattr(vllm_layout, "probed_modules", lambda model: [("gate", model["gate"])])
    given = {"gate.weight": {None: model["gate"].weight.detach().bfloat16()}}
    count, error, _ = probe(model, given, torch.device("cpu"), seed=0)
    assert count == 1 and error < 1e-6


class Merged(nn.Linear):
    """As vLLM's layers of two published weights of 40 and 20 outputs."""

    input_size = 8
    params_dtype = torch.float32

    def __init__(self) -> None:
        super().__init__(8, 60)
        self.quant_method = SimpleNamespace(apply=lambda layer, x, bias: layer(x))


@pytest.mark.e2e
@pytest.mark.filterwarnings("ignore")  # of what vLLM imports
@pytest.mark.parametrize("sample", [None, 16])
def test_a_sample_of_outputs_finds_a_wrong_part(
    sample: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on GPUs, where a probe compares some outputs of every published weight."""
    model = nn.ModuleDict({"up": Merged()})
    monkeypatch.setattr(vllm_layout, "probed_modules", lambda model: [("up", model["up"])])
    monkeypatch.setattr(vllm_layout, "own_parts", lambda module, parts: list(parts.values()))
    sent: list[int] = []
    taken = vllm_layout._taken

    def counted(weight: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        sent.append(len(rows))
        return taken(weight, rows)

    monkeypatch.setattr(vllm_layout, "_taken", counted)
    parts: dict[str, dict[Any, torch.Tensor]] = {
        kind: dict(enumerate(getattr(model["up"], kind).detach().clone().split([40, 20])))
        for kind in ("weight", "bias")
    }
    given = {f"up.{kind}": values for kind, values in parts.items()}
    for seed in range(5):
        count, error, _ = probe(model, given, torch.device("cpu"), seed=seed, sample=sample)
        assert count == 1 and error < 1e-6
    assert set(sent) == ({40, 20} if sample is None else {16})
    parts["weight"][1] += 0.5
    for seed in range(5):
        assert probe(model, given, torch.device("cpu"), seed=seed, sample=sample)[1] > 0.05
    assert vllm_layout.sample_of(torch.device("cpu")) is None
    assert vllm_layout.sample_of(torch.device("cuda")) == vllm_layout.SAMPLE


@pytest.mark.filterwarnings("ignore")  # of what vLLM imports
def test_a_layer_that_computes_nan_is_found_before_right_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where a sleep has dropped a weight that no load restores."""
    model = nn.ModuleDict({"lost": Router(), "right": Router()})
    monkeypatch.setattr(vllm_layout, "probed_modules", lambda model: model.items())
    given = {f"{n}.weight": {None: m.weight.detach().clone()} for n, m in model.items()}
    model["lost"].weight.data.fill_(float("nan"))
    assert probe(model, given, torch.device("cpu"), seed=0) == (2, float("inf"), "lost")
