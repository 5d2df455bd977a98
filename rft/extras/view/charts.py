"""Which curves stand in which chart, and their points as plain values for the page.  Depends on
names of metrics, not on how they are drawn.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rft.extras.view.metric_curves import AXES, TOKENS, Axis, Curves
from rft.monitor.curves import REWARD, reward_parts
from rft.monitor.pictures import covered

# title -> patterns of names; a chart without curves is not drawn
CHARTS: dict[str, tuple[str, ...]] = {
    "Reward": (r"rollout/reward/mean", r"experience/reward/mean"),
    "Evaluation": (r"eval/.+/mean@\d+", r"eval/.+/loss"),
    "Response length (tokens)": (
        r"rollout/response_length/mean",
        r"experience/response_length/max",
        r"eval/.+/response_length/mean",
    ),
    "Truncated (share)": (r"rollout/truncated_ratio",),
    "Groups without spread (share)": (r"frac_reward_zero_std.*", r"rollout/.+/frac_zero_std"),
    "Entropy (nats)": (r"rollout/entropy", r"actor/entropy"),
    "KL (nats)": (r"actor/kl_loss", r"actor/ppo_kl", r"rollout_corr/kl", r"advantage/kl"),
    "Clip fraction (share)": (r"actor/pg_clipfrac", r"actor/pg_clipfrac_lower"),
    "Log-prob mismatch (nats)": (
        r"mismatch/abs_diff_mean",
        r"mismatch/abs_diff_max",
        r"sync/canary_max_abs",
        r"sync/canary_limit",
    ),
    "Staleness (train steps)": (r"experience/staleness/(mean|max)", r"sync/staleness_bound"),
    "Throughput (tokens/s)": (
        r"rollout/tokens_per_s",
        r"perf/tokens_per_s",
        r"engine/tokens_per_s",
    ),
    "Seconds of a step": (r"perf/step_s", r"time/wait_s"),
    "Who waited (share)": (r"trainer/idle_ratio", r"explorer/idle_ratio"),
    "Loss": (r"actor/loss", r"critic/vf_loss"),
    "Gradient norm": (r"actor/grad_norm",),
    "Judge cost (USD)": (r"judge/.+/cost_usd",),
}
_OF_WORKFLOWS = r"rollout/(?!reward/|response_length/|prompt_length/)[^/]+/mean"
COMPARED = (
    "Reward",
    "Evaluation",
    "Response length (tokens)",
    "Entropy (nats)",
    "KL (nats)",
    "Staleness (train steps)",
    "Loss",
)
BUSY = {
    "exploring": "rollout/time/batch",
    "training": "time/train_s",
    "weight sync": "sync/total_s",
    "in train steps": "perf/step_s",
}  # seconds
_MOST_CURVES = 8  # of one chart


def numbers(curves: Curves) -> dict[str, Any]:
    """What stands in figures above the charts, apart from what the run writes on."""
    last = curves.last
    return {
        "step": None if last is None else last.step,
        "reward": next((curves.newest(n) for n in REWARD if n in curves.series), None),
        "evals": list(curves.evals()),
        "cost_usd": curves.cost_usd(),
        "busy": {
            n: covered(c.times, c.values) for n, k in BUSY.items() if (c := curves.series.get(k))
        },
        "names": sorted(curves.series),
        "num_records": curves.num_records,
        "problems": curves.problems[:3],
        "alarms": list(curves.alarms.values()),
        "notes": list(curves.notes),
    }


def of_run(curves: Curves, axis: Axis, extra: str = "") -> dict[str, Any]:
    """All charts of one run; `extra` is a metric that gets one of its own."""
    charts = (
        [{"title": extra, "curves": [_curve(extra, curves, extra, axis)]}]
        if extra in curves.series
        else []
    )
    charts += [
        {"title": t, "curves": [_curve(n, curves, n, axis) for n in names]}
        for t, names in charted(n for n, c in curves.series.items() if c).items()
    ]
    return {"x": AXES[axis], "charts": charts}


def charted(measured: Iterable[str]) -> dict[str, list[str]]:
    """The titles of the charts that can be drawn of the metrics `measured`, and the names in each."""
    measured = sorted(measured)
    parts = reward_parts(measured)
    charts = {title: _names(measured, patterns) for title, patterns in CHARTS.items()}
    charts["Reward parts"] = parts
    charts["Metrics of workflows"] = [
        n for n in measured if re.fullmatch(_OF_WORKFLOWS, n) and n not in parts
    ]
    return {title: names[:_MOST_CURVES] for title, names in charts.items() if names}


def may_be_charted(name: str) -> bool:
    """Whether `charted` can name it, among others, or an axis needs it."""
    of_charts = any(re.fullmatch(p, name) for patterns in CHARTS.values() for p in patterns)
    return (
        of_charts
        or name == TOKENS
        or (name.startswith("rollout/") and name.endswith(("/mean", "/std")))
    )


def several(runs: Mapping[str, Curves], axis: Axis) -> dict[str, Any]:
    """The same charts of several runs, a curve for each run and metric; `group` numbers the run."""
    charts = []
    for title in COMPARED:
        series = [
            _curve(f"{key}: {name}" if title == "Evaluation" or i else key, curves, name, axis)
            | {"group": number, "dash": i}
            for number, (key, curves) in enumerate(runs.items())
            for i, name in enumerate(
                _names(sorted(curves.series), CHARTS[title])[
                    : 2 if title != "Evaluation" else _MOST_CURVES
                ]
            )
        ]
        if series:
            charts.append({"title": title, "curves": series})
    return {"x": AXES[axis], "charts": charts}


def _names(measured: Sequence[str], patterns: tuple[str, ...]) -> list[str]:
    matches = [n for p in patterns for n in measured if re.fullmatch(p, n)]
    return list(dict.fromkeys(matches))


def _curve(label: str, curves: Curves, name: str, axis: Axis) -> dict[str, Any]:
    x, y = curves.points(name, axis)
    return {"label": label, "x": x.tolist(), "y": y.tolist()}
