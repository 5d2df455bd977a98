"""Calls into Ray with a name and a deadline, and Ray's processes on this machine by name.

Depends on no part of a run.  Invariant: a call waits in a daemon thread, so it delays neither the
event loop nor the end of the interpreter.
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
ANSWER_S = 45.0  # Ray's library ends any process that does not reach the GCS for 60 s
LOOK_S = 1.0  # interval of checks of Ray's processes
_TITLES = (
    ("raylet", re.compile(r"\S*/raylet ")),
    ("gcs_server", re.compile(r"\S*/gcs_server ")),
    ("Ray's dashboard agent", re.compile(r"ray::DashboardAgent\b|\S+ .*dashboard/agent\.py ")),
    (
        "Ray's runtime-env agent",
        re.compile(r"ray::RuntimeEnvAgent\b|\S+ .*runtime_env/agent/main\.py "),
    ),
)
# a part with or without its title
_PART = re.compile(r"^ray::(\w+)|^VLLM::\w+|default_worker\.py")
_STOPPED = {psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP}


def in_daemon(
    ask: Callable[..., T], *args: Any, until: threading.Event | None = None, **options: Any
) -> Future[T]:
    """Call `ask` in a new daemon thread, which lasts until the event `until` is set."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # a cancelled waiter cannot cancel it

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
    """Await a call into Ray.

    Raises RayFailed ("Ray did not `what`") past the deadline.
    """
    future = asyncio.wrap_future(in_daemon(ask, *args, **options))
    done, _ = await asyncio.wait([future], timeout=timeout_s)
    if not done:
        raise RayFailed(f"Ray did not {what} within {timeout_s:.0f} s")
    return future.result()


class RayProcesses:
    """Ray's own processes on this machine; `add` ignores all other processes."""

    def __init__(self, processes: Iterable[psutil.Process] = ()) -> None:
        self._names: dict[psutil.Process, str] = {}
        self._stopped: dict[psutil.Process, int] = {}  # consecutive checks in which it was stopped
        self.add(processes)

    def add(self, processes: Iterable[psutil.Process]) -> None:
        for process in processes:
            if process not in self._names and (title := title_of(process)):
                self._names[process] = f"{title} (pid {process.pid})"

    def stopped(self) -> list[psutil.Process]:
        return [p for p in self._names if _status(p) in _STOPPED]

    def trouble(self) -> str:
        """Name processes that have ended or are stopped now; empty if none."""
        return self._named(self.stopped())

    def failed(self, stopped_s: float | None) -> str:
        """Name processes that have ended, or are stopped for `stopped_s` (None: no limit).

        Call it every LOOK_S.  It counts calls, not seconds, so that a suspension of this process,
        too, is no failure.
        """
        self._stopped = {p: self._stopped.get(p, 0) + 1 for p in self.stopped()}
        limit = float("inf") if stopped_s is None else stopped_s
        return self._named([p for p, looks in self._stopped.items() if looks * LOOK_S >= limit])

    def _named(self, stopped: list[psutil.Process]) -> str:
        ended = [f"{name} has ended" for p, name in self._names.items() if _status(p) is None]
        return ", ".join([*ended, *(f"{self._names[p]} is stopped" for p in stopped)])


def local_processes(raylet_socket: str, session: str) -> list[psutil.Process]:
    """Return the raylet of this socket, its agents, and the GCS if it is on this machine."""
    processes = []
    for process in psutil.process_iter():
        title = title_of(process)
        if title == "gcs_server" and session in _command(process):
            processes.append(process)
        elif title == "raylet" and f"{raylet_socket} " in f"{_command(process)} ":
            processes += [process, *process.children()]
    return processes


def stopped_parts() -> dict[psutil.Process, str]:
    """Return stopped processes of parts below this one, with their names."""
    parts = {}
    for process in psutil.Process().children(recursive=True):
        if (
            _status(process) in _STOPPED
            and (part := _PART.search(_command(process)))
            and not title_of(process)
        ):
            parts[process] = f"{part[1] or part[0]} (pid {process.pid})"
    return parts


def title_of(process: psutil.Process) -> str:
    command = f"{_command(process)} "
    return next((title for title, pattern in _TITLES if pattern.match(command)), "")


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _status(process: psutil.Process) -> str | None:
    """Return the status, or None for a process that has ended."""
    try:
        status = str(process.status()) if process.is_running() else psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return None
    if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
        return None
    return status
