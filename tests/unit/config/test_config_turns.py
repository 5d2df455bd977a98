"""mode: colocate: what it refuses, and that engines and trainer then have every core in turns."""

from __future__ import annotations

from pathlib import Path

import pytest

from rft.config.load import load
from rft.config.plan import Facts, Plan
from rft.config.resolve import resolve
from rft.errors import ConfigErrors

FILE = Path(__file__).parent / "data" / "good" / "short.yaml"


def plan(*overrides: str, gpus: int = 0) -> Plan:
    return resolve(load(FILE, ["mode=colocate", *overrides]), Facts(cpus=4, gpus=gpus))


def test_both_sides_have_all_cores_and_never_at_the_same_time() -> None:
    made = plan()
    assert (made.engines[0].cpu_threads, made.learner.cpu_threads) == (4, 4)
    assert (made.sync.style, made.sync.interval, made.sync.offset, made.staleness_bound) == ("fixed", 1, 0, 0)
    two = plan("explorer.rollout_model.engine_num=2")
    assert [e.cpu_threads for e in two.engines] == [2, 2], "engines take their turn together"
    assert not made.not_active


@pytest.mark.parametrize(
    "override",
    [
        "synchronizer.sync_style=trainer_driven",
        "synchronizer.sync_interval=2",
        "synchronizer.sync_offset=1",
        "explorer.eval_in_background=true",
    ],
)
def test_what_overlaps_is_refused(override: str) -> None:
    with pytest.raises(ConfigErrors) as caught:
        plan(override)
    (error,) = [e for e in caught.value.errors if e.key == override.partition("=")[0]]
    assert "must be" in error.message and "take turns" in error.message and "mode: both" in error.message


def test_gpus_are_not_shared_yet() -> None:
    with pytest.raises(ConfigErrors) as caught:
        plan("cluster.gpu_per_node=4", gpus=4)
    assert any(e.key == "mode" and "not implemented yet" in e.message and "mode: both" in e.message for e in caught.value.errors)
    on_cpu = plan("cluster.gpu_per_node=4", "explorer.rollout_model.device=cpu", "trainer.device=cpu", gpus=4)
    assert on_cpu.cluster.trainer_gpus == 0
