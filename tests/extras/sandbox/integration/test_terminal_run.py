"""A run that trains on tasks of Harbor's form: an agent inside a runtime calls the policy, and the
task's tests score its rows.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from rft.extras.sandbox.local_runtime import MachineDriver
from rft.extras.sandbox.processes import SandboxUnavailable
from rft.launch.execute import execute
from rft.types.runtimes import RuntimeSpec
from tests.extras.sandbox import copy_folders
from tests.helpers import runs

TINY = runs.ROOT / "tests" / "integration" / "tiny_config.yaml"
# another reward for almost every answer
TEST = """#!/bin/sh
python3 -c 'print(sum(open("answer", "rb").read()) / 1000)' > /logs/verifier/reward.txt
"""


def test_rows_of_agents_in_runtimes_are_trained(tiny_model: Path, tmp_path: Path) -> None:
    try:
        MachineDriver().start(RuntimeSpec()).kill()
    except SandboxUnavailable as e:
        pytest.skip(str(e))
    rows = [{"prompt": f"qx{number}", "response": ""} for number in range(4)]
    taskset = copy_folders.write(tmp_path / "tasks", "train", rows, TEST)
    config = copy_folders.config(tmp_path, TINY, taskset)
    overrides = (
        f"checkpoint_root_dir={tmp_path}/runs",
        f"model.model_path={tiny_model}",
        "trainer.total_steps=1",
        "trainer.cpu_threads=1",
    )
    run_dir = execute(config, list(overrides), in_process=True).run_dir
    with closing(sqlite3.connect(run_dir / "buffer/experience_buffer.db")) as raw:
        rows = raw.execute("SELECT reward, response_text FROM v_experiences").fetchall()
    assert len(rows) == 8
    assert [reward for reward, _ in rows] == [
        pytest.approx(sum((text or "").encode()) / 1000) for _, text in rows
    ]
    assert len({reward for reward, _ in rows}) > 1
    lines = [p.cmdline() for p in psutil.Process().children(recursive=True)]
    assert not [x for x in lines if "local_room" in " ".join(x)]
