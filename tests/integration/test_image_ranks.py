"""Rows with images on two ranks, one of which may have none: FSDP2 over gloo gives the gradient of
plain transformers.

Run as a script it is one rank: `test_image_ranks.py RANK WORLD RENDEZVOUS MODEL FOLDER`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from rft.algorithm.settings import AlgorithmSettings
from rft.trainer.checkpoint import shards
from rft.trainer.loop.learner import Learner
from rft.trainer.rows.pack import Budget, RankBatch, TrainRow, plan
from rft.trainer.settings import LearnerSettings, OptimizerConfig
from tests.helpers import ranks, shown

# (whether the vision tower is trained, tokens of a micro-batch: ranks have unequal ones)
CASES = {"frozen": (False, 90), "trained": (True, 16384)}
BETA = 0.9  # of AdamW's average of gradients


def share(rows: list[TrainRow], rank: int, world: int, tokens: int) -> RankBatch:
    cut = plan(rows, world, Budget(tokens=tokens))
    return RankBatch(
        step=1,
        micro_batches=tuple(tuple(rows[i] for i in micro) for micro in cut[rank]),
        tokens=float(sum(row.loss_mask.sum() for row in rows)),
        rows=float(len(rows)),
    )


def one_rank(rank: int, world: int, rendezvous: str, model: Path, folder: Path) -> None:
    """Train one step in every cut, frozen and not; save the state after it, and log-probs."""
    rows = shown.rows(model)
    for name, (train_vision, tokens) in CASES.items():
        settings = LearnerSettings(
            model_path=str(model),
            cpu_threads=1,
            world_size=world,
            optim=OptimizerConfig(lr=1e-3, betas=(BETA, 0.999)),
            grad_clip=1e9,
            algorithm=AlgorithmSettings(loss_agg_mode="token-mean"),
            train_vision=train_vision,
        )
        learner = Learner(settings, rank, f"{rendezvous}.{name}")
        (scored,) = learner.score([rows])
        on_policy = [
            msgspec.structs.replace(row, logprobs=shown.spread(row, values["old"]))
            for row, values in zip(rows, scored, strict=True)
        ]
        learner.step(share(on_policy, rank, world, tokens))
        learner.save(str(folder / name), 1)
        if rank == 0:
            np.savez(folder / f"{name}.npz", *[values["old"] for values in scored])
        learner.close()


@pytest.mark.e2e
@pytest.mark.parametrize("family", ["qwen3_vl", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_two_ranks_have_the_gradient_of_transformers(family: str, tmp_path: Path) -> None:
    model = shown.make(tmp_path / family, family)
    ranks.run(__file__, 2, tmp_path, model, tmp_path)
    rows = shown.rows(model)
    values, expected = shown.gradient(shown.reference(model), model, rows)
    norm = float(torch.stack([g.norm() for g in expected.values()]).norm())
    for name, (train_vision, _) in CASES.items():
        with np.load(tmp_path / f"{name}.npz") as found:
            for key, want in zip(found.files, values, strict=True):
                assert found[key] == pytest.approx(want, rel=1e-5, abs=1e-5)
        files = shards.find(tmp_path / name, "optimizer")
        averages = {n.removeprefix("exp_avg."): files.read(n) for n in files if "exp_avg." in n}
        assert {n for n in expected if train_vision or not shown.of_tower(n)} <= averages.keys()
        assert train_vision or not any(map(shown.of_tower, averages))
        for n, average in averages.items():  # 0 for what no rank computes, such as a pooling head
            want = expected.get(n, torch.zeros_like(average))
            assert (average / (1 - BETA) - want).norm() <= 1e-5 * norm, n


if __name__ == "__main__":
    one_rank(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], *map(Path, sys.argv[4:]))
