"""FSDP2 over gloo for real: two processes give one process's gradient, weights travel between world sizes.

Run as a script it is one rank: `test_learner_ranks.py RANK WORLD RENDEZVOUS MODEL FOLDER [FROM]`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from rft.trainer import shards
from rft.trainer.learner import Learner
from rft.trainer.pack import Budget, RankBatch, TrainRow, plan
from rft.trainer.settings import AlgorithmSettings, LearnerSettings, OptimSettings
from rft.types.ids import Version

DEADLINE_S = 120


def rows() -> list[TrainRow]:
    """3 groups of 3 rows of uneven length: 2 ranks get different amounts."""
    rng = np.random.default_rng(3)
    made = []
    for group in range(3):
        prompt = rng.integers(3, 250, 5 + 4 * group).tolist()
        for _ in range(3):
            answer = rng.integers(3, 250, int(rng.integers(1, 9))).tolist()
            mask = np.arange(len(prompt) + len(answer)) >= len(prompt)
            made.append(
                TrainRow(
                    tokens=np.array(prompt + answer, np.int32),
                    loss_mask=mask,
                    logprobs=np.where(mask, -5.5, 0).astype(np.float32),
                    temperatures=np.ones(len(mask), np.float32),
                    advantages=np.full(int(mask.sum()), rng.normal(), np.float32),
                    group=str(group),
                )
            )
    return made


def share(rank: int, world: int, step: int) -> RankBatch:
    given = rows()
    cut = plan(given, world, Budget(tokens=40))
    micro = tuple(tuple(given[i] for i in m) for m in cut[rank])
    return RankBatch(step=step, micro_batches=micro, tokens=float(sum(r.loss_mask.sum() for r in given)), rows=float(len(given)))


def one_rank(rank: int, world: int, rendezvous: str, model: str, folder: Path, source: Path | None) -> None:
    """Load (maybe), train two steps, saving after each; stage and score at the end."""
    settings = LearnerSettings(
        model_path=model,
        cpu_threads=1,
        world_size=world,
        total_steps=4,
        optim=OptimSettings(lr=1e-3, clip_grad=0.5),
        algorithm=AlgorithmSettings(loss_agg_mode="seq-mean-token-mean", kl_loss_fn="k2", kl_loss_fn_args={"kl_coef": 0.01}),
    )
    learner = Learner(settings, rank, rendezvous)
    first = 1
    if source is not None:
        learner.load(str(source))
        learner.save(str(folder / "again"), 2)
        first = 3
    losses = []
    for step in (first, first + 1):
        result = learner.step(share(rank, world, step))
        assert result.finite
        losses.append(result.sums["loss"])
        learner.save(str(folder / str(step)), step)
    broken = share(rank, world, first + 2)
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
    learner.save(str(folder / "skipped"), first + 2)
    learner.export(str(folder / "huggingface"))
    learner.stage(Version(1, 2), None)
    (scored,) = learner.score([rows()])
    np.savez(folder / f"scores{rank}.npz", *[s["old"] for s in scored])
    nothing = RankBatch(step=first + 3, micro_batches=(), tokens=1.0, rows=1.0)  # every group was left out, right after a canary
    assert learner.step(nothing).grad_norm == 0.0
    learner.close()


def run(world: int, model: Path, folder: Path, source: Path | None = None) -> Path:
    folder.mkdir()
    command = [sys.executable, __file__]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [
                *command,
                str(r),
                str(world),
                str(folder / "rendezvous"),
                str(model),
                str(folder),
                *([str(source)] if source else []),
            ],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for r in range(world)
    ]
    try:
        for process in ranks:
            out, _ = process.communicate(timeout=DEADLINE_S)
            assert process.returncode == 0, out[-4000:]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return folder


def whole(folder: Path, kind: str) -> dict[str, torch.Tensor]:
    """All tensors of a kind, put together from every rank's file."""
    files = shards.find(folder, kind)
    return {name: files.read(name) for name in files}


def close(a: Path, b: Path, kind: str, limit: float) -> None:
    x, y = whole(a, kind), whole(b, kind)
    assert x.keys() == y.keys()
    worst = max((float((x[n] - y[n]).abs().max()), n) for n in x)
    assert worst[0] <= limit, worst


@pytest.fixture(scope="module")
def worlds(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("worlds")
    return run(1, tiny_model, folder / "one"), run(2, tiny_model, folder / "two")


def test_two_ranks_have_one_ranks_gradient(worlds: tuple[Path, Path]) -> None:
    one, two = worlds
    close(one / "1", two / "1", "optimizer", 1e-6)  # AdamW's average after a step is a tenth of the gradient
    close(one / "2", two / "2", "optimizer", 1e-5)  # with a KL term
    scores = [np.load(folder / f"scores{rank}.npz") for folder, rank in ((one, 0), (two, 0), (two, 1))]
    for name in scores[0].files:
        assert np.array_equal(scores[1][name], scores[2][name])
        assert np.abs(scores[0][name] - scores[1][name]).max() < 2e-2  # AdamW's first steps divide by near-zero averages


def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_all(worlds: tuple[Path, Path]) -> None:
    for folder in worlds:
        for name in ("model", "optimizer"):
            close(folder / "2", folder / "skipped", name, 0.0)


@pytest.mark.parametrize(("source", "world"), [(0, 2), (1, 1)])
def test_another_world_size_goes_on(worlds: tuple[Path, Path], source: int, world: int, tiny_model: Path, tmp_path: Path) -> None:
    saved = worlds[source] / "2"
    again = run(world, tiny_model, tmp_path / "again", saved)
    for name in ("model", "optimizer"):
        close(saved, again / "again", name, 0.0)


def test_an_export_of_two_ranks_loads(worlds: tuple[Path, Path]) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(worlds[1] / "huggingface")
    saved = whole(worlds[1] / "2", "model")
    assert all(torch.equal(p, saved[n]) for n, p in model.named_parameters())


if __name__ == "__main__":
    import warnings

    warnings.simplefilter("error")
    place, count, meet, path, out, *rest = sys.argv[1:]
    one_rank(int(place), int(count), meet, path, Path(out), Path(rest[0]) if rest else None)
