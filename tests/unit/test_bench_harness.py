"""scripts/bench_harness.py: a program that is asked over its pipes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

HARNESS = Path(__file__).parents[2] / "scripts" / "bench_harness.py"
ECHO = """
import json, sys
print("a library says hello", flush=True)
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    order = json.loads(line)
    if order.get("do") == "die":
        sys.exit("out of ideas")
    if order.get("do") == "think":
        print("hm", file=sys.stderr, flush=True)
        continue
    print(json.dumps({"heard": order}), flush=True)
"""


@pytest.fixture(scope="module")
def harness() -> Any:
    spec = importlib.util.spec_from_file_location("bench_harness", HARNESS)
    assert spec is not None and spec.loader is not None
    module = sys.modules["bench_harness"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["bench_harness"]


def child(harness: Any, program: str = ECHO, **more: Any) -> Any:
    return harness.Child("echo", [sys.executable, "-c", program], **{"ready_s": 60, "answer_s": 60, **more})


def test_a_child_answers_until_its_stdin_closes(harness: Any) -> None:
    with child(harness) as echo:
        assert echo.ready == {"ready": True}
        assert echo.ask("fill", rows=3) == {"heard": {"do": "fill", "rows": 3}}
        assert echo.ask(side="ours") == {"heard": {"side": "ours"}}
        process = echo._process
    assert process.returncode == 0


def test_a_child_that_ends_says_why(harness: Any) -> None:
    with child(harness) as echo:
        with pytest.raises(RuntimeError, match=r"(?s)echo has ended:.*out of ideas"):
            echo.ask("die")
        with pytest.raises(RuntimeError, match="echo has ended"):
            echo.ask("fill")
    with (
        pytest.raises(RuntimeError, match=r"(?s)echo has ended:.*no such thing"),
        child(harness, "raise SystemExit('no such thing')"),
    ):
        pass


def test_a_child_that_says_nothing_is_told_with_its_log(harness: Any) -> None:
    with child(harness, answer_s=1) as echo, pytest.raises(TimeoutError, match=r"(?s)echo said nothing for 1 s:.*hm"):
        echo.ask("think")
