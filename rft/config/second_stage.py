"""What `check` does with a file that has passed the schema: `resolve`, then what the plan names,
and the report of both.

The second stage loads plugins, reads the model's files and opens the tasksets.  Knows the parts
that look, not what they find.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import rft.plugins as plugins
from rft.config import lora_plan, model_folder, offline_plan, plan_checks, playable
from rft.config.check_report import Report
from rft.config.context import Context, Problems
from rft.config.memory_estimate import RoleMemory, estimate, too_much
from rft.config.memory_shared import phases
from rft.config.model_folder import ModelFiles, ModelShape, shape
from rft.config.plan import Facts, Plan, Tasksets
from rft.config.resolve import build, resolve
from rft.config.schema.root import RunConfig
from rft.config.schema.source import Loc, dotted, hidden, leaves
from rft.errors import ConfigError
from rft.secrets import REDACTED, redact
from rft.trainer.manifest import committed


def checked(config: RunConfig, facts: Facts, name: str, schema_only: bool) -> Report:
    """Never raises for a configuration that is wrong: it reports."""
    ctx = Context(config, facts, name)
    plan = build(ctx)
    if schema_only and ctx.errors:
        return Report(errors=tuple(ctx.errors), config=config, schema_only=True)
    if schema_only:
        problems = Problems()
        plan_checks.advise(plan, problems)
        roles = _memory(plan, model_folder.sizes(plan.learner.model_path), None, facts, problems)
        needs = playable.look(plan, facts)
        return _report(config, plan, problems, schema_only=True, memory=roles, needs=needs)
    try:
        plugins.load_all(plan.plugin_dirs)
    except ConfigError as e:
        return Report(
            errors=(*ctx.errors, *e.errors), config=config, plan=None if ctx.errors else plan
        )
    alone = ctx.errors
    ctx = Context(config, replace(facts, plugins_loaded=True), name)
    plan = build(ctx)
    # what is wrong without plugins stays wrong where the look with them finds nothing
    if alone and not ctx.errors:
        return Report(errors=tuple(alone), config=config)
    if ctx.errors:
        return Report(errors=(*ctx.errors, *_other_errors(plan, ctx.errors)), config=config)
    return _second_stage(config, plan, ctx.facts, name)


def _other_errors(plan: Plan, known: list[ConfigError]) -> list[ConfigError]:
    """What is wrong with the model and the tasksets whose keys are right; `plan` holds where no
    error says otherwise.
    """
    from rft.config import preview

    def right(key: str) -> bool:
        return not any(e.key.startswith(key) for e in known)

    problems = Problems()
    model = _model(plan, problems) if right("model.") else None
    if right("buffer.explorer_input.default") and right("data_processor.task_pipeline"):
        x = plan.explorer
        train, evals = (
            tuple(t for t in ts if right(t.key)) for ts in (x.tasksets, x.eval_tasksets)
        )
        preview.look(
            replace(plan, explorer=replace(x, tasksets=train, eval_tasksets=evals)), model, problems
        )
    return problems.errors


def policy_files(plan: Plan) -> ModelFiles | None:
    """The files of the policy's model; None where it is behind a server.  Raises ConfigErrors
    naming what is wrong with them.
    """
    if plan.engines[0].external is not None:
        return None
    plugins.import_library(plan.learner.external_lib)  # it may make the model's classes known
    x = plan.learner
    return model_folder.look(x.model_path, x.tokenizer_path, trusted=x.trust_remote_code)


def _model(plan: Plan, problems: Problems) -> ModelFiles | None:
    with problems.taking():
        return policy_files(plan)
    return None


def _second_stage(config: RunConfig, plan: Plan, facts: Facts, name: str) -> Report:
    from rft.config import preview, required_fields

    problems = Problems()
    plan_checks.storage(plan, problems)
    with problems.taking():
        for need in (*playable.operators(plan), *playable.trackers(plan, plan.monitor)):
            problems.error(need.key, need.message)
    model = _model(plan, problems)
    rows = plan_checks.models(config, plan, model, problems) if model is not None else None
    seen = preview.look(plan, model, problems)
    found, counts = offline_plan.look(plan, problems) if not problems.errors else ([], {})
    required_fields.look(plan, seen.opened, problems)
    own = plan.mode != "bench" and committed(plan.run_dir / "checkpoints")  # it goes on from those
    if plan.resume_from_path is not None and not own and not plan.resume_from_path.is_dir():
        problems.error("resume_from_path", "is not a folder", given=str(plan.resume_from_path))
    if not problems.errors:
        opened = {t.settings.name: t for t in seen.opened}

        def num_batches(tasksets: Tasksets, batch_size: int, epochs: int) -> int:
            from rft.taskset.task_order import num_batches as count

            return count([lengths[t.name] for t in tasksets], batch_size, epochs)

        known = all(t.name in opened for t in plan.explorer.tasksets)
        trained = (
            [plan.trainer.offline_data.rows.name]
            if plan.trainer.offline_data
            else [t.name for t in plan.explorer.tasksets]
        )
        lengths = counts | {name: len(taskset) for name, taskset in opened.items()}
        _say_repeats([lengths[name] for name in trained if name in lengths], plan, problems)
        with problems.taking():
            plan = resolve(config, facts, num_batches=num_batches if known else None, name=name)
    plan = plan_checks.settled(plan, rows)
    plan_checks.advise(plan, problems)
    longest = max(
        (t.max_prompt_tokens for t in seen.tasksets if t.max_prompt_tokens is not None),
        default=None,
    )
    roles = _memory(
        plan, (model.config, model.tensors) if model is not None else None, longest, facts, problems
    )
    about: dict[str, Any] = {}
    if model is not None:
        kind = model.config.get("model_type", "?")
        about = {
            "folder": str(model.model_folder),
            "type": kind,
            "parameters": model.num_parameters,
            "stored": model.dtype,
        }
    if rows is not None:
        about |= {"row_layout": rows.layout, "row_layout_why": rows.why}
    return _report(
        config, plan, problems, tasksets=(*seen.tasksets, *found), model=about, memory=roles
    )


def _say_repeats(lengths: Sequence[int], plan: Plan, problems: Problems) -> None:
    """Warns where a step has more places than there are rows, so that it has some of them several
    times.
    """
    data = plan.trainer.offline_data
    rows = sum(lengths)
    size = plan.explorer.batch_size if data is None else plan.trainer.batch_groups or 0
    if lengths and rows < size:
        what = "the training data has" if data is not None else "the training tasksets have"
        problems.warn(
            f"buffer.batch_size {size} is more than the {rows} rows that {what}: each step takes "
            f"every row about {size / rows:.2g} times; "
            f"write at most {rows}, or add rows"
        )


def _memory(
    plan: Plan,
    sizes: tuple[dict[str, Any], Any] | None,
    prompt_tokens: int | None,
    facts: Facts,
    problems: Problems,
) -> tuple[RoleMemory, ...]:
    if sizes is None or (known := _shape(*sizes, "memory", problems)) is None:
        return ()
    critic = plan.learner.critic.model_path
    other = model_folder.sizes(critic) if critic not in ("", plan.learner.model_path) else None
    lora = plan.learner.lora
    beside = {
        m.name: found
        for m in plan.auxiliary
        if m.engines[0].external is None
        and (theirs := model_folder.sizes(m.engines[0].model_path)) is not None
        and (found := _shape(*theirs, f"memory of auxiliary model {m.name}", problems)) is not None
    }
    roles = estimate(
        plan,
        known,
        critic=None if other is None else _shape(*other, "memory of the critic", problems),
        trained=None if lora is None else lora_plan.parameters(lora, known, sizes[1]),
        auxiliary=beside,
        prompt_tokens=prompt_tokens,
        gpu_memory=facts.gpu_memory,
    )
    roles += phases(plan, roles)
    here = facts.gpus >= plan.cluster.gpus  # else the run is for another machine
    for text in too_much(
        roles,
        plan,
        ram=facts.memory if here else None,
        gpu_memory=facts.gpu_memory,
        disk=facts.disk(plan.run_dir),
    ):
        problems.warn(text)
    return roles


def _shape(
    config: dict[str, Any], tensors: Any, what: str, problems: Problems
) -> ModelShape | None:
    try:
        return shape(config, tensors)
    except ValueError as e:
        problems.note(f"{what} is not estimated: {e}")
        return None


def _report(config: RunConfig, plan: Plan, problems: Problems, **more: Any) -> Report:
    inline = _inline_secrets(config)
    return Report(
        errors=tuple(problems.errors),
        warnings=tuple(
            dict.fromkeys((*config.source.warnings, *plan.warnings, *problems.warnings, *inline))
        ),
        notes=(*plan.notes, *problems.notes),
        config=config,
        plan=plan,
        **more,
    )


def _inline_secrets(config: RunConfig) -> list[str]:
    def secret(at: Loc, value: Any) -> bool:
        named = hidden(at, value) and value not in ({}, [])
        return named or (isinstance(value, str) and redact(value) != value and "://" in value)

    found = [
        at
        for at, value in leaves(dict(config.source.values))
        if at and secret(at, value) and "$" not in config.source.where(at)
    ]
    text = (
        f"is a secret in plain text; write ${{oc.env:NAME}} and set the variable.  It is shown "
        f"as {REDACTED}"
    )
    return [f"{dotted(at)} {text}" for at in found]
