"""Check a file that has passed the schema: build the plan, check everything that it names, and
report.

The second stage loads plugins, reads the model's files and opens the tasksets.  Depends on the
checks, not on their findings.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import rft.plugins as plugins
from rft.config.context import Context, Problems
from rft.config.plan import Derived, Facts, Plan, Tasksets
from rft.config.resolve import build, resolve
from rft.config.schema.root import RunConfig
from rft.config.schema.source import Loc, dotted, hidden, leaves
from rft.errors import ConfigError
from rft.preflight import lora_checks, missing_dependencies, model_folder, plan_checks
from rft.preflight.check_report import Report
from rft.preflight.memory_estimate import estimate, too_much
from rft.preflight.memory_shared import phases, with_share
from rft.preflight.memory_terms import RoleMemory
from rft.preflight.model_folder import ModelFiles, ModelShape, shape
from rft.secrets import REDACTED, redact
from rft.trainer.checkpoint.manifest import committed
from rft.types.row_layout import Choice


def checked(config: RunConfig, facts: Facts, name: str, schema_only: bool) -> Report:
    """Return the report; errors of the configuration are reported, not raised."""
    ctx = Context(config, facts, name)
    plan = build(ctx)
    if schema_only and ctx.errors:
        return Report(errors=tuple(ctx.errors), config=config, schema_only=True)
    if schema_only:
        problems = Problems()
        plan_checks.advise(plan, problems)
        sizes = model_folder.sizes(plan.learner.model_path)
        plan, roles = _memory(config, plan, sizes, (None, None), facts, problems)
        needs = missing_dependencies.look(plan, facts)
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
    # errors found without plugins count even if the check with plugins finds none
    if alone and not ctx.errors:
        return Report(errors=tuple(alone), config=config)
    if ctx.errors:
        return Report(errors=(*ctx.errors, *_other_errors(plan, ctx.errors)), config=config)
    return _second_stage(config, plan, ctx.facts, name)


def _other_errors(plan: Plan, errors: list[ConfigError]) -> list[ConfigError]:
    """Return errors of the model and of the tasksets whose own keys are valid.

    `plan` is valid except for the keys in `errors`.
    """
    from rft.preflight import preview

    def right(key: str) -> bool:
        return not any(e.key.startswith(key) for e in errors)

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
    """Return the files of the policy's model; None if the model is behind a server.

    Raises ConfigErrors for invalid files.
    """
    if plan.engines[0].external is not None:
        return None
    plugins.import_library(plan.learner.external_lib)  # it may register the model's classes
    x = plan.learner
    return model_folder.look(x.model_path, x.tokenizer_path, trusted=x.trust_remote_code)


def _model(plan: Plan, problems: Problems) -> ModelFiles | None:
    with problems.collect_errors():
        return policy_files(plan)
    return None


def _second_stage(config: RunConfig, plan: Plan, facts: Facts, name: str) -> Report:
    from rft.preflight import offline_rows, preview, required_fields, reward_parts, vocabularies

    problems = Problems()
    plan_checks.storage(plan, problems)
    with problems.collect_errors():
        for need in (
            *missing_dependencies.operators(plan),
            *missing_dependencies.trackers(plan, plan.monitor),
        ):
            problems.error(need.key, need.message)
    model = _model(plan, problems)
    rows = plan_checks.models(config, plan, model, problems) if model is not None else None
    plan = vocabularies.compared(plan, model)
    data = preview.look(plan, model, problems)
    offline_previews, counts = (
        offline_rows.look(plan, problems) if not problems.errors else ([], {})
    )
    required_fields.look(plan, data.opened, model, problems)
    if not problems.errors:
        reward_parts.look(plan, data.opened, problems)
    has_checkpoint = plan.mode != "bench" and committed(
        plan.run_dir / "checkpoints"
    )  # the run continues from these
    if (
        plan.resume_from_path is not None
        and not has_checkpoint
        and not plan.resume_from_path.is_dir()
    ):
        problems.error("resume_from_path", "is not a folder", given=str(plan.resume_from_path))
    if not problems.errors:
        opened = {t.settings.name: t for t in data.opened}

        def num_batches(tasksets: Tasksets, batch_size: int, epochs: int) -> int:
            from rft.taskset.task_order import num_batches as count

            return count([lengths[t.name] for t in tasksets], batch_size, epochs)

        all_opened = all(t.name in opened for t in plan.explorer.tasksets)
        trained = (
            [plan.trainer.offline_data.rows.name]
            if plan.trainer.offline_data
            else [t.name for t in plan.explorer.tasksets]
        )
        lengths = counts | {name: len(taskset) for name, taskset in opened.items()}
        _say_repeats([lengths[name] for name in trained if name in lengths], plan, problems)
        with problems.collect_errors():
            counted = resolve(
                config, facts, num_batches=num_batches if all_opened else None, name=name
            )
            plan = replace(counted, auxiliary=plan.auxiliary)
    plan = plan_checks.settled(plan, rows)
    plan_checks.advise(plan, problems)
    longest = (
        _most(t.max_prompt_tokens for t in data.tasksets),
        _most(t.max_image_tokens for t in (*data.tasksets, *offline_previews)),
    )
    sizes = (model.config, model.tensors) if model is not None else None
    plan, roles = _memory(config, plan, sizes, longest, facts, problems)
    return _report(
        config,
        plan,
        problems,
        tasksets=(*data.tasksets, *offline_previews),
        model=_about_model(model, rows),
        memory=roles,
    )


def _most(counts: Iterable[int | None]) -> int | None:
    return max((count for count in counts if count is not None), default=None)


def _about_model(model: ModelFiles | None, rows: Choice | None) -> dict[str, Any]:
    about: dict[str, Any] = {}
    if model is not None:
        about = {
            "folder": str(model.model_folder),
            "type": model.config.get("model_type", "?"),
            "parameters": model.num_parameters,
            "stored": model.dtype,
        }
    if rows is not None:
        about |= {"row_layout": rows.layout, "row_layout_why": rows.reason}
    return about


def _say_repeats(lengths: Sequence[int], plan: Plan, problems: Problems) -> None:
    """Warn if a step needs more rows than exist, so that it repeats some."""
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
    config: RunConfig,
    plan: Plan,
    sizes: tuple[dict[str, Any], Any] | None,
    longest: tuple[int | None, int | None],
    facts: Facts,
    problems: Problems,
) -> tuple[Plan, tuple[RoleMemory, ...]]:
    """Return the plan, with the gradient checkpointing and the engines' share of GPUs that memory
    requires, and every role's peak.  `longest`: tokens of a prompt, and of a prompt's images.

    The size of this machine's GPUs judges only a run on them; a declared size judges any run.
    """
    if sizes is None or (policy_shape := _shape(*sizes, "memory", problems)) is None:
        return plan, ()
    critic = plan.learner.critic.model_path
    other = model_folder.sizes(critic) if critic not in ("", plan.learner.model_path) else None
    critic_shape = None if other is None else _shape(*other, "memory of the critic", problems)
    lora = plan.learner.lora
    auxiliary = {
        m.name: model_shape
        for m in plan.auxiliary
        if m.engines[0].external is None
        and (theirs := model_folder.sizes(m.engines[0].model_path)) is not None
        and (model_shape := _shape(*theirs, f"memory of auxiliary model {m.name}", problems))
        is not None
    }

    here = facts.gpus >= plan.cluster.gpus  # else the run is for another machine
    on_these_gpus = here and plan.cluster.ray_address is None
    gpu_memory = facts.gpu_memory if on_these_gpus or facts.gpu_memory_declared else None

    def peaks(plan: Plan) -> tuple[RoleMemory, ...]:
        roles = estimate(
            plan,
            policy_shape,
            critic=critic_shape,
            trained=None if lora is None else lora_checks.parameters(lora, policy_shape, sizes[1]),
            auxiliary=auxiliary,
            prompt_tokens=longest[0],
            image_tokens=longest[1],
            gpu_memory=gpu_memory,
        )
        return roles + phases(plan, roles, policy_shape)

    roles = peaks(plan)
    if gpu_memory is not None and plan.learner.device == "cuda":
        shared = with_share(plan, roles, policy_shape, gpu_memory)
        if shared is not plan:
            plan = shared
            roles = peaks(plan)
        faster = _without_checkpointing(config, plan)
        faster_roles = roles if faster is plan else peaks(faster)
        if all(r.nbytes <= gpu_memory for r in faster_roles if r.device == "cuda"):
            plan = faster
            roles = faster_roles
    for excess in too_much(
        roles,
        plan,
        ram=facts.memory if here else None,
        gpu_memory=gpu_memory,
        disk=facts.disk(plan.run_dir),
    ):
        if excess.certain:
            problems.error(excess.key, excess.message)
        else:
            problems.warn(excess.message)
    return plan, roles


def _without_checkpointing(config: RunConfig, plan: Plan) -> Plan:
    """Return `plan` without gradient checkpointing where the configuration leaves it open."""
    t = config.trainer
    key = "trainer.enable_gradient_checkpointing"
    if t.enable_gradient_checkpointing is not None or t.enable_activation_offload:
        return plan
    critic = plan.learner.critic
    if t.critic.enable_gradient_checkpointing is None:
        critic = replace(critic, gradient_checkpointing=False)
    derived = Derived(key=key, value=False, reason="the GPUs have the memory")
    return replace(
        plan,
        learner=replace(plan.learner, gradient_checkpointing=False, critic=critic),
        derived=(*(d for d in plan.derived if d.key != key), derived),
    )


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

    secrets = [
        at
        for at, value in leaves(dict(config.source.values))
        if at and secret(at, value) and "$" not in config.source.where(at)
    ]
    text = (
        f"is a secret in plain text; write ${{oc.env:NAME}} and set the variable.  It is shown "
        f"as {REDACTED}"
    )
    return [f"{dotted(at)} {text}" for at in secrets]
