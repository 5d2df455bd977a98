"""The engines: those of the policy, and the auxiliary models beside it.

Part of `resolve`; the same rules hold here.  Invariant: entries of `explorer.auxiliary_models` that differ in nothing but their name are
one model, which is started once and found under each of the names.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from rft.config import spread, turns
from rft.config.plan import Facts
from rft.config.problems import Problems
from rft.config.schema.explorer import AuxiliaryModelConfig, ServedModelConfig
from rft.config.schema.model import ExternalModelConfig
from rft.config.schema.root import RunConfig
from rft.engine.settings import AuxiliarySettings, EngineSettings, ExternalSettings

_SAYS_WHO_ASKS = "whoever asks an auxiliary model says how its answer is sampled"
_UNUSED = {  # keys of an auxiliary model that cannot change anything
    "max_response_tokens": _SAYS_WHO_ASKS,
    "min_response_tokens": _SAYS_WHO_ASKS,
    "repetition_penalty": _SAYS_WHO_ASKS,
    "ignore_eos": _SAYS_WHO_ASKS,
    "enable_prompt_truncation": "a prompt that is too long is refused",
    "enable_history": "calls of auxiliary models are not trained on",
    "use_v1": "vLLM has no other engine",
    "fully_sharded_loras": "its weights have no adapter",
    "max_cpu_loras": "its weights have no adapter",
}
_VLLM_ONLY = {"enable_chunked_prefill": True, "disable_log_stats": True, "enable_log_requests": False}


def gpus(model: ServedModelConfig) -> int:
    """Of one engine."""
    return model.tensor_parallel_size * model.pipeline_parallel_size


def copies(model: ServedModelConfig) -> int:
    """Engines in all; a copy of data_parallel_size is an engine of its own."""
    return model.engine_num * model.data_parallel_size


def stages(model: ServedModelConfig) -> str:
    return f" x pipeline_parallel_size {model.pipeline_parallel_size}" if model.pipeline_parallel_size > 1 else ""


# ---------------------------------------------------------------- the policy


def engines(
    config: RunConfig, facts: Facts, lengths: tuple[int, int, int], device: str, find: Callable[[str], str], p: Problems
) -> tuple[EngineSettings, ...]:
    """The policy's engines."""
    model, e, key = config.model, config.explorer.rollout_model, "explorer.rollout_model"
    if e.engine_type == "external":
        p.error(
            f"{key}.engine_type",
            "a server gives no token ids and takes no new weights, so it cannot be the policy; name a local model here, and the server "
            "in explorer.auxiliary_models",
            given="external",
        )
    if e.ignore_eos:
        p.warn(f"{key}.ignore_eos: every response is written up to max_tokens, in training and evaluation")
    template = model.custom_chat_template
    if model.chat_template_path is not None:
        try:
            template = facts.read_text(find(model.chat_template_path))
        except OSError as error:
            p.error("model.chat_template_path", f"cannot be read: {error.strerror}", given=model.chat_template_path)
    if model.trust_remote_code:
        p.warn("model.trust_remote_code: Python code from the model's folder will run with your rights")
    if e.data_parallel_size > 1:
        p.derive(f"{key}.engine_num", copies(e), f"engine_num {e.engine_num} x data_parallel_size {e.data_parallel_size}")
    shared = _shared(config, facts, e, key, device, lengths[0], p)
    return tuple(
        EngineSettings(
            **shared,
            name=f"{e.name or 'engine'}-{i}",
            model_path=find(model.model_path),
            tokenizer_path=None if model.tokenizer_path is None else find(model.tokenizer_path),
            max_model_len=lengths[0],
            max_prompt_tokens=lengths[1],
            enable_prefix_caching=e.enable_prefix_caching and not config.deterministic,
            seed=(config.seed if e.seed is None else e.seed) + i,
            trust_remote_code=model.trust_remote_code,
            chat_template=template,
            chat_template_kwargs=_thinking(model.enable_thinking),
            tokenization_check=e.tokenization_check,
            deterministic=config.deterministic,
            extra_engine_args=_engine_args(config, shared["engine_type"]),
        )
        for i in range(copies(e))
    )


def _engine_args(config: RunConfig, engine_type: str) -> dict[str, Any]:
    """`model.override_config` has to hold for the engine too, or its log-probs would be another model's."""
    override, given = spread.overrides(config), dict(config.explorer.rollout_model.extra_engine_args)
    if not override:
        return given
    return {"hf_overrides": dict(override), **given} if engine_type == "vllm" else {**override, **given}


# ---------------------------------------------------------------- models beside it


def auxiliary_names(config: RunConfig) -> list[str]:
    """Of all auxiliary models, in the order of the list."""
    return [model.name or f"auxiliary_model_{i}" for i, model in enumerate(config.explorer.auxiliary_models)]


def distinct(config: RunConfig) -> list[int]:
    """Places of the auxiliary models that are started: of equal ones the first."""
    first: dict[str, int] = {}
    for i, model in enumerate(config.explorer.auxiliary_models):
        first.setdefault(_without_name(model), i)
    return list(first.values())


def auxiliary_gpus(config: RunConfig, i: int, total: int, per_node: int, p: Problems) -> list[int]:
    """GPUs of each engine of auxiliary model `i`; none for one that needs none."""
    model, key = config.explorer.auxiliary_models[i], f"explorer.auxiliary_models[{i}]"
    if model.device == "cpu" or (model.device == "auto" and not total) or _is_external(model):
        return []
    if not total:
        p.error(
            f"{key}.device",
            "is cuda, but no GPU was found and none is declared; write cluster.gpu_per_node, or use cpu",
            given="cuda",
        )
    elif gpus(model) > per_node:
        p.error(
            f"{key}.tensor_parallel_size",
            f"is {model.tensor_parallel_size}{stages(model)}, but a node has {per_node} GPUs and an engine stays in one",
            given=model.tensor_parallel_size,
        )
    return [gpus(model)] * copies(model)


def auxiliary(
    config: RunConfig, facts: Facts, max_model_len: int, total: int, find: Callable[[str], str], p: Problems
) -> tuple[AuxiliarySettings, ...]:
    """Every auxiliary model once, in the order of the list.  `max_model_len` is the policy's; `total`: GPUs of the cluster."""
    models = config.explorer.auxiliary_models
    taken: dict[str, int] = {}
    names: dict[str, list[str]] = {}
    for i, (model, name) in enumerate(zip(models, auxiliary_names(config), strict=True)):
        if name in taken and _without_name(models[taken[name]]) != _without_name(model):
            p.error(
                f"explorer.auxiliary_models[{i}].name", f"is the name of explorer.auxiliary_models[{taken[name]}] too", given=name
            )
        taken.setdefault(name, i)
        same = names.setdefault(_without_name(model), [])
        if name not in same:
            same.append(name)
    return tuple(
        _auxiliary(config, facts, i, tuple(names[_without_name(models[i])]), max_model_len, total, find, p)
        for i in distinct(config)
    )


def _auxiliary(
    config: RunConfig,
    facts: Facts,
    i: int,
    names: tuple[str, ...],
    max_model_len: int,
    total: int,
    find: Callable[[str], str],
    p: Problems,
) -> AuxiliarySettings:
    model, key = config.explorer.auxiliary_models[i], f"explorer.auxiliary_models[{i}]"
    for name, why in _UNUSED.items():
        if name in model.model_fields_set and getattr(model, name) != type(model).model_fields[name].default:
            p.warn(f"{key}.{name} {getattr(model, name)} has no effect: {why}")
    if _is_external(model):
        return AuxiliarySettings(
            names=names, engines=(_server(config, model, key, names[0], max_model_len, p),), max_concurrent=model.max_concurrent
        )
    if model.external_model_config is not None:
        p.warn(f"{key}.external_model_config has no effect: engine_type is {model.engine_type}")
    device = ("cuda" if total else "cpu") if model.device == "auto" else model.device
    length = model.max_model_len or max_model_len
    shared = _shared(config, facts, model, key, device, length, p)
    trusted = config.model.trust_remote_code if model.trust_remote_code is None else model.trust_remote_code
    if model.task == "score" and (model.tool_call_parser or model.reasoning_parser):
        p.error(f"{key}.task", "score: a model that gives numbers has no answer to parse; leave the parsers out", given="score")
    if model.task == "score" and model.engine_type == "scripted":
        p.error(f"{key}.task", "score: the scripted engine writes texts; use vllm or transformers", given="score")
    if trusted and not config.model.trust_remote_code:
        p.warn(f"{key}.trust_remote_code: Python code from the model's folder will run with your rights")
    if model.data_parallel_size > 1:
        p.derive(
            f"{key}.engine_num", copies(model), f"engine_num {model.engine_num} x data_parallel_size {model.data_parallel_size}"
        )
    seed = config.seed if model.seed is None else model.seed
    engines = tuple(
        EngineSettings(
            **shared,
            name=f"aux-{names[0]}-{j}",
            task=model.task,
            model_path=find(model.model_path),
            tokenizer_path=None if model.tokenizer_path is None else find(model.tokenizer_path),
            max_model_len=length,
            max_prompt_tokens=model.max_prompt_tokens,
            enable_prefix_caching=model.enable_prefix_caching,
            seed=seed + j,
            trust_remote_code=trusted,
            chat_template=_template(model.chat_template, find),
            chat_template_kwargs=_thinking(model.enable_thinking),
            extra_engine_args=dict(model.extra_engine_args),
            request_timeout_s=model.request_timeout,
            fixed_weights=True,
        )
        for j in range(copies(model))
    )
    return AuxiliarySettings(names=names, engines=engines, max_concurrent=model.max_concurrent)


def _server(
    config: RunConfig, model: AuxiliaryModelConfig, key: str, name: str, max_model_len: int, p: Problems
) -> EngineSettings:
    e = model.external_model_config or ExternalModelConfig()
    ours = {"engine_type", "name", "model_path", "external_model_config", "max_concurrent", "request_timeout", "task"}
    if unused := sorted(
        n for n in model.model_fields_set - ours - set(_UNUSED) if getattr(model, n) != type(model).model_fields[n].default
    ):
        p.warn(f"{key}: {', '.join(f'{n} {getattr(model, n)!r}' for n in unused)}: no effect, the server decides that")
    if model.task == "score":
        p.error(f"{key}.task", "score: a server that chats gives no scores; use engine_type vllm or transformers", given="score")
    known = [h for h in e.headers if h in e.header_envs]
    if known:
        p.error(f"{key}.external_model_config.headers", f"{', '.join(known)} also stand in header_envs; write one of them")
    return EngineSettings(
        engine_type="external",
        name=f"aux-{name}-0",
        model_path=model.model_path,
        max_model_len=model.max_model_len or max_model_len,
        seed=config.seed,
        request_timeout_s=model.request_timeout,
        start_timeout_s=model.start_timeout,
        fixed_weights=True,
        max_concurrent=model.max_concurrent,
        external=ExternalSettings(
            model_name=e.model_name or model.model_path,
            base_url=e.base_url,
            base_url_env=e.base_url_env,
            api_key_env=e.api_key_env,
            headers=dict(e.headers),
            header_envs=dict(e.header_envs),
            requests_per_minute=e.requests_per_minute,
            max_retries=e.max_retries,
            extra_body=dict(e.extra_body),
        ),
    )


def _is_external(model: AuxiliaryModelConfig) -> bool:
    e = model.external_model_config
    return model.engine_type == "external" or (e is not None and e.enable)


def _without_name(model: AuxiliaryModelConfig) -> str:
    return model.model_copy(update={"name": None}).model_dump_json()


# ---------------------------------------------------------------- both


def _shared(
    config: RunConfig, facts: Facts, e: ServedModelConfig, key: str, device: str, max_model_len: int, p: Problems
) -> dict[str, Any]:
    """What is decided in the same way for every engine."""
    engine_type = "vllm" if e.engine_type == "external" else e.engine_type  # refused, or not asked for here
    dtype = e.dtype if e.dtype != "auto" else ("bfloat16" if device == "cuda" else "float32")
    if e.dtype == "auto":
        p.derive(f"{key}.dtype", dtype, f"engines on {device}")
    if device == "cpu" and dtype != "float32":
        p.warn(f"{key}.dtype {dtype} on CPU: slow, and log-probs agree less well with the trainer's; float32 is meant")
    threads = e.cpu_threads or turns.threads(config, facts.cpus, copies(e))
    if e.cpu_threads is None:
        p.derive(f"{key}.cpu_threads", threads, "the machine's cores")
    if engine_type == "transformers":
        for name, default in _VLLM_ONLY.items():
            if getattr(e, name) != default:
                p.warn(f"{key}.{name} has no effect: it is for engine_type vllm")
    if engine_type == "vllm" and not e.enable_chunked_prefill:
        p.warn(f"{key}.enable_chunked_prefill: vLLM advises against false for models that generate text")
        if e.max_num_batched_tokens is not None and e.max_num_batched_tokens < max_model_len:
            p.error(
                f"{key}.max_num_batched_tokens",
                f"is {e.max_num_batched_tokens}; without enable_chunked_prefill a step must hold a whole text of max_model_len "
                f"{max_model_len}",
                given=e.max_num_batched_tokens,
            )
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        if engine_type != "vllm" and getattr(e, name) > 1:
            p.error(f"{key}.{name}", f"the {engine_type} engine knows 1 only", given=getattr(e, name))
    if e.enable_auto_tool_choice and e.tool_call_parser is None:
        p.error(f"{key}.tool_call_parser", "enable_auto_tool_choice needs the name of vLLM's parser for this model, e.g. hermes")
    if e.tool_call_parser is not None and not e.enable_auto_tool_choice:
        p.note(f"{key}.tool_call_parser {e.tool_call_parser} has no effect without enable_auto_tool_choice: true")
    return {
        "engine_type": engine_type,
        "device": device,
        "dtype": dtype,
        "tensor_parallel_size": e.tensor_parallel_size,
        "pipeline_parallel_size": e.pipeline_parallel_size,
        "max_num_seqs": e.max_num_seqs,
        "max_num_batched_tokens": e.max_num_batched_tokens,
        "gpu_memory_utilization": e.gpu_memory_utilization,
        "kv_cache_bytes": e.kv_cache_bytes,
        "enforce_eager": device == "cpu" if e.enforce_eager is None else e.enforce_eager,
        "enable_chunked_prefill": e.enable_chunked_prefill,
        "log_requests": e.enable_log_requests,
        "log_stats": not e.disable_log_stats,
        "block_size": e.block_size,
        "cpu_threads": threads,
        "tool_call_parser": e.tool_call_parser if e.enable_auto_tool_choice else None,
        "reasoning_parser": e.reasoning_parser,
        "start_timeout_s": e.start_timeout,
        "stall_timeout_s": e.stall_timeout,
        "step_timeout_s": e.step_timeout,
    }


def _thinking(enabled: bool | None) -> dict[str, Any]:
    return {} if enabled is None else {"enable_thinking": enabled}


def _template(given: str | None, find: Callable[[str], str]) -> str | None:
    return given if given is None or re.search(r"[{}]", given) else find(given)
