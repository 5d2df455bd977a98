"""How the trainer reads: replay_buffer and staleness_control as settings, and what of them
contradicts itself.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rft.buffer.settings import UNLIMITED, ReplaySettings
from rft.config.load import load
from rft.config.plan import Facts, Plan
from rft.config.resolve import resolve
from rft.errors import ConfigError, ConfigErrors

FILE = Path(__file__).parent / "data" / "good" / "short.yaml"
REPLAY = "buffer.trainer_input.experience_buffer.replay_buffer"
ON = f"{REPLAY}.enable=true"
AGAIN = f"{REPLAY}.reuse_cooldown_time=5"
LIMIT = f"{REPLAY}.priority_fn=decay_limit_randomization"


def plan(*overrides: str) -> Plan:
    return resolve(load(FILE, overrides), Facts(cpus=4, gpus=0))


def errors(*overrides: str) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        plan(*overrides)
    found = caught.value.errors if isinstance(caught.value, ConfigErrors) else [caught.value]
    return {e.key: str(e) for e in found}


def test_without_it_each_experience_is_read_once_oldest_first() -> None:
    p = plan()
    assert (p.buffer.replay, p.buffer.max_uses, p.staleness_bound) == (None, 1, 0)
    assert any(
        f"{REPLAY}.reuse_cooldown_time has no effect: enable is false" in w
        for w in plan(AGAIN).warnings
    )


@pytest.mark.parametrize(
    ("overrides", "max_uses"),
    [
        ((ON,), 1),
        ((ON, LIMIT), 1),
        ((ON, AGAIN), UNLIMITED),
        ((ON, AGAIN, LIMIT), 3),
        ((ON, AGAIN, LIMIT, f"{REPLAY}.priority_fn_args.use_count_limit=0"), UNLIMITED),
        ((ON, AGAIN, LIMIT, f"{REPLAY}.max_uses=2"), 2),
        ((ON, AGAIN, f"{REPLAY}.max_uses=7"), 7),
    ],
)
def test_how_often(overrides: tuple[str, ...], max_uses: int) -> None:
    found = plan(*overrides)
    assert found.buffer.max_uses == max_uses and not any("max_uses" in w for w in found.warnings)


def test_a_max_uses_that_is_never_reached_is_told() -> None:
    found = plan(ON, AGAIN, LIMIT, f"{REPLAY}.max_uses=9")
    assert found.buffer.max_uses < 9 and any(
        "max_uses 9 is never reached: use_count_limit" in w for w in found.warnings
    )


def test_replay_settings() -> None:
    p = plan(ON, AGAIN, LIMIT, f"{REPLAY}.priority_fn_args={{sigma: 0.5}}", "seed=9")
    assert p.buffer.replay == ReplaySettings(
        priority_fn="decay_limit_randomization",
        priority_fn_args={"sigma": 0.5},
        cooldown_s=5.0,
        seed=9,
    )
    assert p.staleness_bound is None
    assert plan(ON, AGAIN, "synchronizer.max_staleness=4").staleness_bound == 4
    assert plan("buffer.on_short_batch=carry").staleness_bound == 1


@pytest.mark.parametrize(
    ("overrides", "key", "message"),
    [
        (
            (ON, f"{REPLAY}.max_uses=2"),
            "max_uses",
            "without reuse_cooldown_time an experience is used once",
        ),
        (
            (ON, f"{REPLAY}.priority_fn=newest"),
            "priority_fn",
            "Known: decay_limit_randomization, linear_decay",
        ),
        ((ON, f"{REPLAY}.priority_fn_args={{sigma: 1}}"), "priority_fn_args.sigma", "unknown key"),
        (
            (ON, LIMIT, f"{REPLAY}.priority_fn_args={{sigma: -1}}"),
            "priority_fn_args.sigma",
            "greater than or equal to 0",
        ),
        ((ON, "deterministic=true"), "enable", "leave it out with deterministic: true"),
    ],
)
def test_what_is_refused(overrides: tuple[str, ...], key: str, message: str) -> None:
    found = errors(*overrides)
    assert message in found[f"{REPLAY}.{key}"], found


def test_staleness_control_is_max_staleness() -> None:
    control = "algorithm.sample_strategy=staleness_control"
    p = plan(control, "algorithm.sample_strategy_args={max_staleness: 3}")
    assert (p.trainer.max_staleness, p.sync.max_staleness) == (3, 3)
    assert plan(control).trainer.max_staleness is None
    assert (
        plan(control, "algorithm.sample_strategy_args={max_staleness: .inf}").trainer.max_staleness
        is None
    )
    key = "algorithm.sample_strategy_args.max_staleness"
    assert "write one of them" in errors(control, f"{key}=3", "synchronizer.max_staleness=4")[key]
    assert key in errors(control, f"{key}=-1")
    assert (
        "cannot be kept"
        in errors(control, f"{key}=0", "synchronizer.sync_interval=2")["synchronizer.max_staleness"]
    )
