"""Curves as SVG text and as a line of blocks."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from rft.monitor.curves import evaluations, is_main, main_curves, sparkline, svg
from rft.monitor.pictures import ticks
from rft.monitor.read import AllSeries
from rft.types.metrics import MetricRecord


def test_a_line_of_blocks() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([3, 3, 3]) == "▁▁▁" and sparkline([]) == "" and sparkline([math.nan]) == ""
    assert sparkline([0, math.nan, 7]) == "▁ █"
    assert sparkline(range(1000), width=8) == "▁▂▃▄▅▆▇█"
    assert len(sparkline(range(41), width=40)) <= 40


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (-3.2, 7.9), (0, 1e-9), (1e6, 1e6 + 1), (0.1, 0.2), (-5, -4), (0, 80)]
)
def test_ticks_are_few_round_and_inside(low: float, high: float) -> None:
    found = ticks(low, high)
    assert 2 <= len(found) <= 6 and all(low - 1e-9 <= t <= high + 1e-9 for t in found)
    sizes = {
        round((b - a) / 10 ** math.floor(math.log10(b - a) + 1e-6), 3) for a, b in pairwise(found)
    }
    assert sizes <= {1.0, 2.0, 5.0}


def test_a_picture_is_well_formed_whatever_its_names_say() -> None:
    evil = '"><script>alert(1)</script>&'
    tree = ElementTree.fromstring(
        svg({evil: [(1, 0.5), (2, math.inf), (3, 0.7)], "b": [(1, 1.0)]}, title=evil)
    )
    assert not list(tree.iter("{http://www.w3.org/2000/svg}script"))
    assert evil in [t.text for t in tree.iter("{http://www.w3.org/2000/svg}text")]
    lines = [p.get("points", "") for p in tree.iter("{http://www.w3.org/2000/svg}polyline")]
    assert [len(x.split()) for x in lines] == [2, 1], "what is not finite leaves a gap"


def test_many_points_are_averaged() -> None:
    tree = ElementTree.fromstring(svg({"a": [(i, i % 2) for i in range(100_000)]}))
    (line,) = tree.iter("{http://www.w3.org/2000/svg}polyline")
    assert len(line.get("points", "").split()) <= 400


def record(role: str, step: int, **values: float) -> MetricRecord:
    return MetricRecord(role=role, step=step, time=0.0, values=values)  # type: ignore[arg-type]


def test_what_is_drawn_first() -> None:
    reward = {"rollout/reward/mean": 0.5}
    loss = {"actor/loss": 2.0}
    found = [
        record("eval", 0, **{"eval/a/mean@4": 0.1, "eval/a/best@4": 0.2}),
        record("explorer", 1, **reward),
        record("trainer", 1, **loss),
    ]
    assert main_curves(AllSeries(is_main, found)) == {
        "rollout/reward/mean": [(1, 0.5)],
        "eval/a/mean@4": [(0, 0.1)],
    }
    assert main_curves(AllSeries(is_main, [record("trainer", 1, **loss)])) == {
        "actor/loss": [(1, 2.0)]
    }
    assert evaluations(["eval/x/loss", "eval/x/accuracy"]) == ["eval/x/loss"]


def test_tens_of_curves_leave_room_for_the_axes() -> None:
    """From 15 names on the axes stood upside down, and with more of them outside of the picture."""
    drawn = ElementTree.fromstring(
        svg({f"eval/{i}/mean@1": [(0, 0.0), (1, float(i))] for i in range(40)})
    )
    height = float(drawn.attrib["height"])
    lines = [e.attrib["points"].split() for e in drawn if e.tag.endswith("polyline")]
    ends = [[float(place.partition(",")[2]) for place in line] for line in lines]
    assert len(ends) == 40 and all(0 < y < height for line in ends for y in line)
    assert ends[-1][0] - ends[-1][1] >= 100, "the greatest value is above the least"


def axis(points: list[tuple[float, float]], anchor: str) -> list[str]:
    """The numbers at one axis: "end" at the left, "middle" below."""
    drawn = svg({"a": points})
    return re.findall(rf'text-anchor="{anchor}"[^>]*>([^<]*)<', drawn)


@pytest.mark.parametrize("steps", [range(1, 4), range(3), range(1, 3), range(7, 8)])
def test_steps_are_whole_numbers(steps: range) -> None:
    below = axis([(float(s), 0.5) for s in steps], "middle")
    assert below and all(number.isdigit() for number in below)


def test_times_may_have_parts() -> None:
    assert "0.5" in axis([(0.0, 1.0), (1.5, 2.0)], "middle")


def test_a_share_that_is_always_zero_is_drawn_from_zero() -> None:
    left = [float(number) for number in axis([(1.0, 0.0), (2.0, 0.0)], "end")]
    assert min(left) == 0 and max(left) == 1
