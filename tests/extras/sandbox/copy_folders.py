"""The copy task of `rft.testing.tiny` as folders of Harbor's form, and an agent of one call that plays
them inside a runtime.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.extras.sandbox import containers

# asks the policy what the task says, and leaves the answer in a file
AGENT = """
import http.client, json, os, sys
_, _, host, path = os.environ["OPENAI_BASE_URL"].split("/", 3)
body = {"model": "policy", "messages": [{"role": "user", "content": sys.stdin.read()}]}
head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
line = http.client.HTTPConnection(host)
line.request("POST", f"/{path}/chat/completions", json.dumps(body), head)
open("answer", "w").write(json.load(line.getresponse())["choices"][0]["message"]["content"] or "")
"""
TEST = """#!/bin/sh
[ "$(cat answer)" = "$(cat /tests/expected)" ] && reward=1 || reward=0
echo $reward > /logs/verifier/reward.txt
"""


def write(
    folder: Path,
    split: str,
    rows: Sequence[Mapping[str, str]],
    test: str = TEST,
) -> dict[str, Any]:
    """Write a task folder for each row {prompt, response}; return the taskset that reads them."""
    for number, row in enumerate(rows):
        for name, text in {
            "instruction.md": row["prompt"],
            "task.toml": f'[metadata]\nsplit = "{split}"\n[environment]\nmemory_mb = 256\n',
            "environment/Dockerfile": f"FROM {containers.NAME}\nWORKDIR /app\n",
            "tests/expected": row["response"],
            "tests/test.sh": test,
        }.items():
            path = folder / split / f"copy-{number:04}" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return {
        "name": "copy_eval" if split == "eval" else "copy",
        "path": "rft.extras.sandbox.harbor_tasks:harbor_tasks",
        "split": split,
        "args": {"folder": str(folder / split)},
        "default_workflow_type": "terminal_workflow",
        "workflow_args": {
            "command": ["python3", "-I", "-S", "{home}/agent.py"],
            "stdin": "{prompt}",
            "home": {"agent.py": AGENT},
        },
    }


def config(
    folder: Path, base: Path, taskset: Mapping[str, Any], held_out: Mapping[str, Any] | None = None
) -> Path:
    """Write a configuration that extends `base`, with these tasksets."""
    tasks: dict[str, Any] = {
        "default_workflow_type": "terminal_workflow",
        "default_reward_fn_type": None,
        "taskset": dict(taskset),
        "eval_tasksets": [dict(held_out)] if held_out else [],
    }
    path = folder / "run.yaml"
    path.write_text(
        yaml.safe_dump({"extends": str(base), "buffer": {"explorer_input": tasks}}, sort_keys=False)
    )
    return path
