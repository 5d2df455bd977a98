"""The example with a small judge: a short plugin, tested without a model in no time; its labelled
answers fit its configuration.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[3] / "examples" / "judge_local"


def rows(name: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in (EXAMPLE / name).read_text(encoding="utf-8").splitlines()]


def test_its_test_needs_no_model_and_no_time() -> None:
    assert len((EXAMPLE / "plugins" / "praise.py").read_text(encoding="utf-8").splitlines()) <= 30
    timed = (
        "import sys, time, test_praise as t; b = time.process_time(); "
        "t.test_the_judge_says_one_of_two_words()"
    )
    tell = "t.test_the_plain_check(); print(time.process_time() - b, 'torch' in sys.modules)"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(EXAMPLE), str(EXAMPLE.parents[1])])}
    done = subprocess.run(
        [sys.executable, "-c", f"{timed}; {tell}"],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    seconds, torch = done.stdout.split()
    assert float(seconds) < 1 and torch == "False"


def test_what_is_held_out_is_not_trained() -> None:
    held_out, trained = (
        {str(r["prompt"]) for r in rows(n)} for n in ("held_out.jsonl", "train.jsonl")
    )
    assert len(held_out) == 32 and len(trained) == 64 and not held_out & trained
    kinds = [r["kind"] for r in rows("labelled.jsonl")]
    assert len(kinds) >= 40 and set(kinds) == {"praise", "blame", "neutral", "adversarial"}
    assert all(r["human"] == (r["kind"] == "praise") for r in rows("labelled.jsonl"))
