"""The program of a process that hosts a vLLM engine on a CPU: vLLM is imported once, for this
process and for the engine's core.

    python -P -c START SCRIPT ARGUMENTS ...

imports vLLM, forks a child that waits, and goes on as SCRIPT, which is Ray's worker.  vLLM would
start its core in a new interpreter, which imports everything again: 6 s of processor time.  Inside
`core_from_child` the waiting child becomes the core instead.

Knows vLLM's imports, and one name that it starts its core with.  Invariant: the fork comes before
Ray and before any computation, so neither has a thread yet whose locks the child could inherit.
"""

from __future__ import annotations

import gc
import importlib
import os
import runpy
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import popen_spawn_posix, util
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext, SpawnProcess, set_spawning_popen
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from rft.worker.parent import die_with_parent

START = (
    f"import sys; sys.path.append({str(Path(__file__).parents[2])!r}); from rft.engine import "
    f"vllm_host; vllm_host.main()"
)
_IMPORTED = (
    "vllm.v1.engine.async_llm",
    "rft.engine.vllm",
    "rft.engine.vllm_worker",
    "rft.engine.vllm_cpu",
)


class _Child(NamedTuple):
    pid: int
    channel: socket.socket


_waiting: list[_Child] = []  # at most one


def main() -> None:
    gc.disable()  # what is imported stays; looking for garbage in it takes a fifth of the time
    for name in _IMPORTED:
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
    """Wait for a process object, and be that process, with the output, environment and folder of
    who sends it.
    """
    die_with_parent()
    message, outputs, _, _ = socket.recv_fds(channel, 1, 2)
    if not message:  # the host has ended without an engine
        os._exit(0)
    for number, output in enumerate(outputs, 1):
        os.dup2(output, number)
        os.close(output)
    with Connection(channel.detach()) as given:
        environment, folder, sys.path[:], process = given.recv()
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(
        {name: value for name, value in environment.items() if os.environ.get(name) != value}
    )
    os.chdir(folder)
    # as forked processes end: taking the interpreter down would take seconds
    os._exit(process._bootstrap())


@contextmanager
def core_from_child() -> Iterator[int | None]:
    """The engine core that vLLM starts in the block is the waiting child; gives its number.  None:
    there is no child.
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
    """The process that was forked before, instead of one that is forked now."""

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
