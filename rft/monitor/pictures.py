"""Draw the timeline of a run from metrics.jsonl: work and waiting of each role.

Depends on no process of the run.
Invariant: a bar ends when its record was written and has the recorded duration; nothing is guessed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from rft.errors import RunFailed
from rft.monitor.read import Records, begins
from rft.secrets import safe
from rft.types.metrics import MetricRecord

GREY = "#858585"  # legible on white and on black
_BARS = 1000  # bars kept before old bars beyond `last` are dropped
ROWS = {"explorer": "explore", "trainer": "train", "synchronizer": "sync", "eval": "evaluate"}
# consecutive parts of a sync; the last ends at the record's time
SYNC = ("stage", "wait", "drain", "pause", "load", "resume", "canary")
STEP = ("wait", "train", "sync", "checkpoint")  # consecutive parts of a train step
HELD = ("pause", "load", "resume")  # parts during which engines generate nothing
COLORS = {
    "explore": "#3987e5",
    "train": "#d9772b",
    "checkpoint": "#c9a227",
    "evaluate": "#2f9e6e",
    "stage": "#b9a3d0",
    "wait": "#dddddd",
    "drain": "#cfc4dd",
    "pause": "#7d4fa3",
    "load": "#b65fc4",
    "resume": "#7d4fa3",
    "canary": "#e3c1ea",
    "sync": "#a99bc0",
}

WIDTH = 1000  # pixels
LEFT = 90
LANE = 18
FOOT = 52


@dataclass(frozen=True)
class Bar:
    """`kind` of work on `row` from `begin` to `end`, seconds since the epoch; `label` names the
    batch, step or version.
    """

    row: str
    kind: str
    label: str
    begin: float
    end: float


def bars(records: Iterable[MetricRecord], *, last: int | None = None) -> list[Bar]:
    """Return the bars of the run's newest process, from its first version on; `last`: only that
    many train steps at the end.

    Raises RunFailed if no version has been published yet.
    """
    bars_found: list[Bar] | None = None
    most = _BARS
    for r in records:
        if begins(r):
            bars_found = []
        if bars_found is not None:
            bars_found += [bar for bar in _bars_of(r) if bar.end > bar.begin]
            if last is not None and len(bars_found) > most:
                bars_found = _newest(bars_found, last)
                most = 2 * len(bars_found) + _BARS
    if bars_found is None:
        raise RunFailed(
            "no weights have been published: a timeline is drawn of a run that explores, from its "
            "first version on"
        )
    return bars_found if last is None else _newest(bars_found, last)


def _newest(all_bars: list[Bar], last: int) -> list[Bar]:
    steps = [b for b in all_bars if b.kind == "train"]
    if len(steps) <= last:
        return all_bars
    since = steps[-last].begin
    return [
        b if b.begin >= since else Bar(b.row, b.kind, b.label, since, b.end)
        for b in all_bars
        if b.end > since
    ]


def _bars_of(r: MetricRecord) -> Iterator[Bar]:
    v = r.values
    end = r.time
    if r.role == "explorer" and "rollout/time/batch" in v:
        yield Bar("explore", "explore", f"batch {r.step - 1}", end - v["rollout/time/batch"], end)
    elif r.role == "trainer" and "perf/step_s" in v:
        yield from _one_after_the_other(
            "train",
            f"step {r.step}",
            end - v["perf/step_s"],
            [(k, v.get(f"time/{k}_s", 0.0)) for k in STEP],
        )
    elif r.role == "synchronizer":
        spent = [(k, v.get(f"sync/{k}_s", 0.0)) for k in SYNC]
        yield from _one_after_the_other(
            "sync", f"version {r.step}", end - sum(s for _, s in spent), spent
        )
    elif r.role == "eval":
        for name in (n for n in v if n.startswith("eval/") and n.endswith("/time")):
            yield Bar("evaluate", "evaluate", f"{name[5:-5]}, version {r.step}", end - v[name], end)


def _one_after_the_other(
    row: str, label: str, begin: float, spent: Iterable[tuple[str, float]]
) -> Iterator[Bar]:
    for kind, seconds in spent:
        if not (row == "train" and kind == "wait"):  # waiting of the trainer is shown as a gap
            yield Bar(row, kind, label, begin, begin + seconds)
        begin += seconds


def shares(all_bars: Sequence[Bar]) -> dict[str, float]:
    """Return shares (0 to 1) of the time from the first version on, or of all time without a
    version.

    Shares: idle time of explorer and trainer, engines paused for weights, both at work.
    """
    began = min(
        (b.end for b in all_bars if b.row == "sync"), default=min(b.begin for b in all_bars)
    )
    ended = max(b.end for b in all_bars)
    duration = max(ended - began, 1e-9)

    def busy(*kinds: str) -> float:
        ends = [
            (b.end, b.end - max(b.begin, began))
            for b in all_bars
            if b.kind in kinds and b.end > began
        ]
        return covered(*zip(*ends, strict=True)) / duration if ends else 0.0

    return {
        "explorer idle": 1 - busy("explore", "evaluate"),
        "trainer idle": 1 - busy("train", "sync", "checkpoint"),
        "engines paused": busy(*HELD),
        "both at work": busy("explore") + busy("train") - busy("explore", "train"),
    }


def covered(ends: Sequence[float], took: Sequence[float]) -> float:
    """Return the total length of spans, given by ends and lengths; overlaps count once."""
    import numpy as np

    end = np.asarray(ends, np.float64)
    begin = end - np.asarray(took, np.float64)
    order = np.argsort(begin, kind="stable")
    begin = begin[order]
    end = end[order]
    until = np.concatenate([[-np.inf], np.maximum.accumulate(end)[:-1]]) if len(end) else end
    return float(np.maximum(0.0, end - np.maximum(begin, until)).sum())


# ---------------------------------------------------------------- the picture


def picture(run_dir: Path, out_svg: Path, *, last: int | None = None) -> dict[str, float]:
    """Draw the timeline of `run_dir` into `out_svg` and return `shares`.  Raises RunFailed if there
    is nothing to draw.
    """
    all_bars = bars(Records(run_dir / "metrics.jsonl"), last=last)
    ratios = shares(all_bars)
    out_svg.parent.mkdir(parents=True, exist_ok=True)
    out_svg.write_text(svg(all_bars, ratios), encoding="utf-8")
    return ratios


def svg(all_bars: Sequence[Bar], ratios: dict[str, float]) -> str:
    """Draw one lane per row, more if its bars overlap, above a time axis in seconds; legible on
    black and on white.
    """
    first = min(b.begin for b in all_bars)
    end = max(b.end for b in all_bars)
    scale = (WIDTH - LEFT - 10) / max(end - first, 1e-9)
    parts: list[str] = []
    y = 6
    for row in ROWS.values():
        for i, lane in enumerate(_lanes([b for b in all_bars if b.row == row])):
            if i == 0:
                parts.append(svg_text(LEFT - 8, y + 13, row, "end"))
            parts += [
                _bar(b, LEFT + (b.begin - first) * scale, y, (b.end - b.begin) * scale)
                for b in lane
            ]
            y += LANE + 3
        y += 3
    for tick in ticks(0, end - first, most=11):
        x = LEFT + tick * scale
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="2" y2="{y}" stroke="{GREY}" '
            f'stroke-opacity="0.25"/>'
        )
        parts.append(svg_text(x, y + 14, f"{tick:g} s", "middle"))
    parts.append(
        svg_text(
            LEFT,
            y + 34,
            ", ".join(f"{name} {share:.0%}" for name, share in ratios.items()),
            "start",
        )
    )
    used = list(dict.fromkeys(b.kind for b in all_bars))
    for i, kind in enumerate(used):
        x = WIDTH - 78 * (len(used) - i)
        parts.append(
            f'<rect x="{x}" y="{y + 40}" width="10" height="10" fill="{COLORS[kind]}"/>'
            + svg_text(x + 14, y + 49, kind, "start")
        )
    size = f'viewBox="0 0 {WIDTH} {y + FOOT + 6}" width="{WIDTH}" height="{y + FOOT + 6}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _lanes(row: Sequence[Bar]) -> list[list[Bar]]:
    """Put bars that do not overlap into one lane."""
    lanes: list[list[Bar]] = []
    for bar in sorted(row, key=lambda b: b.begin):
        free = next((lane for lane in lanes if lane[-1].end <= bar.begin + 1e-6), None)
        if free is None:
            lanes.append([bar])
        else:
            free.append(bar)
    return lanes


def _bar(b: Bar, x: float, y: int, width: float) -> str:
    title = f"<title>{escaped(b.label)}: {b.kind}, {b.end - b.begin:.3f} s</title>"
    number = b.label.rpartition(" ")[2]
    named = b.kind in ("explore", "train") and width > 7 * len(number) + 4
    label = svg_text(x + width / 2, y + 13, number, "middle", "#ffffff") if named else ""
    return (
        f'<rect x="{x:.1f}" y="{y}" width="{max(width, 0.5):.1f}" height="{LANE}" '
        f'fill="{COLORS[b.kind]}">{title}</rect>{label}'
    )


def svg_text(x: float, y: float, text: str, anchor: str, color: str = GREY) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{color}" '
        f'text-anchor="{anchor}">{escaped(text)}</text>'
    )


def escaped(text: str) -> str:
    """Return `text` without control characters, escaped for SVG."""
    return escape(safe(text))


def ticks(low: float, high: float, most: int = 6, *, whole: bool = False) -> list[float]:
    """Return at most `most` round numbers from `low` to `high`, low < high; `whole`: of steps."""
    size = 10.0 ** math.floor(math.log10((high - low) / (most - 1)))
    size = max(size, 1.0) if whole else size
    step = next(
        s for s in (size, 2 * size, 5 * size, 10 * size, 20 * size) if (high - low) / s <= most - 1
    )
    return [
        float(f"{i * step:.12g}")
        for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    ]
