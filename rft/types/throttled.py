"""Callbacks by which a model client reports to its caller while a call is under way.

Throttled: the request waits before it is sent, which the caller's deadline does not count.  Resent: it is sent again although the server
may have worked on it, so both may cost.  Unpaid: the last request costs nothing, because it did not arrive or was refused.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import ContextVar


def _nobody(seconds: float) -> None:
    """The caller has no deadline."""


async def _free() -> None:
    """The caller pays nothing."""


def _unpaid() -> None:
    """The caller counts no costs."""


# called with the seconds to wait, before the wait
THROTTLED: ContextVar[Callable[[float], None]] = ContextVar("held", default=_nobody)
# awaited before the request is sent again; what it raises ends the call
RESENT: ContextVar[Callable[[], Awaitable[None]]] = ContextVar("resent", default=_free)
# called before the error is raised
UNPAID: ContextVar[Callable[[], None]] = ContextVar("unpaid", default=_unpaid)
