"""Lean modules: the same results as transformers' own, with less kept for the backward pass."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    GemmaConfig,
    LlamaConfig,
    Qwen3Config,
)

from rft.preflight.model_folder import LEAN
from rft.trainer.model import recompute

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
CONFIGS = {"llama": LlamaConfig(**SIZES), "qwen3": Qwen3Config(**SIZES)}


def model(
    config: LlamaConfig | Qwen3Config | GemmaConfig, dtype: torch.dtype = torch.float32
) -> nn.Module:
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(config).to(dtype)
    for p in made.parameters():  # norms begin at 1, which hides what is wrong with their weight
        nn.init.normal_(p, 0.1, 0.3)
    return made.train()


def run(lm: nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor], int]:
    """Logits, gradients, and the bytes that autograd keeps."""
    ids = torch.arange(48).view(2, 24)
    kept: dict[int, int] = {}

    def keep(t: torch.Tensor) -> torch.Tensor:
        if not isinstance(t, nn.Parameter):
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        logits = lm(ids).logits
    (logits.float().sin().sum()).backward()
    return (
        logits.detach(),
        {n: p.grad for n, p in lm.named_parameters() if p.grad is not None},
        sum(kept.values()),
    )


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_same_logits_and_gradients(name: str, dtype: torch.dtype) -> None:
    plain = run(model(CONFIGS[name], dtype))
    own = model(CONFIGS[name], dtype)
    norms = 5 + 4 * (name == "qwen3")  # two a layer and the last; queries' and keys'
    assert recompute.apply(own) == norms + 2
    got = run(own)
    assert torch.equal(plain[0], got[0])
    near = 1e-5 if dtype == torch.float32 else 3e-2
    assert plain[1].keys() == got[1].keys()
    for name, grad in plain[1].items():
        assert (grad - got[1][name]).float().norm() <= near * grad.float().norm(), name


def test_keeps_less() -> None:
    own = model(CONFIGS["llama"])
    plain = run(model(CONFIGS["llama"]))[2]
    recompute.apply(own)
    assert run(own)[2] < 0.8 * plain


def test_frozen_weights_get_no_gradient() -> None:
    own = model(CONFIGS["llama"])
    recompute.apply(own)
    for name, p in own.named_parameters():
        p.requires_grad_("q_proj" in name)
    assert set(run(own)[1]) == {f"model.layers.{i}.self_attn.q_proj.weight" for i in range(2)}


def test_other_code_is_left_alone() -> None:
    """Gemma adds 1 to the norms' weights and has another activation."""
    other = model(GemmaConfig(**SIZES))
    before = run(other)
    assert recompute.apply(other) == 0
    assert torch.equal(before[0], run(other)[0])


def test_an_adapter_on_the_last_layer_is_called() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    own = model(CONFIGS["llama"])
    for layer in own.model.layers:  # type: ignore[union-attr, attr-defined]
        layer.mlp.down_proj = Doubled(96, 32, bias=False)
    before = run(own)[0]
    recompute.apply(own)
    assert torch.equal(before, run(own)[0])


@pytest.mark.parametrize("kind", sorted(LEAN))
def test_kinds_that_the_memory_estimate_counts_on(kind: str) -> None:
    """All their norms and MLPs are known."""
    config = AutoConfig.for_model(kind, **SIZES, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    vision = kind.endswith("_vl_text")  # the text part of a model that sees
    made = (AutoModel if vision else AutoModelForCausalLM).from_config(config)
    assert recompute.apply(made) == sum(
        type(m).__name__.endswith(("MLP", "RMSNorm")) for m in made.modules()
    )
