"""A run trains three steps on an environment of OpenEnv, behind OpenEnv's own server and with its own
client; skipped where the package is not installed (its fastmcp needs mcp 1, rft's tools mcp 2).
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rft.launch.execute import execute
from tests.extras.worlds.integration.test_worlds_train import config, rows

pytest.importorskip("openenv")

SERVER = '''
import random, sys
import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

class Say(Action):
    message: str

class Shown(Observation):
    text: str = ""

class Digits(Environment):
    """The longer of two answers earns more."""
    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State(step_count=0)

    def reset(self, seed=None, episode_id=None, **more):
        self.turns = 0
        return Shown(text=str(random.Random(seed).randrange(10)), done=False)

    def step(self, action, **more):
        self.turns += 1
        return Shown(text=str(self.turns), done=self.turns == 2, reward=sum(action.message.encode()) / 1000)

app = create_fastapi_app(Digits, Say, Shown, max_concurrent_envs=64)
uvicorn.run(app, fd=int(sys.argv[1]), log_level="warning")
'''


@pytest.fixture
def address() -> Iterator[str]:
    """Of a server of the environment."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        line = [sys.executable, "-c", SERVER, str(listener.fileno())]
        with subprocess.Popen(line, pass_fds=[listener.fileno()]) as server:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
            server.terminate()


def test_an_environment_of_openenv_is_trained_on(
    address: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    taskset = {
        "path": "rft.taskset.generated_tasks:seeds",
        "split": "train",
        "default_workflow_type": "openenv_workflow",
        "workflow_args": {
            "client": "openenv.core:GenericEnvClient",
            "base_url": address,
            "action": "builtins:dict",
            "observation_field": "text",
            "max_turn_tokens": 2,
        },
    }
    file = config(tmp_path, tiny_model, "grpo", taskset)
    run = execute(file, ["buffer.total_steps=3"], in_process=True).run_dir
    found = rows(tmp_path, run)
    assert len(found) == 3 * 2 * 2
    assert {row["used_step"] for row in found} == {1, 2, 3}
    assert len({row["reward"] for row in found}) > 1
    shown = [m["content"] for m in json.loads(found[0]["messages"]) if m["role"] == "user"]
    assert len(shown) == 2 and shown[0].isdigit() and shown[1] == "1"
