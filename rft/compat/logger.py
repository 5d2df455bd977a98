"""Small things that Trinity-RFT's files import from its utilities."""

from __future__ import annotations

import logging
import warnings
from typing import Any, TypeVar

T = TypeVar("T")


def get_logger(name: str | None = None, level: int | str | None = None, in_ray_actor: bool = False) -> logging.Logger:
    """A logger of the standard library; where its lines go is the configuration's business."""
    found = logging.getLogger(name or "rft.compat")
    if level is not None:
        found.setLevel(level)
    return found


def Deprecated(cls: T) -> T:
    """Marks a class as outdated: making one warns."""
    made: Any = cls.__init__  # type: ignore[misc]

    def init(self: object, *args: object, **kwargs: object) -> None:
        warnings.warn(f"{type(self).__name__} is deprecated", DeprecationWarning, stacklevel=2)
        made(self, *args, **kwargs)

    cls.__init__ = init  # type: ignore[misc]
    return cls
