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
from tests.helpers import runs

TINY = runs.ROOT / "tests" / "integration" / "tiny_config.yaml"
AGENT = """
import json, os, sys, urllib.request
body = {"model": "policy", "messages": [{"role": "user", "content": json.load(sys.stdin)["prompt"]}]}
head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
asked = urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), head))
open("answer", "w").write(json.load(asked)["choices"][0]["message"]["content"] or "")
"""
# another reward for almost every answer
TEST = """#!/bin/sh
python3 -c 'print(sum(open("answer", "rb").read()) / 1000)' > /logs/verifier/reward.txt
"""


def test_rows_of_agents_in_runtimes_are_trained(tiny_model: Path, tmp_path: Path) -> None:
    try:
        MachineDriver().start(RuntimeSpec()).kill()
    except SandboxUnavailable as e:
        pytest.skip(str(e))
    for number in range(4):
        for name, text in {
            "instruction.md": f"qx{number}",
            "task.toml": "[environment]\nmemory_mb = 256\n",
            "environment/Dockerfile": "FROM x\nWORKDIR /app\n",
            "tests/test.sh": TEST,
        }.items():
            path = tmp_path / "tasks" / f"copy-{number}" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    (tmp_path / "run.yaml").write_text(
        f"extends: {TINY}\nbuffer:\n  explorer_input:\n    default_workflow_type: terminal_workflow\n"
        "    default_reward_fn_type: null\n    taskset:\n"
        "      path: rft.extras.sandbox.harbor_tasks:harbor_tasks\n"
        f"      args: {{folder: {tmp_path}/tasks}}\n      workflow_args:\n"
        '        command: [python3, "{home}/agent.py"]\n        home:\n          agent.py: |\n'
        + "".join(f"            {line}\n" for line in AGENT.strip().splitlines())
    )
    overrides = (
        f"checkpoint_root_dir={tmp_path}/runs",
        f"model.model_path={tiny_model}",
        "trainer.total_steps=1",
        "trainer.cpu_threads=1",
    )
    run_dir = execute(tmp_path / "run.yaml", list(overrides), in_process=True).run_dir
    with closing(sqlite3.connect(run_dir / "buffer/experience_buffer.db")) as raw:
        rows = raw.execute("SELECT reward, response_text FROM v_experiences").fetchall()
    assert len(rows) == 8
    assert [reward for reward, _ in rows] == [
        pytest.approx(sum((text or "").encode()) / 1000) for _, text in rows
    ]
    assert len({reward for reward, _ in rows}) > 1
    lines = [p.cmdline() for p in psutil.Process().children(recursive=True)]
    assert not [x for x in lines if "local_room" in " ".join(x)]
