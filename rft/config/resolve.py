"""RunConfig → Plan: one pure function.  Inherited and derived values are decided here and nowhere else.

Knows the machine only through `Facts`.  Invariant: the same configuration and facts give the same Plan; nothing is written back.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rft.algorithm.args import ARGS, BUILT, KINDS, RENAMED, AggMode, check_args
from rft.algorithm.catalog import ALGORITHMS, AlgorithmDefaults, algorithm_defaults, compares_in_groups
from rft.algorithm.loss_args import LOSSES
from rft.buffer.settings import BufferSettings
from rft.config import adapter, given, halves, policies, roles, served, spread, steps, turns
from rft.config.active import used
from rft.config.pipeline import pipeline
from rft.config.plan import Facts, Plan
from rft.config.problems import Problems
from rft.config.reading import reading
from rft.config.schema.root import RunConfig
from rft.config.source import is_secret
from rft.config.steps import NumBatches
from rft.config.taskpipeline import num_process, task_pipeline
from rft.config.tasksets import feedback_lag, limit_prompts, tasksets
from rft.errors import ConfigError
from rft.logs import REDACTED, redact
from rft.monitor.settings import MonitorSettings
from rft.trainer.settings import AlgorithmSettings, TrainerSettings


def resolve(config: RunConfig, facts: Facts | None = None, *, num_batches: NumBatches | None = None, name: str = "") -> Plan:
    """The Plan of `config`.  Raises ConfigErrors with everything that contradicts itself.

    Where the length of the run is given in epochs, `num_batches` is asked for it; without it `Plan.total_steps` is None and
    `Plan.trainer.total_steps` is 0.  `name` replaces the run's name (a time-stamped sibling).
    """
    facts, p = facts or Facts(), Problems()
    find = _finder(config, facts)
    written, config = config, steps.one_place(config, p)
    run_dir = Path(config.checkpoint_root_dir).expanduser().absolute() / config.project / config.group / (name or config.name)
    plugin_dirs = tuple(dict.fromkeys(find(d) for d in (*config.plugin_dirs, *facts.plugin_dirs)))
    lengths = _lengths(config, p)
    algorithm, repeat_times, compares = _algorithm(config, facts, p)
    train, evals = tasksets(config, facts, p, max_response_tokens=lengths[2], repeat_times=repeat_times, find=find)
    cluster, engine_device, world_size, trainer_device = roles.devices(config, facts, p)
    turns.check(config, (engine_device, trainer_device), p)
    engines = served.engines(config, facts, lengths, engine_device, find, p)
    auxiliary = served.auxiliary(config, facts, lengths[0], cluster.gpus, find, p)
    train, evals = limit_prompts(config, train, evals, engines[0], num_process(config, facts))
    prepared, train, evals = task_pipeline(config, facts, train, evals, plugin_dirs, find, p)
    data = given.wanted(config, algorithm, name or config.name, engines[0], find, p)
    halves.check(config, p)
    if config.mode == "explore":
        engines = tuple(replace(e, name=f"{config.explorer.name}-{e.name}") for e in engines)
    groups: int | None
    counted = train
    if data is not None:
        train, counted, evals, num_explore, rows = (), (), (), None, None
        groups, num_train = given.steps(config, data, num_batches, p)
    elif config.mode == "bench":
        train, counted, num_explore, num_train, groups, rows = (), (), 0, 0, 1, None
    else:
        counted = counted or halves.elsewhere(config, repeat_times, p)
        num_explore, num_train = steps.steps(config, counted, num_batches if train else None, p)
        groups, rows = steps.batch(config, counted, compares, p)
    own_rows = rows or (groups or 1) * max((t.num_runs for t in counted), default=1)
    mixed = given.expert(config, algorithm, own_rows, engines[0], find, p)
    read = (f"{given.KEY}.storage_type",) if data is not None else (f"{given.BUFFERS}.{mixed[0].name}.",) if mixed else ()
    _advantage_inputs(algorithm, rows, p)
    policies.whole_groups(algorithm, compares, rows, p)
    policies.critic(config, algorithm, facts, p)
    learner = roles.learner(config, facts, algorithm, lengths, trainer_device, world_size, num_train, run_dir, find, p)
    engines, learner = adapter.published(config, engines, learner, p)
    roles.micro_batches(config, counted, learner, bool(policies.has_critic(algorithm, facts)), p)
    roles.deterministic(config, train, p)
    sync = steps.sync(config, facts, engines, trainer_device, counted, find, p)
    buffer = BufferSettings(folder=run_dir / "buffer")
    if data is None:
        buffer = reading(config, facts, steps.buffer(config, run_dir, p), p)
    explorer = steps.explorer(config, train, evals, num_explore, plugin_dirs, _reads_baseline(algorithm), p)
    dump = config.monitor.eval_dump_dir
    explorer = replace(
        explorer,
        feedback_lag=feedback_lag(sync),
        eval_samples=None if dump else config.monitor.log_eval_samples,
        percentiles=config.monitor.detailed_stats,
        pipeline=pipeline(config, facts, run_dir, algorithm, rows, find, p),
    )
    monitor = MonitorSettings(
        folder=run_dir,
        kinds=config.monitor.monitor_type,
        args=_monitor_args(config, p),
        num_samples=config.monitor.log_eval_samples,
        dump_dir=Path(dump).expanduser().absolute() if dump else None,
        project=config.project,
        group=config.group,
        name=name or config.name,
        config=shown(written),
    )
    saving = spread.trainer(config, trainer_device, p)
    idle = [n for n in used(config) if not n.key.startswith(read)]
    for n in (n for n in idle if n.moot):
        if n.harmless:
            p.warn(f"{n.key} {n.value!r} has no effect: {n.instead}")
        else:
            p.error(n.key, f"has no meaning here: {n.instead}", given=n.value)
    p.raise_if_any()
    return Plan(
        mode=config.mode,
        run_dir=run_dir,
        explorer=explorer,
        engines=engines,
        auxiliary=auxiliary,
        buffer=buffer,
        mix=mixed[0] if mixed else None,
        expert=mixed[1] if mixed else None,
        learner=learner,
        trainer=TrainerSettings(
            total_steps=num_train or 0,
            batch_groups=groups,
            batch_rows=rows,
            save_interval=config.trainer.save_interval,
            max_checkpoints_to_keep=config.trainer.max_checkpoints_to_keep,
            checkpoint_dir=run_dir / "checkpoints",
            read_deadline_s=config.buffer.trainer_input.experience_buffer.max_read_timeout,
            require_batches=config.synchronizer.require_batches if config.synchronizer.sync_style == "fully_async" else 1,
            max_staleness=config.synchronizer.max_staleness,
            max_nonfinite_steps=config.trainer.max_nonfinite_steps,
            given=data.given if data is not None else None,
            held_out=data.held_out if data is not None else None,
            eval_interval=config.trainer.eval_interval,
            seed=config.seed,
            **saving,
        ),
        sync=sync,
        monitor=monitor,
        task_pipeline=prepared,
        cluster=cluster,
        total_steps=num_train,
        log_level=config.log.level,
        log_by_node=config.log.group_by_node,
        plugin_dirs=plugin_dirs,
        seed=config.seed,
        deterministic=config.deterministic,
        continue_from_checkpoint=config.continue_from_checkpoint,
        resume_from_path=Path(find(config.resume_from_path)) if config.resume_from_path else None,
        derived=tuple(p.derived),
        notes=tuple(p.notes),
        warnings=tuple(p.warnings),
        not_active=tuple(n for n in idle if not n.moot),
    )


def shown(config: RunConfig) -> dict[str, Any]:
    """The configuration as plain values, secrets replaced by ***."""

    def clean(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {k: clean(v, str(k)) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [clean(v, key) for v in value]
        if is_secret(key, value):
            return REDACTED
        return redact(value) if isinstance(value, str) else value

    plain = clean(config.model_dump(mode="json"))
    assert isinstance(plain, dict)
    return plain


def _finder(config: RunConfig, facts: Facts) -> Callable[[str], str]:
    """Relative paths: as they stand from the current folder, else beside the configuration file, else unchanged (a hub id, a name)."""
    beside = config.source.path.absolute().parent if config.source.path is not None else None

    def find(text: str) -> str:
        path, colon, attribute = text, "", ""
        if match := re.fullmatch(r"(.+\.py)(:)(\w+)", text):
            path, colon, attribute = match.groups()
        if not path or "://" in path:
            return text
        path = str(Path(path).expanduser()) if path.startswith("~") else path
        looks_local = (
            "/" in path or path.endswith((".py", ".jsonl", ".json", ".parquet", ".csv", ".jinja")) or path.startswith(".")
        )
        for base in (Path.cwd(), beside):
            if (
                base is not None
                and facts.exists(str(base / path))
                and (looks_local or base == beside or Path(base / path).is_dir())
            ):
                return f"{base / path}{colon}{attribute}"
        return f"{path}{colon}{attribute}"

    return find


def _lengths(config: RunConfig, p: Problems) -> tuple[int, int, int]:
    """(max_model_len, max_prompt_tokens, max_response_tokens)."""
    m = config.model
    total, prompt, response = m.max_model_len, m.max_prompt_tokens, m.max_response_tokens
    if total is None and (prompt is None or response is None):
        p.error(
            "model.max_model_len", "the lengths are not known; write max_prompt_tokens and max_response_tokens, or max_model_len"
        )
        return 2, 1, 1
    if total is None:
        assert prompt is not None and response is not None
        total = prompt + response
        p.derive("model.max_model_len", total, "max_prompt_tokens + max_response_tokens")
    if response is None:
        response = total - prompt if prompt is not None else total - total // 2
        p.derive(
            "model.max_response_tokens", response, "the rest of max_model_len" if prompt is not None else "half of max_model_len"
        )
    if prompt is None:
        prompt = total - response
        p.derive("model.max_prompt_tokens", prompt, "the rest of max_model_len")
    for name, length in (("max_prompt_tokens", prompt), ("max_response_tokens", response)):
        if getattr(m, name) is not None and length >= total:
            other = "a response" if name == "max_prompt_tokens" else "a prompt"
            p.error(f"model.{name}", f"is {length} of max_model_len {total} tokens, which leaves none for {other}", given=length)
            return 2, 1, 1
    if prompt + response > total:
        p.error(
            "model.max_model_len",
            f"is {total} tokens, but max_prompt_tokens {prompt} + max_response_tokens {response} = {prompt + response}; "
            "raise max_model_len or lower one of them",
            given=total,
        )
        return 2, 1, 1
    if m.min_response_tokens > response:
        p.error("model.min_response_tokens", f"is more than max_response_tokens ({response})", given=m.min_response_tokens)
    if m.custom_chat_template is not None and m.chat_template_path is not None:
        p.error("model.chat_template_path", "custom_chat_template is written too; write one of them")
    if not m.model_path:
        p.error(
            "model.model_path",
            "is required: a folder with config.json, tokenizer and safetensors, or a hub id in the local cache",
        )
    return total, prompt, response


def _algorithm(config: RunConfig, facts: Facts, p: Problems) -> tuple[AlgorithmSettings, int, bool]:
    """(settings, runs of a task, whether these are compared with each other)."""
    a = config.algorithm
    try:
        base = algorithm_defaults(a.algorithm_type)
    except ConfigError as e:
        p.take(e)
        base = next(iter(ALGORITHMS.values()))
    if base.name != a.algorithm_type and not p.errors:
        p.warn(f"algorithm.algorithm_type: {a.algorithm_type} is the older name of {base.name}")
    parts: dict[str, Any] = {}
    for kind in KINDS:
        written, default = getattr(a, kind), getattr(base, kind)
        part = RENAMED.get((kind, written or default), written or default)
        if written is None:
            p.derive(f"algorithm.{kind}", part, f"of algorithm {base.name}")
        elif part != written:
            p.warn(f"algorithm.{kind}: {written} is another name of {part}")
        inherited = getattr(base, f"{kind}_args", {}) if part == default else {}
        args = {**inherited, **getattr(a, f"{kind}_args")}
        if (
            (kind, part) in ARGS
            or facts.plugins_loaded
            or (":" not in part and not config.plugin_dirs and not facts.plugin_dirs and not _entry_points())
        ):
            try:
                check_args(kind, part, args)
            except ConfigError as e:
                p.take(e)
        if kind in BUILT or kind == "sample_strategy":
            parts[kind], parts[f"{kind}_args"] = part, args
    loss_agg_mode = _loss_agg_mode(a.loss_agg_mode, base, parts["policy_loss_fn"], p)
    repeat_times = a.repeat_times or base.repeat_times
    if a.repeat_times is None:
        p.derive("algorithm.repeat_times", repeat_times, f"of algorithm {base.name}")
    if a.optimizer.lr_warmup_steps >= 0 and a.optimizer.lr_warmup_steps_ratio > 0:
        p.warn("algorithm.optimizer: lr_warmup_steps is written and wins; lr_warmup_steps_ratio has no effect")
    for key, o in (("algorithm.optimizer", a.optimizer), ("trainer.critic.optimizer", config.trainer.critic.optimizer)):
        if not all(0 <= b < 1 for b in o.betas):
            p.error(f"{key}.betas", "each must be in [0, 1)", given=list(o.betas))
    settings = AlgorithmSettings(
        algorithm_type=base.name,
        loss_agg_mode=loss_agg_mode,
        **parts,
    )
    settings = policies.policies(config, settings, p)
    return settings, repeat_times, compares_in_groups(a.advantage_fn or base.advantage_fn)


def _loss_agg_mode(written: AggMode | None, base: AlgorithmDefaults, loss: str, p: Problems) -> AggMode:
    """What is written, else what a loss is defined with that the algorithm does not imply, else the algorithm's."""
    model = LOSSES.get(loss)
    if written is not None:
        if model is not None and model.fixed_agg:
            p.warn(
                f"algorithm.loss_agg_mode: {loss} is a mean over sequences or pairs; {written} holds for KL and entropy terms only"
            )
        return written
    if model is None or model.agg_mode is None or loss == base.policy_loss_fn:
        mode, of = base.loss_agg_mode, f"of algorithm {base.name}"
    else:
        mode, of = model.agg_mode, f"of policy loss {loss}"
    p.derive("algorithm.loss_agg_mode", mode, of)
    return mode


def _reads_baseline(algorithm: AlgorithmSettings) -> bool:
    """Whether the explorer has to play every task once more, greedily."""
    args = ARGS.get(("advantage_fn", algorithm.advantage_fn))
    return bool(getattr(args, "baseline", False))


def _advantage_inputs(algorithm: AlgorithmSettings, rows: int | None, p: Problems) -> None:
    """What the advantage reads that a step may not have."""
    name = algorithm.advantage_fn
    if (model := ARGS.get(("advantage_fn", name))) is None:
        return
    try:
        args = check_args("advantage_fn", name, algorithm.advantage_fn_args)
    except ConfigError:
        return  # told by `_algorithm`
    if rows is not None and getattr(args, "whole_groups", False):
        p.error(
            "buffer.train_batch_size",
            f"counts rows, which may split a group, but advantage {name!r} as it is set compares tokens of all rows of a group; leave it "
            "out, or write batch_size x repeat_times",
            given=rows,
        )
    loss = ARGS.get(("policy_loss_fn", algorithm.policy_loss_fn))
    if algorithm.sample_strategy == "pf_ppo" and getattr(loss, "pairs", False):
        p.error(
            "algorithm.sample_strategy",
            f"draws single rows, but policy loss {algorithm.policy_loss_fn!r} compares pairs; leave it out",
            given=algorithm.sample_strategy,
        )
    if reads := getattr(model, "reads", ""):
        p.note(f"algorithm.advantage_fn {name} reads {reads}; its workflow or an operator has to declare that with `gives`")


def _entry_points() -> bool:
    import importlib.metadata

    from rft.plugins import GROUP

    return bool(importlib.metadata.entry_points(group=GROUP))


def _monitor_args(config: RunConfig, p: Problems) -> dict[str, Any]:
    kinds, given = config.monitor.monitor_type, config.monitor.monitor_args or {}
    if not given:
        return {}
    if set(given) <= set(kinds):
        return dict(given)
    if len(kinds) == 1:
        return {kinds[0]: dict(given)}
    p.error(
        "monitor.monitor_args",
        f"has the keys {', '.join(map(str, given))}; with the trackers {', '.join(kinds) or 'none'} it needs one mapping per tracker",
    )
    return {}
