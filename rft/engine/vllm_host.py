"""The program of a process that hosts a vLLM engine on a CPU: import vLLM once, for this process
and the engine's core.

    python -P -c START_COMMAND SCRIPT ARGUMENTS ...

imports vLLM, forks a waiting child, and runs SCRIPT, which is Ray's worker.  vLLM would start its
core in a new interpreter, which repeats all imports: 6 s of processor time.  Inside
`core_from_child` the waiting child becomes the core instead.

Depends on vLLM's imports and the name `get_mp_context` that vLLM starts its core with.
Invariant: the fork precedes Ray and any computation, so no thread exists whose locks the child
could inherit.
"""

from __future__ import annotations

import gc
import importlib
import os
import runpy
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import popen_spawn_posix, util
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext, SpawnProcess, set_spawning_popen
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from rft.worker.parent import die_with_parent


class _Child(NamedTuple):
    pid: int
    channel: socket.socket


_waiting: list[_Child] = []  # at most one


def start_command(modules: Sequence[str]) -> str:
    """Return Python code that calls `main` with `modules` in a new interpreter."""
    package_folder = str(Path(__file__).parents[2])
    return (
        f"import sys; sys.path.append({package_folder!r}); from rft.engine import vllm_host; "
        f"vllm_host.main({tuple(modules)!r})"
    )


def main(modules: Sequence[str]) -> None:
    """Import `modules`, fork the waiting child, and run the script named by the arguments."""
    gc.disable()  # imported objects stay; collecting garbage would take a fifth of the import time
    for name in modules:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()
    ours, theirs = socket.socketpair()
    if (pid := os.fork()) == 0:
        ours.close()
        _become(theirs)
    theirs.close()
    _waiting.append(_Child(pid, ours))
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")


def _become(channel: socket.socket) -> NoReturn:
    """Wait for a process object and run it with the sender's output, environment and working
    folder.
    """
    die_with_parent()
    message, outputs, _, _ = socket.recv_fds(channel, 1, 2)
    if not message:  # the host ended without an engine
        os._exit(0)
    for number, output in enumerate(outputs, 1):
        os.dup2(output, number)
        os.close(output)
    with Connection(channel.detach()) as connection:
        environment, folder, sys.path[:], process = connection.recv()
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(
        {name: value for name, value in environment.items() if os.environ.get(name) != value}
    )
    os.chdir(folder)
    # ends like a forked process: a regular interpreter exit takes seconds
    os._exit(process._bootstrap())


@contextmanager
def core_from_child() -> Iterator[int | None]:
    """Let the engine core that vLLM starts in the block be the waiting child; yields its process
    id, or None without a child.
    """
    if not _waiting:
        yield None
        return
    from vllm.v1.engine import utils

    theirs = utils.get_mp_context
    utils.get_mp_context = _Context
    try:
        yield _waiting[0].pid
    finally:
        utils.get_mp_context = theirs


class _Handed(popen_spawn_posix.Popen):
    """Uses the waiting child instead of starting a new process."""

    def _launch(self, process_obj: BaseProcess) -> None:
        child = _waiting.pop()
        with Connection(child.channel.detach()) as channel:
            with socket.socket(fileno=os.dup(channel.fileno())) as sender:
                socket.send_fds(sender, [b"."], [1, 2])
            set_spawning_popen(self)
            try:
                channel.send((dict(os.environ), str(Path.cwd()), sys.path, process_obj))
            finally:
                set_spawning_popen(None)
        self.pid = child.pid
        self.sentinel = os.pidfd_open(child.pid)
        self.finalizer = util.Finalize(self, os.close, (self.sentinel,))


class _Process(SpawnProcess):
    @staticmethod
    def _Popen(process_obj: BaseProcess) -> Any:
        return _Handed(process_obj)


class _Context(SpawnContext):
    Process = _Process
