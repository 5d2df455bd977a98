"""One rank: exactness of shared prompts and of cutting, skipped steps, save and load."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import JetMoeConfig, JetMoeForCausalLM

from rft.algorithm.args import Computed
from rft.algorithm.settings import AlgorithmSettings
from rft.errors import CheckpointInvalid, ConfigError, SetupError
from rft.trainer.loop.learner import Learner
from rft.trainer.model import optim
from rft.trainer.rows.pack import RankBatch, TrainRow
from rft.trainer.settings import LearnerSettings
from rft.types.ids import Version

Settings = Callable[..., LearnerSettings]
Batch = Callable[..., RankBatch]


def gradient(learner: Learner, batch: RankBatch) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradient of a batch, without updating."""
    found: dict[str, torch.Tensor] = {}

    def keep(lr: float) -> float:
        found.update(
            {n: p.grad.clone() for n, p in learner.policy.names().items() if p.grad is not None}
        )
        learner.optimizer.zero_grad()
        return 1.0

    learner._update = keep  # type: ignore[method-assign]
    return learner.step(batch).sums["loss"] / batch.tokens, found


def apart(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[n] - b[n]).abs().max()) for n in a)


def state(learner: Learner) -> dict[str, torch.Tensor]:
    return {
        n: t.detach().clone()
        for n, t in [
            *learner.policy.names().items(),
            *optim.moments(learner.optimizer, learner.policy.names()).items(),
        ]
    }


@pytest.mark.parametrize("model", ["tiny_model", "tiny_untied"])
def test_shared_prompts_and_any_cut_give_the_plain_gradient(
    model: str,
    request: pytest.FixtureRequest,
    settings: Settings,
    rows: list[TrainRow],
    make_batch: Batch,
) -> None:
    path = str(request.getfixturevalue(model))
    plain = settings(model_path=path, row_layout="padded")
    expected_loss, expected = gradient(Learner(plain), make_batch(rows, plain))
    for changes in (
        {},
        {"max_token_len_per_gpu": 30},
        {"logprob_chunk_tokens": 5},
        {"row_layout": "padded", "max_token_len_per_gpu": 50},
    ):
        shared = settings(model_path=path, **changes)
        batch = make_batch(rows, shared)
        loss, found = gradient(Learner(shared), batch)
        assert loss == pytest.approx(expected_loss, abs=1e-6)
        assert apart(found, expected) < 1e-5
    assert len(batch.micro_batches) > 1


def test_a_row_that_stands_twice_has_twice_the_gradient(
    settings: Settings, rows: list[TrainRow], make_batch: Batch
) -> None:
    drawn = [rows[0], rows[0], rows[0], rows[4], rows[1]]
    plain = settings(row_layout="padded")
    shared = settings()
    expected_loss, expected = gradient(Learner(plain), make_batch(drawn, plain))
    loss, found = gradient(Learner(shared), make_batch(drawn, shared))
    assert loss == pytest.approx(expected_loss, abs=1e-6)
    assert apart(found, expected) < 1e-5


def test_log_probs_are_those_of_the_plain_model(settings: Settings, rows: list[TrainRow]) -> None:
    from transformers import AutoModelForCausalLM

    learner = Learner(settings())
    (scored,) = learner.score([rows])
    plain = AutoModelForCausalLM.from_pretrained(learner.settings.model_path, dtype=torch.float32)
    for row, found in zip(rows, scored, strict=True):
        with torch.no_grad():
            logits = (
                plain(torch.from_numpy(row.tokens)[None].long()).logits[0] / row.temperatures[0]
            )
        at = np.flatnonzero(row.loss_mask)
        expected = torch.log_softmax(logits, -1)[at - 1, row.tokens[at].tolist()]
        assert np.abs(found["old"] - expected.numpy()).max() < 2e-5


def test_sums_over_the_vocabulary_are_those_of_the_plain_model(
    settings: Settings, rows: list[TrainRow]
) -> None:
    from transformers import AutoModelForCausalLM

    learner = Learner(settings())
    what: tuple[Computed, ...] = ("discriminator_mean", "entropy", "old", "sum_squares")
    (scored,), (old,) = learner.score([rows], what), learner.score([rows])
    plain = AutoModelForCausalLM.from_pretrained(learner.settings.model_path, dtype=torch.float32)
    for row, found, before in zip(rows, scored, old, strict=True):
        with torch.no_grad():
            logits = (
                plain(torch.from_numpy(row.tokens)[None].long()).logits[0] / row.temperatures[0]
            )
        logp = torch.log_softmax(logits, -1)[np.flatnonzero(row.loss_mask) - 1].double()
        p = logp.exp()
        entropy = -(logp.exp() * logp).sum(-1)
        assert np.abs(found["old"] - before["old"]).max() < 1e-6
        assert np.abs(found["entropy"] - entropy.numpy()).max() < 5e-5
        assert found["sum_squares"] == pytest.approx((p**2).sum(-1).numpy(), rel=1e-3)
        assert found["discriminator_mean"] == pytest.approx(
            (p**2 * (entropy[:, None] + logp)).sum(-1).numpy(), rel=1e-2, abs=1e-6
        )


def test_loss_scale_factor_divides_instead_of_the_longest_response(
    settings: Settings, rows: list[TrainRow], make_batch: Batch
) -> None:
    summed = AlgorithmSettings(loss_agg_mode="seq-mean-token-sum-norm")
    by_length = settings(algorithm=summed)
    by_factor = settings(algorithm=summed, loss_scale_factor=48)
    _, expected = gradient(Learner(by_length), make_batch(rows, by_length))
    _, found = gradient(Learner(by_factor), make_batch(rows, by_factor))
    assert apart({n: g * 12 / 48 for n, g in expected.items()}, found) < 1e-6, (
        "max_response_tokens is 12"
    )


def test_gradient_checkpointing_changes_nothing(
    settings: Settings, rows: list[TrainRow], make_batch: Batch
) -> None:
    batch = make_batch(rows, settings())
    _, expected = gradient(Learner(settings()), batch)
    _, found = gradient(Learner(settings(gradient_checkpointing=True)), batch)
    assert apart(found, expected) < 1e-6


def test_a_model_that_cannot_checkpoint_activations_is_named(
    settings: Settings, tmp_path: Path
) -> None:
    """M4: jetmoe ended in a traceback of transformers, as a bug in rft."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    experts = {"num_local_experts": 2, "num_experts_per_tok": 2, "kv_channels": 16}
    config = JetMoeConfig(vocab_size=64, num_key_value_heads=2, **sizes, **experts)
    JetMoeForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(
        ConfigError,
        match=r"trainer\.enable_gradient_checkpointing: .* JetMoeForCausalLM; write false",
    ):
        Learner(settings(model_path=tmp_path, gradient_checkpointing=True))


def test_bfloat16_goes_through_fsdp_and_keeps_float32_weights(
    settings: Settings, rows: list[TrainRow], make_batch: Batch
) -> None:
    learner = Learner(settings(dtype="bfloat16"))
    try:
        before = state(learner)
        result = learner.step(make_batch(rows, learner.settings))
        assert result.finite and result.grad_norm > 0
        assert {p.dtype for p in learner.policy.parameters()} == {torch.float32}
        assert any(not torch.equal(before[n], t) for n, t in state(learner).items() if n in before)
    finally:
        learner.close()


def test_a_step_that_is_not_finite_changes_not_one_bit(
    settings: Settings, rows: list[TrainRow], make_batch: Batch
) -> None:
    learner = Learner(settings())
    assert learner.step(make_batch(rows, learner.settings)).finite
    before = state(learner)
    broken = [
        *rows[:-1],
        TrainRow(
            **{f: getattr(rows[-1], f) for f in rows[-1].__struct_fields__}
            | {"advantages": np.full(int(rows[-1].loss_mask.sum()), np.inf, np.float32)}
        ),
    ]
    result = learner.step(make_batch(broken, learner.settings, step=2))
    assert not result.finite
    assert all(torch.equal(t, before[n]) for n, t in state(learner).items())
    assert all(p.grad is None for p in learner.policy.parameters())


@pytest.mark.parametrize(
    "where",
    ["one advantage", "log-probs of one row", "one gradient", "one weight's gradient, infinite"],
)
def test_nothing_that_is_not_finite_gets_into_weights(
    where: str, settings: Settings, rows: list[TrainRow], make_batch: Batch
) -> None:
    learner = Learner(settings())
    assert learner.step(make_batch(rows, learner.settings)).finite
    before = state(learner)
    broken = rows[-1]
    if where == "one advantage":
        advantages = np.array([np.nan, *np.ones(int(broken.loss_mask.sum()) - 1)], np.float32)
        broken = msgspec.structs.replace(broken, advantages=advantages)
    elif (
        where == "log-probs of one row"
    ):  # divided by a temperature that float32 has no reciprocal of
        broken = msgspec.structs.replace(
            broken, temperatures=np.full(len(broken.tokens), 1e-40, np.float32)
        )
    else:
        bad = float("nan" if where == "one gradient" else "inf")
        weight = next(iter(learner.policy.names().values()))
        weight.register_hook(
            lambda g: g.index_put((torch.tensor([3]), torch.tensor([1])), torch.tensor(bad))
        )
    result = learner.step(make_batch([*rows[:-1], broken], learner.settings, step=2))
    assert not result.finite and not np.isfinite(result.grad_norm)
    assert all(torch.equal(t, before[n]) for n, t in state(learner).items())


def test_without_rows_momentum_still_moves_the_weights(
    settings: Settings, rows: list[TrainRow], make_batch: Batch
) -> None:
    """Rows of zero advantage may be left out, because it makes no difference to the update."""
    flat = [
        TrainRow(**{f: getattr(r, f) for f in r.__struct_fields__} | {"advantages": None})
        for r in rows
    ]
    learners = [Learner(settings()) for _ in range(2)]
    for learner, second in zip(learners, (flat, []), strict=True):
        learner.step(make_batch(rows, learner.settings))
        result = learner.step(
            RankBatch(
                step=2, micro_batches=(tuple(second),) if second else (), tokens=100.0, rows=12.0
            )
        )
        assert result.grad_norm == 0.0
    assert apart(*map(state, learners)) == 0.0


def test_kl_reads_a_frozen_reference(
    settings: Settings, rows: list[TrainRow], make_batch: Batch
) -> None:
    learner = Learner(
        settings(algorithm=AlgorithmSettings(kl_loss_fn="k2", kl_loss_fn_args={"kl_coef": 0.1}))
    )
    assert learner.reference is not None
    first = learner.step(make_batch(rows, learner.settings))
    second = learner.step(make_batch(rows, learner.settings, step=2))
    assert first.sums["kl_loss"] == 0.0 < second.sums["kl_loss"]


def test_saved_and_loaded_goes_on_bit_for_bit(
    settings: Settings, rows: list[TrainRow], make_batch: Batch, tmp_path: Path
) -> None:
    whole = Learner(settings())
    first = Learner(settings())
    for step in (1, 2, 3, 4):
        whole.step(make_batch(rows, whole.settings, step=step))
    for step in (1, 2):
        first.step(make_batch(rows, first.settings, step=step))
    first.save(str(tmp_path / "trainer"), 2)
    second = Learner(settings())
    second.load(str(tmp_path / "trainer"))
    for step in (3, 4):
        second.step(make_batch(rows, second.settings, step=step))
    expected = state(whole)
    found = state(second)
    assert all(torch.equal(found[n], t) for n, t in expected.items())


def test_loading_what_does_not_fit_names_the_file(
    settings: Settings, tiny_untied: Path, tmp_path: Path
) -> None:
    Learner(settings()).save(str(tmp_path), 0)
    with pytest.raises(
        CheckpointInvalid,
        match=r"model-00001-of-00001.safetensors: holds other tensors than this model, e.g. "
        r"lm_head.weight",
    ):
        Learner(settings(model_path=str(tiny_untied))).load(str(tmp_path))
    with pytest.raises(CheckpointInvalid, match=r"state.json"):
        Learner(settings()).load(str(tmp_path / "nowhere"))


@pytest.mark.parametrize("model", ["tiny_model", "tiny_untied"])
def test_export_is_a_hugging_face_folder(
    model: str,
    request: pytest.FixtureRequest,
    settings: Settings,
    rows: list[TrainRow],
    make_batch: Batch,
    tmp_path: Path,
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    learner = Learner(settings(model_path=str(request.getfixturevalue(model))))
    learner.step(make_batch(rows, learner.settings))
    learner.export(str(tmp_path / "huggingface"))
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "huggingface")
    assert all(torch.equal(p, learner.policy.names()[n]) for n, p in back.named_parameters())
    assert back.generation_config.eos_token_id == 2
    assert AutoTokenizer.from_pretrained(tmp_path / "huggingface").chat_template
    assert (
        load_file(tmp_path / "huggingface" / "model.safetensors").keys()
        == learner.policy.names().keys()
    )


def test_stage_gives_every_tensor_once_and_the_tied_names(
    settings: Settings, tmp_path: Path
) -> None:
    from rft.sync.transport.checkpoint import CheckpointTransport

    transport = CheckpointTransport(tmp_path)
    learner = Learner(settings())
    manifest = learner.stage(Version(1, 0), transport)
    assert manifest is not None
    assert {t.name for t in manifest.tensors} == set(learner.policy.names())
    assert manifest.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    transport.close()


def test_engines_that_share_the_gpu_get_what_gathering_took(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[str] = []
    monkeypatch.setattr(
        torch.accelerator.memory, "empty_cache", lambda: happened.append("given back")
    )
    transport: Any = SimpleNamespace(
        stage=lambda version, given, tied: happened.extend(name for name, _ in given)
    )
    learner = Learner(settings(shares_device=True))
    learner.stage(Version(1, 0), transport)
    assert happened.index("given back") == len(learner.policy.names()) == len(happened) - 1
    learner.stage(Version(1, 1), None)
    assert happened[-1] == "given back"


def test_wrong_settings_say_what_to_do(settings: Settings) -> None:
    with pytest.raises(
        ConfigError,
        match=r"trainer.row_layout: needs attn_implementation auto, sdpa or flash_attention_2, not "
        r"eager",
    ):
        Learner(settings(attn_implementation="eager", row_layout="shared"))
    assert Learner(settings(attn_implementation="eager")).settings.row_layout == "padded"
    with pytest.raises(SetupError, match="not a folder"):
        Learner(settings(model_path="some/hub-id"))
    with pytest.raises(SetupError, match="2 ranks need a rendezvous file"):
        Learner(settings(world_size=2))


def test_a_sliding_window_is_the_same_in_shared_and_padded_rows(
    tiny_model: Path, tmp_path: Path, settings: Settings, rows: list[TrainRow]
) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=259,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=4,
    )
    MistralForCausalLM(config).save_pretrained(tmp_path)
    scored = {
        layout: Learner(settings(model_path=str(tmp_path), row_layout=layout)).score([rows])[0]
        for layout in ("shared", "padded")
    }
    for shared, padded in zip(*scored.values(), strict=True):
        np.testing.assert_allclose(shared["old"], padded["old"], atol=1e-5)


def test_state_file_is_readable_json(settings: Settings, tmp_path: Path) -> None:
    Learner(settings()).save(str(tmp_path), 7)
    page = json.loads((tmp_path / "state.json").read_text())
    assert {k: page[k] for k in ("step", "updates", "seed", "world_size")} == {
        "step": 7,
        "updates": 0,
        "seed": 42,
        "world_size": 1,
    }
