"""Mixtures of experts on several ranks (FSDP2 over gloo), and on ranks that share a sequence: one
rank's gradient, whatever the routers do.

Run as a script it is one rank: `test_expert_ranks.py RANK WORLD RENDEZVOUS FOLDER`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from rft.trainer.loop.learner import Learner
from rft.trainer.loop.step_result import StepResult, combined
from rft.trainer.model import tensors
from rft.trainer.rows.pack import Budget, RankBatch, TrainRow, plan
from rft.trainer.settings import LearnerSettings
from tests.helpers import families, ranks

FAMILIES = ("qwen3_moe", "gpt_oss", "deepseek_v3")
REPLAY = {"router_replay": True}
BALANCE = {"router_aux_loss_coef": 0.5}
ROUTERS: dict[str, dict[str, Any]] = {
    "free": {},
    "replay": REPLAY,
    "balance": BALANCE,
    "both": {**REPLAY, **BALANCE},
}
SPREAD: dict[str, dict[str, Any]] = {  # with two ranks
    "ranks": {},
    "sequence": {"sequence_parallel": 2},
    "packed sequence": {
        "sequence_parallel": 2,
        "row_layout": "packed",
        "gradient_checkpointing": True,
    },
    "padded ranks": {"row_layout": "padded"},
}


def rows(layers: int) -> list[TrainRow]:
    """Three groups of uneven length: two ranks get different amounts.  In `layers` their experts
    are others than routers would choose.
    """
    draw = np.random.default_rng(3)
    made = []
    for group in range(3):
        prompt = draw.integers(3, families.VOCABULARY, 5 + 3 * group).tolist()
        for run in range(3):
            answer = draw.integers(3, families.VOCABULARY, 3 + 2 * run + group).tolist()
            mask = np.arange(len(prompt) + len(answer)) >= len(prompt)
            chosen = np.stack(
                [np.random.default_rng(group).permutation(4)[:2] for _ in range(2 * len(mask))]
            ).astype(np.uint8)
            chosen[2 * len(prompt) :] = np.stack(
                [draw.permutation(4)[:2] for _ in range(2 * len(answer))]
            )
            made.append(
                TrainRow(
                    tokens=np.array(prompt + answer, np.int32),
                    loss_mask=mask,
                    logprobs=np.where(mask, -4.5, 0).astype(np.float32),
                    temperatures=1.0 + 0.2 * group,
                    advantages=np.full(int(mask.sum()), draw.normal(), np.float32),
                    experts=chosen.reshape(-1, 2, 2)[: len(mask) - 1, :layers] if layers else None,
                    group=str(group),
                )
            )
    return made


def learn(
    learner: Learner, given: list[TrainRow], rank: int
) -> tuple[StepResult, list[int], dict[str, np.ndarray]]:
    """The step over all ranks, which rows its log-probs are of, and the whole gradient."""
    s = learner.settings
    cut = plan(
        given, s.world_size // s.sequence_parallel, Budget(40 * s.sequence_parallel, s.row_layout)
    )
    batch = RankBatch(
        step=1,
        micro_batches=tuple(tuple(given[i] for i in m) for m in cut[rank // s.sequence_parallel]),
        tokens=float(sum(r.loss_mask.sum() for r in given)),
        rows=float(len(given)),
        positions=float(sum(len(r.inputs) for r in given)),
    )
    gradient: dict[str, np.ndarray] = {}

    def keep(lr: float) -> float:
        gradient.update(
            {
                n: tensors.full(p.grad).numpy().copy()
                for n, p in learner.policy.trainable().items()
                if p.grad is not None
            }
        )
        return 1.0

    learner._update = keep  # type: ignore[method-assign]
    told = [learner.step(batch)]
    if s.world_size > 1:
        every: list[Any] = [None] * s.world_size
        dist.all_gather_object(every, told[0])
        told = every[:: s.sequence_parallel]
    return combined(told), [i for mine in cut for micro in mine for i in micro], gradient


def one_rank(rank: int, world: int, rendezvous: str, folder: Path) -> None:
    for family in FAMILIES:
        for routers, what in ROUTERS.items():
            for spread, how in SPREAD.items() if world > 1 else [("one", {})]:
                name = f"{family}-{routers}-{spread}"
                settings = LearnerSettings(
                    model_path=str(folder.parent / family),
                    cpu_threads=1,
                    world_size=world,
                    max_response_tokens=12,
                    keep_trainer_logprobs=True,
                    **what,
                    **how,
                )
                learner = Learner(settings, rank, f"{rendezvous}.{name}")
                layers = (
                    learner.policy.routers.layers
                    if learner.policy.routers is not None and "router_replay" in what
                    else 0
                )
                report, order, gradient = learn(learner, rows(layers), rank)
                if rank == 0:
                    kept = {
                        f"row{i}": values for i, values in zip(order, report.logprobs, strict=True)
                    }
                    numbers = {
                        n: np.float64(v)
                        for n, v in (report.sums | report.maxima).items()
                        if n.startswith("router_")
                    }
                    np.savez(
                        folder / f"{name}.npz",
                        **{f"d {n}": g for n, g in gradient.items()},
                        **kept,
                        **numbers,
                    )
                learner.close()


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("experts")
    for family in FAMILIES:
        families.make(family, root / family)
    for world in (1, 2):
        (root / str(world)).mkdir()
        ranks.run(__file__, world, root / str(world), root / str(world), deadline_s=400)
    return root


def read(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as found:
        return dict(found)


def norm(values: Iterator[np.ndarray]) -> float:
    return float(np.sqrt(sum(np.square(v.astype(np.float64)).sum() for v in values)))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("routers", ROUTERS)
@pytest.mark.parametrize("spread", SPREAD)
def test_it_is_one_ranks_gradient(family: str, routers: str, spread: str, worlds: Path) -> None:
    one = read(worlds / "1" / f"{family}-{routers}-one.npz")
    two = read(worlds / "2" / f"{family}-{routers}-{spread}.npz")
    assert one.keys() == two.keys() and sum(n.startswith("row") for n in one) == 9
    names = [n for n in one if n.startswith("d ")]
    assert any("experts" in n for n in names)
    apart = norm(one[n] - two[n] for n in names) / norm(one[n] for n in names)
    assert apart <= 1e-5
    for name in one.keys() - names:
        assert one[name].shape == two[name].shape
        assert np.abs(one[name] - two[name]).max() <= 1e-5 * max(1.0, np.abs(one[name]).max()), name


@pytest.mark.parametrize("family", FAMILIES)
def test_what_routers_do_makes_a_difference(family: str, worlds: Path) -> None:
    free, replay, balance = (
        read(worlds / "1" / f"{family}-{name}-one.npz") for name in ("free", "replay", "balance")
    )
    assert max(float(np.abs(free[f"row{i}"] - replay[f"row{i}"]).max()) for i in range(9)) > 0.01
    assert np.array_equal(free["row0"], balance["row0"])
    assert norm(free[n] - balance[n] for n in free if n.startswith("d ")) > 1e-3
    assert "router_aux_loss" in balance and "router_aux_loss" not in free


if __name__ == "__main__":
    import warnings

    warnings.simplefilter("ignore")  # what transformers says of kernels that are not installed
    torch.set_num_threads(1)
    place, count, meet, out = sys.argv[1:]
    one_rank(int(place), int(count), meet, Path(out))
