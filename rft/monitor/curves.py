"""Curves as text: an SVG picture of a few series, and a line of blocks for a terminal.  No library,
no script, no external reference.

Depends on numbers by step, not on their source.
Invariant: every name is escaped, and a non-finite value leaves a gap.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rft.monitor.pictures import GREY, escaped, svg_text, ticks
from rft.monitor.read import AllSeries

Points = Sequence[tuple[float, float]]
# Okabe and Ito, for colour-blind readers
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
REWARD = ("rollout/reward/mean", "experience/reward/mean")
_LOSSES = ("actor/loss", "train/loss")
_BLOCKS = "▁▂▃▄▅▆▇█"
_LEFT = 46  # margins, height of a text line, and minimum height of the axes, pixels
_RIGHT = 10
_BOTTOM = 22
_LINE = 13
_LEAST = 100


@dataclass(frozen=True)
class Picture:
    """An SVG picture; a notebook displays it as the value of a cell."""

    svg: str

    def _repr_svg_(self) -> str:
        return self.svg

    def save(self, path: str | Path) -> None:
        """Write the picture to `path`, a new or existing .svg file."""
        Path(path).write_text(self.svg, encoding="utf-8")


def is_main(name: str) -> bool:
    """Return whether `main_curves` may request the metric `name`."""
    return name in REWARD or name in _LOSSES or is_evaluation(name)


def main_curves(measured: AllSeries) -> dict[str, list[tuple[int, float]]]:
    """Return the most important curves that exist: the training reward (else the loss), and the
    mean of each evaluation.
    """
    curves = {
        name: points
        for name in (REWARD[0], *evaluations(measured.by_name))
        if (points := measured.points(name))
    }
    for name in (*REWARD[1:], *_LOSSES):
        if not curves and (points := measured.points(name)):
            curves[name] = points
    return curves


def main_values(measured: AllSeries) -> dict[str, list[float]]:
    """Return the finite values of each main curve with at least two."""
    curves = {
        name: [v for _, v in points if math.isfinite(v)]
        for name, points in main_curves(measured).items()
    }
    return {name: values for name, values in curves.items() if len(values) > 1}


def is_evaluation(name: str) -> bool:
    """Return whether `name` is an evaluation's main metric: its mean reward, or its loss on
    held-out rows.
    """
    return name.startswith(("eval/", "bench/")) and ("/mean@" in name or name.endswith("/loss"))


def evaluations(names: Iterable[str]) -> list[str]:
    """Return the names that are main metrics of evaluations."""
    return list(filter(is_evaluation, names))


def reward_parts(names: Iterable[str]) -> list[str]:
    """Return `rollout/<name>/mean` of each part of the reward; unlike metrics of workflows, parts
    have a spread.
    """
    unique = dict.fromkeys(names)
    means = [
        n for n in unique if n.startswith("rollout/") and n.endswith("/mean") and n not in REWARD
    ]
    return [n for n in means if f"{n.removesuffix('/mean')}/std" in unique]


def sparkline(values: Iterable[float], width: int = 40) -> str:
    """Return one line of at most `width` blocks scaled from minimum to maximum; a column is the
    mean of its values.
    """
    points = list(values)
    size = max(1, math.ceil(len(points) / width))
    columns = [_mean(points[i : i + size]) for i in range(0, len(points), size)]
    finite = [c for c in columns if math.isfinite(c)]
    if not finite:
        return ""
    low = min(finite)
    high = max(finite)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((c - low) * scale)] if math.isfinite(c) else " " for c in columns)


def svg(
    lines: Mapping[str, Points], *, title: str = "", width: int = 510, height: int = 220
) -> str:
    """Draw series by name, each (x, y) sorted by x, on one pair of axes; beyond 400 points per
    series neighbours are averaged.
    """
    top = 9 + _LINE * max(len(lines), 1)
    height = max(height, top + _LEAST + _BOTTOM)
    shown = {
        name: _thinned([p for p in points if math.isfinite(p[1])]) for name, points in lines.items()
    }
    every = [p for points in shown.values() for p in points]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img"'
    )
    parts = [
        f'{head} font-family="sans-serif" font-size="11">',
        f"<title>{escaped(title or ', '.join(lines))}</title>",
    ]
    if title:
        parts.append(svg_text(_LEFT, _LINE, title, "start", "currentColor"))
    if not every:
        return "\n".join(
            [*parts, svg_text(width / 2, height / 2, "nothing measured", "middle"), "</svg>"]
        )
    (x0, x1), (y0, y1) = _range([p[0] for p in every]), _range([p[1] for p in every])

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            _LEFT + (x - x0) / (x1 - x0) * (width - _LEFT - _RIGHT),
            top + (y1 - y) / (y1 - y0) * (height - top - _BOTTOM),
        )

    for tick in ticks(y0, y1):
        y = at(x0, tick)[1]
        parts.append(
            f'<line x1="{_LEFT}" x2="{width - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="{GREY}" '
            f'stroke-opacity="0.25"/>'
        )
        parts.append(svg_text(_LEFT - 5, y + 4, f"{tick:g}", "end"))
    parts += [
        svg_text(at(tick, y0)[0], height - 6, f"{tick:g}", "middle")
        for tick in ticks(x0, x1, whole=all(float(x).is_integer() for x, _ in every))
    ]
    for i, (name, points) in enumerate(shown.items()):
        parts += _line(name, [at(x, y) for x, y in points], points, COLORS[i % len(COLORS)])
        if len(shown) > 1:
            parts.append(
                svg_text(width - _RIGHT, _LINE * (i + 1), name, "end", COLORS[i % len(COLORS)])
            )
    return "\n".join([*parts, "</svg>"])


def _line(
    name: str, places: Sequence[tuple[float, float]], points: Points, color: str
) -> list[str]:
    way = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    out = [
        f'<polyline points="{way}" fill="none" stroke="{color}" stroke-width="1.8" '
        f'stroke-linejoin="round"/>'
    ]
    if len(points) <= 40:
        out += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{color}"><title>{escaped(name)}, '
            f"{px:g}: {py:.5g}</title></circle>"
            for (x, y), (px, py) in zip(places, points, strict=True)
        ]
    return out


def _range(values: Sequence[float]) -> tuple[float, float]:
    low = min(values)
    high = max(values)
    if low == high == 0:  # of shares and counts: nothing is below
        return 0.0, 1.0
    return (low, high) if high > low else (low - 0.5 * abs(low), high + 0.5 * abs(high))


def _thinned(points: Points, most: int = 400) -> list[tuple[float, float]]:
    size = math.ceil(len(points) / most) or 1
    pieces = [points[i : i + size] for i in range(0, len(points), size)]
    return [(piece[-1][0], _mean([y for _, y in piece])) for piece in pieces]


def _mean(values: Sequence[float]) -> float:
    finite = [v for v in values if math.isfinite(v)]
    return sum(finite) / len(finite) if finite else math.nan
