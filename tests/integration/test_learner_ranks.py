"""FSDP2 over gloo for real: two processes give one process's gradient, weights travel between world
sizes.

Run as a script it is one rank: `test_learner_ranks.py RANK WORLD RENDEZVOUS MODEL FOLDER [FROM]`.
"""

from __future__ import annotations

import gc
import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from rft.algorithm.settings import AlgorithmSettings
from rft.trainer.checkpoint import shards
from rft.trainer.loop.learner import Learner
from rft.trainer.rows.pack import Budget, RankBatch, TrainRow, plan
from rft.trainer.settings import LearnerSettings, OptimizerConfig
from rft.types.ids import Version
from tests.helpers import ranks
from tests.helpers.distill_reference import reference


def rows() -> list[TrainRow]:
    """3 groups of 3 rows of uneven length: 2 ranks get different amounts."""
    rng = np.random.default_rng(3)
    made = []
    for group in range(3):
        prompt = rng.integers(3, 250, 5 + 4 * group).tolist()
        for _ in range(3):
            answer = rng.integers(3, 250, int(rng.integers(1, 9))).tolist()
            mask = np.arange(len(prompt) + len(answer)) >= len(prompt)
            top = [rng.choice(250, 4, replace=False) for _ in answer]
            teacher = rng.dirichlet(np.ones(5), len(answer))
            made.append(
                TrainRow(
                    tokens=np.array(prompt + answer, np.int32),
                    loss_mask=mask,
                    logprobs=np.where(mask, -5.5, 0).astype(np.float32),
                    temperatures=np.ones(len(mask), np.float32),
                    advantages=np.full(int(mask.sum()), rng.normal(), np.float32),
                    values=np.full(int(mask.sum()), 0.1, np.float32),
                    returns=np.full(int(mask.sum()), rng.normal(), np.float32),
                    top_ids=np.array(top, np.int32),
                    top_logprobs=np.log(teacher).astype(np.float16),
                    group=str(group),
                )
            )
    return made


def share(rank: int, world: int, step: int, scorer: Learner | None = None) -> RankBatch:
    """`scorer`: its reference model runs before the step, whose rows are cut so that a rank idles."""
    given = rows()
    if scorer is not None:
        (scored,) = scorer.score([given], ("ref",))
        given = [
            msgspec.structs.replace(row, ref=s["ref"]) for row, s in zip(given, scored, strict=True)
        ]
    cut = plan(given, world, Budget(tokens=40 if scorer is None else 30))
    assert scorer is None or any(not m for mine in cut for m in mine)
    return RankBatch(
        step=step,
        micro_batches=tuple(tuple(given[i] for i in m) for m in cut[rank]),
        tokens=float(sum(r.loss_mask.sum() for r in given)),
        rows=float(len(given)),
        ref_given=scorer is not None,
    )


CRITIC = AlgorithmSettings(algorithm_type="ppo", advantage_fn="ppo")
TAUGHT = AlgorithmSettings(
    advantage_fn="none",
    policy_loss_fn="distill_top",
    policy_loss_fn_args={"k": 4, "divergence": "jsd", "importance_clip": 2.0},
)
DIVERGENCE = "jsd"
EXACT = AlgorithmSettings(
    advantage_fn="none",
    policy_loss_fn="distill_top",
    policy_loss_fn_args={"k": 4, "divergence": DIVERGENCE},
)
# other ways to spread the same step; each must give its gradient
VARIANTS: dict[str, dict[str, Any]] = {
    "sequence": {"sequence_parallel": 2},
    "copies": {"fsdp_size": 1, "forward_prefetch": True},
    "host": {"offload_policy": True, "ref_offload": True, "gradient_checkpointing": True},
    "referred": {},
}


def one_rank(
    rank: int, world: int, rendezvous: str, model: str, folder: Path, source: Path | None
) -> None:
    """Load (maybe), train two steps, saving after each; stage and score, and three steps more."""
    settings = LearnerSettings(
        model_path=model,
        cpu_threads=1,
        world_size=world,
        total_steps=4,
        optim=OptimizerConfig(lr=1e-3),
        grad_clip=0.5,
        algorithm=AlgorithmSettings(
            loss_agg_mode="seq-mean-token-mean", kl_loss_fn="k2", kl_loss_fn_args={"kl_coef": 0.01}
        ),
    )
    learner = Learner(settings, rank, rendezvous)
    if source is not None:
        learner.load(str(source))
        learner.save(str(folder / "again"), 2)
        go_on(learner, rank, world, folder)
        return
    for step in (1, 2):
        result = learner.step(share(rank, world, step))
        assert result.finite
        learner.save(str(folder / str(step)), step)
    broken = share(rank, world, 3)
    if rank == world - 1:  # one rank's rows are enough to skip the step everywhere
        bad = broken.micro_batches[0][0]
        fields = {f: getattr(bad, f) for f in bad.__struct_fields__} | {
            "advantages": np.full(int(bad.loss_mask.sum()), np.inf, np.float32)
        }
        broken = RankBatch(
            step=broken.step,
            micro_batches=((TrainRow(**fields),), *broken.micro_batches[1:]),
            tokens=broken.tokens,
            rows=broken.rows,
        )
    assert not learner.step(broken).finite
    learner.save(str(folder / "skipped"), 3)
    learner.export(str(folder / "huggingface"))
    learner.stage(Version(1, 2), None)
    (scored,) = learner.score([rows()])
    np.savez(folder / f"scores{rank}.npz", *[s["old"] for s in scored])
    # every group was left out, right after a canary
    nothing = RankBatch(step=4, micro_batches=(), tokens=1.0, rows=1.0)
    assert learner.step(nothing).grad_norm == 0.0
    learner.load(str(folder / "2"))
    go_on(learner, rank, world, folder)
    vary(
        settings,
        "critic",
        {"algorithm": CRITIC, "sequence_parallel": world},
        rank,
        rendezvous,
        folder,
    )
    for name, each in (("taught", 1), ("taught_sequence", world)):
        changes = {"algorithm": TAUGHT, "sequence_parallel": each}
        vary(settings, name, changes, rank, rendezvous, folder)
    exact(replace(settings, algorithm=EXACT), rank, rendezvous, folder)
    if world == 2:
        for name, changes in VARIANTS.items():
            vary(settings, name, changes, rank, rendezvous, folder)


def vary(
    settings: LearnerSettings,
    name: str,
    changes: dict[str, Any],
    rank: int,
    rendezvous: str,
    folder: Path,
) -> None:
    """Save what the first step makes of it with `changes`."""
    own = replace(settings, **changes)
    each = own.sequence_parallel
    learner = Learner(own, rank, f"{rendezvous}.{name}")
    mine = share(rank // each, own.world_size // each, 1, learner if name == "referred" else None)
    learner.step(mine, mine if learner.critic is not None else None)
    learner.save(str(folder / name), 1)
    learner.close()


def exact(settings: LearnerSettings, rank: int, rendezvous: str, folder: Path) -> None:
    """Save the gradient of the first step in float64."""
    from rft.trainer.model import policy as policies

    built = policies.built

    def in_float64(*arguments: Any) -> tuple[Any, Path | None]:
        policy, fill = built(*arguments)
        return policy.double(), fill

    policies.built = in_float64
    learner = Learner(settings, rank, f"{rendezvous}.exact")
    policies.built = built

    def keep(lr: float) -> float:
        gradients = {
            n: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            for n, p in learner.policy.trainable().items()
            if p.grad is not None
        }
        if rank == 0:
            np.savez(folder / "exact.npz", **{n: g.numpy() for n, g in gradients.items()})
        learner.optimizer.zero_grad()
        return 1.0

    learner._update = keep  # type: ignore[method-assign]
    learner.step(share(rank, settings.world_size, 1))
    learner.close()


def go_on(learner: Learner, rank: int, world: int, folder: Path) -> None:
    """Three steps more."""
    losses = [learner.step(share(rank, world, step)).sums["loss"] for step in (3, 4, 5)]
    (folder / f"losses{rank}.json").write_text(json.dumps(losses))
    learner.close()


def load_big(rank: int, world: int, rendezvous: str, model: str, folder: Path, warm: Path) -> None:
    """Peak memory of loading, above what the process had before."""
    from rft.trainer.model import policy as policies
    from rft.trainer.model import sharding

    settings = LearnerSettings(
        model_path=model, cpu_threads=1, world_size=world, row_layout="padded"
    )
    sharding.join(settings, rank, rendezvous)
    policies.load(replace(settings, model_path=str(warm)))
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident("VmRSS")
    policy = policies.load(settings)
    peak = resident("VmHWM") - before
    held = sum(p.to_local().nbytes for p in policy.parameters())
    (folder / f"memory{rank}.json").write_text(json.dumps({"peak": peak, "held": held}))
    torch.distributed.destroy_process_group()


def resident(name: str) -> int:
    (line,) = [x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(name)]
    return int(line.split()[1]) * 1024


def run(
    world: int, model: Path, folder: Path, source: Path | None = None, warm: Path | None = None
) -> Path:
    folder.mkdir()
    ranks.run(
        __file__,
        world,
        folder,
        model,
        folder,
        *([source] if source else []),
        *(["memory", warm] if warm else []),
    )
    return folder


def whole(folder: Path, kind: str) -> dict[str, torch.Tensor]:
    """All tensors of a kind, put together from every rank's file."""
    files = shards.find(folder, kind)
    return {name: files.read(name) for name in files}


def close(a: Path, b: Path, kind: str, limit: float) -> None:
    x = whole(a, kind)
    y = whole(b, kind)
    assert x.keys() == y.keys()
    worst = max((float((x[n] - y[n]).abs().max()), n) for n in x)
    assert worst[0] <= limit, worst


def apart(a: Path, b: Path, kind: str = "optimizer") -> float:
    """How far the first step's gradients are apart, relative to their norm: AdamW's average after
    it is a tenth of the gradient.
    """
    x = whole(a, kind)
    y = whole(b, kind)
    names = [n for n in x if n.startswith("exp_avg.")]
    assert len(names) > 10
    difference, size = (
        math.sqrt(sum(float(f(n).double().square().sum()) for n in names))
        for f in (lambda n: x[n] - y[n], x.__getitem__)
    )
    assert size > 1e-3
    return difference / size


@pytest.fixture(scope="module")
def worlds(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("worlds")
    return run(1, tiny_model, folder / "one"), run(2, tiny_model, folder / "two")


def test_two_ranks_have_one_ranks_gradient(worlds: tuple[Path, Path]) -> None:
    one, two = worlds
    assert apart(one / "1", two / "1") <= 1e-5
    close(one / "2", two / "2", "optimizer", 1e-5)  # with a KL term
    scores = [
        np.load(folder / f"scores{rank}.npz") for folder, rank in ((one, 0), (two, 0), (two, 1))
    ]
    for name in scores[0].files:
        assert np.array_equal(scores[1][name], scores[2][name])
        # AdamW's first steps divide by near-zero averages
        assert np.abs(scores[0][name] - scores[1][name]).max() < 2e-2


def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_all(worlds: tuple[Path, Path]) -> None:
    for folder in worlds:
        for name in ("model", "optimizer"):
            close(folder / "2", folder / "skipped", name, 0.0)


def losses(folder: Path) -> np.ndarray:
    """Of steps 3 to 5, added over ranks."""
    return np.sum([json.loads(p.read_text()) for p in folder.glob("losses*.json")], axis=0)


@pytest.mark.parametrize(("source", "world"), [(0, 2), (1, 1)])
def test_another_world_size_goes_on(
    worlds: tuple[Path, Path], source: int, world: int, tiny_model: Path, tmp_path: Path
) -> None:
    saved = worlds[source] / "2"
    again = run(world, tiny_model, tmp_path / "again", saved)
    for kind in ("model", "optimizer"):
        close(saved, again / "again", kind, 0.0)
    assert (
        np.abs(losses(again) - losses(worlds[source])).max() <= 1e-5 * np.abs(losses(again)).max()
    )


@pytest.mark.parametrize("name", VARIANTS)
def test_however_it_is_spread_the_gradient_is_the_same(
    name: str, worlds: tuple[Path, Path]
) -> None:
    one, two = worlds
    assert apart(one / "1", two / name) <= 1e-5
    files = sorted(p.name for p in (two / name).glob("model-*"))
    assert files == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


def test_ranks_learn_the_same_from_a_teachers_likeliest_tokens(worlds: tuple[Path, Path]) -> None:
    one, two = worlds
    for name in ("taught", "taught_sequence"):
        assert apart(one / "taught", two / name) <= 1e-5


def test_a_teachers_gradient_is_that_of_float64(
    worlds: tuple[Path, Path], tiny_model: Path
) -> None:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64)
    expected = reference(model, rows(), DIVERGENCE)
    size = sum(float(g.square().sum()) for g in expected.values())
    for folder in worlds:
        found = np.load(folder / "exact.npz")
        off = sum(
            float((g - torch.from_numpy(found[n])).square().sum()) for n, g in expected.items()
        )
        assert size > 0 and off**0.5 <= 1e-6 * size**0.5, (folder.name, (off / size) ** 0.5)


def test_ranks_that_share_a_sequence_teach_the_critic_the_same(worlds: tuple[Path, Path]) -> None:
    one, two = worlds
    for kind in ("optimizer", "critic_optimizer"):
        assert apart(one / "critic", two / "critic", kind) <= 1e-5


@pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK),
    reason="the peak of a process cannot be reset here",
)
def test_loading_takes_a_ranks_part_and_one_unit(tiny_model: Path, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=16384,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=8,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "big")
    total = sum(p.nbytes for p in model.parameters())
    root = model.model.embed_tokens.weight.nbytes
    layer = sum(p.nbytes for p in model.model.layers[0].parameters())
    assert total > 180e6
    run(2, tmp_path / "big", tmp_path / "out", warm=tiny_model)
    for rank in range(2):
        found = json.loads((tmp_path / "out" / f"memory{rank}.json").read_text())
        assert found["held"] == pytest.approx(total / 2, rel=1e-3)
        assert found["peak"] <= total / 2 + max(root, layer), found


def test_an_export_of_two_ranks_loads(worlds: tuple[Path, Path]) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(worlds[1] / "huggingface")
    saved = whole(worlds[1] / "2", "model")
    assert all(torch.equal(p, saved[n]) for n, p in model.named_parameters())


if __name__ == "__main__":
    import warnings

    warnings.simplefilter("error")
    place, count, meet, path, out, *rest = sys.argv[1:]
    if rest and rest[0] == "memory":
        load_big(int(place), int(count), meet, path, Path(out), Path(rest[1]))
        sys.exit()
    one_rank(int(place), int(count), meet, path, Path(out), Path(rest[0]) if rest else None)
