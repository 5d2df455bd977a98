"""A judge's model that reads less carefully than `FakeJudge`, for the probes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from rft.testing.judge import FakeJudge, as_read

_VERDICT = re.compile(
    r'(?:\{[^{}\n]*"[^{}\n]*\}|(?:score|rating|verdict)\s*[:=]\s*\d+(?:\s*/\s*10)?)', re.IGNORECASE
)


class CarelessJudge(FakeJudge):
    """`sloppy`: any line that looks like a closing delimiter ends a block; `copies`: it ends with
    the last verdict that it read.
    """

    def __init__(self, *args: Any, sloppy: bool = False, copies: bool = False, **more: Any) -> None:
        super().__init__(*args, **more)
        self.copies = copies
        if sloppy:
            self.block_end = r"<{3,}\s*/?end[^\n]*>{3,}"

    def reply(self, messages: Sequence[dict[str, Any]]) -> str:
        read = as_read(messages)
        seen = [v for text in read for v in _VERDICT.findall(text) if not re.search(r"<[^<>]+>", v)]
        return f"As it says:\n{seen[-1]}" if self.copies and seen else super().reply(messages)
