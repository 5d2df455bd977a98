"""What a piece of code does, counted: the same on a busy machine."""

from __future__ import annotations

import sys
from typing import Any


class Counted:
    """Lines of Python in this thread, while it is used; each turn of a loop counts."""

    def __init__(self) -> None:
        self.lines = 0

    def __enter__(self) -> Counted:
        self._before = sys.gettrace()
        sys.settrace(self._one)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(self._before)

    def _one(self, frame: object, event: str, arg: object) -> Any:
        self.lines += event == "line"
        return self._one
