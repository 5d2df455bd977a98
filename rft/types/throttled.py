"""What a model tells whoever asks it while a call is under way: that it was held back before it was sent, which a deadline does not count,
that it is about to be sent once more although the first sending may have been worked on, which has its price, and that the last sending
has none: it did not arrive, or was turned away.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import ContextVar


def _nobody(seconds: float) -> None:
    """The caller has no deadline of its own."""


async def _free() -> None:
    """The caller pays nothing."""


def _unpaid() -> None:
    """The caller counts no costs."""


# is told for how many seconds, before they pass
THROTTLED: ContextVar[Callable[[float], None]] = ContextVar("held", default=_nobody)
# is awaited before; what it raises ends the call
RESENT: ContextVar[Callable[[], Awaitable[None]]] = ContextVar("resent", default=_free)
# is told before the error is raised
UNPAID: ContextVar[Callable[[], None]] = ContextVar("unpaid", default=_unpaid)
