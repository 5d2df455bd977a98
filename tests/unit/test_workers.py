"""Several pytest workers: whole runs on Ray or vLLM are played by one of them (ON_RAY in tests/conftest.py)."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
ALONE = re.compile(r"mark\.vllm|\bray_run\b|^import ray$|\bruns\.Run\((?!.*--in-process)", re.MULTILINE)


def test_every_file_with_runs_on_ray_is_listed() -> None:
    spec = importlib.util.spec_from_file_location("tests_conftest", TESTS / "conftest.py")
    assert spec is not None and spec.loader is not None
    conftest = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conftest)
    files = {path.name: path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py") if path != Path(__file__)}
    assert {name for name, text in files.items() if ALONE.search(text)} <= conftest.ON_RAY <= set(files)
