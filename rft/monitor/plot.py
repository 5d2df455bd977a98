"""The picture of a run: training reward and held-out accuracy over steps, from metrics.jsonl alone."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

from rft.errors import RunFailed, SetupError
from rft.monitor.read import read, series
from rft.types.metrics import MetricRecord

TRAINING = "rollout/reward/mean"
_EVAL = re.compile(r"eval/(?P<taskset>.+)/mean@(?P<k>\d+)")
_GREY, _BLUE, _WARM = "#858585", "#3987e5", ("#d9772b", "#2f9e6e", "#b65fc4", "#c9a227")  # legible on white and on black
_WINDOW = 5  # steps of the running mean


def reward_curve(run_dir: Path, out_png: Path) -> None:
    """Draws `rollout/reward/mean` and every `eval/<taskset>/mean@k` of `run_dir`/metrics.jsonl into `out_png`.

    The background is transparent.  Raises SetupError without matplotlib, RunFailed where neither metric has been written yet.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as e:
        raise SetupError("drawing the reward curve needs matplotlib: pip install matplotlib") from e
    records = read(run_dir / "metrics.jsonl")
    training, evals = series(records, TRAINING), _evals(records)
    if not training and not evals:
        raise RunFailed(f"{run_dir / 'metrics.jsonl'} holds neither {TRAINING} nor an evaluation yet; there is nothing to draw")
    figure = Figure(figsize=(8, 4.5), dpi=160, layout="constrained")
    axes = figure.add_subplot()
    if training:
        steps, rewards = zip(*training, strict=True)
        smooth = len(training) > 2 * _WINDOW
        axes.plot(
            steps, rewards, color=_BLUE, lw=1 if smooth else 2, alpha=0.4 if smooth else 1, label="" if smooth else "training"
        )
        if smooth:
            axes.plot(steps, running_mean(rewards), color=_BLUE, lw=2.2, label=f"training, mean of {_WINDOW} steps")
    for (label, points), color in zip(evals.items(), itertools.cycle(_WARM), strict=False):
        axes.plot(*zip(*points, strict=True), color=color, lw=1.4, ls=(0, (4, 2)), marker="o", ms=6, label=label)
        step, value = points[-1]
        axes.annotate(f"{value:.2f}", (step, value), (7, 0), textcoords="offset points", color=color, va="center", fontsize=9)
    axes.set_xlabel("step", color=_GREY)
    axes.set_ylabel("mean reward", color=_GREY)
    axes.set_title(run_dir.resolve().name, color=_GREY, loc="left", fontsize=11)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0.04, y=0.08)
    axes.grid(color=_GREY, alpha=0.25, lw=0.6)
    axes.tick_params(colors=_GREY)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(_GREY)
    axes.legend(frameon=False, labelcolor=_GREY, fontsize=9, loc="best")
    out_png.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out_png, transparent=True)


def running_mean(values: tuple[float, ...]) -> list[float]:
    """Mean of each value and the `_WINDOW` - 1 before it."""
    windows = [values[max(0, i + 1 - _WINDOW) : i + 1] for i in range(len(values))]
    return [sum(w) / len(w) for w in windows]


def _evals(records: list[MetricRecord]) -> dict[str, list[tuple[int, float]]]:
    names = dict.fromkeys(name for r in records for name in r.values if _EVAL.fullmatch(name))
    return {name.removeprefix("eval/").replace("/mean@", " mean@"): series(records, name) for name in names}
