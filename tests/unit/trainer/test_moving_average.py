"""The moving average of the weights: its closed form, its publication, its place in a checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from rft.engine.weights import MappedWeights
from rft.sync.transport.memory import MemoryTransport
from rft.trainer.loop.learner import Learner
from rft.trainer.loop.ranks import Ranks
from rft.trainer.rows.pack import RankBatch, TrainRow
from rft.trainer.settings import LearnerSettings
from rft.types.ids import Version
from rft.types.ports import ScoreRow

Settings = Callable[..., LearnerSettings]
Batch = Callable[..., RankBatch]
DECAY = 0.75


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {n: t.detach().double().clone() for n, t in learner.policy.names().items()}


def average(learner: Learner) -> dict[str, torch.Tensor]:
    assert learner._average is not None
    return learner._average.weights


def apart(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[n].double() - b[n].double()).abs().max()) for n in a)


def closed_form(path: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """d^n w_0 + (1 - d) sum_i d^(n - i) w_i, float64."""
    count = len(path) - 1
    factors = [DECAY**count, *((1 - DECAY) * DECAY ** (count - i) for i in range(1, count + 1))]
    return {n: sum(f * w[n] for f, w in zip(factors, path, strict=True)) for n in path[0]}  # type: ignore[misc]


def test_after_n_steps_it_is_the_closed_form(
    settings: Settings, rows: list[TrainRow], make_batch: Batch, tmp_path: Path
) -> None:
    learner = Learner(settings(average_decay=DECAY))
    path = [weights(learner)]
    assert apart(average(learner), path[0]) == 0.0, "it begins with the policy of the start"
    for _ in range(4):
        learner.step(make_batch(rows, learner.settings))
        path.append(weights(learner))
    bad = msgspec.structs.replace(rows[0], advantages=np.full_like(rows[0].advantages, np.inf))
    assert not learner.step(make_batch([bad, *rows[1:]], learner.settings)).finite
    moved = apart(path[0], path[-1])
    assert moved > 1e-3
    assert apart(average(learner), closed_form(path)) <= 1e-6 * max(1.0, moved)
    assert apart(average(learner), path[-1]) > 0.1 * moved
    learner.save(str(tmp_path), 4)

    other = Learner(settings(average_decay=DECAY))
    other.load(str(tmp_path))
    for a in (learner, other):
        a.step(make_batch(rows, learner.settings))
    assert apart(average(other), average(learner)) == 0.0, "it goes on from a checkpoint"


def test_a_checkpoint_that_has_none_begins_it(
    settings: Settings,
    rows: list[TrainRow],
    make_batch: Batch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain = Learner(settings())
    plain.step(make_batch(rows, plain.settings))
    plain.save(str(tmp_path), 1)
    learner = Learner(settings(average_decay=DECAY))
    with caplog.at_level(logging.WARNING):
        learner.load(str(tmp_path))
    assert "has no moving average, which begins with its weights" in caplog.text
    assert apart(average(learner), weights(plain)) == 0.0


async def test_it_is_published_and_scored_beside_the_weights(
    settings: Settings, rows: list[TrainRow], make_batch: Batch, tmp_path: Path
) -> None:
    learner = Learner(settings(average_decay=DECAY))
    ranks = Ranks(learner)
    learner.step(make_batch(rows, learner.settings))
    trained = weights(learner)
    transport = MemoryTransport(tmp_path)
    manifest = await ranks.stage(Version(1, 1), transport, average=True)
    mapped = MappedWeights(manifest)
    published = {spec.name: mapped.tensor(spec) for spec in manifest.tensors}
    assert apart(published, average(learner)) == 0.0
    transport.close()
    row = ScoreRow(tokens=np.array([1, 5, 6, 7], np.int32), prompt_length=1)
    (of_average,) = await ranks.score([row], "average")
    (of_policy,) = await ranks.score([row])
    assert not np.array_equal(of_average, of_policy)
    assert apart(weights(learner), trained) == 0.0, "the trained weights are put back"
    with torch.no_grad():
        for name, p in learner.policy.names().items():
            p.copy_(average(learner)[name])
    (expected,) = await ranks.score([row])
    assert np.array_equal(of_average, expected)
