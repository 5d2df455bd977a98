"""vLLM beside the policy: scores, log-probs of given tokens, parsers; and every key of an engine or
of sampling reaches it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rft.config.load import from_dict
from rft.config.plan import Facts
from rft.config.resolve import resolve
from rft.engine.built_in import make
from rft.engine.chat import load_tokenizer
from rft.engine.environment import cpu_environment
from rft.engine.local_engine import Parsers
from rft.engine.settings import EngineSettings
from rft.engine.vllm_args import engine_args, sampling_params
from rft.errors import ConfigError
from rft.testing import tiny
from rft.testing.engine_contract import ask
from rft.types.completion import Completion, Turn
from rft.types.ports import GenerateRequest
from rft.types.sessions import pack_turns, unpack_turns
from rft.types.task import SamplingArgs
from rft.workflow.tools import find

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]
CHAT = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "good day"}]


async def started(folder: Path, patch: pytest.MonkeyPatch, **more: Any) -> Any:
    settings = EngineSettings(
        model_path=str(folder),
        name="aux-x-0",
        max_model_len=200,
        max_num_seqs=8,
        kv_cache_bytes=1 << 26,
        fixed_weights=True,
        **more,
    )
    for name, value in cpu_environment(settings).items():
        patch.setenv(name, value)
    return await make(settings)


@pytest.mark.slow  # an engine of its own
async def test_a_reward_model_gives_the_models_logits(
    tmp_path: Path, environment: pytest.MonkeyPatch
) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = tiny.make(tmp_path / "rm", labels=2)
    engine = await started(folder, environment, task="score")
    try:
        got = await engine.classify(CHAT)
        await engine.health()
        with pytest.raises(ValueError, match="no answers"):
            await engine.generate(ask())
    finally:
        await engine.close()
    ids = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        CHAT, return_tensors="pt", return_dict=False
    )
    with torch.no_grad():
        want = (
            AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)(ids)
            .logits[0]
            .numpy()
        )
    assert np.abs(np.array(got) - want).max() < 1e-4


# ---------------------------------------------------------------- parsers


def parsed(
    folder: Path,
    text: str,
    tools: tuple[dict[str, Any], ...] = (),
    template_args: dict[str, Any] | None = None,
    opened: bool = False,
    **named: str,
) -> Completion:
    settings = EngineSettings(model_path=str(folder), **named)  # type: ignore[arg-type]
    tokenizer = load_tokenizer(settings)
    tokenizer.add_tokens(["<think>", "</think>"])
    ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    c = Completion(
        prompt_tokens=np.array([1], np.int32),
        tokens=np.array(ids, np.int32),
        logprobs=np.zeros(len(ids), np.float32),
        text=text,
        finish_reason="stop",
        version_spans=(),
        sampling=SamplingArgs(),
        in_thought=opened,
    )
    return Parsers(settings, tokenizer)(
        c, GenerateRequest(tools=tools, chat_template_args=template_args or {})
    )


TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}


def test_tool_calls_are_taken_out(tiny_model: Path) -> None:
    text = 'Let me see.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    c = parsed(tiny_model, text, (TOOL,), tool_call_parser="hermes")
    assert c.text == "Let me see."
    (call,) = c.tool_calls
    assert (
        call["function"]["name"] == "add"
        and json.loads(call["function"]["arguments"]) == {"a": 1}
        and call["type"] == "function"
    )
    assert c.message == {"role": "assistant", "content": "Let me see.", "tool_calls": [call]}
    assert (
        parsed(tiny_model, text, (TOOL,), tool_call_parser="hermes").tool_calls == c.tool_calls
    ), "equal answers give equal ids"
    assert call["id"].isalnum() and len(call["id"]) == 9, "Mistral's templates take no others"
    plain = parsed(tiny_model, text, (), tool_call_parser="hermes")
    assert plain.text == text and plain.tool_calls == (), "a request without tools is not looked at"


def test_half_a_character_in_a_call_can_be_stored(tiny_model: Path) -> None:
    """A group with such an answer was refused by the buffer, and a client of `rft serve` was told
    500.
    """
    c = parsed(
        tiny_model,
        '<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}</tool_call>',
        (TOOL,),
        tool_call_parser="hermes",
    )
    assert c.tool_calls[0]["function"] == {"name": "add", "arguments": '{"a": "\\ud800"}'}
    assert (
        unpack_turns(pack_turns([Turn(messages=(), completion=c)]))[0].completion.tool_calls
        == c.tool_calls
    )
    (call,) = find(c)
    assert "no JSON" in call.error


@pytest.mark.parametrize("name", ["deepseek_r1", "qwen3"])
def test_reasoning_is_taken_out(name: str, tiny_model: Path) -> None:
    c = parsed(tiny_model, "<think>one and one</think>It is 2.", reasoning_parser=name)
    assert (c.reasoning, c.text) == ("one and one", "It is 2.")
    both = '<think>hm</think>So:<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    c = parsed(tiny_model, both, (TOOL,), reasoning_parser=name, tool_call_parser="hermes")
    assert (c.reasoning, c.text, len(c.tool_calls)) == ("hm", "So:", 1)


PAY = '<tool_call>{"name": "add", "arguments": {"a": %d}}</tool_call>'


@pytest.mark.parametrize(
    "reasoning", [{}, {"reasoning_parser": "deepseek_r1"}, {"reasoning_parser": "qwen3"}]
)
@pytest.mark.parametrize(
    ("text", "opened", "made"),
    [
        (f"<think>Perhaps {PAY % 500}? No.</think>I cannot.", False, []),
        (f"<think>Perhaps {PAY % 500}? No.</think>{PAY % 5}", False, [5]),
        (f"Perhaps {PAY % 500}? No.</think>{PAY % 5}", True, [5]),
        (f"Perhaps {PAY % 500}", True, []),
        (f"<think>Perhaps {PAY % 500}", False, []),
    ],
)
def test_parsers_find_no_call_in_a_thought(
    reasoning: dict[str, str], text: str, opened: bool, made: list[int], tiny_model: Path
) -> None:
    """Finding G2."""
    c = parsed(tiny_model, text, (TOOL,), opened=opened, tool_call_parser="hermes", **reasoning)
    assert [json.loads(call["function"]["arguments"])["a"] for call in c.tool_calls] == made
    assert [call.arguments["a"] for call in find(c)] == made


def test_a_request_says_whether_it_is_thought_about(tiny_model: Path) -> None:
    """A taskset's `format.enable_thinking` goes before the model's, for what reads the answer too."""
    plain = parsed(
        tiny_model, "It is 2.", template_args={"enable_thinking": False}, reasoning_parser="qwen3"
    )
    assert (plain.reasoning, plain.text) == ("", "It is 2.")
    c = parsed(
        tiny_model,
        "one and one</think>It is 2.",
        template_args={"enable_thinking": True},
        reasoning_parser="deepseek_v3",
    )
    assert (c.reasoning, c.text) == ("one and one", "It is 2.")


def test_parsers_that_vllm_does_not_have(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="no reasoning_parser 'nonsense'"):
        parsed(tiny_model, "", reasoning_parser="nonsense")
    with pytest.raises(ConfigError, match="no tool_call_parser 'nonsense'"):
        parsed(tiny_model, "", tool_call_parser="nonsense")


# ---------------------------------------------------------------- keys

# key of an engine: (another value, vLLM's argument, what it becomes)
KEYS: dict[str, tuple[Any, str, Any]] = {
    "tensor_parallel_size": (2, "tensor_parallel_size", 2),
    "pipeline_parallel_size": (2, "pipeline_parallel_size", 2),
    "dtype": ("float16", "dtype", "float16"),
    "seed": (7, "seed", 7),
    "gpu_memory_utilization": (0.5, "gpu_memory_utilization", 0.5),
    "enforce_eager": (True, "enforce_eager", True),
    "enable_prefix_caching": (False, "enable_prefix_caching", False),
    "enable_chunked_prefill": (False, "enable_chunked_prefill", False),
    "max_num_seqs": (17, "max_num_seqs", 17),
    "max_num_batched_tokens": (4096, "max_num_batched_tokens", 4096),
    "block_size": (64, "block_size", 64),
    "kv_cache_bytes": (1 << 27, "kv_cache_memory_bytes", 1 << 27),
    "max_model_len": (90, "max_model_len", 90),
    "trust_remote_code": (True, "trust_remote_code", True),
    "enable_log_requests": (True, "enable_log_requests", True),
    "disable_log_stats": (False, "disable_log_stats", False),
    # what this vLLM does not have is named
    "extra_engine_args": ({"swap_space": 1}, "", "not arguments of vLLM"),
}
_OF_MODEL = {"max_model_len", "trust_remote_code"}  # keys of the section `model`
OTHERWISE = {  # what is not vLLM's to know, and who reads it
    **dict.fromkeys(
        ("name", "engine_type", "engine_num", "data_parallel_size", "device"),
        "the launcher: which engines, and where",
    ),
    **dict.fromkeys(
        ("cpu_threads", "start_timeout", "stall_timeout", "step_timeout"),
        "the environment and the clocks of the engine's process",
    ),
    "tokenization_check": "Chat",
    "ignore_eos": "SamplingArgs",
    **dict.fromkeys(
        ("tool_call_parser", "reasoning_parser"),
        "Parsers, which are vLLM's",
    ),
    **dict.fromkeys(("enable_openai_api", "base_port", "api_key"), "the explorer's endpoint"),
    **dict.fromkeys(
        ("fully_sharded_loras", "max_cpu_loras"), "not active: adapters come with LoRA"
    ),
    "router_replay": "of mixtures of experts: test_vllm_experts.py",
}


def planned(folder: Path, **values: Any) -> EngineSettings:
    of_model = {key: values.pop(key) for key in _OF_MODEL & set(values)}
    config = {
        "model": {
            "model_path": str(folder),
            "max_prompt_tokens": 30,
            "max_response_tokens": 30,
            **of_model,
        },
        "cluster": {"gpu_per_node": 8},
        "buffer": {
            "batch_size": 4,
            "total_steps": 1,
            "explorer_input": {"default_workflow_type": "w", "taskset": {"path": "x.jsonl"}},
        },
        "explorer": {"rollout_model": values},
    }
    if "max_model_len" in of_model:
        del config["model"]["max_response_tokens"]  # type: ignore[attr-defined]
    return resolve(from_dict(config), Facts(cpus=2, gpus=8)).engines[0]


@pytest.mark.parametrize("key", KEYS)
def test_a_key_reaches_vllm(key: str, tiny_model: Path) -> None:
    value, name, wanted = KEYS[key]
    settings = planned(tiny_model, **{key: value})
    if not name:
        with pytest.raises(ConfigError, match=wanted):
            engine_args(settings)
        return
    assert getattr(engine_args(settings), name) == wanted
    assert getattr(engine_args(planned(tiny_model)), name) != wanted


def test_every_key_has_its_place() -> None:
    from rft.config.schema.explorer_section import InferenceModelConfig

    assert set(InferenceModelConfig.model_fields) == {*KEYS, *OTHERWISE} - _OF_MODEL


def test_a_copy_is_an_engine_of_its_own() -> None:
    config = {
        "model": {"model_path": "m", "max_prompt_tokens": 9, "max_response_tokens": 9},
        "cluster": {"gpu_per_node": 8},
    }
    config |= {"explorer": {"rollout_model": {"engine_num": 2, "data_parallel_size": 2}}}
    config |= {
        "buffer": {
            "total_steps": 1,
            "explorer_input": {"default_workflow_type": "w", "taskset": {"path": "x.jsonl"}},
        }
    }
    plan = resolve(from_dict(config), Facts(cpus=2, gpus=8))
    assert len(plan.engines) == 4 and len({e.seed for e in plan.engines}) == 4
    assert (plan.cluster.gpus_per_engine, plan.learner.world_size) == (1, 4)


def test_every_sampling_value_reaches_vllm() -> None:
    others: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.2,
        "max_tokens": 33,
        "min_tokens": 2,
        "stop": ("x",),
        "ignore_eos": True,
        "seed": 11,
    }
    assert set(others) == set(SamplingArgs.__struct_fields__)
    params = sampling_params(SamplingArgs(**others), 3, 100)
    for name, value in others.items():
        assert getattr(params, name) == (list(value) if isinstance(value, tuple) else value), name
    assert params.n == 3
