from __future__ import annotations

import pytest

from rft.trainer.schedule import learning_rate
from rft.trainer.settings import OptimSettings


def test_warm_up_begins_above_zero_and_constant_follows() -> None:
    optim = OptimSettings(lr=1.0, lr_warmup_steps=4)
    assert [learning_rate(optim, step, 10) for step in range(1, 7)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(("t", "rate"), [(10, 1.0), (35, 0.868198), (60, 0.55), (110, 0.1)])
def test_cosine(t: int, rate: float) -> None:
    optim = OptimSettings(lr=1.0, lr_warmup_steps_ratio=10 / 110, min_lr_ratio=0.1, lr_scheduler_type="cosine")
    assert learning_rate(optim, t + 1, 110) == pytest.approx(rate, abs=1e-6)
