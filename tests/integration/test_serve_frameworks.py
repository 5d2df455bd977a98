"""Agent frameworks, unchanged and in an environment of their own, play sessions of a service."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rft.serve.access import ENVIRONMENT
from rft.testing.scripted import ScriptedEngine
from rft.threads import in_thread
from tests.helpers import runs
from tests.helpers.serving import KEY, serving

EXAMPLE = runs.ROOT / "examples" / "serve"
PYTHON = "RFT_FRAMEWORKS_PYTHON"  # of an environment with frameworks.txt; else one is made, from the package registry


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> str:
    if given := os.environ.get(PYTHON):
        return given
    made: Path = tmp_path_factory.mktemp("frameworks") / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(made)], check=True)
    subprocess.run([str(made / "bin" / "pip"), "install", "--quiet", "-r", str(EXAMPLE / "frameworks.txt")], check=True)
    return str(made / "bin" / "python")


@pytest.mark.slow
async def test_frameworks_play_sessions(tmp_path, monkeypatch, python):
    engine = ScriptedEngine(answer=lambda m: next(f"to {said['content']}" for said in m if said["role"] == "user"))
    async with serving(tmp_path, monkeypatch, engine, num_runs=2) as served:
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(client_alone(tmp_path)), ENVIRONMENT: KEY}
        command = [python, str(EXAMPLE / "frameworks.py"), served.address]

        def play() -> subprocess.CompletedProcess[str]:
            return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)

        done = await in_thread(play, "the frameworks")
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == [
            f"{n}: 'to hi', reward ok" for n in ("langgraph", "openai_agents", "pydantic_ai", "smolagents", "agentscope")
        ]
        await served.gate.wait_explored(2)
        audit = await served.buffer.audit()
        assert audit.ok and audit.available == 4 and audit.waiting == 1


@pytest.mark.slow
async def test_node_plays_sessions(tmp_path, monkeypatch):
    """With the package `openai` of npm, which is installed from its registry."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("Node is not installed")
    shutil.copy(EXAMPLE / "play.mjs", tmp_path)
    install = [npm, "install", "--no-audit", "--no-fund", "openai"]
    await in_thread(lambda: subprocess.run(install, cwd=tmp_path, check=True, capture_output=True, timeout=120), "npm")
    async with serving(tmp_path, monkeypatch, ScriptedEngine(answer=lambda m: f"to {m[-1]['content']}"), num_runs=2) as served:
        environment = {"PATH": os.environ["PATH"], ENVIRONMENT: KEY}
        command = [node, "play.mjs", served.address]

        def play() -> subprocess.CompletedProcess[str]:
            return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False)

        done = await in_thread(play, "node")
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == [f'{how}: "to hi", reward ok' for how in ("whole", "stream")]
        await served.gate.wait_explored(1)


def client_alone(folder: Path) -> Path:
    """`rft.client` without the rest of rft, which that environment has not installed."""
    (folder / "path" / "rft").mkdir(parents=True)
    (folder / "path" / "rft" / "client.py").write_text((runs.ROOT / "rft" / "client.py").read_text())
    return folder / "path"
