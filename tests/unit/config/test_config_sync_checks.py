"""Loads that a weight sync cannot prove are refused by `rft check`, with what to use instead; and
experts that cannot be replayed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rft.config.load import from_dict
from rft.config.plan import Facts
from rft.config.resolve import resolve
from rft.errors import ConfigError, ConfigErrors
from rft.preflight.check import Report, check
from rft.preflight.sync_checks import TEXTS_ALONE
from rft.testing import tiny
from rft.types.row_layout import TEXT_CLASSES
from tests.helpers import families

REGISTERS = """
from transformers import AutoConfig, LlamaConfig


class Own(LlamaConfig):
    model_type = "rft_checked"


AutoConfig.register("rft_checked", Own)
"""


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
def test_a_load_that_no_sync_can_prove(
    name: str, value: Any, instead: str, tiny_model: Path
) -> None:
    said = refused(config(tiny_model, extra_engine_args={name: value}))
    assert f"explorer.rollout_model.extra_engine_args.{name}" in said and instead in said


def test_plain_arguments_are_taken(tiny_model: Path) -> None:
    given = {
        "quantization": None,
        "kv_cache_dtype": "auto",
        "load_format": "auto",
        "enable_expert_parallel": False,
    }
    assert (
        resolve(from_dict(config(tiny_model, extra_engine_args=given)), Facts(cpus=2))
        .engines[0]
        .extra_engine_args
        == given
    )


@pytest.mark.parametrize(
    ("rollout", "trainer", "why"),
    [
        ({"engine_type": "scripted"}, {}, "does not tell which experts"),
        ({"pipeline_parallel_size": 2}, {}, "pipeline_parallel_size: 1"),
        ({"enable_prefix_caching": False}, {}, "enable_prefix_caching: true"),
        ({}, {"use_torch_compile": True}, "use_torch_compile: false"),
    ],
)
def test_replay_that_cannot_be(
    rollout: dict[str, Any], trainer: dict[str, Any], why: str, tiny_model: Path
) -> None:
    assert why in refused(config(tiny_model, trainer, router_replay=True, **rollout))


def test_replay_needs_experts(tiny_model: Path, tmp_path: Path) -> None:
    report = checked(config(tiny_model, router_replay=True), tmp_path)
    assert any("has no experts" in e.message for e in report.errors)
    folder = tiny.make(tmp_path / "m", family="qwen3_moe", **families.TINY["qwen3_moe"])
    report = checked(config(folder, router_replay=True), tmp_path)
    assert not report.errors, report.errors
    assert (
        report.plan is not None
        and report.plan.learner.router_replay
        and report.plan.engines[0].router_replay
    )
    assert any("4 bytes of each stored token" in note for note in report.notes)
    off = checked(config(folder, router_replay=False), tmp_path)
    assert off.plan is not None and not off.plan.learner.router_replay


@pytest.mark.parametrize(
    ("family", "whole"), [("llama4", "Llama4"), ("qwen3_5", None), ("gemma3", None)]
)
def test_a_text_model_that_vllm_serves_with_its_tower(
    family: str, whole: str | None, tmp_path: Path
) -> None:
    """Of Gemma 3 transformers trains what vLLM serves, of Qwen3.5 vLLM serves what transformers
    trains; of Llama 4 neither.
    """
    folder = families.with_tower(family, tmp_path / "m")
    tiny.tokenizer().save_pretrained(folder)

    def said(**rollout: Any) -> list[str]:
        return [
            e.message
            for e in checked(config(folder, **rollout), tmp_path).errors
            if "vLLM serves" in e.message
        ]

    assert said(engine_type="transformers") == []
    assert (
        said(extra_engine_args={"hf_overrides": {"architectures": [f"{whole}ForCausalLM"]}}) == []
    )
    told = said()
    assert len(told) == bool(whole)
    assert whole is None or f"{whole}ForConditionalGeneration whole" in told[0]
    assert not any(
        "vLLM serves" in e.message
        for e in checked({**config(folder), "mode": "bench"}, tmp_path).errors
    )


def test_models_that_are_trained_without_their_towers() -> None:
    from transformers.models.auto import modeling_auto as tables

    whole = {
        **tables.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
        **tables.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    }
    trained = tables.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    assert {
        kind for kind in trained if whole.get(kind, trained[kind]) != trained[kind]
    } == TEXTS_ALONE | TEXT_CLASSES.keys()


def test_an_adapter_alone_for_the_language_model_of_a_whole(tmp_path: Path) -> None:
    folder = families.with_tower("qwen3_5", tmp_path / "m")
    tiny.tokenizer().save_pretrained(folder)

    def said(**more: Any) -> list[str]:
        given = config(folder)
        given["model"] |= {"lora_configs": [{"lora_rank": 4, **more}]}
        return [e.message for e in checked(given, tmp_path).errors]

    assert any("write merge: true" in m for m in said()) and not any(
        "write merge: true" in m for m in said(merge=True)
    )


def test_an_adapter_alone_for_latent_attention(tmp_path: Path) -> None:
    folder = families.make("deepseek_v3", tmp_path / "m", words=True)

    def said(engine_type: str, **more: Any) -> list[str]:
        given = config(folder, engine_type=engine_type)
        given["model"] |= {"lora_configs": [{"lora_rank": 4, **more}]}
        return [str(e) for e in checked(given, tmp_path).errors if "latent attention" in str(e)]

    (text,) = said("vllm")
    assert text.startswith("model.lora_configs[0].merge") and "write merge: true" in text
    assert not said("vllm", merge=True) and not said("transformers")


@pytest.mark.e2e
def test_an_adapter_alone_beside_experts(tmp_path: Path) -> None:
    """vLLM's own LoRA layers, which it has where it captures graphs, are around the experts too."""
    folder = tiny.make(tmp_path / "m", family="qwen3_moe", **families.TINY["qwen3_moe"])

    def said(merge: bool | None = None, **rollout: Any) -> list[str]:
        given = config(folder, **rollout)
        given["model"] |= {"lora_configs": [{"lora_rank": 4, "merge": merge}]}
        return [str(e) for e in checked(given, tmp_path).errors if "own LoRA layers" in str(e)]

    (text,) = said(enforce_eager=False)
    assert (
        "explorer.rollout_model.enforce_eager" in text
        and "Write true" in text
        and "merge: true" in text
    )
    assert said(enforce_eager=True, fully_sharded_loras=True) and not said(enforce_eager=True)
    assert not said(enforce_eager=False, merge=True)
    offline = config(folder, enforce_eager=False) | {
        "mode": "train",
        "algorithm": {"algorithm_type": "sft"},
    }
    offline["model"] |= {"lora_configs": [{"lora_rank": 4}]}
    offline["buffer"] = {
        "train_batch_size": 4,
        "trainer_input": {"experience_buffer": {"path": "rft.testing.tiny:copy_tasks"}},
    }
    report = checked(offline, tmp_path)
    assert not report.errors, "nothing is published where no engine samples"
    assert report.plan is not None and report.plan.trainer.alone


def test_a_library_is_imported_before_the_model_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny.make(tmp_path / "m")
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "rft_checked"}))
    (tmp_path / "rft_registers.py").write_text(REGISTERS)
    (tmp_path / "rft_does_not.py").write_text("")
    (tmp_path / "rft_fails.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(str(tmp_path))

    def said(library: str) -> list[str]:
        given = config(folder)
        given["model"]["external_lib"] = library
        return [str(e) for e in checked(given, tmp_path).errors]

    assert any("does not know" in text for text in said("rft_does_not"))
    assert any(
        "model.external_lib: cannot be imported: ZeroDivisionError" in text
        for text in said("rft_fails")
    )
    assert any("No module named 'rft_is_not_there'" in text for text in said("rft_is_not_there"))
    assert not any("does not know" in text for text in said("rft_registers"))


def test_weights_that_are_stored_quantized(tmp_path: Path) -> None:
    folder = tiny.make(tmp_path / "m")
    path = folder / "config.json"
    path.write_text(
        json.dumps(
            {**json.loads(path.read_text()), "quantization_config": {"quant_method": "mxfp4"}}
        )
    )
    report = checked(config(folder), tmp_path)
    assert any("stored as mxfp4" in e.message and "bfloat16" in e.message for e in report.errors)
