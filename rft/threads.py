"""Blocking code of users, in threads that may never end.

Knows nothing of what it runs.  Invariant: a call that never returns holds up nobody and does not keep the program alive.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


async def in_thread(call: Callable[[], T], name: str, *, error: Callable[[BaseException], BaseException]) -> T:
    """The result of `call`, in a daemon thread of its own called `name`.

    `error`: what is raised here for what `call` raised; it must not give a StopIteration, which a future cannot hold.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def deliver(set_it: Callable[[Any], None], value: Any) -> None:
        if not result.done():
            set_it(value)

    def work() -> None:
        try:
            outcome: tuple[Callable[[Any], None], Any] = (result.set_result, call())
        except BaseException as e:
            outcome = (result.set_exception, error(e))
        if not loop.is_closed():
            loop.call_soon_threadsafe(deliver, *outcome)

    threading.Thread(target=work, name=name, daemon=True).start()
    return await result
