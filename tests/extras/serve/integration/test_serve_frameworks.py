"""Agent frameworks, unchanged and in an environment of their own, play sessions of a service."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import shutil
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rft.engine.scripted import ScriptedEngine
from rft.extras.serve.access import ENVIRONMENT
from rft.taskset.generated_tasks import digit_sums
from rft.testing.models import smollm2
from rft.worker.threads import in_thread
from tests.extras.serve.serving import KEY, serving
from tests.helpers import runs

EXAMPLE = runs.ROOT / "examples" / "serve"
# of an environment with frameworks.txt; else one is made, from the package registry
PYTHON = "RFT_FRAMEWORKS_PYTHON"


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> str:
    if given := os.environ.get(PYTHON):
        return given
    made: Path = tmp_path_factory.mktemp("frameworks") / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(made)], check=True)
    subprocess.run(
        [str(made / "bin" / "pip"), "install", "--quiet", "-r", str(EXAMPLE / "frameworks.txt")],
        check=True,
    )
    return str(made / "bin" / "python")


@pytest.mark.slow
async def test_frameworks_play_sessions(tmp_path, monkeypatch, python):
    engine = ScriptedEngine(
        answer=lambda m: next(f"to {said['content']}" for said in m if said["role"] == "user")
    )
    async with serving(tmp_path, monkeypatch, engine, num_runs=2) as served:
        environment = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(client_alone(tmp_path)),
            ENVIRONMENT: KEY,
        }
        command = [python, str(EXAMPLE / "frameworks.py"), served.address]

        def play() -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=120, check=False
            )

        done = await in_thread(play, "the frameworks")
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == [
            f"{n}: 'to hi', reward ok"
            for n in ("langgraph", "openai_agents", "pydantic_ai", "smolagents", "agentscope")
        ]
        await served.gate.wait_explored(2)
        audit = await served.buffer.audit()
        assert audit.ok and audit.available == 4 and audit.waiting == 1


@pytest.mark.slow
async def test_node_plays_sessions(tmp_path, monkeypatch):
    """With the package `openai` of npm, which is installed from its registry."""
    node = shutil.which("node")
    npm = shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("Node is not installed")
    shutil.copy(EXAMPLE / "play.mjs", tmp_path)
    install = [npm, "install", "--no-audit", "--no-fund", "openai"]
    await in_thread(
        lambda: subprocess.run(install, cwd=tmp_path, check=True, capture_output=True, timeout=120),
        "npm",
    )
    async with serving(
        tmp_path, monkeypatch, ScriptedEngine(answer=lambda m: f"to {m[-1]['content']}"), num_runs=2
    ) as served:
        environment = {"PATH": os.environ["PATH"], ENVIRONMENT: KEY}
        command = [node, "play.mjs", served.address]

        def play() -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                command,
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )

        done = await in_thread(play, "node")
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == [
            f'{how}: "to hi", reward ok' for how in ("whole", "stream")
        ]
        await served.gate.wait_explored(1)


KILLED = ("engine", "trainer", "buffer", "explorer")  # the explorer's process has the service
KILLS = 20


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_langgraph_run_loses_nothing(launch, tmp_path, python):
    """kill -9 of parts at random moments of the run that scripts/learning_serve.py plays, with real
    vLLM and SmolLM2.
    """
    dice = random.Random(0)
    tasks = digit_sums(split="train")
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    more = (
        f"checkpoint_root_dir={tmp_path}",
        f"explorer.proxy_port={port}",
        "trainer.save_interval=1",
        "trainer.total_steps=1000",
    )
    folder = tmp_path / "rft" / "examples" / "langgraph"

    def start() -> Any:
        run = launch(
            "serve",
            "-c",
            str(EXAMPLE / "smollm2.yaml"),
            *more,
            MODEL_PATH=str(smollm2()),
            **{ENVIRONMENT: KEY},
        )
        deadline = time.monotonic() + 400
        while time.monotonic() < deadline and run.process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                return run
            over.wait(0.2)
        raise AssertionError(run.output)

    run = start()
    plays: list[dict[str, Any]] = []
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(client_alone(tmp_path)),
        ENVIRONMENT: KEY,
    }
    command = [python, str(EXAMPLE / "langgraph_agent.py"), f"http://127.0.0.1:{port}"]
    agent = subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )

    def play() -> None:
        for step in itertools.count():
            asked = {
                "tasks": [tasks[(4 * step + i) % len(tasks)] for i in range(4)],
                "runs": 8,
                "train": True,
            }
            print(json.dumps(asked), file=agent.stdin, flush=True)
            plays.extend(json.loads(agent.stdout.readline())["plays"])
            if over.is_set():
                return

    player = threading.Thread(target=play)
    player.start()
    killed: Counter[str] = Counter()
    while killed.total() < KILLS:
        over.wait(dice.uniform(1, 40))
        assert player.is_alive() and run.process.poll() is None, run.output
        parts = {
            runs.role(p): p
            for p in runs.parts(json.loads((folder / "state.json").read_text())["run_id"])
        }
        # the engine, while it is being restarted
        if (part := KILLED[killed.total() % len(KILLED)]) not in parts:
            continue
        parts[part].kill()
        killed[part] += 1
        if part != "engine":
            run.end(180)
            run = start()
    over.set()
    player.join(400)
    assert not player.is_alive()
    agent.communicate(timeout=60)
    assert agent.returncode == 0
    run.interrupt()
    run.end(120)
    with contextlib.closing(sqlite3.connect(folder / "buffer" / "experience_buffer.db")) as ledger:
        calls = Counter(f"chatcmpl-{id}" for (id,) in ledger.execute("SELECT id FROM calls"))
        scores = {
            id: json.loads(score)["value"]
            for id, score in ledger.execute("SELECT id, score FROM sessions")
            if score
        }
    ok, audit = runs.audit(folder)
    rewarded = {p["session"]: p["reward"] for p in plays if p["reward"] is not None}
    answers = [a for p in plays for a in p["answers"]]
    print(
        f"{dict(killed)} killed, {len(answers)} answers, {len(rewarded)} rewards of {len(plays)} "
        f"sessions, audit {audit}"
    )
    assert ok, audit
    assert {a for a in answers if calls[a] != 1} == set()
    assert {s for s, reward in rewarded.items() if scores.get(s) != reward} == set()
    assert len(rewarded) > 10 * KILLS


def client_alone(folder: Path) -> Path:
    """`rft.extras.serve.client` without the rest of rft, which that environment has not installed."""
    (folder / "path" / "rft").mkdir(parents=True)
    (folder / "path" / "rft" / "client.py").write_text(
        (runs.ROOT / "rft" / "client.py").read_text()
    )
    return folder / "path"
