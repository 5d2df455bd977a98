"""The other side of `rft.workflow.isolated`: the server of one file, and in each process that it
forks, one run.

Invariant: user code runs only after the limits are in place, and in a process group of its own.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import os
import resource
import socket
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rft.engine.base import PromptTooLong
from rft.plugins import import_file
from rft.reward.base import checked
from rft.types.completion import Completion, Score, Transcript
from rft.types.ports import GenerateRequest, ScoreRow
from rft.worker import framing, limits
from rft.worker.parent import die_with_parent
from rft.worker.threads import last_lines
from rft.workflow.base import RunContext
from rft.workflow.isolation_wire import Answer, Isolation, Order, Played, RunCall, pack, unpack
from rft.workflow.play_run import check_transcript, play, reason_of
from rft.workflow.recipes import Recipe


def main(argv: Sequence[str]) -> None:
    """`argv`: control descriptor, file to import.  Says {} or {error}, then forks for every class
    name that comes with a descriptor.
    """
    with socket.socket(fileno=int(argv[0])) as control:
        try:
            module = _module(Path(argv[1]))
        except BaseException as e:  # whatever an import raises is told, not lost
            control.send(json.dumps({"error": f"{type(e).__name__}: {e}"[:4000]}).encode())
            return
        control.send(b"{}")
        while _served(control, module):
            pass


def _served(control: socket.socket, module: Any) -> bool:
    """Answers one message; False where the other side is gone: children die with this process."""
    said, fds, _, _ = socket.recv_fds(control, 4096, 1)
    if not said:
        return False
    if said.startswith(b"reap "):
        control.send(_reaped(int(said[5:])))
        return True
    try:
        pid = os.fork()
    except (
        OSError
    ) as e:  # too many processes, too little memory: this run fails, later ones may not
        control.send(f"{type(e).__name__}: {e}".encode())
    else:
        if pid == 0:
            control.close()
            _child(socket.socket(fileno=fds[0]), getattr(module, said.decode()))
        os.setpgid(pid, pid)
        control.send(str(pid).encode())
    os.close(fds[0])
    return True


def _reaped(pid: int) -> bytes:
    try:
        return str(os.waitpid(pid, 0)[1]).encode()
    except ChildProcessError:
        return b"no child of this server"


def _module(file: Path) -> Any:
    """The module of `file`, by its name where it belongs to what this process has imported already."""
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == str(file):
            return module
    return import_file(file)


def _child(channel: socket.socket, cls: Any) -> None:
    code = 1
    try:
        os.setpgid(0, 0)
        die_with_parent()
        asyncio.run(_play(channel, cls))
        code = 0
    finally:
        os._exit(code)


async def _play(channel: socket.socket, cls: Any) -> None:
    reader, writer = await asyncio.open_connection(sock=channel)
    order: Order = unpack(await framing.read(reader), Order)
    _limit(order.limits)
    link = _Link(reader, writer)
    listening = asyncio.ensure_future(link.listen())
    contexts = [
        RunContext(
            link.model(i),
            order.task,
            run=run,
            request_id=name,
            models={m: link.model(i, m) for m in order.models},
        )
        for i, (run, name) in enumerate(order.runs)
    ]
    try:
        done = await _run(cls, order, contexts)
        verb = "done"
        body = pack([_played(t, link) for t in done])
    except BaseException as e:  # user code may raise anything
        verb = "failed"
        body = pack(f"{reason_of(e)}\n{last_lines(e)[-4000:]}")
    writer.write(framing.frame(pack(RunCall(0, verb, 0, "", msgspec.Raw(body)))))
    await writer.drain()
    listening.cancel()


async def _run(cls: Any, order: Order, contexts: list[RunContext]) -> list[Transcript]:
    blocking = not inspect.iscoroutinefunction(cls.run_group if order.together else cls.run)
    recipe = Recipe(order.task.workflow, partial(cls, **order.keywords), blocking, reward=None)
    got = await play(recipe, order.task, contexts if order.together else contexts[0])
    transcripts = list(got) if order.together else [got]
    for transcript in transcripts:
        check_transcript(transcript, recipe)
    return transcripts


def _played(t: Transcript, link: _Link) -> Played:
    if any(turn.mask is not None for turn in t.turns):
        raise ValueError(
            "an isolated workflow cannot leave tokens out of training (mask); play it without "
            "isolated"
        )
    calls = [
        (link.number(turn.completion), _score(turn.score), turn.info, turn.teacher_logprobs)
        for turn in t.turns
    ]
    metrics = {name: float(value) for name, value in t.metrics.items()}
    return Played(
        calls=calls,
        layout=t.layout,
        metrics=metrics,
        info=t.info,
        score=_score(t.score),
        limited=t.limited,
    )


def _score(given: Any) -> Score | None:
    """As a run that is not isolated may give it: a number, parts or a Score."""
    return None if given is None else checked(given)


def _limit(most: Isolation) -> None:
    limits.limit_memory(most.memory_mb)
    limits.limit(resource.RLIMIT_FSIZE, most.file_mb << 20)
    limits.limit(resource.RLIMIT_NOFILE, most.open_files)
    limits.limit(resource.RLIMIT_CORE, 0)


class _Link:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        # id() of a completion → itself, number of its call, place there
        self._given: dict[int, tuple[Completion, int, int]] = {}

    def model(self, run: int, name: str = "") -> _Model:
        return _Model(self, run, name)

    def gave(self, call: int, done: Sequence[Completion]) -> None:
        """`call` of the policy was answered with these."""
        self._given |= {
            id(completion): (completion, call, place) for place, completion in enumerate(done)
        }

    def number(self, completion: Completion) -> tuple[int, int]:
        if id(completion) not in self._given:
            raise ValueError(
                "the transcript has a completion that no call of the policy's engine gave"
            )
        return self._given[id(completion)][1:]

    async def listen(self) -> None:
        while True:
            answer: Answer = unpack(await framing.read(self._reader), Answer)
            future = self._waiting.pop(answer.id)
            if future.done():  # the workflow has given this call up
                continue
            if not answer.error:
                future.set_result(bytes(answer.body))
            else:
                too_long = answer.error == "prompt_too_long"
                error = (
                    PromptTooLong(*unpack(answer.body, tuple[int, int]))
                    if too_long
                    else RuntimeError(unpack(answer.body, str))
                )
                future.set_exception(error)

    async def ask(self, verb: str, run: int, model: str, body: Any, kind: Any) -> tuple[int, Any]:
        number = next(self._ids)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        self._writer.write(
            framing.frame(pack(RunCall(number, verb, run, model, msgspec.Raw(pack(body)))))
        )
        return number, unpack(await self._waiting[number], kind)


class _Model:
    """A `ChatModel` at the other end of the socket."""

    def __init__(self, link: _Link, run: int, name: str) -> None:
        self._link = link
        self._run = run
        self._name = name

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        number, done = await self._link.ask(
            "generate", self._run, self._name, request, list[Completion]
        )
        if not self._name:
            self._link.gave(number, done)
        return list(done)

    async def logprobs(self, row: ScoreRow) -> np.ndarray:
        return np.asarray(
            (await self._link.ask("logprobs", self._run, self._name, row, np.ndarray))[1]
        )

    async def classify(self, messages: Sequence[dict[str, Any]]) -> list[float]:
        return list(
            (await self._link.ask("classify", self._run, self._name, list(messages), list[float]))[
                1
            ]
        )


if __name__ == "__main__":
    main(sys.argv[1:])
