"""Several updates on one batch, the proximal policy of a window, corrections and steered KL,
through feed, ranks and learner.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from rft.algorithm.settings import AlgorithmSettings, CorrectionConfig
from rft.errors import CheckpointInvalid, RunFailed
from rft.taskset.offline_data import OfflineData
from rft.taskset.settings import OfflineDataSettings, TasksetSettings
from rft.trainer.loop.learner import Learner
from rft.trainer.loop.numbers import numbers
from rft.trainer.loop.offline_reader import HeldOut
from rft.trainer.loop.ranks import Ranks
from rft.trainer.rows import batch_builder
from rft.trainer.rows.pack import RankBatch, TrainRow
from rft.trainer.settings import LearnerSettings
from rft.types.block import decode, encode
from rft.types.completion import VersionSpan
from rft.types.experience import Demonstration, Experience, SamplingRecord
from rft.types.ids import ExperienceId, GroupId, Version
from rft.types.ports import GroupStats, Lease
from rft.types.task import SamplingArgs

Settings = Callable[..., LearnerSettings]
Batch = Callable[..., RankBatch]


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {n: t.detach().clone() for n, t in learner.policy.names().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(t, b[n]) for n, t in a.items())


def lease(
    step: int = 1, *, rewards: tuple[float, ...] = (0.0, 1.0, 1.0), shift: float = 0.0
) -> Lease:
    """Two groups of rows whose sampler was sure to within `shift` of the tiny model's flat
    distribution.
    """
    rows = []
    groups = []
    for task in range(2):
        group = GroupId(1, 0, step, task)
        for run, reward in enumerate(rewards):
            tokens = np.array([1, 40 + task, 6, 7 + run, 9 + task, 2], np.int32)
            mask = np.arange(6) > 2
            rows.append(
                Experience(
                    id=group.run(run),
                    taskset="t",
                    task_index=task,
                    workflow="w",
                    status="complete",
                    tokens=tokens,
                    loss_mask=mask,
                    logprobs=np.where(mask, -5.5 - shift * run, 0).astype(np.float32),
                    version_spans=(VersionSpan(Version(1, 0), 3, 6),),
                    sampling=(SamplingRecord(start=3, end=6, sampling=SamplingArgs()),),
                    reward=reward,
                )
            )
        groups.append(
            GroupStats(
                group=str(group),
                rewards=rewards,
                mean=float(np.mean(rewards)),
                std=float(np.std(rewards, ddof=1)),
                runs=tuple(range(len(rewards))),
                steps=(0,) * len(rewards),
                lengths=(3,) * len(rewards),
            )
        )
    return Lease(step=step, frame=encode(rows), groups=tuple(groups))


async def train(ranks: Ranks, given: Lease) -> tuple[batch_builder.StepBatch, Any]:
    """One step as the trainer makes it, without a buffer."""
    read = batch_builder.decode_lease(given, samples=ranks.algorithm.needs.samples)
    feed = batch_builder.build_step(
        read,
        ranks.algorithm,
        ranks.budget,
        world_size=1,
        computed=await ranks.prepare(read.rows),
        critic_budget=ranks.critic_budget,
        factors=ranks.factors,
    )
    report = await ranks.step(feed.shares, feed.critic)
    ranks.update_controllers(feed.kl, report, feed.rows, feed.tokens)
    return feed, report


def test_passes_are_updates_with_the_old_policy_fixed(
    settings: Settings, rows: list[TrainRow], make_batch: Batch
) -> None:
    """Two passes are two steps of the same rows whose old log-probs are those before the first."""
    own = AlgorithmSettings(bypass_old_logprobs=False)
    twice = Learner(settings(algorithm=own, ppo_epochs=2))
    assert Ranks(twice).before == {"old"}
    (old,) = twice.score([rows])
    given = [msgspec.structs.replace(r, old=s["old"]) for r, s in zip(rows, old, strict=True)]
    result = twice.step(make_batch(given, twice.settings))
    assert (result.updates, result.skipped, result.finite) == (2, 0, True)
    assert result.sums["ratio_abs_dev"] > 0

    once = Learner(settings(algorithm=own))
    assert Ranks(once).before == frozenset()
    norms = [once.step(make_batch(given, once.settings)).grad_norm for _ in range(2)]
    assert same(weights(twice), weights(once))
    assert result.grad_norm == pytest.approx(
        np.mean(norms)
    ) and result.computed_positions == 2 * _positions(given, twice, make_batch)


def _positions(rows: list[TrainRow], learner: Learner, make_batch: Batch) -> int:
    return sum(
        learner._micro_batch(m).computed for m in make_batch(rows, learner.settings).micro_batches
    )


def test_shuffled_micro_batches_give_the_same_gradient_in_an_order_of_the_seed(
    settings: Settings, rows: list[TrainRow], make_batch: Batch
) -> None:
    def run(**changes: Any) -> tuple[dict[str, torch.Tensor], list[int]]:
        learner = Learner(settings(max_token_len_per_gpu=30, ppo_epochs=2, **changes))
        seen: list[int] = []
        accumulate = learner._accumulate

        def noted(rows: Any, *more: Any) -> None:
            seen.append(len(rows))
            accumulate(rows, *more)

        learner._accumulate = noted  # type: ignore[method-assign]
        learner.step(make_batch(rows, learner.settings))
        return weights(learner), seen

    plain, in_order = run()
    one, first = run(shuffle_minibatches=True, data_seed=1)
    again, second = run(shuffle_minibatches=True, data_seed=1)
    assert len(in_order) > 4 and first == second and same(one, again)
    half = len(first) // 2
    assert sorted(first[:half]) == sorted(in_order[:half]) and first[:half] != first[half:]
    # AdamW divides by tiny averages in its first steps, so rounding of the sums shows: compare with
    # what the step moved
    moved = weights(Learner(settings()))
    assert max(float((one[n] - plain[n]).abs().max()) for n in one) < 0.1 * max(
        float((plain[n] - moved[n]).abs().max()) for n in one
    )


def test_a_pass_that_is_not_finite_is_left_out_alone(
    settings: Settings, rows: list[TrainRow], make_batch: Batch
) -> None:
    learner = Learner(settings(ppo_epochs=3))
    plain = Learner(settings(ppo_epochs=2))
    update = learner._update
    calls = 0

    def broken(lr: float) -> float:
        nonlocal calls
        calls += 1
        if calls == 2:
            next(learner.policy.parameters()).grad.fill_(float("nan"))  # type: ignore[union-attr]
        return update(lr)

    learner._update = broken  # type: ignore[method-assign]
    result = learner.step(make_batch(rows, learner.settings))
    plain.step(make_batch(rows, plain.settings))
    assert (result.updates, result.skipped, result.finite) == (2, 1, True) and np.isnan(
        result.grad_norm
    )
    assert same(weights(learner), weights(plain))


def test_the_proximal_policy_is_the_windows_first(
    settings: Settings, rows: list[TrainRow], make_batch: Batch
) -> None:
    ranks = Ranks(
        learner := Learner(
            settings(algorithm=AlgorithmSettings(bypass_old_logprobs=False, proximal_window=True))
        )
    )
    assert ranks.before == {"old"}
    with pytest.raises(RunFailed, match="no weights of the window's start"):
        asyncio.run(ranks.prepare(rows))
    asyncio.run(ranks.remember())
    first = [s["old"] for s in asyncio.run(ranks.prepare(rows))]
    learner.step(make_batch(rows, learner.settings))
    moved = weights(learner)
    kept = [s["old"] for s in asyncio.run(ranks.prepare(rows))]
    now = [s["old"] for s in asyncio.run(ranks.compute(rows, ("old",)))]
    assert all(np.array_equal(a, b) for a, b in zip(first, kept, strict=True))
    assert not any(np.array_equal(a, b) for a, b in zip(first, now, strict=True))
    assert same(moved, weights(learner)), "the weights are put back"
    asyncio.run(ranks.remember())
    again = [s["old"] for s in asyncio.run(ranks.prepare(rows))]
    assert all(np.array_equal(a, b) for a, b in zip(now, again, strict=True))


async def test_mismatch_is_of_the_weights_before_the_step(settings: Settings) -> None:
    # every row is computed
    ranks = Ranks(Learner(settings(ppo_epochs=3, algorithm=AlgorithmSettings(kl_loss_fn="k2"))))
    given = lease(shift=0.1)
    read = batch_builder.decode_lease(given)
    old = [s["old"] for s in await ranks.compute(read.rows, ("old",))]
    feed, report = await train(ranks, given)
    found = numbers(feed, report, ranks.factors)
    ratio = np.exp(
        np.concatenate(
            [o - r.logprobs[r.loss_mask] for o, r in zip(old, read.rows, strict=True)]
        ).astype(np.float64)
    )
    assert found["mismatch/ratio_mean"] == pytest.approx(ratio.mean(), rel=1e-5)
    assert found["mismatch/ratio_max"] == pytest.approx(ratio.max(), rel=1e-5)
    assert found["mismatch/ratio_outside"] == pytest.approx(np.mean((ratio < 0.9) | (ratio > 1.1)))
    assert found["mismatch/ess"] == pytest.approx(
        ratio.sum() ** 2 / (len(ratio) * np.square(ratio).sum()), rel=1e-5
    )
    assert (found["train/updates"], found["train/skipped_updates"]) == (3.0, 0.0)


async def test_the_critics_numbers_are_of_the_rows_that_it_learns(settings: Settings) -> None:
    """An expert's rows, which the policy alone imitates, are in none of its means."""
    own = AlgorithmSettings(advantage_fn="ppo", policy_loss_fn="mix")
    given = lease()
    rows = decode(given.frame)
    expert = msgspec.structs.replace(
        rows[0],
        id=GroupId(1, 0, 1, 9).run(0),
        is_expert=True,
        reward=None,
        has_logprobs=False,
        version_spans=(),
        sampling=(),
    )
    with_expert = msgspec.structs.replace(given, frame=encode([*rows, expert]))
    told = []
    for each in (given, with_expert):
        found = numbers(*await train(Ranks(Learner(settings(algorithm=own))), each), {})
        told.append({name: value for name, value in found.items() if name.startswith("critic/")})
    assert told[0]["critic/vf_loss"] > 0 and told[1] == pytest.approx(told[0], rel=1e-5)


async def test_weights_and_rejection_reach_the_loss(settings: Settings) -> None:
    """Decoupled PPO: the ratio is 1 in the first pass, and token losses have the weights of old
    against sampler.
    """
    correction = {
        "rollout_is": "token",
        "rollout_is_threshold": 1.1,
        "rollout_rs": "seq_mean_k1",
        "rollout_rs_threshold": 1.15,
    }
    ranks = Ranks(
        Learner(
            settings(
                algorithm=AlgorithmSettings(
                    bypass_old_logprobs=False, rollout_correction=CorrectionConfig(**correction)
                )
            )
        )
    )
    feed, report = await train(ranks, given := lease(shift=0.1))
    read = batch_builder.decode_lease(given)
    (old,) = Learner(ranks.settings).score([read.rows])
    deltas = [
        s["old"].astype(np.float64) - r.logprobs[r.loss_mask]
        for s, r in zip(old, read.rows, strict=True)
    ]
    kept = [abs(d.mean()) <= np.log(1.15) for d in deltas]
    assert 0 < sum(kept) < 6
    mean = 2 / 3
    std = np.std([0, 1, 1], ddof=1)
    advantages = [(reward - mean) / (std + 1e-6) for reward in (0.0, 1.0, 1.0) * 2]
    total = sum(
        -a * np.minimum(np.exp(d), 1.1).sum()
        for a, d, keep in zip(advantages, deltas, kept, strict=True)
        if keep
    )
    assert feed.tokens == 3 * sum(kept)
    assert numbers(feed, report, {})["actor/pg_loss"] == pytest.approx(
        total / feed.tokens, rel=1e-4
    )
    assert feed.metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == pytest.approx(
        1 - sum(kept) / 6
    )


async def test_a_correction_that_corrects_nothing_needs_nothing(settings: Settings) -> None:
    """Two policies and the clipped loss: the ratio against the sampler holds the weight."""
    for correction in ({"bypass_mode": True}, {"bypass_mode": True, "rollout_is": "token"}):
        ranks = Ranks(
            Learner(
                settings(
                    algorithm=AlgorithmSettings(rollout_correction=CorrectionConfig(**correction))
                )
            )
        )
        plain = Ranks(Learner(settings(algorithm=AlgorithmSettings())))
        assert ranks.before == frozenset()
        (_, one), (_, two) = (
            await train(ranks, lease(shift=0.1)),
            await train(plain, lease(shift=0.1)),
        )
        assert one.sums["loss"] == two.sums["loss"] and one.grad_norm == two.grad_norm > 0


REJECTS = {
    "rollout_correction": CorrectionConfig(rollout_rs="token_k2", rollout_rs_threshold=1e-9),
    "bypass_old_logprobs": False,
}
NO_BEST = {"sample_strategy": "group_best", "sample_strategy_args": {"min_reward": 5.0}}


@pytest.mark.parametrize("loss", ["ppo", "clip_cov", "kl_cov", "m2po"])
@pytest.mark.parametrize("parts", [REJECTS, NO_BEST], ids=["rejected", "not_chosen"])
@pytest.mark.filterwarnings("error::RuntimeWarning")
async def test_a_step_of_which_nothing_is_left_computes_nothing(
    parts: dict[str, Any], loss: str, settings: Settings
) -> None:
    ranks = Ranks(Learner(settings(algorithm=AlgorithmSettings(policy_loss_fn=loss, **parts))))
    read = batch_builder.decode_lease(lease(shift=1.0))
    feed = batch_builder.build_step(
        read, ranks.algorithm, ranks.budget, world_size=1, computed=await ranks.prepare(read.rows)
    )
    assert feed.tokens == 0 and feed.shares[0].micro_batches == ()


STEERED = {"kl_coef": 0.5, "adaptive": True, "target_kl": 1e-4, "horizon": 60}


@pytest.mark.parametrize("where", ["kl_penalty", "kl_loss"])
async def test_an_adaptive_factor_is_steered_and_goes_on_after_a_resume(
    where: str, settings: Settings, tmp_path: Path
) -> None:
    own = AlgorithmSettings(**{f"{where}_fn": "k2", f"{where}_fn_args": STEERED})
    ranks = Ranks(Learner(settings(algorithm=own)))
    coefs = [ranks.factors[where]]
    losses = []
    for step in (1, 2, 3, 4):
        feed, report = await train(ranks, lease(step))
        told = numbers(feed, report, {where: coefs[-1]})
        kl = told["advantage/kl" if where == "kl_penalty" else "actor/kl"]
        expected = coefs[-1] * (1 + min(0.2, max(-0.2, kl / 1e-4 - 1)) * 6 / 60)
        coefs.append(ranks.factors[where])
        losses.append(report.sums["loss"])
        assert coefs[-1] == pytest.approx(expected, rel=1e-5)
        if step == 2:
            await ranks.take(2, copy=False)
            await ranks.write(tmp_path / "trainer")
    assert len(set(coefs)) == 5, "it moves in every step"

    second = Ranks(Learner(settings(algorithm=own)))
    await second.load(tmp_path)
    assert second.factors[where] == coefs[2]
    again = [(await train(second, lease(step)))[1].sums["loss"] for step in (3, 4)]
    assert again == losses[2:] and second.factors[where] == coefs[4]


async def test_an_adaptive_entropy_bonus_goes_on_after_a_resume(
    settings: Settings, tmp_path: Path
) -> None:
    """The first two steps measure an entropy below the target: the bonus begins in the second."""
    own = AlgorithmSettings(
        entropy_loss_fn="default",
        entropy_loss_fn_args={"adaptive": True, "target_entropy": 50.0, "delta": 0.1},
    )
    ranks = Ranks(Learner(settings(algorithm=own)))
    factors = []
    losses = []
    for step in (1, 2, 3):
        factors.append(ranks.factors["entropy_loss"])
        feed, report = await train(ranks, lease(step))
        told = numbers(feed, report, {"entropy_loss": factors[-1]})
        assert told["actor/entropy_coef"] == factors[-1]
        bonus = told["actor/pg_loss"] - told["actor/loss"]
        assert bonus == pytest.approx(factors[-1] * told["actor/entropy"], rel=1e-4, abs=1e-6)
        losses.append(report.sums["loss"])
        if step == 2:
            await ranks.take(2, copy=False)
            await ranks.write(tmp_path / "trainer")
    assert factors == pytest.approx([0, 0.1, 0.2])
    second = Ranks(Learner(settings(algorithm=own)))
    await second.load(tmp_path)
    assert second.factors == {"entropy_loss": pytest.approx(0.2)}
    assert (await train(second, lease(3)))[1].sums["loss"] == losses[2]


async def test_a_checkpoint_without_the_factor_is_refused(
    settings: Settings, tmp_path: Path
) -> None:
    plain = Ranks(Learner(settings()))
    await plain.take(0, copy=False)
    await plain.write(tmp_path / "trainer")
    own = AlgorithmSettings(kl_loss_fn="k2", kl_loss_fn_args=STEERED)
    with pytest.raises(CheckpointInvalid, match="has no factor of the adaptive kl_loss"):
        await Ranks(Learner(settings(algorithm=own))).load(tmp_path)
    fixed = replace(own, kl_loss_fn_args={"kl_coef": 0.5})
    await Ranks(Learner(settings(algorithm=fixed))).load(tmp_path)


async def test_a_constant_factor_is_the_written_one_whatever_the_checkpoint_was_trained_with(
    settings: Settings, tmp_path: Path
) -> None:
    own = AlgorithmSettings(
        kl_loss_fn="k2",
        kl_loss_fn_args={"kl_coef": 0.001},
        kl_penalty_fn="k1",
        kl_penalty_fn_args={"kl_coef": 0.002},
    )
    first = Ranks(Learner(settings(algorithm=own)))
    await first.take(0, copy=False)
    await first.write(tmp_path / "trainer")
    other = replace(own, kl_loss_fn_args={"kl_coef": 0.1}, kl_penalty_fn_args={"kl_coef": 0.2})
    ranks = Ranks(Learner(settings(algorithm=other)))
    await ranks.load(tmp_path)
    assert ranks.factors == {"kl_loss": 0.1, "kl_penalty": 0.2}


async def test_held_out_rows_have_the_factor_that_the_next_step_has(settings: Settings) -> None:
    own = AlgorithmSettings(
        advantage_fn="none", policy_loss_fn="sft", kl_loss_fn="k2", kl_loss_fn_args=STEERED
    )
    learner = Learner(settings(algorithm=own))
    ranks = Ranks(learner)
    # apart from the reference
    torch.nn.init.normal_(learner.policy.trainable()["model.norm.weight"], 1.0, 0.1)
    row = Demonstration(
        id=ExperienceId(0, 0, 0, 0, 0),
        tokens=np.arange(5, 13, dtype=np.int32),
        loss_mask=np.arange(8) > 2,
    )
    rows = TasksetSettings(name="mine", path="", workflow="")
    held_out = HeldOut(
        OfflineData(
            OfflineDataSettings(rows=rows, kind="chats", model_path="", max_tokens=8), [row], ""
        )
    )
    told = []
    for coef in (1.0, 3.0):
        ranks.controllers["kl_loss"].coef = coef
        told.append(await held_out.evaluate(ranks))
    (first, second), kl = told, told[0]["eval/mine/kl_loss"]
    assert kl > 1e-4 and second["eval/mine/loss"] - first["eval/mine/loss"] == pytest.approx(
        2 * kl, rel=1e-2
    )


async def test_a_kl_in_the_reward_of_ones_own_is_trained_and_told(
    settings: Settings, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(
        "import numpy as np\ndef apart(x, args):\n    return [np.full(r.length, 0.25) for r in "
        "x.rows]\n"
    )
    ranks = Ranks(
        Learner(settings(algorithm=AlgorithmSettings(kl_penalty_fn=f"{tmp_path / 'own.py'}:apart")))
    )
    told = numbers(*await train(ranks, lease()), ranks.factors)
    assert (
        told["advantage/kl"] == 0.25
        and told["train/updates"] == 1
        and "advantage/kl_coef" not in told
    )
