"""Calls into Ray that may wait, each with a name and a deadline; and Ray's processes on this
machine, which are named when they fail.

Knows no part of a run.  Invariant: no call holds up the event loop or the end of the interpreter:
it waits in a daemon thread.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

import psutil

from rft.errors import RayFailed

T = TypeVar("T")
# for an answer of Ray, whose library ends any process that does not reach the GCS for 60 s
ANSWER_S = 45.0
LOOK_S = 1.0  # between two looks at Ray's processes
_TITLES = (
    ("raylet", re.compile(r"\S*/raylet ")),
    ("gcs_server", re.compile(r"\S*/gcs_server ")),
    ("Ray's dashboard agent", re.compile(r"ray::DashboardAgent\b|\S+ .*dashboard/agent\.py ")),
    (
        "Ray's runtime-env agent",
        re.compile(r"ray::RuntimeEnvAgent\b|\S+ .*runtime_env/agent/main\.py "),
    ),
)
# with its title, or before it has one
_PART = re.compile(r"^ray::(\w+)|^VLLM::\w+|default_worker\.py")
_STOPPED = {psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP}


def in_daemon(
    ask: Callable[..., T], *args: Any, until: threading.Event | None = None, **options: Any
) -> Future[T]:
    """What `ask` gives, from a daemon thread of its own, which lasts until the event `until` is
    set.
    """
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # from now on a waiter that gives up cannot cancel it

    def run() -> None:
        try:
            future.set_result(ask(*args, **options))
        except BaseException as e:
            future.set_exception(e)
        if until is not None:
            until.wait()

    threading.Thread(target=run, name="ray-call", daemon=True).start()
    return future


async def answer(
    what: str, ask: Callable[..., T], *args: Any, timeout_s: float = ANSWER_S, **options: Any
) -> T:
    """What the call into Ray gives.  `what` completes "Ray did not ...".  Raises RayFailed past the
    deadline.
    """
    future = asyncio.wrap_future(in_daemon(ask, *args, **options))
    done, _ = await asyncio.wait([future], timeout=timeout_s)
    if not done:
        raise RayFailed(f"Ray did not {what} within {timeout_s:.0f} s")
    return future.result()


class RayProcesses:
    """Ray's own processes on this machine; `processes` may hold others, which are left out."""

    def __init__(self, processes: Iterable[psutil.Process] = ()) -> None:
        self._names: dict[psutil.Process, str] = {}
        self._stopped: dict[psutil.Process, int] = {}  # for how many looks in a row
        self.add(processes)

    def add(self, processes: Iterable[psutil.Process]) -> None:
        for process in processes:
            if process not in self._names and (title := title_of(process)):
                self._names[process] = f"{title} (pid {process.pid})"

    def stopped(self) -> list[psutil.Process]:
        return [p for p in self._names if _status(p) in _STOPPED]

    def trouble(self) -> str:
        """Which of them have ended or are stopped at this moment; empty if none."""
        return self._named(self.stopped())

    def failed(self, stopped_s: float | None) -> str:
        """Which of them have ended, or were stopped for `stopped_s` (None: for ever); to be asked
        every LOOK_S.

        Looks are counted, not seconds: while this process is suspended as well, nothing is wrong.
        """
        self._stopped = {p: self._stopped.get(p, 0) + 1 for p in self.stopped()}
        limit = float("inf") if stopped_s is None else stopped_s
        return self._named([p for p, looks in self._stopped.items() if looks * LOOK_S >= limit])

    def _named(self, stopped: list[psutil.Process]) -> str:
        ended = [f"{name} has ended" for p, name in self._names.items() if _status(p) is None]
        return ", ".join([*ended, *(f"{self._names[p]} is stopped" for p in stopped)])


def local_processes(raylet_socket: str, session: str) -> list[psutil.Process]:
    """Of a Ray that is there: the raylet of this socket, its agents, and the GCS where it is on
    this machine.
    """
    found = []
    for process in psutil.process_iter():
        title = title_of(process)
        if title == "gcs_server" and session in _command(process):
            found.append(process)
        elif title == "raylet" and f"{raylet_socket} " in f"{_command(process)} ":
            found += [process, *process.children()]
    return found


def stopped_parts() -> dict[psutil.Process, str]:
    """Processes of parts below this one that are stopped, with their names."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        if (
            _status(process) in _STOPPED
            and (part := _PART.search(_command(process)))
            and not title_of(process)
        ):
            found[process] = f"{part[1] or part[0]} (pid {process.pid})"
    return found


def title_of(process: psutil.Process) -> str:
    command = f"{_command(process)} "
    return next((title for title, pattern in _TITLES if pattern.match(command)), "")


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _status(process: psutil.Process) -> str | None:
    """None for one that has ended."""
    try:
        status = str(process.status()) if process.is_running() else psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return None
    return None if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD) else status
