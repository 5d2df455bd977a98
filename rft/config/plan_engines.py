"""The engines: those of the policy, and the auxiliary models beside it.  Part of `resolve`.

Invariant: entries of `explorer.auxiliary_models` that differ in nothing but their name are one
model, which is started once and found under each of the names.
"""

from __future__ import annotations

import re
from typing import Any

from rft.config.context import Context, filled
from rft.config.engine_rules import check_engine
from rft.config.hints import value_hint
from rft.config.plan_trainer import overrides
from rft.config.roles import apart, explores, joins, trains
from rft.config.schema.explorer_section import AuxiliaryModelConfig, ServedModelConfig
from rft.config.schema.root import RunConfig
from rft.engine.settings import (
    ENGINE_TYPES,
    SELF,
    AuxiliarySettings,
    EngineSettings,
    ExternalModelConfig,
)
from rft.errors import ConfigError

_NO_POLICY = "a server returns no token ids and takes no new weights, so it cannot be the policy"
_VLLM_ONLY = (
    "gpu_memory_utilization enforce_eager enable_prefix_caching enable_chunked_prefill "
    "max_num_batched_tokens block_size "
    "disable_log_stats enable_log_requests"
).split()


def gpus(model: ServedModelConfig) -> int:
    """Of one engine."""
    return model.tensor_parallel_size * model.pipeline_parallel_size


def copies(model: ServedModelConfig) -> int:
    """Engines in all; each copy of data_parallel_size is a separate engine."""
    return model.engine_num * model.data_parallel_size


def stages(model: ServedModelConfig) -> str:
    return (
        f" x pipeline_parallel_size {model.pipeline_parallel_size}"
        if model.pipeline_parallel_size > 1
        else ""
    )


def lengths(ctx: Context) -> tuple[int, int, int]:
    """(max_model_len, max_prompt_tokens, max_response_tokens)."""
    m = ctx.config.model
    total = m.max_model_len
    prompt = m.max_prompt_tokens
    response = m.max_response_tokens
    if total is None and (prompt is None or response is None):
        ctx.error(
            "model.max_model_len",
            "the lengths are not known; write max_prompt_tokens and max_response_tokens, or "
            "max_model_len",
        )
        return 2, 1, 1
    if total is None:
        assert prompt is not None and response is not None
        total = prompt + response
        ctx.derive("model.max_model_len", total, "max_prompt_tokens + max_response_tokens")
    if response is None:
        response = total - prompt if prompt is not None else total - total // 2
        ctx.derive(
            "model.max_response_tokens",
            response,
            "the rest of max_model_len" if prompt is not None else "half of max_model_len",
        )
    if prompt is None:
        prompt = total - response
        ctx.derive("model.max_prompt_tokens", prompt, "the rest of max_model_len")
    for name, length in (("max_prompt_tokens", prompt), ("max_response_tokens", response)):
        if getattr(m, name) is not None and length >= total:
            other = "a response" if name == "max_prompt_tokens" else "a prompt"
            ctx.error(
                f"model.{name}",
                f"is {length} of max_model_len {total} tokens, which leaves none for {other}",
            )
            return 2, 1, 1
    if prompt + response > total:
        ctx.error(
            "model.max_model_len",
            f"is {total} tokens, but max_prompt_tokens {prompt} + max_response_tokens {response} = "
            f"{prompt + response}; "
            "raise max_model_len or lower one of them",
        )
        return 2, 1, 1
    if m.min_response_tokens > response:
        ctx.error("model.min_response_tokens", f"is more than max_response_tokens ({response})")
    return total, prompt, response


# ---------------------------------------------------------------- the policy


def engines(
    ctx: Context, lengths: tuple[int, int, int], device: str, top_logprobs: int
) -> tuple[EngineSettings, ...]:
    """The policy's engines."""
    model = ctx.config.model
    e = ctx.config.explorer.rollout_model
    key = "explorer.rollout_model"
    if model.external_model.enable:
        return (_policy_server(ctx, lengths),)
    if e.engine_type == "external":
        ctx.error(
            f"{key}.engine_type",
            f"{_NO_POLICY}; name a local model here, and the server in explorer.auxiliary_models",
        )
    check_engine(ctx)
    if e.ignore_eos:
        ctx.warn(
            f"{key}.ignore_eos: every response is written up to max_tokens, in training and "
            f"evaluation"
        )
    template = model.custom_chat_template
    if template is not None and not re.search(r"[{}]", template):
        try:
            template = ctx.facts.read_text(ctx.find(template))
        except OSError as error:
            ctx.error("model.custom_chat_template", f"cannot be read: {error.strerror}")
    shared = _shared(ctx, e, key, device, lengths[0])
    explorer = f"{ctx.config.explorer.name}-" if joins(ctx.config) else ""
    return tuple(
        filled(
            EngineSettings,
            e,
            **shared,
            name=f"{explorer}{e.name or 'engine'}-{i}",
            model_path=ctx.find_model(model.model_path),
            tokenizer_path=None
            if model.tokenizer_path is None
            else ctx.find_model(model.tokenizer_path),
            max_model_len=lengths[0],
            max_prompt_tokens=lengths[1],
            seed=(ctx.config.seed if e.seed is None else e.seed) + i,
            first_core=first,
            trust_remote_code=model.trust_remote_code,
            chat_template=template,
            chat_template_kwargs=_thinking(model.enable_thinking),
            image_processor_args=model.image_processor_args.written(),
            extra_engine_args=_engine_args(ctx.config, shared["engine_type"]),
            top_logprobs=top_logprobs,
        )
        for i, first in enumerate(_first_cores(ctx, e, key, device, shared["cpu_threads"]))
    )


def _policy_server(ctx: Context, lengths: tuple[int, int, int]) -> EngineSettings:
    """A server in the policy's place: it can be evaluated, and nothing else."""
    e = ctx.config.model.external_model
    key = "model.external_model"
    if ctx.config.mode != "bench":
        ctx.error(
            f"{key}.enable",
            f"{_NO_POLICY}: it can be evaluated with mode: bench, not trained, and not with mode: "
            f"{ctx.config.mode}",
        )
    if not (e.model_name or ctx.config.model.model_path):
        ctx.error(f"{key}.model_name", "is required: the model's name there")
    return _behind(
        ctx,
        e,
        key,
        name="policy",
        model_path=ctx.config.model.model_path or str(e.model_name),
        max_model_len=lengths[0],
        request_timeout_s=e.request_timeout,
        max_concurrent=e.max_concurrent,
    )


def _engine_args(config: RunConfig, engine_type: str) -> dict[str, Any]:
    """`model.override_config` has to hold for the engine too, or its log-probs would be another
    model's.
    """
    override = overrides(config)
    engine_args = dict(config.explorer.rollout_model.extra_engine_args)
    if not override or engine_type not in ENGINE_TYPES:
        return engine_args
    if engine_type != "vllm":
        return {**override, **engine_args}
    return {**engine_args, "hf_overrides": {**override, **(engine_args.get("hf_overrides") or {})}}


# ---------------------------------------------------------------- models beside it


def auxiliary_names(config: RunConfig) -> list[str]:
    """Of all auxiliary models, in the order of the list."""
    return [
        model.name or f"auxiliary_model_{i}"
        for i, model in enumerate(config.explorer.auxiliary_models)
    ]


def distinct(config: RunConfig) -> list[int]:
    """Places of the auxiliary models that are started: of equal ones the first."""
    first: dict[str, int] = {}
    for i, model in enumerate(config.explorer.auxiliary_models):
        first.setdefault(_without_name(model), i)
    return list(first.values())


def auxiliary_gpus(ctx: Context, i: int, total: int, per_node: int) -> list[int]:
    """GPUs of each engine of auxiliary model `i`; none for one that needs none."""
    model = ctx.config.explorer.auxiliary_models[i]
    key = f"explorer.auxiliary_models[{i}]"
    if model.device == "cpu" or (model.device == "auto" and not total) or _is_external(model):
        return []
    if not total:
        ctx.error(
            f"{key}.device",
            "is cuda, but no GPU was found and none is declared; write cluster.gpu_per_node, or "
            "use cpu",
        )
    elif gpus(model) > per_node:
        ctx.error(
            f"{key}.tensor_parallel_size",
            f"is {model.tensor_parallel_size}{stages(model)}, but a node has {per_node} GPUs and "
            f"an engine stays in one",
        )
    return [gpus(model)] * copies(model)


def auxiliary(
    ctx: Context, max_model_len: int, total: int, top_logprobs: int
) -> tuple[tuple[AuxiliarySettings, ...], float | None]:
    """Every auxiliary model once, in the order of the list, and the decay of the moving average that
    the trainer keeps for one of them, or None.  `max_model_len` is the policy's; `total`: GPUs of
    the cluster; `top_logprobs`: most likely tokens that the algorithm reads.
    """
    models = ctx.config.explorer.auxiliary_models
    taken: dict[str, int] = {}
    names: dict[str, dict[str, None]] = {}
    for i, (model, name) in enumerate(zip(models, auxiliary_names(ctx.config), strict=True)):
        if _without_name(models[taken.setdefault(name, i)]) != _without_name(model):
            ctx.error(
                f"explorer.auxiliary_models[{i}].name",
                f"is the name of explorer.auxiliary_models[{taken[name]}] too",
            )
        if name == SELF:
            ctx.error(
                f"explorer.auxiliary_models[{i}].name",
                f"{SELF} is the policy's name as its own teacher; choose another",
            )
        names.setdefault(_without_name(model), {})[name] = None
    started = tuple(
        _auxiliary(
            ctx, i, tuple(names[_without_name(models[i])]), max_model_len, total, top_logprobs
        )
        for i in distinct(ctx.config)
    )
    return started, _average_decay(ctx, started)


def _average_decay(ctx: Context, models: tuple[AuxiliarySettings, ...]) -> float | None:
    """Return the decay of the moving average that the trainer keeps; None: it keeps none."""
    decays = {m.decay for m in models if m.decay is not None}
    if len(decays) > 1:
        ctx.error(
            "explorer.auxiliary_models",
            f"serve moving averages of {', '.join(f'{d:g}' for d in sorted(decays))}; the trainer "
            f"keeps one",
        )
    return min(decays, default=None)


def _decay(ctx: Context, model: AuxiliaryModelConfig, key: str) -> float | None:
    """Return the decay of the moving average that a model serves; None: its weights are fixed."""
    if model.moving_average is None or not explores(ctx.config.mode):
        return None
    reason = ""
    if apart(ctx.config):
        reason = "is kept by the trainer of the same command; write mode: both"
    elif model.model_path != ctx.config.model.model_path:
        reason = "is of the policy's weights; write model_path: ${model.model_path}"
    elif ctx.config.model.lora_configs:
        reason = "is of the whole model, and model.lora_configs trains an adapter; leave one out"
    elif model.task == "score" or model.engine_type not in ("vllm", "transformers"):
        reason = "is served by engine_type vllm or transformers with task: generate"
    if reason:
        ctx.error(f"{key}.moving_average", reason, given=model.moving_average)
    return model.moving_average if trains(ctx.config) else None


def _auxiliary(
    ctx: Context,
    i: int,
    names: tuple[str, ...],
    max_model_len: int,
    total: int,
    top_logprobs: int,
) -> AuxiliarySettings:
    model = ctx.config.explorer.auxiliary_models[i]
    key = f"explorer.auxiliary_models[{i}]"
    if _is_external(model):
        return AuxiliarySettings(
            names=names,
            engines=(_server(ctx, model, key, names[0], max_model_len),),
            max_concurrent=model.max_concurrent,
        )
    if model.external_model_config is not None:
        ctx.warn(f"{key}.external_model_config has no effect: engine_type is {model.engine_type}")
    device = ("cuda" if total else "cpu") if model.device == "auto" else model.device
    length = model.max_model_len or max_model_len
    shared = _shared(ctx, model, key, device, length)
    policys = ctx.config.model.trust_remote_code
    trusted = policys if model.trust_remote_code is None else model.trust_remote_code
    if model.task == "score" and (model.tool_call_parser or model.reasoning_parser):
        ctx.error(
            f"{key}.task",
            "score: a model that returns numbers has no answer to parse; leave the parsers out",
        )
    if model.task == "score" and model.engine_type == "scripted":
        ctx.error(
            f"{key}.task", "score: the scripted engine writes texts; use vllm or transformers"
        )
    if trusted and not policys:
        ctx.warn(
            f"{key}.trust_remote_code: Python code from the model's folder will run with your "
            f"rights"
        )
    seed = ctx.config.seed if model.seed is None else model.seed
    decay = _decay(ctx, model, key)
    template = model.chat_template
    engines = tuple(
        filled(
            EngineSettings,
            model,
            **shared,
            name=_engine_name(names[0], j),
            model_path=ctx.find_model(model.model_path),
            tokenizer_path=None
            if model.tokenizer_path is None
            else ctx.find_model(model.tokenizer_path),
            max_model_len=length,
            seed=seed + j,
            first_core=first,
            trust_remote_code=trusted,
            chat_template=template
            if template is None or re.search(r"[{}]", template)
            else ctx.find(template),
            chat_template_kwargs=_thinking(model.enable_thinking),
            request_timeout_s=model.request_timeout,
            fixed_weights=decay is None,
            top_logprobs=top_logprobs,
            policy_tokenizer=_policy_tokenizer(ctx, model),
        )
        for j, first in enumerate(_first_cores(ctx, model, key, device, shared["cpu_threads"]))
    )
    return AuxiliarySettings(
        names=names, engines=engines, max_concurrent=model.max_concurrent, decay=decay
    )


def _policy_tokenizer(ctx: Context, model: AuxiliaryModelConfig) -> str | None:
    policy = ctx.config.model
    path = policy.tokenizer_path or policy.model_path
    return ctx.find_model(path) if model.alignment == "text" else None


def _engine_name(name: str, number: int) -> str:
    """Return the name of an auxiliary model's engine in logs and metrics."""
    return f"{name}-{number}" if name.startswith("auxiliary_model_") else f"aux-{name}-{number}"


def _server(
    ctx: Context, model: AuxiliaryModelConfig, key: str, name: str, max_model_len: int
) -> EngineSettings:
    e = model.external_model_config or ExternalModelConfig()
    ours = set(
        "engine_type name model_path external_model_config max_concurrent request_timeout "
        "start_timeout task".split()
    )
    served_keys = sorted(type(model).model_fields.keys() - ours)
    if unused := [n for n in served_keys if model.is_changed(n)]:
        ctx.warn(
            f"{key}: {', '.join(f'{n} {getattr(model, n)!r}' for n in unused)}: no effect; the "
            f"server decides this"
        )
    if model.task == "score":
        ctx.error(
            f"{key}.task",
            "score: a server that chats gives no scores; use engine_type vllm or transformers",
        )
    return _behind(
        ctx,
        e,
        f"{key}.external_model_config",
        name=_engine_name(name, 0),
        model_path=model.model_path,
        max_model_len=model.max_model_len or max_model_len,
        request_timeout_s=model.request_timeout,
        start_timeout_s=model.start_timeout,
        max_concurrent=model.max_concurrent,
    )


def _behind(
    ctx: Context, e: ExternalModelConfig, key: str, *, model_path: str, **settings: Any
) -> EngineSettings:
    """A model behind the server of section `key`."""
    if twice := [h for h in e.headers if h in e.header_envs]:
        ctx.error(
            f"{key}.headers", f"{', '.join(twice)} also stand in header_envs; write one of them"
        )
    return EngineSettings(
        engine_type="external",
        model_path=model_path,
        seed=ctx.config.seed,
        fixed_weights=True,
        external=e.model_copy(update={"model_name": e.model_name or model_path}),
        **settings,
    )


def _is_external(model: AuxiliaryModelConfig) -> bool:
    e = model.external_model_config
    return model.engine_type == "external" or (e is not None and e.enable)


def _without_name(model: AuxiliaryModelConfig) -> str:
    return model.model_copy(update={"name": None}).model_dump_json()


# ---------------------------------------------------------------- both


def _shared(
    ctx: Context, e: ServedModelConfig, key: str, device: str, max_model_len: int
) -> dict[str, Any]:
    """What is decided in the same way for every engine."""
    # refused, or not asked for here
    engine_type = "vllm" if e.engine_type == "external" else e.engine_type
    usual = "bfloat16" if device == "cuda" else "float32"
    dtype = ctx.chosen(f"{key}.dtype", e.dtype, usual, f"engines on {device}")
    if device == "cpu" and dtype != "float32":
        ctx.warn(
            f"{key}.dtype {dtype} on CPU: slow, and log-probs agree less well with the trainer's; "
            f"float32 is meant"
        )
    # with mode colocate they take their turn together
    sharing = copies(e) if ctx.config.mode == "colocate" or gpus(e) > 1 else 1
    cpus = ctx.facts.cpus // sharing // gpus(e) * gpus(e) or gpus(e)
    threads = ctx.chosen(f"{key}.cpu_threads", e.cpu_threads, cpus, "the machine's cores")
    if e.data_parallel_size > 1:
        ctx.derive(
            f"{key}.engine_num",
            copies(e),
            f"engine_num {e.engine_num} x data_parallel_size {e.data_parallel_size}",
        )
    if engine_type == "transformers":
        e.warn_unused(key, _VLLM_ONLY, "it is for engine_type vllm", ctx)
    if engine_type == "vllm":
        _of_vllm(ctx, e, key, max_model_len)
    if engine_type not in ENGINE_TYPES:
        engine_type = ctx.find(engine_type) if ":" in engine_type else engine_type
        _own_engine(ctx, engine_type, e.extra_engine_args, key)
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        if engine_type in ENGINE_TYPES and engine_type != "vllm" and getattr(e, name) > 1:
            ctx.error(f"{key}.{name}", f"the {engine_type} engine knows 1 only")
    for name, stub in (("tool_call_parser", "openai"), ("reasoning_parser", "openai_gptoss")):
        if getattr(e, name) == stub:
            text = (
                f"{stub} reads no texts in vLLM, so every answer would fail; leave it out and "
                f"read gpt-oss's answers in the workflow"
            )
            ctx.error(f"{key}.{name}", text)
    return {
        "engine_type": engine_type,
        "device": device,
        "dtype": dtype,
        "deterministic": ctx.config.deterministic,
        "enable_prefix_caching": e.enable_prefix_caching and not ctx.config.deterministic,
        "enforce_eager": device == "cpu" if e.enforce_eager is None else e.enforce_eager,
        "fully_sharded_loras": False,  # with an adapter `lora_plan` decides
        "max_cpu_loras": None,
        "log_requests": e.enable_log_requests,
        "log_stats": not e.disable_log_stats,
        "cpu_threads": threads,
        "external_lib": ctx.config.model.external_lib,
        "start_timeout_s": e.start_timeout,
        "stall_timeout_s": e.stall_timeout,
        "step_timeout_s": e.step_timeout,
    }


def _first_cores(
    ctx: Context, e: ServedModelConfig, key: str, device: str, threads: int
) -> list[int]:
    """Of each copy the place of its first core: of several processes on CPU each is bound to cores
    of its own.
    """
    workers = gpus(e)
    cpus = ctx.facts.cpus
    first = ctx.bound_cores
    each = max(threads, gpus(e))
    if workers == 1 or device != "cpu":
        return [0] * copies(e)
    ctx.bound_cores += copies(e) * each
    if workers > cpus:
        text = (
            f"is {e.tensor_parallel_size}{stages(e)}: each process on CPU needs a core, and "
            f"there are {cpus}; lower it"
        )
        ctx.error(f"{key}.tensor_parallel_size", text)
    elif threads % workers or ctx.bound_cores > cpus:
        text = (
            f"{copies(e)} x {threads} for engines of {workers} processes, and {cpus} cores are "
            f"there: some are shared or idle"
        )
        ctx.warn(
            f"{key}.cpu_threads: {text}; write a multiple of {workers}, at most {cpus} for all "
            f"engines together"
        )
    return [first + i * each for i in range(copies(e))]


def _of_vllm(ctx: Context, e: ServedModelConfig, key: str, max_model_len: int) -> None:
    """What vLLM would refuse when it starts, and arguments that have keys here, which the rest of
    the run goes by.
    """
    tokens = e.max_num_batched_tokens
    if tokens is not None and tokens < e.max_num_seqs:
        text = (
            f"is {tokens}, and a step has a token of each of max_num_seqs {e.max_num_seqs}; "
            f"raise it or lower that"
        )
        ctx.error(f"{key}.max_num_batched_tokens", text)
    if not e.enable_chunked_prefill:
        ctx.warn(
            f"{key}.enable_chunked_prefill: vLLM advises against false for models that generate "
            f"text"
        )
        if tokens is not None and tokens < max_model_len:
            text = (
                f"is {tokens}; without enable_chunked_prefill a step must hold a whole text of "
                f"max_model_len {max_model_len}"
            )
            ctx.error(f"{key}.max_num_batched_tokens", text)
    for name, value in e.extra_engine_args.items():
        if name in type(e).model_fields and value != getattr(e, name):
            ctx.error(
                f"{key}.extra_engine_args.{name}",
                f"is {value!r}, and has a key here, which the run goes by: write {key}.{name}",
            )


def _own_engine(ctx: Context, name: str, args: dict[str, Any], key: str) -> None:
    """A plugin engine is looked at, and its arguments checked, once plugins may be imported."""
    if not ctx.can_check_plugin("engine", name):
        return
    from rft.engine.built_in import find, own_args  # numpy

    try:
        own_args(find(name), args, f"{key}.extra_engine_args")
    except ConfigError as error:
        at = f"{key}.engine_type" if error.key in ("", "engine_type") else error.key
        hint = value_hint(at, name)
        ctx.error(at, f"given {name!r}: {hint}" if hint else error.message)


def _thinking(enabled: bool | None) -> dict[str, Any]:
    return {} if enabled is None else {"enable_thinking": enabled}
