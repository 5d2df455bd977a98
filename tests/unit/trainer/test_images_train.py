"""Rows with images: log-probs and gradients are those of plain transformers, whatever the cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from rft.algorithm.settings import AlgorithmSettings
from rft.testing import vision
from rft.trainer.loop.learner import Learner
from rft.trainer.rows.pack import RankBatch
from rft.trainer.settings import LearnerSettings
from tests.helpers import shown

Settings = Callable[..., LearnerSettings]
Batch = Callable[..., RankBatch]


@pytest.fixture(scope="module", params=sorted(vision.FAMILIES))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision.make(request.param, tmp_path_factory.mktemp("vision") / request.param)


def apart(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of a tensor, relative to the gradient's norm."""
    assert a.keys() == b.keys(), set(a) ^ set(b)
    norm = float(torch.stack([t.norm() for t in b.values()]).norm())
    return max(float((a[n] - b[n]).norm()) for n in a) / norm


@pytest.mark.parametrize("train_vision", [False, True])
def test_log_probs_and_gradient_are_those_of_transformers(
    folder: Path, settings: Settings, make_batch: Batch, train_vision: bool
) -> None:
    rows = shown.rows(folder.name, folder)
    model = shown.reference(folder)
    values, expected = shown.gradient(model, folder, rows)
    expected = {n: g for n, g in expected.items() if train_vision or not shown.of_tower(n)}
    rows = [
        msgspec.structs.replace(row, logprobs=shown.spread(row, lp))
        for row, lp in zip(rows, values, strict=True)
    ]
    plain = replace(
        settings(model_path=str(folder)),
        algorithm=AlgorithmSettings(loss_agg_mode="token-mean"),
        train_vision=train_vision,
    )
    learner = Learner(plain)
    for tokens in (16384, 260, 90):
        batch = make_batch(rows, replace(plain, max_token_len_per_gpu=tokens))
        cut = [list(micro) for micro in batch.micro_batches]
        for micro, scores in zip(cut, learner.score(cut), strict=True):
            for row, score in zip(micro, scores, strict=True):
                want = row.logprobs[row.loss_mask]
                assert score["old"] == pytest.approx(want, rel=1e-5, abs=1e-5)
        found = learner.gradient(batch)
        assert apart(found, expected) <= 1e-5
