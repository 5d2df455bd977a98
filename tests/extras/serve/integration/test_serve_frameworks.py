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
from learning_serve import client_alone

from rft.engine.scripted import ScriptedEngine
from rft.extras.serve.access import ENVIRONMENT
from rft.taskset.generated_tasks import digit_sums
from rft.testing import run_workflow_async
from rft.testing.models import smollm2
from rft.types.ports import GenerateRequest
from rft.worker.threads import in_thread
from tests.extras.serve.serving import KEY, serving
from tests.helpers import howto, runs
from tests.helpers.calling_engine import Called, CallingEngine

EXAMPLE = runs.ROOT / "examples" / "serve"
# of an environment with frameworks.txt; else one is made, from the package registry
PYTHON = "RFT_FRAMEWORKS_PYTHON"
PAGE = runs.ROOT / "docs" / "howto" / "agents-elsewhere.md"
PROGRAMS = {b.title: b.body for b in howto.blocks(PAGE) if b.lang == "py" and b.title}


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


def a_call_first(request: GenerateRequest) -> tuple[str, Called | None]:
    """Calls the agent's tool, where it has one, then answers."""
    told = "rain in Oslo" in str(request.messages[-1]["content"])
    names = {tool["function"]["name"] for tool in request.tools}
    if not told and "Bash" in names:
        return "", ("Bash", {"command": "echo rain in Oslo", "description": "ask"})
    answer = "rain: 7" if told else "hi: 7"
    return ("", ("final_answer", {"answer": answer})) if "final_answer" in names else (answer, None)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
async def test_programs_of_the_page_play_a_run(name: str, python: str) -> None:
    engine = CallingEngine(a_call_first)
    args = {
        "command": [python, "{home}/agent.py"],
        "stdin": "{prompt}",
        "home": {"agent.py": PROGRAMS[name]},
        "env": {"IS_SANDBOX": "1"},
    }
    result = await run_workflow_async(
        "agent_command_workflow",
        {"prompt": "hi", "response": "7"},
        engine,
        reward="exact_answer",
        workflow_args=args,
        timeout_s=200,
    )
    # run_workflow_async has compared tokens, log-probs and masks of the row with the engine's
    # the last answer of smolagents is a call
    assert result.rewards == [float(name != "smolagents")]
    (run,), (row,) = result.runs, result.group.rows
    tools = name == "claude-agent-sdk"
    assert len(engine.calls) == 1 + tools
    assert row.info["agent_output"].strip() == f"{'rain' if tools else 'hi'}: 7"
    assert run.transcript is not None and len(run.transcript.turns) == len(engine.calls)


@pytest.mark.slow
async def test_programs_of_the_page_play_sessions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python: str
) -> None:
    async with serving(
        tmp_path, monkeypatch, CallingEngine(a_call_first), num_runs=len(PROGRAMS)
    ) as served:
        agent = tmp_path / "agent.py"
        for program in PROGRAMS.values():
            session = await served.open(task_id="weather")
            agent.write_text(program)
            environment = {
                "PATH": os.environ["PATH"],
                "HOME": str(tmp_path),
                "IS_SANDBOX": "1",
                "OPENAI_BASE_URL": session["base_url"],
                "OPENAI_API_KEY": session["api_key"],
                "ANTHROPIC_BASE_URL": session["base_url"].removesuffix("/v1"),
                "ANTHROPIC_API_KEY": session["api_key"],
            }

            def play(env: dict[str, str] = environment) -> str:
                return subprocess.run(
                    [python, str(agent)],
                    input="hi",
                    env=env,
                    capture_output=True,
                    text=True,
                    timeout=200,
                    check=True,
                ).stdout

            assert (await in_thread(play, "a framework")).strip().endswith(": 7")
            assert (await served.reward(session, 1.0)).status_code == 200
        await served.gate.wait_explored(1)
        audit = await served.buffer.audit()
        assert audit.ok and audit.available == len(PROGRAMS)


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
