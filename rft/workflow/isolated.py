"""Plays unsafe workflows in child processes with limits: a class with `isolated = True`.

    @workflow("browses")
    class Browses(Workflow):
        isolated = Isolation(memory_mb=512)     # or True

A run gets a process group of its own, forked from a server that has imported the class's file, and
killed when the run is over, at its deadline, or with this process.  Its model calls come back here
over a socket, so tokens and log-probs never pass through user code. It is a guard against accidents
(endless loops, leaks, crashes, children that stay), not a sandbox for hostile programs. Invariant:
what a run leaves running in its process group is dead when `play` returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import signal
import socket
import sys
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from rft.engine.base import PromptTooLong
from rft.errors import ConfigError, RftError
from rft.types.completion import Completion, Transcript, Turn
from rft.types.ports import ChatModel, GenerateRequest, ScoreRow
from rft.types.task import Task
from rft.worker import framing
from rft.worker.forking import ForkingProcess
from rft.worker.process import START_TIMEOUT_S, environment
from rft.workflow.base import RunContext
from rft.workflow.isolation_wire import (
    MAX_FRAME,
    Answer,
    Isolation,
    Order,
    Played,
    RunCall,
    pack,
    unpack,
)


class IsolatedRunFailed(Exception):
    """What ended a run in its process; the message is the record's reason."""


class Place:
    """Where a class's runs are forked: its file's server, started on first use."""

    def __init__(self, cls: type, wanted: Any, *, key: str) -> None:
        """Raises ConfigError for a class that a new process could not find, and for an `isolated`
        that is neither true nor limits.
        """
        if not isinstance(wanted, Isolation) and wanted is not True:
            raise ConfigError(
                "`isolated` must be True or an Isolation(...)", key=key, given=repr(wanted)
            )
        if cls.__qualname__ != cls.__name__:
            raise ConfigError(
                f"workflow class {cls.__qualname__} is isolated, so it must stand at the top of "
                f"its file",
                key=key,
            )
        self.limits = wanted if isinstance(wanted, Isolation) else Isolation()
        self._server = _Server.of(inspect.getfile(cls))
        self._name = cls.__name__

    async def play(
        self,
        task: Task,
        keywords: Mapping[str, Any],
        contexts: Sequence[RunContext],
        *,
        together: bool,
    ) -> list[Transcript]:
        """The transcripts of these runs.  Raises IsolatedRunFailed, PromptTooLong, or the RftError
        of an engine.
        """
        ours, theirs = socket.socketpair()
        forking = asyncio.ensure_future(asyncio.to_thread(self._server.fork, self._name, theirs))
        try:
            pid = await asyncio.shield(forking)
        except BaseException:
            ours.close()
            forking.add_done_callback(self._unwanted)
            raise
        order = Order(
            task=task,
            keywords=dict(keywords),
            runs=[(c.run, c.request_id) for c in contexts],
            together=together,
            models=list(contexts[0].models),
            limits=self.limits,
        )
        try:
            reader, writer = await asyncio.open_connection(sock=ours)
            try:
                writer.write(framing.frame(pack(order)))
                return await _Talk(reader, writer, contexts).end()
            except ConnectionError:
                status = await asyncio.shield(asyncio.to_thread(self._server.kill, pid))
                raise IsolatedRunFailed(
                    f"the run's process ended without a result ({_said(status)})"
                ) from None
            finally:
                writer.close()
        finally:
            self._server.kill(pid)

    def _unwanted(self, forking: asyncio.Future[int]) -> None:
        """The run was cancelled while its process was being made."""
        if not forking.cancelled() and forking.exception() is None:
            self._server.kill(forking.result())

    def close(self) -> None:
        """Ends the server, and with it every run that is left."""
        self._server.close()


class _Talk:
    """One child's calls, answered side by side."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        contexts: Sequence[RunContext],
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._contexts = contexts
        self._turns: dict[tuple[int, int], Turn] = {}
        self._jobs: set[asyncio.Task[None]] = set()
        self._too_long: PromptTooLong | None = None
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def end(self) -> list[Transcript]:
        listen = asyncio.ensure_future(self._listen())
        try:
            both: set[asyncio.Future[Any]] = {listen, self._broken}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if self._broken.done():
                self._broken.result()
            return listen.result()
        finally:
            for job in (listen, *self._jobs):
                job.cancel()
            self._broken.cancel()
            await asyncio.gather(listen, *self._jobs, return_exceptions=True)

    async def _listen(self) -> list[Transcript]:
        while True:
            try:
                call: RunCall = unpack(await framing.read(self._reader, largest=MAX_FRAME), RunCall)
                if call.verb == "failed":
                    text = unpack(call.body, str)
                    if self._too_long is not None and text.startswith("PromptTooLong"):
                        raise self._too_long  # it would not fit the next time either
                    raise IsolatedRunFailed(text)
                if call.verb == "done":
                    return self._transcripts(unpack(call.body, list[Played]))
            except PromptTooLong:
                raise
            except (ValueError, msgspec.MsgspecError) as e:
                raise IsolatedRunFailed(
                    f"the run's process sent what cannot be read: {e}"
                ) from None
            job = asyncio.ensure_future(self._answer(call))
            self._jobs.add(job)
            job.add_done_callback(self._jobs.discard)

    def _transcripts(self, runs: list[Played]) -> list[Transcript]:
        if len(runs) != len(self._contexts):
            raise ValueError(f"{len(runs)} runs instead of {len(self._contexts)}")
        made = []
        for ctx, run in zip(self._contexts, runs, strict=True):
            for number, score, info, teacher in run.calls:
                if number not in self._turns:
                    raise ValueError(f"call {number[0]} gave no completion {number[1]}")
                ctx.record(
                    msgspec.structs.replace(
                        self._turns[number], score=score, info=info, teacher_logprobs=teacher
                    )
                )
            made.append(
                ctx.transcript(
                    score=run.score,
                    metrics=run.metrics,
                    info=run.info,
                    layout=run.layout,
                    limited=run.limited,
                )
            )
        return made

    async def _answer(self, call: RunCall) -> None:
        error = ""
        body = b""
        try:
            body = pack(await self._result(call, self._contexts[call.run]))
        except RftError as e:
            if not self._broken.done():
                self._broken.set_exception(e)
            return
        except PromptTooLong as e:
            self._too_long = e
            error = "prompt_too_long"
            body = pack([e.tokens, e.limit])
        except (
            Exception
        ) as e:  # of a model, or of a frame that makes no sense: the workflow hears of it
            error = "other"
            body = pack(f"{type(e).__name__}: {e}")
        self._writer.write(framing.frame(pack(Answer(call.id, error, msgspec.Raw(body)))))

    async def _result(self, call: RunCall, ctx: RunContext) -> Any:
        model: ChatModel = ctx.policy if not call.model else ctx.model(call.model)
        if call.verb == "classify":
            return await model.classify(unpack(call.body, list[dict[str, Any]]))
        if call.verb == "logprobs":
            return await model.logprobs(unpack(call.body, ScoreRow))
        request: GenerateRequest = unpack(call.body, GenerateRequest)
        if call.model:
            return await model.generate(request)
        if ctx.seed is not None and request.sampling.seed is None:
            turn = int(request.request_id.rpartition("-")[2])
            seeded = msgspec.structs.replace(request.sampling, seed=ctx.seed(turn))
            request = msgspec.structs.replace(request, sampling=seeded)
        done: list[Completion] = await model.generate(request)
        for place, completion in enumerate(done):
            self._turns[call.id, place] = Turn(
                messages=request.messages, tools=request.tools, completion=completion
            )
        # which no workflow reads
        return [msgspec.structs.replace(c, routed_experts=None) for c in done]


class _Server(ForkingProcess):
    """The process that runs of one file are forked from.  Usable from any thread."""

    _all: ClassVar[weakref.WeakValueDictionary[str, _Server]] = weakref.WeakValueDictionary()

    @classmethod
    def of(cls, file: str) -> _Server:
        if (found := cls._all.get(file)) is None:
            found = cls._all[file] = cls(file)
        return found

    def __init__(self, file: str) -> None:
        super().__init__(env=environment(), start_s=START_TIMEOUT_S, answers=True)
        self._file = file
        self._children: set[int] = set()

    def fork(self, name: str, theirs: socket.socket) -> int:
        """The id of a new process, leader of its group, that plays class `name` as it is told over
        `theirs`.
        """
        with theirs, self._lock:
            said = self._order(name.encode(), [theirs.fileno()]).decode()
            if not said.isdecimal():
                raise self._cannot_order(said)
            self._children.add(int(said))
            return int(said)

    def kill(self, pid: int) -> int | None:
        """Kill the process group of a child, which only this method waits for; its wait status,
        None if that was returned before.
        """
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self._stop()  # its children died with it, and their ids may be others' by now
            if pid not in self._children or self._control is None:
                return None
            self._children.discard(pid)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            said = b""
            with contextlib.suppress(OSError):
                self._control.send(f"reap {pid}".encode())
                said = self._control.recv(64)
            if not said:
                self._stop()
            return int(said) if said.isdigit() else None

    def _command(self, control: int) -> list[str]:
        return [sys.executable, "-m", "rft.workflow.isolated_child", str(control), self._file]

    def _cannot_start(self, why: str) -> Exception:
        return IsolatedRunFailed(f"{self._file} cannot be loaded in a process of its own: {why}")

    def _cannot_order(self, why: str) -> Exception:
        return IsolatedRunFailed(f"a process for the run could not be forked: {why}")

    def _stop(self) -> None:
        # of a dead server, ids may be others' by now
        if self._process is not None and self._process.poll() is None:
            for pid in self._children:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
        self._children.clear()
        super()._stop()


def _said(status: int | None) -> str:
    if status is None:
        return "killed"
    code = os.waitstatus_to_exitcode(status)
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
