"""The value model: what it reads, its gradient, its warm-up, and that it goes on from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from rft.algorithm.base import Denominators
from rft.algorithm.settings import AlgorithmSettings
from rft.errors import CheckpointInvalid, ConfigError
from rft.testing import tiny
from rft.trainer.loop.learner import Learner
from rft.trainer.loop.ranks import Ranks
from rft.trainer.loop.step_result import StepResult
from rft.trainer.model import policy as policies
from rft.trainer.rows.pack import Budget, RankBatch, TrainRow, plan, spread
from rft.trainer.settings import CriticSettings, LearnerSettings, OptimizerConfig

Settings = Callable[..., LearnerSettings]
Made = Callable[..., Learner]
PPO = AlgorithmSettings(
    algorithm_type="ppo", advantage_fn="ppo", loss_agg_mode="seq-mean-token-mean"
)


@pytest.fixture
def made(settings: Settings) -> Made:
    def make(critic: dict[str, Any] | None = None, **changes: Any) -> Learner:
        return Learner(
            settings(
                algorithm=PPO,
                critic=CriticSettings(optim=OptimizerConfig(lr=1e-3), **(critic or {})),
                **changes,
            )
        )

    return make


def valued(rows: list[TrainRow], learner: Learner, seed: int = 0) -> list[TrainRow]:
    """`rows` with the critic's values and random returns."""
    rng = np.random.default_rng(seed)
    (scored,) = learner.score([rows], ("values",))
    returns = [rng.normal(size=int(r.loss_mask.sum())).astype(np.float32) for r in rows]
    return [
        msgspec.structs.replace(r, values=s["values"], returns=g)
        for r, s, g in zip(rows, scored, returns, strict=True)
    ]


def batch(
    rows: list[TrainRow], learner: Learner, *, step: int = 1, tokens: int = 16384
) -> RankBatch:
    (cut,) = plan(rows, 1, Budget(tokens, learner.settings.row_layout))
    micro = tuple(tuple(rows[i] for i in m) for m in cut)
    return RankBatch(
        step=step,
        micro_batches=micro,
        tokens=float(sum(r.loss_mask.sum() for r in rows)),
        rows=float(len(rows)),
    )


def learn(learner: Learner, rows: list[TrainRow], step: int) -> StepResult:
    given = batch(valued(rows, learner, step), learner, step=step)
    return learner.step(given, given)


def state(learner: Learner) -> dict[str, torch.Tensor]:
    assert learner.critic is not None
    return {n: p.detach().clone() for n, p in learner.critic.model.names().items()}


def randomise(learner: Learner) -> None:
    """A head that says something: at first it says 0."""
    assert learner.critic is not None
    with torch.no_grad():
        learner.critic.model.value_head.weight.normal_(generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("model", ["tiny_model", "tiny_untied"])
def test_it_begins_with_the_policys_layers_and_says_zero(
    model: str, request: pytest.FixtureRequest, made: Made, rows: list[TrainRow]
) -> None:
    learner = made(model_path=str(request.getfixturevalue(model)))
    policy = learner.policy.names()
    critic = state(learner)
    assert set(policy) - set(critic) == ({"lm_head.weight"} if model == "tiny_untied" else set())
    assert set(critic) - set(policy) == {"value_head.weight", "value_head.bias"}
    assert all(torch.equal(critic[n], policy[n]) for n in set(critic) & set(policy))
    (scored,) = learner.score([rows], ("values",))
    assert all(not s["values"].any() and s["values"].dtype == np.float32 for s in scored)


def test_a_value_is_of_the_state_before_its_token(made: Made, rows: list[TrainRow]) -> None:
    learner = made()
    randomise(learner)
    assert learner.critic is not None
    lm = learner.critic.model.lm
    head = learner.critic.model.value_head
    assert learner.settings.critic is not None
    plain = Learner(
        replace(
            learner.settings,
            row_layout="padded",
            critic=replace(learner.settings.critic, row_layout="padded"),
        )
    )
    randomise(plain)
    for found, other, row in zip(
        learner.score([rows], ("values",))[0],
        plain.score([rows], ("values",))[0],
        rows,
        strict=True,
    ):
        at = np.flatnonzero(row.loss_mask)
        # the plain model reads the row alone, up to the last token that predicts one
        alone = policies.Policy.hidden(plain.critic.model, plain._micro_batch([row]))  # type: ignore[union-attr]
        expected = head(alone)[:, 0].detach().numpy()
        assert len(at) == len(expected) and np.abs(found["values"] - expected).max() < 1e-4
        assert np.abs(found["values"] - other["values"]).max() < 1e-4
    changed = msgspec.structs.replace(
        rows[0],
        tokens=np.where(np.arange(len(rows[0].tokens)) == at_last(rows[0]), 9, rows[0].tokens),
    )
    before, after = (learner.score([[r]], ("values",))[0][0]["values"] for r in (rows[0], changed))
    assert np.array_equal(before, after), "the last token is predicted, not read"
    assert lm.get_output_embeddings() is None or isinstance(
        lm.get_output_embeddings(), torch.nn.Identity
    )


def at_last(row: TrainRow) -> int:
    return int(np.flatnonzero(row.loss_mask)[-1])


def gradient(learner: Learner, given: RankBatch) -> tuple[float, dict[str, torch.Tensor]]:
    critic = learner.critic
    found = {}
    assert critic is not None

    def keep(lr: float) -> float:
        found.update(
            {n: p.grad.clone() for n, p in critic.model.names().items() if p.grad is not None}
        )
        critic.optimizer.zero_grad()
        return 1.0

    critic.update = keep  # type: ignore[method-assign]
    result = learner.step(batch([], learner), given).critic
    assert result is not None
    return result.sums["vf_loss"] / given.tokens, found


def test_any_cut_gives_the_same_gradient(made: Made, rows: list[TrainRow]) -> None:
    plain = made(row_layout="padded")
    randomise(plain)
    given = valued(rows, plain)
    expected_loss, expected = gradient(plain, batch(given, plain))
    assert {n for n, g in expected.items() if g.abs().max() > 0} >= {
        "value_head.weight",
        "model.embed_tokens.weight",
    }
    for tokens, changes in (
        (16384, {}),
        (30, {}),
        (30, {"critic": {"gradient_checkpointing": True}}),
    ):
        learner = made(**changes)
        randomise(learner)
        loss, found = gradient(learner, batch(given, learner, tokens=tokens))
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        assert expected.keys() == found.keys()
        scale = max(float(g.abs().max()) for g in expected.values())
        assert max(float((found[n] - g).abs().max()) for n, g in expected.items()) < 1e-5 * scale


def test_the_loss_is_the_formula_on_the_stored_rows(made: Made, rows: list[TrainRow]) -> None:
    learner = made(critic={"cliprange_value": 0.2})
    randomise(learner)
    given = [
        msgspec.structs.replace(r, values=r.values + 0.3)
        for r in valued(rows, learner)
        if r.values is not None
    ]  # some clip
    result = learner.step(batch(given, learner), batch(given, learner)).critic
    assert result is not None
    per_row = []
    for r in given:
        assert r.values is not None and r.returns is not None
        v, old, goal = (a.astype(np.float64) for a in (r.values - 0.3, r.values, r.returns))
        per_row.append(
            np.maximum((v - goal) ** 2, (np.clip(v, old - 0.2, old + 0.2) - goal) ** 2).mean() / 2
        )
    tokens = sum(r.loss_mask.sum() for r in given)
    assert result.sums["vf_loss"] / tokens == pytest.approx(np.mean(per_row), rel=1e-4)
    assert 0 < result.sums["vf_clipfrac"] / tokens < 1


def test_policy_and_critic_are_trained_apart(made: Made, rows: list[TrainRow]) -> None:
    learner = made(critic={"ppo_epochs": 3, "warmup": 1}, ppo_epochs=2)
    policy = {n: p.detach().clone() for n, p in learner.policy.names().items()}
    critic = state(learner)
    first = learn(learner, rows, 1)
    assert first.critic is not None and (first.updates, first.critic.updates, first.finite) == (
        0,
        3,
        True,
    )
    assert first.sums == {} and all(
        torch.equal(p, policy[n]) for n, p in learner.policy.names().items()
    )
    assert not all(torch.equal(p, critic[n]) for n, p in state(learner).items())
    assert first.critic.lr == 1e-3
    second = learn(learner, rows, 2)
    assert second.critic is not None and (second.updates, second.critic.updates) == (2, 3)
    assert not all(torch.equal(p, policy[n]) for n, p in learner.policy.names().items())


@pytest.mark.e2e
def test_it_learns_what_it_is_taught(made: Made, rows: list[TrainRow]) -> None:
    learner = made(critic={"warmup": 100})
    losses = []
    for step in range(1, 31):
        given = batch(valued(rows, learner, seed=0), learner, step=step)
        result = learner.step(batch([], learner, step=step), given).critic
        assert result is not None
        losses.append(result.sums["vf_loss"])
    assert losses[-1] < 0.2 * losses[0], losses


@pytest.mark.parametrize(
    "contents", [("model", "optimizer", "extra"), ("hf_model", "optimizer", "extra")]
)
def test_saved_and_loaded_gives_the_same_next_losses(
    contents: tuple[str, ...], made: Made, rows: list[TrainRow], tmp_path: Path
) -> None:
    """Also where the policy's weights are in a Hugging Face folder, which holds no critic."""
    whole = made(critic={"ppo_epochs": 2}, save_contents=contents)
    for step in (1, 2):
        learn(whole, rows, step)
    whole.save(str(tmp_path / "trainer"), 2)
    kinds = {"optimizer", "critic_model", "critic_optimizer"} | ({"model"} & set(contents))
    assert {p.name.split("-")[0] for p in (tmp_path / "trainer").glob("*.safetensors")} == kinds
    if "hf_model" in contents:
        (tmp_path / "huggingface").mkdir()
        whole.export(str(tmp_path / "huggingface"))
    second = made(critic={"ppo_epochs": 2})
    second.load(str(tmp_path / "trainer"))
    for step in (3, 4):
        expected, found = (learn(learner, rows, step) for learner in (whole, second))
        assert expected.critic is not None and found.critic is not None
        assert found.sums == expected.sums and found.critic.sums == expected.critic.sums
    assert all(torch.equal(p, state(second)[n]) for n, p in state(whole).items())


def test_a_checkpoint_without_a_critic_says_what_to_do(
    made: Made, settings: Settings, tmp_path: Path
) -> None:
    """Of a run with another algorithm, which `resume_from_path` named."""
    Learner(settings()).save(str(tmp_path), 1)
    with pytest.raises(CheckpointInvalid, match=r"holds no critic.*model\.model_path"):
        made().load(str(tmp_path))


def test_a_critics_state_of_another_optimizer_is_refused(
    made: Made, rows: list[TrainRow], tmp_path: Path
) -> None:
    sgd = OptimizerConfig(optimizer_type="sgd", lr=1e-3, momentum=0.9)
    whole = made()
    learn(whole, rows, 1)
    whole.save(str(tmp_path), 1)
    other = Learner(replace(whole.settings, critic=replace(whole.settings.critic, optim=sgd)))
    with pytest.raises(
        CheckpointInvalid, match=r"critic: the optimizer's state is of adamw, not of sgd"
    ):
        other.load(str(tmp_path))
    learn(other, rows, 1)
    other.save(str(tmp_path / "sgd"), 1)
    with pytest.raises(
        CheckpointInvalid, match=r"critic: the optimizer's state is of sgd, not of adamw"
    ):
        made().load(str(tmp_path / "sgd"))


def test_another_model_with_other_heads_reads_the_same_rows(
    made: Made, rows: list[TrainRow], tmp_path: Path, tiny_model: Path
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=259,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=1,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    learner = made(critic={"model_path": str(tmp_path)})
    result = learn(learner, rows, 1)
    assert result.critic is not None and result.critic.updates == 1 and result.critic.grad_norm > 0


@pytest.mark.parametrize(("family", "eps"), [("qwen2", 1e-6), ("llama", 0.5)])
def test_a_critic_of_another_family_has_its_own_configuration(
    family: str, eps: float, made: Made, tmp_path: Path
) -> None:
    path = tiny.make(tmp_path / "critic", family=family, rms_norm_eps=1e-6)
    learner = made(critic={"model_path": str(path)}, override_config={"rms_norm_eps": 0.5})
    assert learner.critic is not None and learner.policy.lm.config.rms_norm_eps == 0.5
    assert learner.critic.model.lm.config.rms_norm_eps == eps


@pytest.mark.parametrize(("size", "count"), [(5, 3), (12, 1), (20, 1)])
async def test_values_are_computed_in_micro_batches_of_their_own(
    size: int, count: int, made: Made, rows: list[TrainRow]
) -> None:
    learner = made(
        critic={"use_dynamic_bsz": False, "micro_batch_size": 4, "forward_micro_batch_size": size}
    )
    randomise(learner)
    ranks = Ranks(learner)
    budget = ranks.forward_budget("values")
    assert budget == Budget(16384, "shared", size) and ranks.forward_budget("old") == Budget(
        16384, "shared"
    )
    (cut,) = spread(len(rows), 1, size)
    assert [len(m) for m in cut] == [size] * (len(rows) // size) + (
        [len(rows) % size] if len(rows) % size else []
    )
    assert len(cut) == count
    found = await ranks.prepare(rows)
    (expected,) = learner.score([rows], ("values",))
    assert all(
        np.abs(f["values"] - e["values"]).max() < 1e-5 for f, e in zip(found, expected, strict=True)
    )
    assert ranks.critic_budget == Budget(16384, "shared", 4)
    without = Ranks(made(critic={"use_dynamic_bsz": False}))
    with pytest.raises(ConfigError, match=r"trainer.critic.micro_batch_size_per_gpu: is needed"):
        _ = without.critic_budget


def test_idle_ranks_compute_without_effect(made: Made, rows: list[TrainRow]) -> None:
    learner = made()
    assert learner.critic is not None
    out = learner.critic.loss(
        learner._micro_batch([]), Denominators(1, 1, 1), "token-mean", idle=True
    )
    out.loss.backward()
    assert all(p.grad is None or not p.grad.any() for p in learner.critic.model.parameters())
