"""The child side of `rft.workflow.isolated`: a server per file, and per run a process forked from
it.

Invariant: user code runs only after the limits are set, and in a separate process group.
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
from typing import Any, cast

import msgspec

from rft.engine.base import PromptTooLong
from rft.plugins import import_file
from rft.reward.base import checked
from rft.types.completion import Completion, Score, TokenScores, Transcript
from rft.types.ports import GenerateRequest, ScoreRow
from rft.worker import framing, limits
from rft.worker.parent import die_with_parent
from rft.worker.threads import last_lines
from rft.workflow.base import RunContext
from rft.workflow.call_workflow import call_workflow, check_transcript, reason_of
from rft.workflow.isolation_wire import Answer, Isolation, Order, Played, RunCall, pack, unpack


def main(argv: Sequence[str]) -> None:
    """Import a file, report {} or {error}, then fork for every class name received with a
    descriptor.

    `argv`: control descriptor, file.
    """
    with socket.socket(fileno=int(argv[0])) as control:
        try:
            module = _module(Path(argv[1]))
        except BaseException as e:  # reported, whatever an import raises
            control.send(json.dumps({"error": f"{type(e).__name__}: {e}"[:4000]}).encode())
            return
        control.send(b"{}")
        while _serve_order(control, module):
            pass


def _serve_order(control: socket.socket, module: Any) -> bool:
    """Answer one message; return False at the end of the channel: children die with this process."""
    order, fds, _, _ = socket.recv_fds(control, 4096, 1)
    if not order:
        return False
    if order.startswith(b"reap "):
        control.send(_reaped(int(order[5:])))
        return True
    try:
        pid = os.fork()
    except OSError as e:  # too many processes or too little memory: only this run fails
        control.send(f"{type(e).__name__}: {e}".encode())
    else:
        if pid == 0:
            control.close()
            _run_child(socket.socket(fileno=fds[0]), getattr(module, order.decode()))
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
    """Return the module of `file`: an imported one, else a new import."""
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == str(file):
            return module
    return import_file(file)


def _run_child(channel: socket.socket, cls: Any) -> None:
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
    _set_limits(order.limits)
    link = _Link(reader, writer)
    listening = asyncio.ensure_future(link.listen())
    contexts = [
        RunContext(
            _Model(link, i),
            order.task,
            run=run,
            request_id=name,
            models={m: _Model(link, i, m) for m in order.models},
            teacher_top=order.teacher_top,
        )
        for i, (run, name) in enumerate(order.runs)
    ]
    try:
        transcripts = await _transcripts(cls, order, contexts)
        verb = "done"
        body = pack([_played(t, link) for t in transcripts])
    except BaseException as e:  # user code may raise anything
        verb = "failed"
        body = pack(f"{reason_of(e)}\n{last_lines(e)[-4000:]}")
    writer.write(framing.frame(pack(RunCall(0, verb, 0, "", msgspec.Raw(body)))))
    await writer.drain()
    listening.cancel()


async def _transcripts(cls: Any, order: Order, contexts: list[RunContext]) -> list[Transcript]:
    name = order.task.workflow
    transcripts = await call_workflow(
        name,
        partial(cls, **order.keywords),
        order.task,
        contexts,
        whole_group=order.whole_group,
        blocking=not inspect.iscoroutinefunction(cls.run_group if order.whole_group else cls.run),
    )
    for transcript in transcripts:
        check_transcript(transcript, name)
    return transcripts


def _played(t: Transcript, link: _Link) -> Played:
    if any(turn.mask is not None for turn in t.turns):
        raise ValueError(
            "an isolated workflow cannot leave tokens out of training (mask); play it without "
            "isolated"
        )
    calls = [
        (link.number(turn.completion), _score(turn.score), turn.info, turn.teacher)
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
        expert=t.expert,
    )


def _score(score: Any) -> Score | None:
    """Check a score (a number, parts or a Score), as in a run that is not isolated."""
    return None if score is None else checked(score)


def _set_limits(isolation: Isolation) -> None:
    limits.limit_memory(isolation.memory_mb)
    limits.limit(resource.RLIMIT_FSIZE, isolation.file_mb << 20)
    limits.limit(resource.RLIMIT_NOFILE, isolation.open_files)
    limits.limit(resource.RLIMIT_CORE, 0)


class _Link:
    """The calls of a child to the models of its parent."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        # id() of the policy's completion -> (completion, number of its call, index in the call)
        self._completions: dict[int, tuple[Completion, int, int]] = {}

    def add_completions(self, call: int, completions: Sequence[Completion]) -> None:
        """Remember the policy's answers to `call`."""
        for index, completion in enumerate(completions):
            self._completions[id(completion)] = (completion, call, index)

    def number(self, completion: Completion) -> tuple[int, int]:
        if id(completion) not in self._completions:
            raise ValueError(
                "the transcript has a completion that no call of the policy's engine gave"
            )
        return self._completions[id(completion)][1:]

    async def listen(self) -> None:
        while True:
            answer: Answer = unpack(await framing.read(self._reader), Answer)
            future = self._waiting.pop(answer.id)
            if future.done():  # the workflow has cancelled this call
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

    def __init__(self, link: _Link, run: int, name: str = "") -> None:
        self._link = link
        self._run = run
        self._name = name

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        number, completions = await self._ask("generate", request, list[Completion])
        if not self._name:
            self._link.add_completions(number, completions)
        return list(completions)

    async def score(self, row: ScoreRow) -> TokenScores:
        _, scores = await self._ask("score", row, TokenScores)
        return cast(TokenScores, scores)

    async def classify(self, messages: Sequence[dict[str, Any]]) -> list[float]:
        _, scores = await self._ask("classify", list(messages), list[float])
        return list(scores)

    async def _ask(self, verb: str, body: Any, kind: Any) -> tuple[int, Any]:
        return await self._link.ask(verb, self._run, self._name, body, kind)


if __name__ == "__main__":
    main(sys.argv[1:])
