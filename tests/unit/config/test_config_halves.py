"""A run in two processes: what each needs, where they meet, and that they are told when they do not
belong together.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from rft.config.context import Problems
from rft.config.load import load
from rft.config.plan import Facts, Plan
from rft.config.resolve import resolve
from rft.errors import ConfigError
from rft.launch.membership import differences
from rft.preflight.plan_checks import advise

FILE = Path(__file__).parent / "data" / "good" / "short.yaml"
RAY = "cluster.ray_address=auto"
ENGINES = "explorer.rollout_model"


def plan(*overrides: str) -> Plan:
    return resolve(load(FILE, overrides), Facts(cpus=4, gpus=0))


def messages(*overrides: str) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        plan(*overrides)
    return {e.key: str(e) for e in getattr(caught.value, "errors", [caught.value])}


@pytest.mark.parametrize(("mode", "other"), [("train", "explore"), ("explore", "train")])
def test_both_join_a_ray_that_is_there(mode, other):
    assert (
        plan().cluster.ray_address is None
        and plan(f"mode={mode}", "cluster.ray_address=h:1").cluster.ray_address == "h:1"
    )
    made = plan(f"mode={mode}")
    assert made.cluster.ray_address == "auto" and any(
        f"mode: {other}" in d.reason for d in made.derived
    )
    assert made.trainer.total_steps == plan().trainer.total_steps
    assert made.explorer.tasksets == plan().explorer.tasksets


def test_each_explorer_says_how_many_workers_its_engines_have():
    made = plan(
        "mode=explore",
        RAY,
        "synchronizer.sync_method=nccl",
        f"{ENGINES}.engine_num=3",
        f"{ENGINES}.tensor_parallel_size=2",
    )
    assert made.sync_runtime.workers == (2, 2, 2)


def test_engines_stand_still_for_a_trainer_on_the_same_cpus():
    assert plan().sync_runtime.shares_cores
    assert not plan(
        "synchronizer.sync_method=checkpoint", "cluster.node_num=2", RAY
    ).sync_runtime.shares_cores


def test_they_meet_where_the_run_is():
    def place(*overrides: str) -> tuple[str, str]:
        made = plan(RAY, *overrides)
        return made.cluster.namespace, made.buffer.run

    assert place("mode=train") == place(
        "mode=explore", "explorer.name=b", "continue_from_checkpoint=false"
    )
    assert place("mode=train") != place("mode=train", "name=other")
    assert place("mode=train") != place("mode=train", "checkpoint_root_dir=elsewhere")
    assert place("mode=train", "ray_namespace=here")[0] == "here"


def test_the_name_of_an_explorer_is_in_its_engines_names():
    made = plan("mode=explore", RAY, "explorer.name=left")
    assert made.explorer.name == "left" and all(e.name.startswith("left-") for e in made.engines)
    assert "explorer.name" in messages("explorer.name=a/b")
    assert any("explorer.name has no effect" in w for w in plan("explorer.name=left").warnings)


def advice(*given: str) -> list[str]:
    problems = Problems()
    advise(plan(*given), problems)
    return problems.warnings


def test_a_budget_of_an_explorer_is_its_own():
    """What a judge has cost is counted in the explorer's folder, of whom there are several."""

    def told(mode: str, reward: str = "rubric_judge", **args: object) -> list[str]:
        given = [f"buffer.explorer_input.default_reward_fn_type={reward}", f"mode={mode}", RAY]
        given += [f"buffer.explorer_input.taskset.reward_fn_args.{k}={v}" for k, v in args.items()]
        return [w for w in advice(*given) if "max_cost_usd" in w]

    (text,) = told("explore", max_cost_usd=20)
    assert "max_cost_usd 20 is for this explorer alone" in text and "cost_ledger" in text
    assert (
        not told("explore", max_cost_usd=20, cost_ledger="/tmp/one.db")
        and not told("explore")
        and not told("both", max_cost_usd=20)
    )
    (text,) = told(
        "explore", "weighted_reward", rewards="{j: {reward: rubric_judge, args: {max_cost_usd: 9}}}"
    )
    assert "max_cost_usd 9 is for this explorer alone" in text


def test_the_process_that_trains_need_not_name_the_tasks():
    alone = (
        "mode=train",
        "buffer.explorer_input.taskset=null",
        "buffer.total_epochs=null",
        "buffer.total_steps=null",
    )
    assert "trainer.total_steps" in messages(*alone, "trainer.total_steps=null")
    made = plan(*alone, "trainer.total_steps=2")
    whole = plan("trainer.total_steps=2")
    assert (made.sync, made.trainer.batch_groups, made.trainer.batch_rows) == (
        whole.sync,
        whole.trainer.batch_groups,
        None,
    )
    assert (
        made.trainer.total_steps == 2
        and made.explorer.total_batches == whole.explorer.total_batches
    )
    ours, theirs = (load(FILE, (RAY, *more)).shown() for more in (alone, ("mode=explore",)))
    assert differences(ours, theirs) == []


def test_a_service_and_its_trainer_can_be_two_processes():
    apart = "explorer.serve.trainer_apart=true"
    whole = plan("mode=serve")
    service = plan("mode=serve", apart)
    trainer = plan("mode=train", apart)
    assert (whole.joins, service.joins, trainer.joins) == (False, True, False)
    assert (whole.trains, service.trains, trainer.trains) == (True, False, True)
    assert service.serve.sampling == whole.serve.sampling and trainer.serve is None
    assert trainer.sync == service.sync == whole.sync and trainer.buffer == service.buffer
    assert (trainer.trainer.batch_groups, trainer.trainer.read_deadline_s) == (
        whole.trainer.batch_groups,
        math.inf,
    )
    assert trainer.cluster == service.cluster and service.cluster.ray_address == "auto"
    ours, theirs = (
        load(FILE, (RAY, *more)).shown() for more in (("mode=train", apart), ("mode=serve", apart))
    )
    assert differences(ours, theirs) == []
    alone = load(FILE, (RAY, "mode=train")).shown()
    assert [k for k, *_ in differences(alone, theirs)] == ["explorer.serve.trainer_apart"]


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ("seed=3", "seed"),
        ("buffer.batch_size=2", "buffer.batch_size"),
        ("algorithm.repeat_times=3", "algorithm.repeat_times"),
        ("synchronizer.sync_offset=1", "synchronizer.sync_offset"),
        ("model.max_response_tokens=5", "model.max_response_tokens"),
        ("explorer.rollout_model.dtype=bfloat16", "explorer.rollout_model.dtype"),
        ("algorithm.optimizer.lr=0.5", ""),
        ("explorer.rollout_model.engine_num=3", ""),
        ("explorer.name=b", ""),
        ("trainer.save_interval=7", ""),
        ("monitor.monitor_type=none", ""),
        ("buffer.trainer_input.experience_buffer.capacity=777", ""),
    ],
)
def test_what_must_be_the_same(change, key):
    ours, theirs = (
        load(FILE, (RAY, f"mode={mode}", *more)).shown()
        for mode, more in (("train", ()), ("explore", (change,)))
    )
    assert [k for k, *_ in differences(ours, theirs)] == ([key] if key else [])


@pytest.mark.extra
def test_what_the_start_needs_of_the_environment_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be set where the run starts, so it is no error."""
    aux = "explorer.auxiliary_models=[{model_path: gpt, engine_type: external}]"

    def told(*given: str) -> str:
        return "\n".join(advice(*given))

    for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY", "RFT_SERVE_KEY"):
        monkeypatch.delenv(name, raising=False)
    assert "the environment variable OPENAI_BASE_URL is not set here: the run cannot start" in told(
        aux
    )
    assert "no client key: set RFT_SERVE_KEY" in told(
        "mode=serve", "buffer.explorer_input.taskset=null"
    )
    monkeypatch.setenv("OPENAI_BASE_URL", "https://example.org/v1")
    assert (
        "https://example.org/v1 is asked without a key: the environment variable OPENAI_API_KEY is "
        "not set here" in told(aux)
    )
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    monkeypatch.setenv("RFT_SERVE_KEY", "k" * 16)
    assert "environment variable" not in told(aux) and "nobody" not in told(
        "mode=serve", "buffer.explorer_input.taskset=null"
    )
