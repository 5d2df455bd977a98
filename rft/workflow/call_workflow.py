"""Call a workflow's `run` or `run_group`, async or in a thread, and check what it returns.

Depends on no reward and no record.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar, get_args

import msgspec

from rft.errors import PluginStopped
from rft.reward.base import as_number
from rft.types.completion import Layout, Transcript
from rft.types.readonly import hint
from rft.types.task import Task
from rft.worker.threads import OutOfTime, contained, in_thread
from rft.workflow.base import RunContext, Workflow

T = TypeVar("T")
_LAYOUTS = get_args(Layout)


class RunError(Exception):
    """A run ended without a usable transcript; the message is the failed row's reason."""


class BlockingContext:
    """The context of a workflow whose `run` is an ordinary function: its coroutines block the
    run's thread.
    """

    def __init__(self, ctx: RunContext, loop: asyncio.AbstractEventLoop) -> None:
        self._ctx = ctx
        self._loop = loop
        self._over = False
        self._calls: set[Future[Any]] = set()  # calls in progress

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._ctx, name)
        if not inspect.iscoroutinefunction(attribute):
            return attribute
        return lambda *args, **kwargs: self.wait(attribute(*args, **kwargs))

    def wait(self, call: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the event loop and return its result:
        `ctx.wait(ctx.model("judge").generate(request))`.
        """
        if self._over:
            call.close()
            raise RunError("this run is over")
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)
        if self._over:  # `end` was called meanwhile
            future.cancel()
        return future.result()

    def end(self) -> None:
        """Cancel the calls in progress, and refuse later ones."""
        self._over = True
        for call in list(self._calls):
            call.cancel()


async def call_workflow(
    name: str,
    make: Callable[[], Workflow],
    task: Task,
    contexts: Sequence[RunContext],
    *,
    whole_group: bool,
    blocking: bool,
) -> list[Any]:
    """Call a new workflow object for these runs; return one result per run.

    `whole_group`: one call of `run_group` for all, else one call of `run` for the only context.
    `blocking`: run in a new thread, so that a workflow that never returns delays no other run and
    does not keep the program alive.  Raises RunError unless `run_group` returns a list of that
    length.
    """
    what = f"workflow {name}"

    def start(contexts: Sequence[Any]) -> Any:
        workflow = make()
        if whole_group:
            return workflow.run_group(task, list(contexts))
        return workflow.run(task, contexts[0])

    if blocking:
        returned = await _in_thread(start, contexts, what)
    else:
        with contained(what):
            returned = await start(contexts)
    if not whole_group:
        return [returned]
    if not isinstance(returned, list | tuple) or len(returned) != len(contexts):
        raise RunError(f"{what}: run_group must return a list of {len(contexts)} transcripts")
    return list(returned)


async def _in_thread(
    start: Callable[[Sequence[Any]], Any], contexts: Sequence[RunContext], what: str
) -> Any:
    blocking = [BlockingContext(c, asyncio.get_running_loop()) for c in contexts]

    def call() -> Any:
        with contained(what):
            return start(blocking)

    try:
        return await in_thread(call, f"run-{contexts[0].request_id}")
    finally:
        for b in blocking:
            b.end()


def check_transcript(transcript: Any, workflow: str) -> None:
    """Raise RunError unless `transcript` is complete and valid."""
    if not isinstance(transcript, Transcript):
        raise RunError(
            f"workflow {workflow} returned {type(transcript).__name__}; it must return "
            f"ctx.transcript()"
        )
    if not transcript.turns:
        raise RunError(f"workflow {workflow} made no model call")
    if any(t.completion.finish_reason == "abort" for t in transcript.turns):
        raise RunError("the engine aborted a model call")
    if transcript.layout not in _LAYOUTS:
        raise RunError(
            f"workflow {workflow}: layout is {transcript.layout!r}; it must be one of "
            f"{', '.join(_LAYOUTS)}"
        )
    for name, metric in transcript.metrics.items():
        if (number := as_number(metric)) is None or not math.isfinite(number):
            raise RunError(
                f"workflow {workflow}: metric {name!r} is {metric!r}; it must be a finite number"
            )
    try:
        msgspec.json.encode(transcript.info)
    except (TypeError, RecursionError) as e:
        raise RunError(f"workflow {workflow}: info must be JSON values: {e}") from None


def reason_of(error: BaseException) -> str:
    """Return the reason of a failed run: the error's text, preceded by its type for foreign errors."""
    if isinstance(error, RunError | PluginStopped | OutOfTime):
        return str(error)
    return f"{type(error).__name__}: {error}{hint(error)}"
