"""Loads that a weight sync cannot prove are refused by `rft check`, with what to use instead; and experts that cannot be replayed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rft.config.load import from_dict
from rft.config.plan import Facts
from rft.config.resolve import resolve
from rft.config.verify import Report, check
from rft.errors import ConfigError, ConfigErrors
from rft.testing import tiny
from tests.helpers import families


def config(folder: Path, trainer: dict[str, Any] | None = None, **rollout: Any) -> dict[str, Any]:
    return {
        "model": {"model_path": str(folder), "max_prompt_tokens": 30, "max_response_tokens": 30},
        "cluster": {"gpu_per_node": 0},
        "buffer": {
            "batch_size": 4,
            "explorer_input": {
                "default_workflow_type": "simple_workflow",
                "default_reward_fn_type": "exact_answer",
                "taskset": {"path": "rft.testing.tiny:copy_tasks"},
            },
        },
        "explorer": {"rollout_model": rollout},
        "trainer": {"total_steps": 1, **(trainer or {})},
    }


def checked(given: dict[str, Any], folder: Path) -> Report:
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(given).replace("router_replay: true", "router_replay: on"))
    return check(path)


def refused(given: dict[str, Any]) -> str:
    with pytest.raises((ConfigError, ConfigErrors)) as info:
        resolve(from_dict(given), Facts(cpus=2))
    return str(info.value)


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("quantization", "fp8", "dtype: bfloat16"),
        ("load_format", "bitsandbytes", "Write auto"),
        ("kv_cache_dtype", "fp8", "Write auto"),
        ("enable_expert_parallel", True, "tensor_parallel_size"),
        ("worker_extension_cls", "mine.Worker", "engine_type"),
        ("logprobs_mode", "raw_logprobs", "processed distribution"),
    ],
)
def test_a_load_that_no_sync_can_prove(name: str, value: Any, instead: str, tiny_model: Path) -> None:
    said = refused(config(tiny_model, extra_engine_args={name: value}))
    assert f"explorer.rollout_model.extra_engine_args.{name}" in said and instead in said


def test_plain_arguments_are_taken(tiny_model: Path) -> None:
    given = {"quantization": None, "kv_cache_dtype": "auto", "load_format": "auto", "enable_expert_parallel": False}
    assert resolve(from_dict(config(tiny_model, extra_engine_args=given)), Facts(cpus=2)).engines[0].extra_engine_args == given


@pytest.mark.parametrize(
    ("rollout", "trainer", "why"),
    [
        ({"engine_type": "scripted"}, {}, "does not tell which experts"),
        ({"pipeline_parallel_size": 2}, {}, "pipeline_parallel_size: 1"),
        ({"enable_prefix_caching": False}, {}, "enable_prefix_caching: true"),
        ({}, {"use_torch_compile": True}, "use_torch_compile: false"),
    ],
)
def test_replay_that_cannot_be(rollout: dict[str, Any], trainer: dict[str, Any], why: str, tiny_model: Path) -> None:
    assert why in refused(config(tiny_model, trainer, router_replay=True, **rollout))


def test_replay_needs_experts(tiny_model: Path, tmp_path: Path) -> None:
    report = checked(config(tiny_model, router_replay=True), tmp_path)
    assert any("has no experts" in e.message for e in report.errors)
    folder = tiny.make(tmp_path / "m", family="qwen3_moe", **families.TINY["qwen3_moe"])
    report = checked(config(folder, router_replay=True), tmp_path)
    assert not report.errors, report.errors
    assert report.plan is not None and report.plan.learner.router_replay and report.plan.engines[0].router_replay
    assert any("4 bytes of each stored token" in note for note in report.notes)
    off = checked(config(folder, router_replay=False), tmp_path)
    assert off.plan is not None and not off.plan.learner.router_replay


def test_weights_that_are_stored_quantized(tmp_path: Path) -> None:
    folder = tiny.make(tmp_path / "m")
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": {"quant_method": "mxfp4"}}))
    report = checked(config(folder), tmp_path)
    assert any("stored as mxfp4" in e.message and "bfloat16" in e.message for e in report.errors)
