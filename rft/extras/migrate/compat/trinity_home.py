"""Where a workflow of Trinity-RFT's shape runs: a thread of its own, from which it asks the
explorer's event loop.

Depends on contexts and models, on no experience.  Invariant: after its run a workflow gets no more
answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Sequence
from contextlib import AsyncExitStack
from contextvars import ContextVar
from typing import Any, TypeVar

from rft.types.completion import Turn
from rft.types.task import Task
from rft.workflow.base import RunContext
from rft.workflow.endpoint import serve, serve_models

T = TypeVar("T")


class RunIsOver(Exception):
    """The run has passed its deadline; what is left of its workflow ends here."""


class Home:
    """The runs that one workflow object plays (one, or with `can_repeat` all of a task), seen from
    its thread.
    """

    def __init__(
        self, task: Task, contexts: Sequence[RunContext], loop: asyncio.AbstractEventLoop
    ) -> None:
        self.task = task
        self.contexts = contexts
        self.loop = loop
        self.turns: list[Turn] = []  # of all contexts, as they were recorded
        self.sessions = AsyncExitStack()
        self._recorded = [0] * len(contexts)
        self._over = False

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine of the explorer's loop, waited for in this thread."""
        return asyncio.run_coroutine_threadsafe(self._guarded(work), self.loop).result()

    def awaited(self, work: Coroutine[Any, Any, T]) -> Awaitable[T]:
        """The same for a coroutine of this thread's own loop."""
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._guarded(work), self.loop))

    async def _guarded(self, work: Coroutine[Any, Any, T]) -> T:
        if self._over:
            work.close()
            raise RunIsOver("this run has ended")
        return await work

    def collect(self) -> list[Turn]:
        """The turns that have been recorded since the last time, in order of contexts."""
        new: list[Turn] = []
        for i, ctx in enumerate(self.contexts):
            turns = ctx.transcript().turns
            new += turns[self._recorded[i] :]
            self._recorded[i] = len(turns)
        self.turns += new
        return new

    async def session(self, model: str | None) -> tuple[str, str]:
        """Base URL and key of an OpenAI-compatible server for a model; for the policy (None), whose
        calls are recorded.
        """
        if model is not None:
            return (await self.sessions.enter_async_context(serve_models(self.contexts[0].models)))[
                model
            ]
        session = await self.sessions.enter_async_context(serve(self.contexts[0], self.task))
        return session.base_url, session.api_key

    async def end(self) -> None:
        self._over = True
        await self.sessions.aclose()


HOME: ContextVar[Home | None] = ContextVar("rft_compat_home", default=None)


def run(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work` for code that cannot await: in the explorer's loop during a run, else in
    a loop of its own.
    """
    if (home := HOME.get()) is not None:
        return home.wait(work)
    return asyncio.run(work)
