"""The written tasksets → the taskset room's settings: inherited sampling, workflow, reward, group size.

Invariant: what a taskset writes wins over `model` and `algorithm`; nothing else decides a task's sampling.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rft.config.halves import samples
from rft.config.plan import Facts, schedule
from rft.config.problems import Problems
from rft.config.schema.buffer import ExplorerInputConfig, FormatConfig, RolloutArgs, TasksetConfig
from rft.config.schema.root import RunConfig
from rft.engine.settings import EngineSettings
from rft.errors import ConfigError
from rft.plugins import REGISTRY, may_come
from rft.sync.settings import SyncSettings
from rft.taskset.settings import FormatSettings, PromptLimit, TasksetSettings
from rft.types.task import SamplingArgs

INPUT = "buffer.explorer_input"


def tasksets(
    config: RunConfig,
    facts: Facts,
    problems: Problems,
    *,
    max_response_tokens: int,
    repeat_times: int,
    find: Callable[[str], str],
) -> tuple[tuple[TasksetSettings, ...], tuple[TasksetSettings, ...]]:
    """Settings of the tasksets to train on and to evaluate on."""
    given = config.buffer.explorer_input
    train = _train(given, problems, needed=samples(config) and config.mode != "train")
    evals = [(f"{INPUT}.eval_tasksets[{i}]", t) for i, t in enumerate(given.eval_tasksets)]
    names: dict[str, str] = {}
    made: tuple[list[TasksetSettings], list[TasksetSettings]] = ([], [])
    for is_eval, written in ((False, train), (True, evals)):
        for key, t in written:
            name = _name(t, is_eval, names, key, problems)
            workflow = (
                t.default_workflow_type or (given.default_eval_workflow_type if is_eval else None) or given.default_workflow_type
            )
            if workflow is None:
                problems.error(
                    f"{key}.default_workflow_type",
                    "no workflow is named; write it here or as buffer.explorer_input.default_workflow_type "
                    "(`rft plugins workflow` lists them; simple_workflow asks once, math_workflow asks for a final answer)",
                )
            _source(t, key, problems)
            named = t.default_reward_fn_type or given.default_reward_fn_type
            made[is_eval].append(
                TasksetSettings(
                    name=name,
                    path=find(t.path),
                    storage_type=t.storage_type,
                    reader_path=_found(t.reader_path, find),
                    reader_name=t.reader_name,
                    subset_name=t.subset_name,
                    split=t.split,
                    format=_format(t.format, named is not None, key, problems),
                    workflow=find(workflow or ""),
                    workflow_args=dict(t.workflow_args),
                    reward=_found(named, find),
                    reward_args=dict(t.reward_fn_args),
                    sampling=_sampling(config, t.rollout_args, max_response_tokens, key, problems, is_eval),
                    num_runs=_runs(t, 1 if is_eval else repeat_times, key, problems),
                    **_selector(t, name, is_eval, config, facts, find, key, problems),
                    seed=t.data_selector.seed,
                    weight=t.weight,
                    is_eval=is_eval,
                    args=dict(t.args),
                    max_rows=t.max_rows,
                    skip_bad_rows=t.skip_bad_rows,
                )
            )
    weights = [t.weight for t in made[0]]
    if any(w is None for w in weights) and any(w is not None for w in weights):
        problems.error(
            f"{INPUT}.tasksets", "weight is written for some tasksets only; write it for all or for none", given=weights
        )
    return tuple(made[0]), tuple(made[1])


def limit_prompts(
    config: RunConfig,
    train: tuple[TasksetSettings, ...],
    evals: tuple[TasksetSettings, ...],
    engine: EngineSettings,
    processes: int,
) -> tuple[tuple[TasksetSettings, ...], tuple[TasksetSettings, ...]]:
    """The same tasksets; those whose long prompts are left out or refused know what the engine will make of a chat, and the limit."""
    m = config.model
    side = "error" if m.enable_prompt_truncation else m.prompt_truncation_side
    refuse = not m.enable_prompt_truncation and side == "error"
    given = config.buffer.explorer_input
    written = (given.taskset,) if given.taskset is not None else given.tasksets

    def limited(t: TasksetConfig, settings: TasksetSettings) -> TasksetSettings:
        settings = replace(settings, prompt_truncation=side, num_process=processes)
        if engine.max_prompt_tokens is None or not (t.filter_overlong_prompts or refuse):
            return settings
        limit = PromptLimit(
            model_path=engine.tokenizer_path or engine.model_path,
            max_tokens=engine.max_prompt_tokens,
            refuse=not t.filter_overlong_prompts,
            chat_template=settings.format.chat_template or engine.chat_template,
            chat_template_args={**engine.chat_template_kwargs, **settings.format.chat_template_args},
        )
        return replace(settings, prompt_limit=limit)

    return tuple(map(limited, written, train)), tuple(map(limited, given.eval_tasksets, evals))


VERL = {"prompt_type": "messages", "response_key": "reward_model.ground_truth", "reward_fn_key": "data_source"}
"""What the columns of veRL's data mean, as values of `format`."""


def _format(f: FormatConfig, reward_is_named: bool, key: str, problems: Problems) -> FormatSettings:
    """The meaning of the columns.  A key that has its default counts as not written: the preset decides it."""
    values = {name: getattr(f, name) for name in FORMAT_KEYS}
    template_args = dict(f.chat_template_args)
    if f.enable_thinking is not None and template_args.setdefault("enable_thinking", f.enable_thinking) != f.enable_thinking:
        problems.error(f"{key}.format.enable_thinking", "chat_template_args says otherwise; write one", given=f.enable_thinking)
    if f.preset is None:
        return FormatSettings(**values, chat_template_args=template_args)
    standard = FormatConfig()
    values |= {name: value for name, value in VERL.items() if values[name] == getattr(standard, name)}
    if f.messages_key == standard.messages_key:
        values["messages_key"] = f.prompt_key
    data_source = values["reward_fn_key"]
    if reward_is_named:
        values["reward_fn_key"] = ""
    return FormatSettings(**values, preset=f.preset, data_source_key=data_source, chat_template_args=template_args)


def data_format(f: FormatConfig, key: str, problems: Problems) -> FormatSettings:
    """The meaning of the columns of a data set that is trained on."""
    return _format(f, False, key, problems)


FORMAT_KEYS = (
    "prompt_type prompt_key response_key messages_key system_prompt_key system_prompt tools_key workflow_key reward_fn_key chat_template"
).split()


def feedback_lag(sync: SyncSettings) -> int:
    """How many explore batches the schedule lets run side by side: a choice of tasks waits for none of these."""
    found = schedule(replace(sync, max_staleness=None))  # the schedule itself is checked elsewhere
    bound = found.staleness_bound
    if sync.style != "fixed":  # a choice that waits for earlier batches holds nobody up for ever
        bound = min((b for b in (bound, sync.max_staleness) if b is not None), default=sync.interval)
    assert bound is not None
    return -(-bound * sync.step_units // sync.batch_units)


def _source(t: TasksetConfig, key: str, problems: Problems) -> None:
    if (t.reader_path is None) != (t.reader_name is None):
        missing = "reader_name" if t.reader_name is None else "reader_path"
        problems.error(f"{key}.{missing}", "reader_path (a file) and reader_name (a class in it) go together; write both")


def _selector(
    t: TasksetConfig,
    name: str,
    is_eval: bool,
    config: RunConfig,
    facts: Facts,
    find: Callable[[str], str],
    key: str,
    problems: Problems,
) -> dict[str, Any]:
    """Fields of the order of a taskset's rows.  What is no plugin that can be known yet is checked."""
    from rft.taskset.order import check_selector

    given = t.data_selector
    kind = given.selector_type
    known = REGISTRY.names("selector")
    kind = kind.strip().lower() if kind.strip().lower() in known else find(kind) if ":" in kind else kind
    fields: dict[str, Any] = {"selector": kind, "selector_args": dict(given.kwargs), "feature_keys": given.feature_keys}
    later = kind not in known and not facts.plugins_loaded and may_come(kind, (*config.plugin_dirs, *facts.plugin_dirs))
    if not later:
        here = TasksetSettings(name=name, path=t.path, workflow="", **fields)
        try:
            check_selector(here, f"{key}.data_selector", is_eval=is_eval)
        except ConfigError as e:
            problems.take(e)
    return fields


def _train(given: ExplorerInputConfig, problems: Problems, *, needed: bool) -> list[tuple[str, TasksetConfig]]:
    if given.taskset is not None and given.tasksets:
        problems.error(f"{INPUT}.taskset", "taskset and tasksets are both written; put all of them into tasksets")
    if given.taskset is not None:
        return [(f"{INPUT}.taskset", given.taskset)]
    if not given.tasksets and needed:
        problems.error(f"{INPUT}.tasksets", "there is nothing to train on; write taskset: {path: ...} or a list of tasksets")
    return [(f"{INPUT}.tasksets[{i}]", t) for i, t in enumerate(given.tasksets)]


def _name(t: TasksetConfig, is_eval: bool, names: dict[str, str], key: str, problems: Problems) -> str:
    if t.name is not None:
        if t.name in names:
            problems.error(f"{key}.name", f"is also the name of {names[t.name]}; names must differ", given=t.name)
        names[t.name] = key
        return t.name
    stem = t.path.split("://")[-1].split("?")[0].rstrip("/").rsplit("/", 1)[-1].rsplit(":", 1)[-1]
    base = re.sub(r"\.(jsonl?|parquet|csv)$", "", stem) or "taskset"
    base = re.sub(r"[^\w.+-]", "_", base).lstrip("._") or "taskset"
    base = f"{base}_eval" if is_eval and not base.endswith("_eval") else base
    name, n = base, 1
    while name in names:
        n += 1
        name = f"{base}_{n}"
    names[name] = key
    return name


def _runs(t: TasksetConfig, default: int, key: str, problems: Problems) -> int:
    n, repeat = t.rollout_args.n, t.repeat_times
    if n is not None and repeat is not None and n != repeat:
        problems.error(
            f"{key}.rollout_args.n", f"is {n}, but repeat_times is {repeat}; both mean runs per task, write one", given=n
        )
    return repeat or n or default


def _found(name: str | None, find: Callable[[str], str]) -> str | None:
    return None if name is None else find(name)


def _sampling(
    config: RunConfig, args: RolloutArgs, max_response_tokens: int, key: str, problems: Problems, is_eval: bool
) -> SamplingArgs:
    m = config.model
    values: dict[str, Any] = {
        "temperature": m.temperature,
        "top_p": m.top_p,
        "top_k": m.top_k,
        "repetition_penalty": m.repetition_penalty,
        "max_tokens": max_response_tokens,
        "min_tokens": m.min_response_tokens,
        "ignore_eos": config.explorer.rollout_model.ignore_eos,
    }
    values |= {k: v for k, v in args.model_dump(exclude={"n", "logprobs"}).items() if v is not None}
    if values["top_k"] == 0:
        values["top_k"] = -1  # OpenAI's and Hugging Face's spelling of "off"
    if values["max_tokens"] > max_response_tokens:
        problems.error(
            f"{key}.rollout_args.max_tokens",
            f"is {values['max_tokens']} tokens, more than model.max_response_tokens ({max_response_tokens}); raise that or lower this",
            given=values["max_tokens"],
        )
        values["max_tokens"] = max_response_tokens
    try:
        sampling = SamplingArgs(**values)
    except ValueError as e:
        problems.error(f"{key}.rollout_args", str(e))
        return SamplingArgs()
    if not is_eval:
        _reproducible(sampling, args, key, problems)
    elif sampling.temperature == 0 and (config_runs := (args.n or 1)) > 1:
        problems.warn(f"{key}: temperature 0 gives the same answer {config_runs} times; use a temperature above 0 or one run")
    return sampling


def _reproducible(sampling: SamplingArgs, args: RolloutArgs, key: str, problems: Problems) -> None:
    """The trainer knows the temperature; anything else that bends the distribution cannot be trained on-policy."""
    if sampling.temperature == 0:
        where = f"{key}.rollout_args.temperature" if args.temperature is not None else "model.temperature"
        problems.error(
            where, "training samples at temperature 0 are all alike and have no on-policy gradient; use e.g. 1.0", given=0
        )
    off = SamplingArgs(max_tokens=sampling.max_tokens)
    for name in ("top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens"):
        value = getattr(sampling, name)
        if value == getattr(off, name):
            continue
        written = getattr(args, name) is not None
        top = {"min_tokens": "model.min_response_tokens"}.get(name, f"model.{name}")
        problems.error(
            f"{key}.rollout_args.{name}" if written else top,
            f"is {value} for a training taskset; the trainer cannot compute the log-probs of tokens drawn that way, so the policy "
            f"gradient would be wrong.  Use {getattr(off, name)} (off); evaluation tasksets may use any value",
            given=value,
        )
