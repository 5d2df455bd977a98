"""R2: calls into Ray have a deadline, and its processes are named when they end or are stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rft.errors import RayFailed
from rft.launch.ray_calls import LOOK_S, RayProcesses, answer, in_daemon, stopped_parts


@pytest.fixture
def raylet(tmp_path: Path) -> Iterator[psutil.Process]:
    """A process that waits, under the raylet's name."""
    program = tmp_path / "raylet"
    program.symlink_to(sys.executable)
    with subprocess.Popen(
        [str(program), "-c", "print(flush=True); input()"], stdin=-1, stdout=-1
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()  # it has its name by now
        yield psutil.Process(process.pid)
        process.kill()


def test_a_raylet_that_is_well_is_no_trouble(raylet: psutil.Process) -> None:
    watched = RayProcesses([raylet, psutil.Process()])
    assert watched.trouble() == "" and watched.failed(LOOK_S) == ""


def test_a_stopped_raylet_is_named_and_fails_later(raylet: psutil.Process) -> None:
    watched = RayProcesses([raylet])
    raylet.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, raylet.pid, os.WSTOPPED | os.WNOWAIT)
    named = f"raylet (pid {raylet.pid}) is stopped"
    assert watched.trouble() == named and watched.stopped() == [raylet]
    assert [watched.failed(3 * LOOK_S) for _ in range(3)] == ["", "", named]
    assert [watched.failed(None) for _ in range(9)] == [""] * 9, (
        "cluster.stall_timeout: null waits for ever"
    )
    raylet.send_signal(signal.SIGCONT)
    os.waitid(os.P_PID, raylet.pid, os.WCONTINUED)
    assert watched.failed(3 * LOOK_S) == "" == watched.trouble(), "looks count in a row"


def test_a_raylet_that_ended_fails_at_once(raylet: psutil.Process) -> None:
    watched = RayProcesses([raylet])
    raylet.kill()
    # as long as nobody collects it, it is a zombie
    os.waitid(os.P_PID, raylet.pid, os.WEXITED | os.WNOWAIT)
    assert watched.failed(None) == watched.trouble() == f"raylet (pid {raylet.pid}) has ended"


async def test_a_call_without_an_answer_has_a_deadline() -> None:
    answers = threading.Event()
    with pytest.raises(RayFailed, match=r"Ray did not list its nodes within 0 s"):
        await answer("list its nodes", answers.wait, timeout_s=0.05)
    answers.set()  # what comes late disturbs nobody
    assert await answer("list its nodes", sorted, [2, 1], reverse=True) == [2, 1]


async def test_an_error_of_a_call_is_its_own() -> None:
    with pytest.raises(ZeroDivisionError):
        await answer("divide", divmod, 1, 0)


async def test_a_thread_lasts_as_long_as_asked() -> None:
    ended = threading.Event()
    thread = await asyncio.wrap_future(in_daemon(threading.current_thread, until=ended))
    assert thread.is_alive() and thread.daemon
    ended.set()
    await asyncio.to_thread(thread.join)


def test_a_part_that_is_stopped_is_named(tmp_path: Path) -> None:
    """Also before it has a title, as while it starts."""
    program = tmp_path / "default_worker.py"
    program.write_text("print(flush=True); input()")
    with subprocess.Popen([sys.executable, str(program)], stdin=-1, stdout=-1) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert stopped_parts() == {}
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert stopped_parts() == {
            psutil.Process(process.pid): f"default_worker.py (pid {process.pid})"
        }
        process.kill()
