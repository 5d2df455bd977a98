"""scripts/bench_harness.py: a program that is asked over its pipes."""

from __future__ import annotations

import sys
from typing import Any

import bench_harness
import pytest

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


def child(program: str = ECHO, **more: Any) -> Any:
    return bench_harness.Child(
        "echo", [sys.executable, "-c", program], **{"ready_s": 60, "answer_s": 60, **more}
    )


def test_a_child_answers_until_its_stdin_closes() -> None:
    with child() as echo:
        assert echo.ready == {"ready": True}
        assert echo.ask("fill", rows=3) == {"heard": {"do": "fill", "rows": 3}}
        assert echo.ask(side="ours") == {"heard": {"side": "ours"}}
        process = echo._process
    assert process.returncode == 0


def test_a_child_that_ends_says_why() -> None:
    with child() as echo:
        with pytest.raises(RuntimeError, match=r"(?s)echo has ended:.*out of ideas"):
            echo.ask("die")
        with pytest.raises(RuntimeError, match="echo has ended"):
            echo.ask("fill")
    with (
        pytest.raises(RuntimeError, match=r"(?s)echo has ended:.*no such thing"),
        child("raise SystemExit('no such thing')"),
    ):
        pass


@pytest.mark.e2e
def test_a_child_that_says_nothing_is_told_with_its_log() -> None:
    with (
        child(answer_s=1) as echo,
        pytest.raises(TimeoutError, match=r"(?s)echo said nothing for 1 s:.*hm"),
    ):
        echo.ask("think")
