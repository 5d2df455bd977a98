"""A run's facts as one HTML file that needs nothing else: no script, no other file, no network.

Knows `RunFacts`; not where they come from.  Invariant: every text, of a model too, is escaped and made safe to read, secrets are redacted,
and the page's own policy (a Content-Security-Policy) allows its one style sheet and nothing more.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from rft.logs import redact, safe
from rft.monitor.curves import Points, main_curves, reward_parts, svg
from rft.monitor.read import series
from rft.report.facts import RunFacts, first_and_last
from rft.types.metrics import MetricRecord

MAX_BYTES = 5 << 20
_TEXT = 6000  # characters of a prompt or an answer that are shown
_HERE = Path(__file__).parent
CURVES = (  # title, and names of which those that there are share one picture
    ("response length, tokens", ("experience/response_length/mean", "experience/response_length/max")),
    ("truncated and equal-reward groups, share", ("experience/truncated_ratio", "frac_reward_zero_std")),
    ("entropy, nats", ("actor/entropy",)),
    ("KL to the reference, nats", ("actor/kl_loss", "advantage/kl")),
    ("clipped, share of tokens", ("actor/pg_clipfrac", "actor/pg_clipfrac_lower")),
    ("gradient norm", ("actor/grad_norm",)),
    ("engine against trainer, nats", ("mismatch/abs_diff_mean", "mismatch/abs_diff_max")),
    ("staleness, train steps", ("experience/staleness/mean", "experience/staleness/max")),
    ("seconds of a step", ("perf/step_s", "time/wait_s")),
    ("tokens/s", ("perf/tokens_per_s", "engine/tokens_per_s")),
)


def page(facts: RunFacts) -> str:
    """The file's text, at most `MAX_BYTES` of UTF-8."""
    css = (_HERE / "report.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(css.encode()).digest()).decode()
    environment = Environment(autoescape=True, undefined=StrictUndefined, finalize=_clean, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((_HERE / "report.html").read_text(encoding="utf-8"))
    return template.render(
        facts=facts,
        css=Markup(css),  # ours
        policy=f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'",
        pictures=[Markup(redact(p)) for p in pictures(facts.records)],  # made by `svg`, which escapes
        evals=first_and_last(facts.evals),
    )


def pictures(records: Sequence[MetricRecord]) -> list[str]:
    """One for the reward and every evaluation, then one for each group of `CURVES` that the run has measured."""
    groups: list[tuple[str, dict[str, Points]]] = [("reward, and mean of each evaluation", dict(main_curves(records)))]
    groups += [(title, {n: points for n in names if (points := series(records, n))}) for title, names in CURVES]
    parts = reward_parts(n for r in records if r.role == "explorer" for n in r.values)
    groups.append(("parts of the reward", {n: series(records, n) for n in parts[:6]}))
    return [svg(lines, title=title) for title, lines in groups if any(len(points) > 1 for points in lines.values())]


def _clean(value: Any) -> Any:
    """What a template shows: numbers short, texts without secrets and without what deceives a reader; our own markup as it is."""
    if isinstance(value, Markup) or value is None:
        return "" if value is None else value
    if isinstance(value, float):
        return f"{value:.4g}"
    text = safe(redact(str(value)), lines=True)
    return text if len(text) <= _TEXT else f"{text[:_TEXT]}\n… {len(text) - _TEXT:,} more characters"
