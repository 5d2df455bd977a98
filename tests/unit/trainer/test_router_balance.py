"""The load-balancing loss is transformers' own, in every layout and however the step is cut."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from rft.errors import ConfigError
from rft.trainer.loop.learner import Learner
from rft.trainer.model import policy
from rft.trainer.rows.pack import Budget, RankBatch, TrainRow, plan
from rft.trainer.settings import LearnerSettings, LoraSettings
from tests.helpers import families

Settings = Callable[..., LearnerSettings]
# what transformers says of kernels that are not installed
pytestmark = pytest.mark.filterwarnings("ignore")
COEF = 0.5


@pytest.fixture
def grouped(rows: list[TrainRow]) -> list[TrainRow]:
    return [msgspec.structs.replace(r, tokens=r.tokens % families.VOCABULARY) for r in rows]


def theirs(folder: Path, rows: list[TrainRow]) -> tuple[float, dict[str, torch.Tensor]]:
    """transformers' loss of padded rows, and its gradient."""
    from transformers import AutoModelForCausalLM
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    inputs = [torch.from_numpy(r.inputs).long() for r in rows]
    ids = torch.nn.utils.rnn.pad_sequence(inputs, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(x) for x in inputs], batch_first=True)
    out = lm(input_ids=ids, attention_mask=mask, output_router_logits=True, use_cache=False)
    loss = load_balancing_loss_func(out.router_logits, 4, 2, mask)
    (COEF * loss).backward()
    return float(loss), {n: p.grad for n, p in lm.named_parameters() if p.grad is not None}


def mine(
    learner: Learner, rows: list[TrainRow], budget: Budget
) -> tuple[Any, dict[str, torch.Tensor]]:
    (cut,) = plan(rows, 1, budget)
    batch = RankBatch(
        step=1,
        micro_batches=tuple(tuple(rows[i] for i in m) for m in cut),
        tokens=float(sum(r.loss_mask.sum() for r in rows)),
        rows=float(len(rows)),
        positions=float(sum(len(r.inputs) for r in rows)),
    )
    found: dict[str, torch.Tensor] = {}

    def keep(lr: float) -> float:
        found.update(
            {n: p.grad.clone() for n, p in learner.policy.trainable().items() if p.grad is not None}
        )
        learner.optimizer.zero_grad()
        return 1.0

    learner._update = keep  # type: ignore[method-assign]
    result = learner.step(batch)
    return result, found


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen3_moe", "shared"),
        ("qwen3_moe", "packed"),
        ("qwen3_moe", "padded"),
        ("mixtral", "shared"),
        ("gpt_oss", "padded"),
    ],
)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_it_is_what_transformers_computes(
    family: str,
    layout: Any,
    checkpointing: bool,
    tmp_path: Path,
    settings: Settings,
    grouped: list[TrainRow],
) -> None:
    folder = families.make(family, tmp_path / "m")
    how: dict[str, Any] = {
        "model_path": str(folder),
        "row_layout": layout,
        "gradient_checkpointing": checkpointing,
    }
    wanted, gradient = theirs(folder, grouped)
    tokens = float(sum(r.loss_mask.sum() for r in grouped))
    with_it = Learner(settings(router_aux_loss_coef=COEF, **how))
    without = Learner(settings(**how))
    for cut in (4000, 40):
        budget = Budget(cut, layout)
        (result, full), (_, plain) = mine(with_it, grouped, budget), mine(without, grouped, budget)
        assert result.sums["router_aux_loss"] / tokens == pytest.approx(wanted, rel=1e-5)
        assert result.maxima["router_max_load"] >= 1
        scale = max(float(g.abs().max()) for g in gradient.values())
        assert scale > 0
        for name, given in gradient.items():
            assert float((full[name] - plain[name] - given).abs().max()) <= 1e-4 * scale, name


def test_counting_leaves_the_output_layer_out(
    tmp_path: Path, settings: Settings, grouped: list[TrainRow], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    heads = policy.token_logprobs
    monkeypatch.setattr(policy, "token_logprobs", lambda *a, **k: calls.append(1) or heads(*a, **k))
    learner = Learner(
        settings(
            model_path=str(families.make("qwen3_moe", tmp_path / "m")), router_aux_loss_coef=COEF
        )
    )
    calls.clear()  # of the proof at load
    mine(learner, grouped, Budget(4000))
    assert len(calls) == 1
    assert learner._micro_batch(grouped).counts is not None
    assert Learner(settings())._micro_batch(grouped).counts is None


def test_it_is_off_by_default(tmp_path: Path, settings: Settings, grouped: list[TrainRow]) -> None:
    learner = Learner(settings(model_path=str(families.make("qwen3_moe", tmp_path / "m"))))
    assert learner.policy.routers is None
    assert "router_aux_loss" not in mine(learner, grouped, Budget(4000))[0].sums


def test_a_step_without_rows_to_compute_has_none(tmp_path: Path, settings: Settings) -> None:
    """As where all rewards of every group are equal."""
    learner = Learner(
        settings(
            model_path=str(families.make("qwen3_moe", tmp_path / "m")), router_aux_loss_coef=COEF
        )
    )
    result = learner.step(RankBatch(step=1, micro_batches=(), tokens=10.0, rows=2.0))
    assert result.finite and not result.sums


def test_an_adapter_learns_from_it(
    tmp_path: Path, settings: Settings, grouped: list[TrainRow]
) -> None:
    lora = LoraSettings(rank=2, alpha=4, target_modules=("q_proj", "o_proj"))
    folder = str(families.make("qwen3_moe", tmp_path / "m"))
    learner = Learner(settings(model_path=folder, lora=lora, router_aux_loss_coef=COEF))
    result, found = mine(learner, grouped, Budget(4000))
    assert result.sums["router_aux_loss"] > 0 and all("lora" in name for name in found)


def test_a_model_without_experts_is_refused(settings: Settings) -> None:
    with pytest.raises(ConfigError, match="has no experts"):
        Learner(settings(router_aux_loss_coef=0.1))
