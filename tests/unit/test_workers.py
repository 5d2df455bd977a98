"""Several pytest workers: whole runs on Ray or vLLM are played by one of them (ON_RAY in
tests/conftest.py).
"""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import ON_RAY, WHOLE_RUNS, pytest_ignore_collect

TESTS = Path(__file__).parents[1]
ALONE = re.compile(
    r"mark\.vllm|\bray_run\b|^import ray$|\bruns\.Run\((?!.*--in-process)", re.MULTILINE
)


FILES = {
    path.name: path.read_text(encoding="utf-8")
    for path in TESTS.rglob("test_*.py")
    if path != Path(__file__)
}
WHOLE = {name for name, text in FILES.items() if ALONE.search(text)}


@pytest.mark.extra
def test_every_file_with_runs_on_ray_is_listed() -> None:
    assert WHOLE <= ON_RAY <= set(FILES)


def test_whole_runs_are_end_to_end_tests_but_for_smoke_tests() -> None:
    assert {
        file.parent.name for file in TESTS.rglob("test_*.py") if file.name in WHOLE
    } <= WHOLE_RUNS
    assert {name for name, text in FILES.items() if "mark.smoke" in text} == {
        "test_smoke_run.py",
        "test_fault_matrix.py",
    }


@pytest.mark.extra
@pytest.mark.parametrize(
    ("tier", "ignores"),
    [
        ("not slow and not e2e", True),
        ("e2e and not slow", False),
        ("not e2e or vllm", False),
        ("", False),
    ],
)
def test_files_of_end_to_end_tests_alone_are_not_imported_by_make_test(
    tier: str, ignores: bool
) -> None:
    config: Any = SimpleNamespace(option=SimpleNamespace(markexpr=tier))
    ignored = {
        f"{path.parent.name}/{path.name}"
        for path in TESTS.rglob("test_*.py")
        if pytest_ignore_collect(path, config)
    }
    assert (
        ("integration/test_serve.py" in ignored)
        == ("attacks/test_reasoning_gym.py" in ignored)
        == ignores
    )
    assert not ignored & {
        "integration/test_smoke_run.py",
        "fault/test_fault_matrix.py",
        "unit/test_workers.py",
    }
