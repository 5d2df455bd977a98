"""How a model tells whoever asks it that a call was held back before it was sent: a deadline for the answer does not count that time."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar


def _nobody(seconds: float) -> None:
    """The caller has no deadline of its own."""


HELD: ContextVar[Callable[[float], None]] = ContextVar("held", default=_nobody)  # is told for how many seconds, before they pass
