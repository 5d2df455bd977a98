"""Run unsafe workflows in child processes with limits: a class with `isolated = True`.

    @workflow("browses")
    class Browses(Workflow):
        isolated = Isolation(memory_mb=512)     # or True

Each run has a process group, forked from a server that has imported the class's file; the group is
killed when the run is over, at its deadline, or with this process.  Model calls are sent to this
process over a socket, so tokens and log-probs never pass through user code.  This guards against
accidents (endless loops, leaks, crashes, orphans), not against hostile programs.
Invariant: the process group of a run is dead when `play` returns.
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
from rft.errors import ConfigError, DeadlineExceeded, RftError
from rft.types.completion import Completion, Transcript, Turn
from rft.types.ports import ChatModel, GenerateRequest, ScoreRow
from rft.types.task import Task
from rft.worker import framing
from rft.worker.forking import ForkingProcess
from rft.worker.process import START_TIMEOUT_S, environment
from rft.workflow.base import RunContext, turn_of
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
    """A run failed in its process; the message is the failed row's reason."""


class IsolatedRuns:
    """Plays the runs of one workflow class, forked from the server of its file."""

    def __init__(self, cls: type, isolated: Any, *, key: str) -> None:
        """Raises ConfigError for a class that a new process cannot find, and for an invalid
        `isolated`.
        """
        if not isinstance(isolated, Isolation) and isolated is not True:
            raise ConfigError(
                "`isolated` must be True or an Isolation(...)", key=key, given=repr(isolated)
            )
        if cls.__qualname__ != cls.__name__:
            raise ConfigError(
                f"workflow class {cls.__qualname__} is isolated, so it must stand at the top of "
                f"its file",
                key=key,
            )
        self.limits = isolated if isinstance(isolated, Isolation) else Isolation()
        self._server = _Server.for_file(inspect.getfile(cls))
        self._name = cls.__name__

    async def play(
        self,
        task: Task,
        keywords: Mapping[str, Any],
        contexts: Sequence[RunContext],
        *,
        whole_group: bool,
    ) -> list[Transcript]:
        """Return the transcripts of these runs.  Raises IsolatedRunFailed, PromptTooLong, or the
        RftError of an engine.
        """
        channel, child_channel = socket.socketpair()
        forking = asyncio.ensure_future(
            asyncio.to_thread(self._server.fork, self._name, child_channel)
        )
        try:
            pid = await asyncio.shield(forking)
        except BaseException:
            channel.close()
            forking.add_done_callback(self._kill_forked)
            raise
        order = Order(
            task=task,
            keywords=dict(keywords),
            runs=[(c.run, c.request_id) for c in contexts],
            whole_group=whole_group,
            models=list(contexts[0].models),
            limits=self.limits,
            teacher_top=contexts[0].teacher_top,
        )
        try:
            reader, writer = await asyncio.open_connection(sock=channel)
            try:
                writer.write(framing.frame(pack(order)))
                return await _RunCalls(reader, writer, contexts).transcripts()
            except ConnectionError:
                status = await asyncio.shield(asyncio.to_thread(self._server.kill, pid))
                raise IsolatedRunFailed(
                    f"the run's process ended without a result ({_exit_text(status)})"
                ) from None
            finally:
                writer.close()
        finally:
            self._server.kill(pid)

    def _kill_forked(self, forking: asyncio.Future[int]) -> None:
        """Kill a process whose run was cancelled while it was being forked."""
        if not forking.cancelled() and forking.exception() is None:
            self._server.kill(forking.result())

    def close(self) -> None:
        """End the server, and with it every run."""
        self._server.close()


class _RunCalls:
    """Answers the model calls of one child concurrently."""

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
        self._engine_error: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def transcripts(self) -> list[Transcript]:
        """Answer calls until the child reports its runs."""
        listen = asyncio.ensure_future(self._listen())
        try:
            either: set[asyncio.Future[Any]] = {listen, self._engine_error}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if self._engine_error.done():
                self._engine_error.result()
            return listen.result()
        finally:
            for job in (listen, *self._jobs):
                job.cancel()
            self._engine_error.cancel()
            await asyncio.gather(listen, *self._jobs, return_exceptions=True)

    async def _listen(self) -> list[Transcript]:
        while True:
            try:
                call: RunCall = unpack(await framing.read(self._reader, largest=MAX_FRAME), RunCall)
                if call.verb == "failed":
                    text = unpack(call.body, str)
                    if self._too_long is not None and text.startswith("PromptTooLong"):
                        raise self._too_long  # another attempt would not fit either
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
        transcripts = []
        for ctx, run in zip(self._contexts, runs, strict=True):
            for number, score, info, teacher in run.calls:
                if number not in self._turns:
                    raise ValueError(f"call {number[0]} gave no completion {number[1]}")
                ctx.record(
                    msgspec.structs.replace(
                        self._turns[number], score=score, info=info, teacher=teacher
                    )
                )
            transcripts.append(
                ctx.transcript(
                    score=run.score,
                    metrics=run.metrics,
                    info=run.info,
                    layout=run.layout,
                    limited=run.limited,
                    expert=run.expert,
                )
            )
        return transcripts

    async def _answer(self, call: RunCall) -> None:
        error = ""
        body = b""
        try:
            body = pack(await self._result(call, self._contexts[call.run]))
        except RftError as e:
            if call.verb != "score" or not isinstance(e, DeadlineExceeded):
                if not self._engine_error.done():
                    self._engine_error.set_exception(e)
                return
            error = "other"  # a late teacher fails this run alone
            body = pack(f"TeacherLate: {e}")
        except PromptTooLong as e:
            self._too_long = e
            error = "prompt_too_long"
            body = pack([e.tokens, e.limit])
        except Exception as e:  # of the model or frame: raised in the workflow
            error = "other"
            body = pack(f"{type(e).__name__}: {e}")
        self._writer.write(framing.frame(pack(Answer(call.id, error, msgspec.Raw(body)))))

    async def _result(self, call: RunCall, ctx: RunContext) -> Any:
        model: ChatModel = ctx.policy if not call.model else ctx.model(call.model)
        if call.verb == "classify":
            return await model.classify(unpack(call.body, list[dict[str, Any]]))
        if call.verb == "score":
            return await model.score(unpack(call.body, ScoreRow))
        request: GenerateRequest = unpack(call.body, GenerateRequest)
        if call.model:
            return await model.generate(request)
        if ctx.seed is not None and request.sampling.seed is None:
            turn = int(request.request_id.rpartition("-")[2])
            seeded = msgspec.structs.replace(request.sampling, seed=ctx.seed(turn))
            request = msgspec.structs.replace(request, sampling=seeded)
        completions: list[Completion] = await model.generate(request)
        for number, completion in enumerate(completions):
            self._turns[call.id, number] = turn_of(request, completion)
        # no workflow reads routed experts
        return [msgspec.structs.replace(c, routed_experts=None) for c in completions]


class _Server(ForkingProcess):
    """The process that the runs of one file are forked from.  Usable from any thread."""

    _by_file: ClassVar[weakref.WeakValueDictionary[str, _Server]] = weakref.WeakValueDictionary()

    @classmethod
    def for_file(cls, file: str) -> _Server:
        server = cls._by_file.get(file)
        if server is None:
            server = cls._by_file[file] = cls(file)
        return server

    def __init__(self, file: str) -> None:
        super().__init__(env=environment(), start_s=START_TIMEOUT_S, answers=True)
        self._file = file
        self._children: set[int] = set()

    def fork(self, name: str, channel: socket.socket) -> int:
        """Fork a process, leader of its group, that plays class `name`; return its id.

        The process reads its order from `channel`.
        """
        with channel, self._lock:
            reply = self._order(name.encode(), [channel.fileno()]).decode()
            if not reply.isdecimal():
                raise self._cannot_order(reply)
            self._children.add(int(reply))
            return int(reply)

    def kill(self, pid: int) -> int | None:
        """Kill the process group of a child and return its wait status; None if that was returned
        before.
        """
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self._stop()  # its children died with it; their ids may be reused
            if pid not in self._children or self._control is None:
                return None
            self._children.discard(pid)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            status = b""
            with contextlib.suppress(OSError):
                self._control.send(f"reap {pid}".encode())
                status = self._control.recv(64)
            if not status:
                self._stop()
            return int(status) if status.isdigit() else None

    def _command(self, control: int) -> list[str]:
        return [sys.executable, "-m", "rft.workflow.isolated_child", str(control), self._file]

    def _cannot_start(self, reason: str) -> Exception:
        return IsolatedRunFailed(f"{self._file} cannot be imported in the worker process: {reason}")

    def _cannot_order(self, reason: str) -> Exception:
        return IsolatedRunFailed(f"a process for the run could not be forked: {reason}")

    def _stop(self) -> None:
        # the ids of a dead server's children may be reused
        if self._process is not None and self._process.poll() is None:
            for pid in self._children:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
        self._children.clear()
        super()._stop()


def _exit_text(status: int | None) -> str:
    if status is None:
        return "killed"
    code = os.waitstatus_to_exitcode(status)
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
