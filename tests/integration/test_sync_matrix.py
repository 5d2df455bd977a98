"""Styles and transports for real: one cell of scripts/sync_matrix.py with Ray and vLLM always, each
style once where there is time.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def matrix() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts"))
        import sync_matrix

        yield sync_matrix
    sys.modules.pop("sync_matrix")


SMALL = (
    "buffer.batch_size=8",
    "algorithm.repeat_times=4",
    "explorer.rollout_model.max_num_seqs=64",
    "explorer.eval_interval=2",
)


def check(matrix: Any, style: str, transport: str, folder: Path, model: Path) -> None:
    cell = matrix.play(style, transport, 0, folder, model, *SMALL, steps=6)
    assert cell.oldest <= cell.bound and cell.versions >= 3
    assert matrix.verdict([cell.row])[0]


@pytest.mark.vllm
def test_one_cell(matrix: Any, tmp_path: Path, tiny_model: Path) -> None:
    check(matrix, "fully_async", "memory", tmp_path, tiny_model)


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize(
    "style",
    [
        "fixed, interval 2, offset 1",
        "explorer_driven",
        "trainer_driven",
        "fully_async, whole groups",
    ],
)
def test_other_styles(matrix: Any, style: str, tmp_path: Path, tiny_model: Path) -> None:
    check(matrix, style, "checkpoint", tmp_path, tiny_model)


def test_all_that_work_are_played(matrix: Any) -> None:
    assert {"memory", "checkpoint"} <= set(matrix.working())
    keys = matrix.changes("fixed, offset 1", "memory:model.x=1;trainer.y=2")
    assert keys == [
        "synchronizer.sync_method=memory",
        "synchronizer.sync_style=fixed",
        "synchronizer.sync_offset=1",
        "model.x=1",
        "trainer.y=2",
    ]


def test_rows_are_kept_and_judged(matrix: Any) -> None:
    def cell(style: str, seed: int, accuracy: float, oldest: int) -> Any:
        return matrix.Cell(style, "memory", seed, accuracy, oldest, 1, 9, 0.5, 60.0, "2026-01-01")

    page = "\n".join(c.row for c in (cell("fixed", 0, 0.9, 0), cell("fully_async", 0, 0.99, 1)))
    rows = matrix.merged(page, [cell("fixed", 0, 0.98, 0), cell("fixed", 1, 0.98, 0)])
    assert rows == [
        cell("fixed", 0, 0.98, 0).row,
        cell("fixed", 1, 0.98, 0).row,
        cell("fully_async", 0, 0.99, 1).row,
    ]
    assert matrix.verdict(rows)[0]
    assert not matrix.verdict([*rows, cell("explorer_driven", 0, 0.99, 2).row])[0], (
        "older than the bound"
    )
    assert not matrix.verdict([*rows, cell("explorer_driven", 0, 0.9, 1).row])[0], "too far apart"
