"""Launch scripts of differing shapes, each with the arguments it must give in the JSON file beside
it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rft.extras.migrate.convert.launch import read_launch

SCRIPTS = sorted((Path(__file__).parent / "scripts").glob("*.sh"))
# their values are the tables' and tested with the conversion
WORKED = {"ppo_rm": 47, "grpo_seq_balance": 36}


def test_there_are_many_shapes_and_each_has_its_answer() -> None:
    assert len(SCRIPTS) >= 32
    assert [p.stem for p in SCRIPTS if not p.with_suffix(".json").exists()] == sorted(WORKED)


@pytest.mark.parametrize("path", [p for p in SCRIPTS if p.stem not in WORKED], ids=lambda p: p.stem)
def test_script(path: Path) -> None:
    want: dict[str, Any] = json.loads(path.with_suffix(".json").read_text())
    launch = read_launch(path)
    got = {a.prefix + a.key: a for a in launch.arguments}
    assert (launch.program, launch.passed_through) == (want["program"], want["passed_through"])
    assert {k: repr(a.value) for k, a in got.items()} == {
        k: repr(v) for k, v in want["arguments"].items()
    }
    assert list(got) == list(want["arguments"])
    assert {a.key: a.value for a in launch.options} == want.get("options", {})
    assert {k: got[k].line for k in want.get("lines", {})} == want.get("lines", {})
    assert {k: list(got[k].variables) for k in want.get("variables", {})} == want.get(
        "variables", {}
    )
    said = "\n".join(launch.notes)
    assert [n for n in want.get("notes", []) if n not in said] == []
    assert launch.path == str(path)


@pytest.mark.parametrize(("stem", "count"), WORKED.items())
def test_worked_example(stem: str, count: int) -> None:
    path = Path(__file__).parent / "scripts" / f"{stem}.sh"
    launch = read_launch(path)
    rows = path.read_text().splitlines()
    assert len(launch.arguments) == count
    assert launch.passed_through
    assert all(a.key in rows[a.line - 1] for a in launch.arguments)
    assert len(launch.notes) == 1


def test_lists_from_variables() -> None:
    launch = read_launch(Path(__file__).parent / "scripts" / "ppo_rm.sh")
    files = next(a for a in launch.arguments if a.key == "data.train_files")
    assert files.value == [
        "${oc.env:HOME}/data/gsm8k/train.parquet",
        "${oc.env:HOME}/data/math/train.parquet",
    ]
    assert (
        files.text
        == "['${oc.env:HOME}/data/gsm8k/train.parquet', '${oc.env:HOME}/data/math/train.parquet']"
    )
    assert files.variables == ("HOME",)
