"""A run's facts as one HTML file that needs nothing else: no script, no other file, no network.

Depends on `RunFacts`, not on where they come from.  Invariant: every text, of a model too, is
escaped and made safe to read, secrets are redacted, and the page's own policy (a
Content-Security-Policy) allows its one style sheet and nothing more.
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from rft.extras.view.charts import charted
from rft.extras.view.report_facts import RunFacts, first_and_last
from rft.monitor.curves import main_curves, svg
from rft.monitor.read import AllSeries
from rft.secrets import redact, safe

MAX_BYTES = 5 << 20
_TEXT = 6000  # characters of a prompt or an answer that are shown
_HERE = Path(__file__).parent


def page(facts: RunFacts) -> str:
    """The file's text, at most `MAX_BYTES` of UTF-8."""
    css = (_HERE / "report.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(css.encode()).digest()).decode()
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_clean,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    template = environment.from_string((_HERE / "report.html").read_text(encoding="utf-8"))
    return template.render(
        facts=facts,
        css=Markup(css),  # ours
        policy=f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action "
        f"'none'",
        # made by `svg`, which escapes
        pictures=[Markup(redact(p)) for p in pictures(facts.series)],
        evals=first_and_last(facts.evals),
    )


def pictures(series: AllSeries) -> list[str]:
    """One for the reward and every evaluation, then the other charts that `rft view` draws too."""
    main = main_curves(series)
    figures = (
        [svg(main, title="Reward, and mean of each evaluation")]
        if any(len(points) > 1 for points in main.values())
        else []
    )
    for title, names in charted(series.by_name).items():
        lines = {n: series.points(n) for n in names if title not in ("Reward", "Evaluation")}
        figures += (
            [svg(lines, title=title)] if any(len(points) > 1 for points in lines.values()) else []
        )
    return figures


def _clean(value: Any) -> Any:
    """What a template shows: numbers short, texts without secrets and without what deceives a
    reader; our own markup as it is.
    """
    if isinstance(value, Markup) or value is None:
        return "" if value is None else value
    if isinstance(value, float):
        return f"{value:.4g}"
    text = safe(redact(str(value)), lines=True)
    return (
        text if len(text) <= _TEXT else f"{text[:_TEXT]}\n… {len(text) - _TEXT:,} more characters"
    )
