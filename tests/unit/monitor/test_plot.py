"""The reward curve is drawn from metrics.jsonl alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from rft.errors import RunFailed
from rft.monitor.monitor import Monitor
from rft.monitor.pictures import reward_curve, running_mean
from rft.monitor.settings import MonitorSettings
from rft.types.metrics import MetricRecord


async def write(folder: Path, steps: int, evals: dict[int, float]) -> None:
    m = Monitor(MonitorSettings(folder=folder))
    for s in range(1, steps + 1):
        values = {"rollout/reward/mean": s / steps}
        await m.log(MetricRecord(role="explorer", step=s, time=0.0, values=values))
    for s, v in evals.items():
        await m.log(MetricRecord(role="eval", step=s, time=0.0, values={"eval/sums/mean@8": v, "eval/sums/best@8": 1.0}))
    await m.close()


@pytest.mark.parametrize(("steps", "evals"), [(30, {0: 0.1, 30: 0.9}), (3, {}), (0, {0: 0.2})])
async def test_a_picture_with_a_transparent_background(tmp_path: Path, steps: int, evals: dict[int, float]) -> None:
    import matplotlib.image

    await write(tmp_path, steps, evals)
    reward_curve(tmp_path, tmp_path / "out" / "curve.png")
    pixels = matplotlib.image.imread(tmp_path / "out" / "curve.png")
    assert pixels.shape == (720, 1280, 4)
    assert pixels[0, 0, 3] == 0
    assert 0.003 < (pixels[..., 3] > 0).mean() < 0.3


async def test_nothing_to_draw(tmp_path: Path) -> None:
    await write(tmp_path, 0, {})
    with pytest.raises(RunFailed, match="nothing to draw"):
        reward_curve(tmp_path, tmp_path / "curve.png")


def test_running_mean() -> None:
    assert running_mean((1.0, 3.0, 5.0, 7.0, 9.0, 11.0)) == [1, 2, 3, 4, 5, 7]
