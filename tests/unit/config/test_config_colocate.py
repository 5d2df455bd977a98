"""mode: colocate: engines and trainer have the same cores or GPUs in turns; what lets them overlap
is refused.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rft.config.load import load
from rft.config.plan import Facts, Plan
from rft.config.resolve import resolve
from rft.errors import ConfigError, ConfigErrors
from rft.launch.cluster import placement
from rft.preflight.check import check
from rft.preflight.memory_estimate import estimate, too_much
from rft.preflight.memory_shared import KEY, LEFT, MOST, phases
from rft.preflight.memory_terms import CUDA_CONTEXT
from rft.preflight.memory_trainer import canary
from rft.preflight.model_folder import ModelShape
from tests.helpers.model_sizes import MODELS

FILE = Path(__file__).parent / "data" / "good" / "short.yaml"


def plan(*overrides: str, gpus: int = 0) -> Plan:
    return resolve(load(FILE, ["mode=colocate", *overrides]), Facts(cpus=4, gpus=gpus))


def test_one_gpu_is_named_where_the_mode_was_not_chosen() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(load(FILE, ["synchronizer.sync_offset=1"]), Facts(cpus=4, gpus=1))
    assert "with one GPU" in str(caught.value) and "mode: both" not in str(caught.value)
    assert (
        resolve(
            load(FILE, ["synchronizer.sync_offset=1", "trainer.device=cpu"]), Facts(cpus=4, gpus=1)
        ).mode
        == "both"
    )


def test_both_sides_have_all_cores_and_never_at_the_same_time() -> None:
    made = plan()
    assert (made.engines[0].cpu_threads, made.learner.cpu_threads) == (4, 4)
    assert (
        made.schedule.style,
        made.schedule.interval,
        made.schedule.offset,
        made.staleness_bound,
    ) == (
        "fixed",
        1,
        0,
        0,
    )
    two = plan("explorer.rollout_model.engine_num=2")
    assert [e.cpu_threads for e in two.engines] == [2, 2], "engines take their turn together"


@pytest.mark.parametrize(
    "override",
    [
        "synchronizer.sync_style=trainer_driven",
        "synchronizer.sync_offset=1",
        "explorer.eval_in_background=true",
    ],
)
def test_what_overlaps_is_refused(override: str) -> None:
    with pytest.raises(ConfigErrors) as caught:
        plan(override)
    (error,) = [e for e in caught.value.errors if e.key == override.partition("=")[0]]
    assert (
        "must be" in error.message
        and "take turns" in error.message
        and "mode: both" in error.message
    )


def test_a_window_is_sampled_whole_before_its_first_step() -> None:
    made = plan("synchronizer.sync_interval=3")
    assert (made.sync_runtime.in_turns, made.schedule.interval, made.trainer.require_batches) == (
        True,
        3,
        3,
    )


@pytest.mark.parametrize(("tp", "engines"), [(1, 4), (2, 2)])
def test_engines_and_ranks_have_the_same_gpus(tp: int, engines: int) -> None:
    made = plan(
        f"explorer.rollout_model.tensor_parallel_size={tp}",
        f"explorer.rollout_model.engine_num={engines}",
        gpus=4,
    )
    assert made.cluster.shared and (made.learner.world_size, made.learner.shares_device) == (
        4,
        True,
    )
    assert {(e.sleep_level, e.gpu_memory_utilization) for e in made.engines} == {(2, 0.5)}
    seats = placement(made.engines, made.learner, [4], shared=True)
    assert [s.host for s in seats if s.role == "trainer"] == [rank // tp for rank in range(4)]
    assert not made.warnings


def test_several_machines_are_a_ray_that_is_there() -> None:
    several = ("cluster.node_num=2", "synchronizer.sync_method=checkpoint")
    made = plan(*several, "cluster.gpu_per_node=2", "explorer.rollout_model.engine_num=4")
    assert made.cluster.ray_address == "auto" and any(
        "other nodes" in d.reason for d in made.derived if d.key == "cluster.ray_address"
    )
    assert (
        plan(
            *several, "cluster.gpu_per_node=2", "cluster.ray_address=head:6379"
        ).cluster.ray_address
        == "head:6379"
    )
    assert plan().cluster.ray_address is None


def test_adapters_that_travel_alone_need_the_base_model_kept() -> None:
    alone = plan("model.lora_configs=[{lora_rank: 8}]", gpus=1)
    merged = plan("model.lora_configs=[{lora_rank: 8, merge: true}]", gpus=1)
    assert [m.engines[0].sleep_level for m in (alone, merged)] == [1, 2]


def test_one_gpu_is_shared_by_itself() -> None:
    made = resolve(load(FILE, []), Facts(cpus=4, gpus=1))
    assert made.mode == "colocate" and any(
        d.key == "mode" and "one GPU" in d.reason for d in made.derived
    )
    for overrides, gpus in (([], 2), ([], 0), (["trainer.device=cpu"], 1)):
        assert resolve(load(FILE, overrides), Facts(cpus=4, gpus=gpus)).mode == "both"


@pytest.mark.parametrize(
    ("override", "key", "said"),
    [
        ("trainer.device=cpu", "mode", "engines are on cuda, the trainer on cpu"),
        ("synchronizer.sync_method=nccl", "synchronizer.sync_method", "use memory"),
        ("explorer.rollout_model.engine_num=3", "explorer.rollout_model.engine_num", "need 3 GPUs"),
    ],
)
def test_what_cannot_share_a_gpu_is_refused(override: str, key: str, said: str) -> None:
    with pytest.raises(ConfigErrors) as caught:
        plan(override, gpus=2)
    assert [said in e.message for e in caught.value.errors if e.key == key] == [True]


def test_an_engine_that_does_not_sleep_is_told() -> None:
    made = plan("explorer.rollout_model.engine_type=transformers", gpus=1)
    assert made.engines[0].sleep_level == 0 and any(
        "keeps its memory while the trainer works" in w for w in made.warnings
    )


def test_check_plans_the_memory_of_both_phases() -> None:
    """The engine's share and the trainer at rest; the trainer at work and what a sleeping engine
    keeps.
    """
    shape = ModelShape(
        parameters=494_032_768,
        vocab=151_936,
        hidden=896,
        layers=24,
        heads=14,
        kv_heads=2,
        head_dim=64,
        mlp=4864,
        tied=True,
    )
    made = plan(gpus=1)
    gpu = 24 << 30
    found = estimate(made, shape, gpu_memory=gpu)
    roles = {r.role: r for r in (*found, *phases(made, found, shape))}
    exploring = roles["shared GPU, exploring"]
    training = roles["shared GPU, training"]
    scoring = canary(made, shape)
    assert shape.embedding * 2 < scoring < 1 << 30
    assert (
        exploring.nbytes
        == roles["engine-0"].nbytes + 12 * shape.parameters + CUDA_CONTEXT + scoring
    )
    assert training.nbytes == roles["trainer-0"].nbytes + CUDA_CONTEXT
    assert too_much(tuple(roles.values()), made, ram=None, gpu_memory=gpu) == []
    greedy = plan("explorer.rollout_model.gpu_memory_utilization=0.9", gpus=1)
    found = estimate(greedy, shape, gpu_memory=gpu)
    (excess,) = too_much((*found, *phases(greedy, found, shape)), greedy, ram=None, gpu_memory=gpu)
    assert "shared GPU, exploring" in excess.message and "gpu_memory_util" in excess.message


@pytest.mark.parametrize(
    ("gib", "written", "share"),
    [(80, None, 0.77), (80, 0.6, 0.6), (141, None, 0.85), (None, None, 0.5)],
)
def test_engines_take_what_the_trainer_at_rest_leaves(
    gib: int | None, written: float | None, share: float, tmp_path: Path
) -> None:
    """U12: Qwen3-8B on eight GPUs; a share that is written, or GPUs of unknown size, stay."""
    (tmp_path / "config.json").write_text(json.dumps(MODELS["qwen3-8b"]))
    overrides = ["mode=colocate", f"model.model_path={tmp_path}", "cluster.gpu_per_node=8"]
    overrides += ["explorer.rollout_model.engine_num=8", "model.max_response_tokens=8192"]
    overrides += [] if written is None else [f"{KEY}={written}"]
    memory = None if gib is None else gib << 30
    facts = Facts(cpus=64, gpus=8, memory=None, gpu_memory=memory, disk=lambda _: None)
    report = check(FILE, overrides, facts=facts, schema_only=True)
    assert report.plan is not None and not report.errors
    assert {e.gpu_memory_utilization for e in report.plan.engines} == {share}
    derived = [d.value for d in report.plan.derived if d.key == KEY]
    assert derived == ([share] if written is None else [])
    if memory is not None and written is None:
        exploring = next(r for r in report.memory if r.role == "shared GPU, exploring")
        assert share <= MOST and exploring.nbytes <= (1 - LEFT) * memory
