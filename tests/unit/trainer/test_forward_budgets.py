"""Micro-batches of forward passes alone: own budgets cut otherwise and change no number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from rft.algorithm.settings import AlgorithmSettings
from rft.trainer.loop.learner import Learner
from rft.trainer.loop.ranks import Ranks
from rft.trainer.rows.pack import RankBatch, TrainRow, spread
from rft.trainer.settings import ForwardSettings, LearnerSettings

Settings = Callable[..., LearnerSettings]
Batch = Callable[..., RankBatch]

KL = AlgorithmSettings(
    kl_loss_fn="k2",
    kl_loss_fn_args={"kl_coef": 0.1},
    bypass_old_logprobs=False,
    loss_agg_mode="token-mean",
)


class Watched(Ranks):
    """Notes what every forward pass computes, and how many rows its micro-batches have."""

    def __init__(self, learner: Learner) -> None:
        super().__init__(learner)
        self.seen: dict[str, list[int]] = {}

    async def _dealt(self, method: str, args: Sequence[tuple[Any, ...]]) -> list[Any]:
        if method == "score":
            ((micro_batches, what, *_),) = args
            self.seen["+".join(what)] = [len(m) for m in micro_batches]
        return await super()._dealt(method, args)


@pytest.mark.parametrize(
    ("log_prob", "ref", "seen"),
    [
        (None, None, {"old+ref": [12]}),
        (ForwardSettings(micro_batch_size=5), None, {"old+ref": [5, 5, 2]}),
        (
            ForwardSettings(micro_batch_size=5),
            ForwardSettings(micro_batch_size=8),
            {"old": [5, 5, 2], "ref": [8, 4]},
        ),
        (None, ForwardSettings(micro_batch_size=4), {"old": [12], "ref": [4, 4, 4]}),
        (ForwardSettings(max_token_len_per_gpu=60), None, None),
    ],
)
async def test_each_pass_has_its_micro_batches(
    log_prob: ForwardSettings | None,
    ref: ForwardSettings | None,
    seen: dict[str, list[int]] | None,
    settings: Settings,
    rows: list[TrainRow],
) -> None:
    ranks = Watched(Learner(settings(algorithm=KL, ppo_epochs=2, log_prob=log_prob, ref=ref)))
    found = await ranks.prepare(rows)
    if seen is None:
        (counts,) = ranks.seen.values()
        assert len(counts) > 1 and sum(counts) == len(rows)
    else:
        assert {name: sorted(counts) for name, counts in ranks.seen.items()} == {
            name: sorted(c) for name, c in seen.items()
        }
    plain = await Ranks(Learner(settings(algorithm=KL, ppo_epochs=2))).prepare(rows)
    for mine, theirs in zip(found, plain, strict=True):
        assert set(mine) == {"old", "ref"}
        assert all(np.abs(mine[name] - theirs[name]).max() < 1e-5 for name in theirs)


async def test_a_reference_model_with_its_own_micro_batches_runs_before_the_step(
    settings: Settings, rows: list[TrainRow], make_batch: Batch
) -> None:
    beside = settings(algorithm=KL)
    apart = settings(algorithm=KL, ref=ForwardSettings(micro_batch_size=4))
    reports = []
    for chosen in (beside, apart):
        ranks = Ranks(Learner(chosen))
        assert ranks.before == ({"ref"} if chosen is apart else frozenset())
        found = await ranks.prepare(rows)
        given = [
            msgspec.structs.replace(row, ref=f.get("ref"))
            for row, f in zip(rows, found, strict=True)
        ]
        reports.append(await ranks.step([make_batch(given, chosen)]))
    assert reports[0].grad_norm == pytest.approx(reports[1].grad_norm, rel=1e-5)
    assert reports[0].sums["kl"] == pytest.approx(reports[1].sums["kl"], abs=1e-6)


async def test_the_canary_is_cut_as_log_probs_are(settings: Settings, rows: list[TrainRow]) -> None:
    ranks = Watched(Learner(settings(log_prob=ForwardSettings(micro_batch_size=7))))
    await ranks.compute(rows, ("old",))
    assert ranks.seen == {"old": [7, 5]}


async def test_fixed_micro_batches_of_training_hold_for_forward_passes(
    settings: Settings, rows: list[TrainRow]
) -> None:
    ranks = Watched(Learner(settings(use_dynamic_bsz=False, micro_batch_size=5)))
    await ranks.compute(rows, ("old",))
    assert ranks.seen == {"old": [5, 5, 2]}, "any number of rows"


async def test_a_row_over_a_budget_is_a_micro_batch_of_its_own(
    settings: Settings, rows: list[TrainRow]
) -> None:
    small = ForwardSettings(max_token_len_per_gpu=3)
    ranks = Watched(Learner(settings(algorithm=KL, log_prob=small, ref=small)))
    await ranks.compute(rows, ("old",))
    await ranks.compute(rows, ("ref",))
    assert ranks.seen == {name: [1] * len(rows) for name in ("old", "ref")}


@pytest.mark.parametrize(
    ("count", "world", "size"), [(12, 1, 5), (12, 2, 5), (3, 4, 2), (0, 2, 3), (7, 3, 1)]
)
def test_spread_gives_every_row_once_and_every_rank_as_many(
    count: int, world: int, size: int
) -> None:
    cut = spread(count, world, size)
    assert sorted(i for mine in cut for micro in mine for i in micro) == list(range(count))
    assert len(cut) == world and len({len(mine) for mine in cut}) == 1
    assert all(len(micro) <= size for mine in cut for micro in mine)
