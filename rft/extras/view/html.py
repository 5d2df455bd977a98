"""Pages as HTML: what is written into them is escaped, and numbers are those that `rft buffer
query` prints.

Depends on the templates.  Invariant: text of models and data reaches a page through `clean` or as
an escaped value; there is no other way in.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from rft.launch.progress import duration
from rft.secrets import safe

HERE = Path(__file__).parent
SHOWN_CHARS = 20_000  # of one text


def environment() -> Environment:
    """The templates with their filters."""
    environment = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"clean": clean, "num": num, "ago": ago, "took": took, "short": short}
    return environment


def clean(value: Any) -> str:
    """Text with line breaks, everything that could deceive its reader written as an escape, cut if
    it is long.
    """
    text = str(value)
    cut = f"\n… {len(text) - SHOWN_CHARS:,} more characters" if len(text) > SHOWN_CHARS else ""
    return safe(text[:SHOWN_CHARS], lines=True) + cut


def num(value: Any) -> str:
    """A number as in `rft buffer query`."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def short(value: Any, most: int = 160) -> str:
    """One line."""
    text = " ".join(safe(str(value or ""), lines=True).split())
    return text if len(text) <= most else text[:most] + "…"


def ago(seconds: float | None) -> str:
    """How long since a time."""
    return "–" if not seconds else f"{duration(max(time.time() - seconds, 0))} ago"


def took(seconds: float | None) -> str:
    return "–" if seconds is None else duration(seconds)
