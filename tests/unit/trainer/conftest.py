"""Rows and settings that the trainer's tests share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rft.algorithm.settings import AlgorithmSettings
from rft.trainer.rows.pack import Budget, RankBatch, TrainRow, plan
from rft.trainer.settings import LearnerSettings, OptimizerConfig

SETTINGS = LearnerSettings(
    model_path="",
    cpu_threads=1,
    total_steps=10,
    algorithm=AlgorithmSettings(loss_agg_mode="seq-mean-token-mean"),
    optim=OptimizerConfig(lr=1e-3),
    max_response_tokens=12,
)


@pytest.fixture
def settings(tiny_model: Path) -> Callable[..., LearnerSettings]:
    """Learner settings for the tiny model, with some fields replaced."""
    return lambda **changes: replace(SETTINGS, **{"model_path": str(tiny_model), **changes})


def row(
    prompt: list[int],
    answer: list[int],
    *,
    advantage: float = 1.0,
    group: str = "0",
    temperature: float = 1.0,
) -> TrainRow:
    count = len(prompt) + len(answer)
    mask = np.arange(count) >= len(prompt)
    return TrainRow(
        tokens=np.array(prompt + answer, np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -5.5, 0).astype(np.float32),
        temperatures=np.full(count, temperature, np.float32),
        advantages=np.full(len(answer), advantage, np.float32),
        group=group,
    )


@pytest.fixture
def rows() -> list[TrainRow]:
    """4 groups of 3 rows that share a system prompt; answers of 1 to 12 tokens, some beginning
    alike, one row with two turns.
    """
    rng = np.random.default_rng(7)
    made = []
    system = rng.integers(3, 250, 6).tolist()
    for group in range(4):
        prompt = system + rng.integers(3, 250, 3 + group).tolist()
        start = rng.integers(3, 250, 2).tolist()
        for run in range(3):
            answer = (start if run else []) + rng.integers(
                3, 250, int(rng.integers(1, 11))
            ).tolist()
            made.append(
                row(
                    prompt,
                    answer,
                    advantage=float(rng.normal()),
                    group=str(group),
                    temperature=1.0 + 0.2 * group,
                )
            )
    two_turns = made[1]
    mask = two_turns.loss_mask.copy()
    mask[len(mask) // 2 + 4] = False
    mask[-1] = True
    made[1] = TrainRow(
        tokens=two_turns.tokens,
        loss_mask=mask,
        logprobs=np.where(mask, two_turns.logprobs, 0).astype(np.float32),
        temperatures=two_turns.temperatures,
        advantages=np.full(int(mask.sum()), 0.7, np.float32),
        group=two_turns.group,
    )
    return made


def batch(rows: list[TrainRow], settings: LearnerSettings, *, step: int = 1) -> RankBatch:
    """All rows for one rank."""
    layouts = {"layout": settings.row_layout, "images": settings.image_layout}
    budget = Budget(settings.max_token_len_per_gpu, **layouts)
    (cut,) = plan(rows, 1, budget)
    return RankBatch(
        step=step,
        micro_batches=tuple(tuple(rows[i] for i in m) for m in cut),
        tokens=float(sum(r.loss_mask.sum() for r in rows)),
        rows=float(len(rows)),
    )


@pytest.fixture
def make_batch() -> Callable[..., RankBatch]:
    return batch


@pytest.fixture
def make_row() -> Callable[..., Any]:
    return row
