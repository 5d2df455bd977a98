"""The written tasksets → the settings of `rft.taskset`: inherited sampling, workflow, reward, group
size; and the task pipeline before them.

Part of `resolve`.  Invariant: what a taskset writes wins over `model` and `algorithm`; nothing else
decides a task's sampling.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rft.config.context import Context, Problems, filled
from rft.config.plan import Facts, Tasksets
from rft.config.roles import samples
from rft.config.schema.buffer_section import (
    ExplorerInputConfig,
    FormatConfig,
    PriorityWeightsConfig,
    RolloutArgs,
    TaskFormatConfig,
    TaskPipelineConfig,
    TasksetConfig,
)
from rft.config.schema.root import RunConfig
from rft.config.yamlfile import parse
from rft.engine.settings import EngineSettings
from rft.errors import ConfigError
from rft.plugins import REGISTRY
from rft.sync.schedule import Schedule
from rft.taskset.settings import (
    FormatSettings,
    PromptLimit,
    TaskOperatorSettings,
    TaskPipelineSettings,
    TasksetSettings,
)
from rft.types.task import SamplingArgs

INPUT = "buffer.explorer_input"


def tasksets(
    ctx: Context, *, max_response_tokens: int, repeat_times: int, any_sampling: bool
) -> tuple[Tasksets, Tasksets]:
    """Settings of the tasksets to train on and to evaluate on.

    `any_sampling`: training may draw tokens from a part of the distribution, e.g. with top_p.
    """
    explorer_input = ctx.config.buffer.explorer_input
    train = _train(
        explorer_input,
        ctx,
        needed=samples(ctx.config) and ctx.config.mode not in ("train", "serve"),
    )
    evals = [(f"{INPUT}.eval_tasksets[{i}]", t) for i, t in enumerate(explorer_input.eval_tasksets)]
    names: dict[str, str] = {}
    settings: tuple[list[TasksetSettings], list[TasksetSettings]] = ([], [])
    for is_eval, written in ((False, train), (True, evals)):
        for key, t in written:
            name = _name(t, is_eval, names, key, ctx)
            workflow = _workflow(ctx, t, key, is_eval)
            named = t.default_reward_fn_type or explorer_input.default_reward_fn_type
            runs = t.repeat_times or (1 if is_eval else repeat_times)
            if t.rollout_args.seed is not None and runs > 1 and not is_eval:
                ctx.error(
                    f"{key}.rollout_args.seed",
                    f"gives all {runs} runs of a task the same answer; leave it out",
                )
            settings[is_eval].append(
                filled(
                    TasksetSettings,
                    t,
                    name=name,
                    key=key,
                    path=ctx.find(t.path),
                    storage_type=ctx.find(t.storage_type)
                    if ":" in t.storage_type
                    else t.storage_type.lower(),
                    format=columns(t.format, key, ctx, reward_is_named=named is not None),
                    workflow=ctx.find(workflow),
                    reward=named and ctx.find(named),
                    reward_args=dict(t.reward_fn_args),
                    sampling=sampling_args(
                        ctx, t.rollout_args, max_response_tokens, key, is_eval, any_sampling
                    ),
                    num_runs=runs,
                    **_selector(ctx, t, name, is_eval, key),
                    seed=t.data_selector.seed,
                    is_eval=is_eval,
                )
            )
    weights = [t.weight for t in settings[0]]
    if any(w is None for w in weights) and any(w is not None for w in weights):
        ctx.error(
            f"{INPUT}.tasksets",
            "weight is written for some tasksets only; write it for all or for none",
        )
    return tuple(settings[0]), tuple(settings[1])


def _workflow(ctx: Context, t: TasksetConfig, key: str, is_eval: bool) -> str:
    explorer_input = ctx.config.buffer.explorer_input
    workflow = (
        t.default_workflow_type
        or (explorer_input.default_eval_workflow_type if is_eval else None)
        or explorer_input.default_workflow_type
    )
    if workflow is None:
        ctx.error(
            f"{key}.default_workflow_type",
            "no workflow is named; write it here or as "
            "buffer.explorer_input.default_workflow_type (`rft plugins workflow` lists them; "
            "simple_workflow asks once, math_workflow asks for a final answer)",
        )
    return workflow or ""


def limit_prompts(
    config: RunConfig, train: Tasksets, evals: Tasksets, engine: EngineSettings, processes: int
) -> tuple[Tasksets, Tasksets]:
    """The same tasksets; those whose long prompts are left out or refused know what the engine will
    make of a chat, and the limit.
    """
    m = config.model
    side = "error" if m.enable_prompt_truncation else m.prompt_truncation_side
    refuse = not m.enable_prompt_truncation and side == "error"
    explorer_input = config.buffer.explorer_input
    written = (
        (explorer_input.taskset,) if explorer_input.taskset is not None else explorer_input.tasksets
    )

    def limited(t: TasksetConfig, settings: TasksetSettings) -> TasksetSettings:
        settings = replace(settings, prompt_truncation=side, num_process=processes)
        if engine.max_prompt_tokens is None or not (t.filter_overlong_prompts or refuse):
            return settings
        limit = PromptLimit(
            model_path=engine.tokenizer_path or engine.model_path,
            max_tokens=engine.max_prompt_tokens,
            refuse=not t.filter_overlong_prompts,
            chat_template=settings.format.chat_template or engine.chat_template,
            chat_template_args={
                **engine.chat_template_kwargs,
                **settings.format.chat_template_args,
            },
            weights_path=engine.model_path if engine.tokenizer_path else None,
            image_processor_args=engine.image_processor_args,
        )
        return replace(settings, prompt_limit=limit)

    return tuple(map(limited, written, train)), tuple(
        map(limited, explorer_input.eval_tasksets, evals)
    )


VERL = {
    "prompt_type": "messages",
    "response_key": "reward_model.ground_truth",
    "reward_fn_key": "data_source",
}
"""What the columns of veRL's data mean, as values of `format`."""


def columns(
    f: FormatConfig, key: str, problems: Problems, *, reward_is_named: bool = False
) -> FormatSettings:
    """The meaning of the columns.  A key that has its default counts as not written: the preset
    decides it.
    """
    template_args = dict(f.chat_template_args)
    if (
        f.enable_thinking is not None
        and template_args.setdefault("enable_thinking", f.enable_thinking) != f.enable_thinking
    ):
        problems.error(
            f"{key}.format.enable_thinking", "chat_template_args says otherwise; write one"
        )
    if not isinstance(f, TaskFormatConfig) or f.preset is None:
        return filled(FormatSettings, f, chat_template_args=template_args)
    standard = TaskFormatConfig()
    values = {
        name: value for name, value in VERL.items() if getattr(f, name) == getattr(standard, name)
    }
    data_source = values.get("reward_fn_key", f.reward_fn_key)
    if reward_is_named:
        values["reward_fn_key"] = ""
    if f.messages_key == standard.messages_key:
        values["messages_key"] = f.prompt_key
    return filled(
        FormatSettings, f, data_source_key=data_source, chat_template_args=template_args, **values
    )


def feedback_lag(schedule: Schedule) -> int:
    """Return how many explore batches the schedule lets run side by side.

    A choice of tasks waits for none of these.
    """
    bound = replace(schedule, max_staleness=None).staleness_bound
    if schedule.style != "fixed":  # a choice that waits for earlier batches never blocks for ever
        bounds = [b for b in (bound, schedule.max_staleness) if b is not None]
        bound = min(bounds, default=schedule.interval)
    assert bound is not None
    return -(-bound * schedule.step_units // schedule.batch_units)


def _selector(ctx: Context, t: TasksetConfig, name: str, is_eval: bool, key: str) -> dict[str, Any]:
    """Fields of the order of a taskset's rows.  What is no plugin that can be known yet is checked."""
    from rft.taskset.task_order import check_selector

    selector = t.data_selector
    kind = selector.selector_type
    shipped = REGISTRY.names("selector")
    kind = (
        kind.strip().lower()
        if kind.strip().lower() in shipped
        else ctx.find(kind)
        if ":" in kind
        else kind
    )
    fields: dict[str, Any] = {
        "selector": kind,
        "selector_args": dict(selector.kwargs),
        "feature_keys": selector.feature_keys,
    }
    if ctx.can_check_plugin("selector", kind):
        here = TasksetSettings(name=name, path=t.path, workflow="", **fields)
        with ctx.collect_errors():
            check_selector(here, f"{key}.data_selector", is_eval=is_eval)
    return fields


def _train(
    explorer_input: ExplorerInputConfig, problems: Problems, *, needed: bool
) -> list[tuple[str, TasksetConfig]]:
    if explorer_input.taskset is not None and explorer_input.tasksets:
        problems.error(
            f"{INPUT}.taskset",
            "taskset and tasksets are both written; put all of them into tasksets",
        )
    if explorer_input.taskset is not None:
        return [(f"{INPUT}.taskset", explorer_input.taskset)]
    if not explorer_input.tasksets and needed:
        problems.error(
            f"{INPUT}.tasksets",
            "there is nothing to train on; write taskset: {path: ...} or a list of tasksets",
        )
    return [(f"{INPUT}.tasksets[{i}]", t) for i, t in enumerate(explorer_input.tasksets)]


def _name(
    t: TasksetConfig, is_eval: bool, names: dict[str, str], key: str, problems: Problems
) -> str:
    if t.name is not None:
        name = t.name
        if is_eval and name in names and f"{name}_eval" not in names:
            name = f"{name}_eval"
            problems.warn(
                f"{key}.name: {t.name} is the name of {names[t.name]}; this one is called {name}, "
                f"in metrics too"
            )
        elif name in names:
            problems.error(f"{key}.name", f"is also the name of {names[name]}; names must differ")
        names[name] = key
        return name
    stem = t.path.split("://")[-1].split("?")[0].rstrip("/").rsplit("/", 1)[-1].rsplit(":", 1)[-1]
    base = re.sub(r"\.(jsonl?|ndjson|parquet|csv)$", "", stem) or "taskset"
    base = re.sub(r"[^\w.+-]", "_", base).lstrip("._") or "taskset"
    base = f"{base}_eval" if is_eval and not base.endswith("_eval") else base
    name = base
    n = 1
    while name in names:
        n += 1
        name = f"{base}_{n}"
    names[name] = key
    return name


def sampling_args(
    ctx: Context,
    args: RolloutArgs,
    max_response_tokens: int,
    key: str,
    is_eval: bool,
    any_sampling: bool,
) -> SamplingArgs:
    m = ctx.config.model
    values: dict[str, Any] = {
        "temperature": m.temperature,
        "top_p": m.top_p,
        "top_k": m.top_k,
        "repetition_penalty": m.repetition_penalty,
        "max_tokens": max_response_tokens,
        "min_tokens": m.min_response_tokens,
        "ignore_eos": ctx.config.explorer.rollout_model.ignore_eos,
    }
    values |= {k: v for k, v in args.model_dump(exclude={"n"}).items() if v is not None}
    if values["top_k"] == 0:
        values["top_k"] = -1  # OpenAI's and Hugging Face's spelling of "off"
    if values["max_tokens"] > max_response_tokens:
        ctx.error(
            f"{key}.rollout_args.max_tokens",
            f"is {values['max_tokens']} tokens, more than model.max_response_tokens "
            f"({max_response_tokens}); raise that or lower this",
        )
        values["max_tokens"] = max_response_tokens
    try:
        sampling = SamplingArgs(**values)
    except ValueError as e:
        ctx.error(f"{key}.rollout_args", str(e))
        return SamplingArgs()
    if not is_eval:
        _reproducible(sampling, args, key, any_sampling, ctx)
    return sampling


def _reproducible(
    sampling: SamplingArgs, args: RolloutArgs, key: str, any_sampling: bool, problems: Problems
) -> None:
    """The trainer knows the temperature; what else bends the distribution is for losses that read
    no log-probs, or reject by them.
    """
    if sampling.temperature == 0:
        where = (
            f"{key}.rollout_args.temperature"
            if args.temperature is not None
            else "model.temperature"
        )
        problems.error(
            where,
            "training samples at temperature 0 are all identical and have no on-policy gradient; "
            "use e.g. 1.0",
        )
    off = SamplingArgs(max_tokens=sampling.max_tokens)
    for name in (
        ()
        if any_sampling
        else (
            "top_p",
            "top_k",
            "min_p",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
            "min_tokens",
        )
    ):
        value = getattr(sampling, name)
        if value == getattr(off, name):
            continue
        written = getattr(args, name) is not None
        top = {"min_tokens": "model.min_response_tokens"}.get(name, f"model.{name}")
        problems.error(
            f"{key}.rollout_args.{name}" if written else top,
            f"is {value} for a training taskset; the trainer cannot compute the log-probs of "
            f"tokens drawn that way, so the policy "
            f"gradient would be wrong.  Use {getattr(off, name)} (off), or "
            f"algorithm.rollout_correction with rollout_rs; evaluation "
            "tasksets may use any value",
        )


PIPELINE = "data_processor.task_pipeline"


def num_process(config: RunConfig, facts: Facts) -> int:
    """Processes that work on rows: as many as are written, else the default but no more than there
    are cores.
    """
    pipeline = config.data_processor.task_pipeline
    return (
        pipeline.num_process
        if pipeline is not None
        else min(TaskPipelineConfig().num_process, facts.cpus)
    )


def task_pipeline(
    ctx: Context, train: Tasksets, evals: Tasksets
) -> tuple[TaskPipelineSettings | None, Tasksets, Tasksets]:
    """The pipeline, and the tasksets; those that read its result do so by its absolute path.  None
    where nothing is to be done.
    """
    given = ctx.config.data_processor.task_pipeline
    if given is None or given == TaskPipelineConfig(num_process=given.num_process):
        return None, train, evals
    operators = _operators(ctx, given)
    before = len(ctx.errors)
    if not given.inputs:
        ctx.error(
            f"{PIPELINE}.inputs",
            "name the files whose rows are worked on; the result goes into the path of the "
            "training taskset",
        )
    if given.output is None and not train:
        ctx.error(
            f"{PIPELINE}.output",
            "there is no training taskset whose path could take the result; name one",
        )
    if len(ctx.errors) > before:
        return None, train, evals
    written = given.output.path if given.output is not None else train[0].path
    output = Path(ctx.find(written)).expanduser().absolute()
    if output.suffix != ".jsonl" or "://" in written:
        where = f"{PIPELINE}.output.path" if given.output is not None else "buffer.explorer_input"
        ctx.error(where, f"takes the result of {PIPELINE} and must be a file that ends with .jsonl")
    inputs = tuple(str(Path(ctx.find(path)).expanduser().absolute()) for path in given.inputs)
    if str(output) in inputs:
        ctx.error(
            f"{PIPELINE}.inputs",
            "the result cannot go into one of the inputs; give the taskset another path",
        )
    weights = {
        name: getattr(given.priority_weights, name) for name in PriorityWeightsConfig.model_fields
    }
    if given.priority_weights != PriorityWeightsConfig() or given.top_k >= 0:
        order = ctx.chosen(
            f"{PIPELINE}.order", given.order, "sort", "priority_weights or top_k is written"
        )
    else:
        order = ctx.chosen(
            f"{PIPELINE}.order", given.order, "keep", "neither priority_weights nor top_k is"
        )

    def reads(t: TasksetSettings) -> TasksetSettings:
        written = "://" not in t.path and Path(t.path).expanduser().absolute() == output
        return replace(t, path=str(output)) if written else t

    train = tuple(map(reads, train))
    evals = tuple(map(reads, evals))
    if not any(t.path == str(output) for t in (*train, *evals)):
        ctx.warn(f"{PIPELINE}.output: no taskset of the run reads {output}")
    pipeline = filled(
        TaskPipelineSettings,
        given,
        inputs=inputs,
        output=str(output),
        operators=operators,
        order=order,
        priority_weights=weights,
        seed=ctx.config.seed,
        plugin_dirs=ctx.plugin_dirs,
    )
    return pipeline, train, evals


def _operators(ctx: Context, given: TaskPipelineConfig) -> tuple[TaskOperatorSettings, ...]:
    """Those of config_path, then the written ones; what is known already is checked."""
    written = [
        (o.name, dict(o.args), f"{PIPELINE}.operators[{i}]") for i, o in enumerate(given.operators)
    ]
    if given.config_path is not None:
        try:
            with ctx.collect_errors():
                written = [*_from_file(given.config_path, ctx.find, ctx.facts), *written]
        except OSError as e:
            ctx.error(f"{PIPELINE}.config_path", f"cannot be read: {e.strerror or e}")
    operators = tuple(
        TaskOperatorSettings(name=ctx.find(name) if ":" in name else name, args=args, key=key)
        for name, args, key in written
    )
    from rft.taskset import task_pipeline as pipeline

    for o in operators:
        if ctx.can_check_plugin("task_operator", o.name):
            with ctx.collect_errors():
                pipeline.check_operator(o)
    return operators


def _from_file(
    path: str, find: Callable[[str], str], facts: Facts
) -> list[tuple[str, dict[str, Any], str]]:
    key = f"{PIPELINE}.config_path"
    value, _ = parse(facts.read_text(find(path)), path)
    if isinstance(value, dict) and "process" in value:
        raise ConfigError(
            f"{path} is a recipe of Data-Juicer; write operators: [{{name: data_juicer_filter, "
            f"args: {{config_path: {path}}}}}]",
            key=key,
            given=path,
        )
    listed = (
        value.get("operators") if isinstance(value, dict) and set(value) == {"operators"} else None
    )
    if not isinstance(listed, list) or not all(
        isinstance(o, dict) and set(o) <= {"name", "args"} and "name" in o for o in listed
    ):
        raise ConfigError(
            f"{path} must hold the key operators alone, a list of {{name: ..., args: {{...}}}}",
            key=key,
            given=path,
        )
    return [
        (str(o["name"]), dict(o.get("args") or {}), f"{key}, operator {i}")
        for i, o in enumerate(listed)
    ]
