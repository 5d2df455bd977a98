"""M6, M7 and requests: what an agent's program is told, whether its own reward counts, and what is
left of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import sys
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from rft.engine.scripted import ScriptedEngine
from rft.launch import leftovers
from rft.plugins import load_all
from rft.types.ids import GroupId
from rft.types.task import SamplingArgs, Task
from rft.workflow import endpoint
from rft.workflow.base import RunContext
from rft.workflow.endpoint import serve
from rft.workflow.group import run_group
from rft.workflow.play_run import RunLimits
from rft.workflow.recipes import Recipes
from tests.attacks.table import attack

CHAT = """
import os, sys, httpx
http = httpx.Client(base_url=os.environ["OPENAI_BASE_URL"], headers={"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}, timeout=30)
http.post("/chat/completions", json={"messages": [{"role": "user", "content": "x"}]})
"""
POSTS = CHAT + "print(http.post('/reward', json={'reward': 100.0}).json()['status'])\n"
TELLS = CHAT + "import json; print(json.dumps(dict(os.environ)))\n"
DAEMONS = (
    CHAT
    + """
import subprocess, time
def daemon(how):
    reading, writing = os.pipe()
    if how == "two forks" and os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
    elif how != "two forks" and os.fork():
        return os.read(reading, 20)
    elif how == "setsid":
        os.setsid()
    if how == "two forks" and os.getsid(0) == SESSION:
        return os.read(reading, 20)
    os.environ.clear()
    os.write(writing, str(os.getpid()).encode())
    os.execve("/bin/sleep", ["sleep", "300"], {})
SESSION = os.getsid(0)
with open(sys.argv[1], "w") as file:
    for how in ("child", "setsid", "two forks"):
        print(daemon(how).decode(), file=file, flush=True)
"""
)


@pytest.fixture(scope="module", autouse=True)
def plugins() -> None:
    load_all()


async def _play(program: str, *argv: str, reward: str | None, **args: Any) -> Any:
    command = [sys.executable, "-c", program, *argv]
    of = Task(
        taskset="t",
        index=0,
        prompt="hi",
        truth="4",
        workflow="agent_command_workflow",
        reward=reward,
        workflow_args={"command": command, **args},
    )
    group = await run_group(
        of,
        Recipes().find(of),
        ScriptedEngine(answer=lambda m: "5"),
        GroupId(1, 0, 3, 5),
        limits=RunLimits(max_timeout_s=60),
    )
    return group.rows[0]


@attack(
    "M6",
    "an agent posts a reward of 100",
    "it counts where the taskset has no reward or says so; else it is kept beside",
)
@pytest.mark.parametrize(
    ("reward", "args", "counts"),
    [
        ("exact_answer", {}, 0.0),
        ("exact_answer", {"agent_reward": True}, 100.0),
        (None, {}, 100.0),
    ],
    ids=["taskset has one", "taskset lets it", "taskset has none"],
)
async def test_m6_a_posted_reward_counts_where_the_taskset_says_so(
    reward: str | None, args: dict[str, Any], counts: float
) -> None:
    row = await _play(POSTS, reward=reward, **args)
    assert row.reward == counts, row.reason
    assert (row.info["agent_output"], row.info.get("agent_reward")) == (
        ("ignored\n", 100.0) if counts == 0 else ("ok\n", None)
    )


@attack(
    "M6",
    "an agent's program looks for keys in its environment",
    "it finds what `pass_env` and `env` name, and where things are",
)
async def test_m6_a_program_gets_no_keys_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "HTTPS_PROXY", "SOME_SETTING", "NEEDED"):
        monkeypatch.setenv(name, "sesame")
    row = await _play(TELLS, reward="exact_answer", env={"MINE": "1"}, pass_env=["NEEDED"])
    assert row.status != "failed", row.reason
    told = json.loads(row.info["agent_output"])
    assert (
        {n for n, v in told.items() if v == "sesame"} == {"NEEDED"}
        and told["MINE"] == "1"
        and "PATH" in told
    )


@attack(
    "M7",
    "an agent's program leaves a child, one in another session, one behind two forks",
    "they end with it",
)
async def test_m7_daemons_of_a_program_end_with_it(tmp_path: Path) -> None:
    """A child, one in a session of its own, and one behind two forks; none of them keeps the
    environment it was started with.
    """
    file = tmp_path / "pids"
    row = await _play(DAEMONS, str(file), reward="exact_answer")
    assert row.status != "failed", row.reason
    pids = [int(line) for line in file.read_text().split()]
    assert len(pids) == 3 and not [p for p in pids if psutil.pid_exists(p)]


@attack("M7", "the same, while the run is given up", "they end with the run")
async def test_m7_daemons_end_with_a_run_that_is_given_up(tmp_path: Path) -> None:
    file = tmp_path / "pids"
    run = asyncio.ensure_future(
        _play(
            DAEMONS + "\nos.mkfifo(sys.argv[1] + '.f'); open(sys.argv[1] + '.f').read()",
            str(file),
            reward=None,
        )
    )
    fifo = Path(f"{file}.f")
    while not await asyncio.to_thread(fifo.exists):
        await asyncio.sleep(0.05)
        assert not run.done(), run.result().reason
    handles = [
        os.pidfd_open(int(line)) for line in (await asyncio.to_thread(file.read_text)).split()
    ]
    run.cancel()
    for handle in handles:
        ended, _, _ = await asyncio.to_thread(select.select, [handle], [], [], 20)
        os.close(handle)
        assert ended
    await asyncio.gather(run, return_exceptions=True)
    await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()}, timeout=20)  # type: ignore[arg-type]


@attack(
    "M7",
    "an orphan with an empty environment in another session",
    "collected and ended with the run, and told",
)
def test_m7_what_parts_of_a_run_leave_is_collected() -> None:
    """An orphan with an empty environment, in a session of its own, whose parent has ended."""
    reading, writing = os.pipe()
    code = f"import os, sys\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        os.write({writing}, str(os.getpid()).encode())\n        os.set_inheritable({writing}, False)\n        os.execve('/bin/sleep', ['sleep', '300'], {{}})\n    os._exit(0)\nos.wait()"  # noqa: E501
    import subprocess

    with leftovers.collected() as ended:
        subprocess.run([sys.executable, "-c", code], pass_fds=(writing,), check=True, timeout=60)
        os.close(writing)
        with os.fdopen(reading, "rb") as told:  # to its end: it is another program by then
            pid = int(told.read())
        assert psutil.Process(pid).ppid() == os.getpid()
    assert not psutil.pid_exists(pid) and any(
        f"ended process {pid} sleep" in line for line in ended
    )


@attack("L", "messages of a wrong form", "400 with the message's number, never 500")
@pytest.mark.parametrize(
    "message",
    [
        {"role": {}, "content": "x"},
        {"role": "user", "content": "x", "tool_calls": 5},
        {"role": "user", "name": 5},
        {"role": ["user"]},
        7,
    ],
)
async def test_a_message_of_the_wrong_form_is_refused_not_failed(message: Any) -> None:
    of = Task(taskset="t", index=0, prompt="hi", workflow="w", sampling=SamplingArgs(max_tokens=3))
    async with (
        serve(RunContext(ScriptedEngine("a"), of, run=0, request_id="r"), of) as run,
        httpx.AsyncClient(
            base_url=run.base_url, headers={"Authorization": f"Bearer {run.api_key}"}, timeout=20
        ) as http,
    ):
        got = await http.post("/chat/completions", json={"messages": [message]})
    assert got.status_code == 400 and "messages[0]" in got.json()["error"]["message"]


@pytest.mark.e2e
@attack(
    "L", "three hundred slow connections", "closed at their deadline; others are served meanwhile"
)
async def test_three_hundred_slow_connections_are_closed_and_others_are_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(endpoint, "HEAD_S", 2.0)
    monkeypatch.setattr(endpoint, "BODY_S", 2.0)
    of = Task(taskset="t", index=0, prompt="hi", workflow="w", sampling=SamplingArgs(max_tokens=3))
    async with serve(RunContext(ScriptedEngine("a"), of, run=0, request_id="r"), of) as run:
        host, port = run.base_url.split("/")[2].split(":")
        slow = [await asyncio.open_connection(host, int(port)) for _ in range(300)]
        for i, (_, writer) in enumerate(slow):
            writer.write(
                b"P"
                if i % 2
                else b"POST /v1/reward HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{"
            )
        async with httpx.AsyncClient(
            base_url=run.base_url, headers={"Authorization": f"Bearer {run.api_key}"}, timeout=60
        ) as http:
            assert (
                await http.post(
                    "/chat/completions", json={"messages": [{"role": "user", "content": "x"}]}
                )
            ).status_code == 200
        async with asyncio.timeout(60):
            for reader, writer in slow:
                while await reader.read(1 << 16):
                    pass
                writer.close()
                with contextlib.suppress(ConnectionError):
                    await writer.wait_closed()
