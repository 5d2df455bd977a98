from __future__ import annotations

import pytest

from rft.trainer.loop.lr_schedule import learning_rate
from rft.trainer.settings import OptimizerConfig


def test_warm_up_begins_above_zero_and_constant_follows() -> None:
    optim = OptimizerConfig(lr=1.0, lr_warmup_steps=4)
    assert [learning_rate(optim, step, 10) for step in range(1, 7)] == [
        0.25,
        0.5,
        0.75,
        1.0,
        1.0,
        1.0,
    ]


def test_warm_up_of_verl_begins_at_zero() -> None:
    optim = OptimizerConfig(lr=1.0, lr_warmup_steps=4, lr_warmup_from_zero=True)
    assert [learning_rate(optim, step, 10) for step in range(1, 7)] == [
        0,
        0.25,
        0.5,
        0.75,
        1.0,
        1.0,
    ]


@pytest.mark.parametrize(("t", "rate"), [(10, 1.0), (35, 0.868198), (60, 0.55), (110, 0.1)])
def test_cosine(t: int, rate: float) -> None:
    optim = OptimizerConfig(
        lr=1.0, lr_warmup_steps_ratio=10 / 110, min_lr_ratio=0.1, lr_scheduler_type="cosine"
    )
    assert learning_rate(optim, t + 1, 110) == pytest.approx(rate, abs=1e-6)


def test_cosine_of_several_periods_returns_to_the_peak() -> None:
    optim = OptimizerConfig(lr=1.0, min_lr_ratio=0.1, num_cycles=2.0, lr_scheduler_type="cosine")
    assert [learning_rate(optim, t + 1, 100) for t in (0, 25, 50, 75, 100)] == pytest.approx(
        [1, 0.1, 1, 0.1, 1]
    )


def test_wsd_keeps_the_peak_for_nine_tenths_and_then_falls_to_the_floor() -> None:
    optim = OptimizerConfig(lr=1.0, lr_warmup_steps=10, min_lr_ratio=0.1, lr_scheduler_type="wsd")
    rates = [learning_rate(optim, t + 1, 110) for t in (4, 10, 60, 100, 105, 110, 200)]
    assert rates == pytest.approx([0.5, 1, 1, 1, 0.55, 0.1, 0.1])


def test_linear_ends_at_the_floor() -> None:
    optim = OptimizerConfig(
        lr=1.0, lr_warmup_steps=10, min_lr_ratio=0.1, lr_scheduler_type="linear"
    )
    assert [learning_rate(optim, t + 1, 110) for t in (4, 10, 60, 110, 200)] == pytest.approx(
        [0.5, 1, 0.55, 0.1, 0.1]
    )
