"""The critic on two processes gives one process's gradient; its checkpoint goes on at another world
size.

Run as a script it is one rank: `test_critic_ranks.py RANK WORLD RENDEZVOUS MODEL FOLDER DTYPE
[FROM]`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from rft.algorithm.settings import AlgorithmSettings
from rft.trainer.checkpoint import shards
from rft.trainer.loop.learner import Learner
from rft.trainer.rows.pack import Budget, RankBatch, TrainRow, plan
from rft.trainer.settings import CriticSettings, LearnerSettings, OptimizerConfig
from tests.helpers import ranks


def rows() -> list[TrainRow]:
    """3 groups of 3 rows of uneven length, with values and returns."""
    rng = np.random.default_rng(3)
    made = []
    for group in range(3):
        prompt = rng.integers(3, 250, 5 + 4 * group).tolist()
        for _ in range(3):
            answer = rng.integers(3, 250, int(rng.integers(1, 9))).tolist()
            mask = np.arange(len(prompt) + len(answer)) >= len(prompt)
            values, returns = (rng.normal(size=len(answer)).astype(np.float32) for _ in range(2))
            made.append(
                TrainRow(
                    tokens=np.array(prompt + answer, np.int32),
                    loss_mask=mask,
                    logprobs=np.where(mask, -5.5, 0).astype(np.float32),
                    temperatures=np.ones(len(mask), np.float32),
                    advantages=rng.normal(size=len(answer)).astype(np.float32),
                    values=values,
                    returns=returns,
                    group=str(group),
                )
            )
    return made


def share(rank: int, world: int, step: int, tokens: int) -> RankBatch:
    given = rows()
    micro = tuple(tuple(given[i] for i in m) for m in plan(given, world, Budget(tokens))[rank])
    return RankBatch(
        step=step,
        micro_batches=micro,
        tokens=float(sum(r.loss_mask.sum() for r in given)),
        rows=float(len(given)),
    )


def one_rank(
    rank: int,
    world: int,
    rendezvous: str,
    model: str,
    folder: Path,
    dtype: str,
    source: Path | None,
) -> None:
    settings = LearnerSettings(
        model_path=model,
        cpu_threads=1,
        world_size=world,
        dtype=dtype,
        total_steps=4,
        algorithm=AlgorithmSettings(advantage_fn="ppo", loss_agg_mode="seq-mean-token-mean"),
        critic=CriticSettings(optim=OptimizerConfig(lr=1e-3), grad_clip=100.0, ppo_epochs=1),
    )
    learner = Learner(settings, rank, rendezvous)
    assert learner.critic is not None
    losses = []
    first = 1
    if source is None:
        learner.step(share(rank, world, 1, 40), share(rank, world, 1, 50))
        learner.save(str(folder / "1"), 1)
    else:
        learner.load(str(source))
        first = 2
    for step in range(first + (source is None), 4):
        result = learner.step(share(rank, world, step, 40), share(rank, world, step, 50)).critic
        assert result is not None and result.finite
        losses.append(result.sums["vf_loss"])
    assert {p.dtype for p in learner.critic.model.parameters()} == {torch.float32}
    (scored,) = learner.score([rows()], ("values",))
    (folder / f"said{rank}.json").write_text(
        json.dumps({"losses": losses, "values": [s["values"].tolist() for s in scored]})
    )
    learner.close()


def run(
    world: int, model: Path, folder: Path, dtype: str = "float32", source: Path | None = None
) -> Path:
    folder.mkdir()
    ranks.run(__file__, world, folder, model, folder, dtype, *([source] if source else []))
    return folder


def said(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """(losses of the steps, added over ranks; values of all tokens)."""
    found = [json.loads(p.read_text()) for p in sorted(folder.glob("said*.json"))]
    assert all(f["values"] == found[0]["values"] for f in found)
    return np.sum([f["losses"] for f in found], axis=0), np.concatenate(found[0]["values"])


@pytest.fixture(scope="module")
def worlds(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("critics")
    return run(1, tiny_model, folder / "one"), run(2, tiny_model, folder / "two")


def test_two_ranks_have_one_ranks_gradient(worlds: tuple[Path, Path]) -> None:
    one, two = (shards.find(folder / "1", "critic_optimizer") for folder in worlds)
    assert set(one) == set(two)
    for name in one:  # AdamW's average after a step is a tenth of the gradient
        a = one.read(name)
        b = two.read(name)
        assert float((a - b).abs().max()) <= 1e-5 * max(1e-3, float(a.abs().max())), name
    assert any(float(one.read(n).abs().max()) > 1e-3 for n in one if "value_head" in n)


@pytest.mark.slow
@pytest.mark.parametrize(("source", "world"), [(0, 2), (1, 1)])
def test_another_world_size_goes_on(
    source: int, world: int, worlds: tuple[Path, Path], tiny_model: Path, tmp_path: Path
) -> None:
    again = said(run(world, tiny_model, tmp_path / "again", source=worlds[source] / "1"))
    before = said(worlds[source])
    assert np.abs(again[0] - before[0]).max() < 1e-4 * np.abs(before[0]).max()


@pytest.mark.slow
def test_bfloat16_keeps_its_head_exact(
    tiny_model: Path, tmp_path: Path, worlds: tuple[Path, Path]
) -> None:
    low = said(run(1, tiny_model, tmp_path / "low", "bfloat16"))
    exact = said(worlds[0])
    assert np.abs(low[0] - exact[0]).max() < 0.05 * np.abs(exact[0]).max()
    as_bfloat16 = torch.tensor(low[1], dtype=torch.float32).bfloat16().float().numpy()
    assert not np.array_equal(as_bfloat16, low[1].astype(np.float32)), (
        "values have more digits than bfloat16"
    )


if __name__ == "__main__":
    rank, world, rendezvous, model, folder, dtype, *rest = sys.argv[1:]
    one_rank(
        int(rank),
        int(world),
        rendezvous,
        model,
        Path(folder),
        dtype,
        Path(rest[0]) if rest else None,
    )
