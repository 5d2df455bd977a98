"""What a configuration will do, told before anything starts.  Two stages: the file by itself, then what it names.

Stage 1 loads no torch and opens nothing but the file.  Stage 2 imports plugins and opens tasksets and the model's files.
Invariant: what passes here fails later only because of the machine.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from rft import plugins
from rft.algorithm.catalog import needs
from rft.config import adapter, given, modelfiles, served, wants
from rft.config.active import NotActive
from rft.config.advice import advise
from rft.config.load import load
from rft.config.memory import RoleMemory, estimate, too_much
from rft.config.modelshape import ModelShape, shape
from rft.config.plan import Derived, Facts, Plan
from rft.config.problems import Problems
from rft.config.resolve import resolve
from rft.config.schema.root import RunConfig
from rft.config.source import Source, is_secret, undotted
from rft.config.stages import rekey
from rft.errors import ConfigError, ConfigErrors
from rft.logs import REDACTED, redact
from rft.taskset.settings import TasksetSettings
from rft.types import rotary


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything `rft check` found.  `plan` is None where the errors left none."""

    errors: tuple[ConfigError, ...] = ()
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    config: RunConfig | None = None
    plan: Plan | None = None
    tasksets: tuple[Any, ...] = ()  # preview.TasksetPreview
    model: dict[str, Any] = field(default_factory=dict)
    memory: tuple[RoleMemory, ...] = ()  # empty where the model's sizes are not known
    schema_only: bool = False

    @property
    def ok(self) -> bool:
        return not self.errors

    @property
    def not_active(self) -> tuple[NotActive, ...]:
        """What is accepted and comes later."""
        return self.plan.not_active if self.plan is not None else ()

    def to_json(self) -> dict[str, Any]:
        """Plain values, secrets redacted."""
        return {
            "ok": self.ok,
            "errors": [plain({"key": e.key, "given": e.given, "message": redact(e.message)}) for e in self.errors],
            "warnings": [redact(w) for w in self.warnings],
            "notes": [redact(n) for n in self.notes],
            "not_active": plain(self.not_active),
            "plan": plain(self.plan) if self.plan is not None else None,
            "tasksets": plain(self.tasksets),
            "model": plain(self.model),
            "values": self._values(),
            "step": step(self.plan, self.tasksets) if self.plan is not None else None,
            "memory": [{**plain(r), "bytes": r.nbytes} for r in self.memory],
        }

    def _values(self) -> list[dict[str, str]]:
        from rft.config.explain import values

        if self.config is None or self.plan is None:
            return []
        return [{"key": k, "value": redact(v), "from": redact(where)} for k, v, where in values(self.config, self.plan)]


def step(plan: Plan, tasksets: Sequence[Any] = ()) -> dict[str, Any]:
    """What one explore step and the whole run amount to.  `tasksets`: previews; without them prompts and epochs are not known."""
    from rft.config.explain import timeline
    from rft.config.plan import schedule
    from rft.sync.timeline import picture

    if plan.trainer.given is not None:
        return given.summary(plan, tuple(tasksets))
    train = [t for t in tasksets if not t.is_eval]
    prompts = [t.mean_prompt_tokens for t in train if t.mean_prompt_tokens is not None]
    rows, batches = sum(t.num_rows for t in train), plan.explorer.total_batches
    runs = plan.runs_per_step
    most = max((t.sampling.max_tokens for t in plan.explorer.tasksets), default=0)
    return {
        "train_steps": plan.total_steps,
        "explore_steps": batches or None,
        "epochs": round(batches * plan.explorer.batch_size / rows, 2) if rows and batches else None,
        "tasks": plan.explorer.batch_size,
        "experiences": runs,
        "prompt_tokens": round(runs * sum(prompts) / len(prompts)) if prompts else None,
        "max_generated_tokens": runs * most,
        "staleness_bound": plan.staleness_bound,
        "sync": timeline(plan),
        "timeline": picture(schedule(plan.sync)),
    }


def load_plan(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    plugin_dirs: Sequence[str] = (),
    facts: Facts | None = None,
    name: str = "",
    stage: str = "",
    model_path: str = "",
) -> tuple[RunConfig, Plan]:
    """The configuration and its complete Plan, ready to run.  Raises ConfigErrors with all that is wrong.

    `plugin_dirs` are further folders with plugins; `name` replaces the run's name; `stage` and `model_path` as for `check`.
    """
    report = check(path, overrides, plugin_dirs=plugin_dirs, facts=facts, name=name, stage=stage, model_path=model_path)
    if report.errors:
        raise ConfigErrors(list(report.errors))
    assert report.config is not None and report.plan is not None
    if waiting := [n for n in report.not_active if not n.harmless]:
        raise ConfigErrors(
            [ConfigError(f"accepted by `rft check`, not active yet: {n.instead}", key=n.key, given=n.value) for n in waiting]
        )
    idle = tuple(f"{n.key} has no effect yet: {n.instead}" for n in report.not_active)
    return report.config, replace(report.plan, warnings=(*report.warnings, *idle), notes=report.notes)


def check(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    plugin_dirs: Sequence[str] = (),
    schema_only: bool = False,
    facts: Facts | None = None,
    name: str = "",
    stage: str = "",
    model_path: str = "",
) -> Report:
    """Both stages, or with `schema_only` the first.  Never raises for a configuration that is wrong: it reports.

    Of a program of several stages, `stage` says which one, and `model_path` is what the one before has exported; where nothing has been
    exported yet, the program's own model stands in for it.
    """
    facts = replace(facts or Facts(), plugin_dirs=tuple(plugin_dirs))
    try:
        written = load(path, overrides, stage=stage)
    except ConfigError as e:
        return Report(errors=_listed(e), schema_only=schema_only)
    config = written if not model_path else _with_model(written, model_path)
    report = _checked(config, facts, f"{name or config.name}/{stage}" if stage else name, schema_only)
    plan = report.plan
    if plan is not None and model_path:
        why = Derived(key="model.model_path", value=model_path, why="what the stage before exported")
        plan = replace(plan, derived=(*plan.derived, why))
    errors = [_located(e, written.source) for e in report.errors]
    return replace(report, config=written, plan=plan, errors=tuple(rekey(errors, written.source)))


def _located(error: ConfigError, source: Source) -> ConfigError:
    """With the line that wrote the key, as errors of the schema have it."""
    where = source.where(undotted(error.key)) if error.key else ""
    if not where or where in error.message:
        return error
    return ConfigError(f"{error.message}  ({where})", key=error.key, given=error.given)


def _checked(config: RunConfig, facts: Facts, name: str, schema_only: bool) -> Report:
    try:
        plan = resolve(config, facts, name=name)
    except ConfigError as e:
        return Report(errors=_listed(e), config=config, schema_only=schema_only)
    if schema_only:
        problems = Problems()
        advise(plan, _keys(config, plan), problems)
        roles = _memory(plan, modelfiles.sizes(plan.learner.model_path), None, facts, problems)
        return _report(config, plan, problems, schema_only=True, memory=roles)
    return _second_stage(config, plan, facts, name)


def _with_model(config: RunConfig, path: str) -> RunConfig:
    return config.model_copy(update={"model": config.model.model_copy(update={"model_path": path})})


def _second_stage(config: RunConfig, plan: Plan, facts: Facts, name: str) -> Report:
    from rft.config import preview

    problems = Problems()
    try:
        plugins.load_all(plan.plugin_dirs)
    except ConfigError as e:
        return Report(errors=_listed(e), config=config, plan=plan)
    _storage_is_there(plan, problems)
    model = None
    try:
        model = modelfiles.look(plan.learner.model_path, plan.learner.tokenizer_path)
    except ConfigError as e:
        problems.take(e)
    else:
        _model_fits(model, plan, problems)
        _critic_fits(model, plan, problems)
        adapter.fits(plan.learner, model.tensors, problems)
        adapter.rounding(plan, problems)
        _auxiliary_fit(config, plan, problems)
    seen = preview.look(plan, _keys(config, plan), model, problems)
    found, counts = given.look(plan, problems) if not problems.errors else ([], {})
    wants.look(plan, seen.opened, problems)
    if plan.resume_from_path is not None and not plan.resume_from_path.is_dir():
        problems.error("resume_from_path", "is not a folder", given=str(plan.resume_from_path))
    if not problems.errors:
        opened = {t.settings.name: t for t in seen.opened}

        def num_batches(tasksets: tuple[TasksetSettings, ...], batch_size: int, epochs: int) -> int:
            from rft.taskset.order import num_batches as count

            lengths = counts | {name: len(taskset) for name, taskset in opened.items()}
            return count([lengths[t.name] for t in tasksets], batch_size, epochs)

        known = all(t.name in opened for t in plan.explorer.tasksets)
        try:
            plan = resolve(config, replace(facts, plugins_loaded=True), num_batches=num_batches if known else None, name=name)
        except ConfigError as e:
            problems.take(e)
    facts_of_model: dict[str, Any] = {}
    advise(plan, _keys(config, plan), problems)
    longest = max((t.max_prompt_tokens for t in seen.tasksets if t.max_prompt_tokens is not None), default=None)
    roles = _memory(plan, (model.config, model.tensors) if model is not None else None, longest, facts, problems)
    if model is not None:
        kind = model.config.get("model_type", "?")
        facts_of_model = {
            "folder": str(model.model_folder),
            "type": kind,
            "parameters": model.num_parameters,
            "stored": model.dtype,
        }
    return _report(config, plan, problems, tasksets=(*seen.tasksets, *found), model=facts_of_model, memory=roles)


def _memory(
    plan: Plan, sizes: tuple[dict[str, Any], Any] | None, prompt_tokens: int | None, facts: Facts, problems: Problems
) -> tuple[RoleMemory, ...]:
    if sizes is None:
        return ()
    try:
        known = shape(*sizes)
    except ValueError as e:
        problems.note(f"memory is not estimated: {e}")
        return ()
    critic = plan.learner.critic.model_path
    other = modelfiles.sizes(critic) if critic not in ("", plan.learner.model_path) else None
    valued = shape(*other) if other is not None else None
    lora = plan.learner.lora
    trained = None if lora is None else adapter.parameters(lora, known, sizes[1])
    roles = estimate(
        plan,
        known,
        critic=valued,
        trained=trained,
        auxiliary=_beside(plan, problems),
        prompt_tokens=prompt_tokens,
        gpu_memory=facts.gpu_memory,
    )
    here = facts.gpus >= plan.cluster.gpus  # else the run is for another machine
    for text in too_much(roles, plan, ram=facts.memory if here else None, gpu_memory=facts.gpu_memory):
        problems.warn(text)
    return roles


def _beside(plan: Plan, problems: Problems) -> dict[str, ModelShape]:
    """Sizes of the auxiliary models whose files are here."""
    found: dict[str, ModelShape] = {}
    for m in plan.auxiliary:
        if m.engines[0].external is None and (sizes := modelfiles.sizes(m.engines[0].model_path)) is not None:
            try:
                found[m.name] = shape(*sizes)
            except ValueError as e:
                problems.note(f"memory of auxiliary model {m.name} is not estimated: {e}")
    return found


def _auxiliary_fit(config: RunConfig, plan: Plan, problems: Problems) -> None:
    """Their files, and what is asked of them."""
    for i, m in zip(served.distinct(config), plan.auxiliary, strict=True):
        e, key = m.engines[0], f"auxiliary model {m.name}"
        if e.external is not None or e.engine_type == "scripted":
            continue
        try:
            files = modelfiles.look(e.model_path, e.tokenizer_path)
        except ConfigError as error:
            for one in error.errors if isinstance(error, ConfigErrors) else [error]:
                problems.error(f"explorer.auxiliary_models[{i}].model_path", f"{key}: {one.message}", given=e.model_path)
            continue
        kinds = files.config.get("architectures") or []
        head = any("ForSequenceClassification" in k or "RewardModel" in k for k in kinds)
        if kinds and head != (e.task == "score"):
            other = "generate" if e.task == "score" else "score"
            problems.error(
                f"explorer.auxiliary_models[{i}].task",
                f"{key}: is {e.task}, but the model is a {', '.join(kinds)}; use task: {other} or another model",
                given=e.task,
            )
        longest = files.config.get("max_position_embeddings")
        if isinstance(longest, int) and e.max_model_len > longest:
            problems.error(
                f"explorer.auxiliary_models[{i}].max_model_len",
                f"{key}: is {e.max_model_len} tokens, but the model knows {longest} positions",
                given=e.max_model_len,
            )
        if files.chat_template is None and e.chat_template is None:
            problems.warn(f"{key} has no chat template; it can be asked with token ids only.  Write chat_template there")


def _report(config: RunConfig, plan: Plan, problems: Problems, **more: Any) -> Report:
    inline = _inline_secrets(config)
    return Report(
        errors=tuple(problems.errors),
        warnings=tuple(dict.fromkeys((*config.source.warnings, *plan.warnings, *problems.warnings, *inline))),
        notes=(*plan.notes, *problems.notes),
        config=config,
        plan=plan,
        **more,
    )


def _critic_fits(policy: modelfiles.ModelFiles, plan: Plan, problems: Problems) -> None:
    """The critic reads the policy's tokens with weights of its own."""
    path, key = plan.learner.critic.model_path, "model.critic_model_path"
    if path in ("", plan.learner.model_path) or not needs(plan.learner.algorithm).critic:
        return
    try:
        found = modelfiles.look(path)
    except ConfigError as e:
        for error in e.errors if isinstance(e, ConfigErrors) else [e]:
            problems.error(key, error.message, given=path)
        return
    ours, theirs = policy.config.get("vocab_size"), found.config.get("vocab_size")
    if ours != theirs:
        problems.error(key, f"has a vocabulary of {theirs}, the policy one of {ours}; both read the same tokens", given=path)


def _storage_is_there(plan: Plan, problems: Problems) -> None:
    from rft.buffer.place import place  # SQLAlchemy takes a quarter of a second

    key = "buffer.trainer_input.experience_buffer"
    try:
        where = place(plan.buffer)
    except ConfigError as e:
        problems.error(f"{key}.path", e.message)
        return
    if where.url is not None and importlib.util.find_spec("psycopg") is None:
        problems.error(f"{key}.path", 'needs the package psycopg: pip install "rft-platform[postgres]"')


def _model_fits(model: Any, plan: Plan, problems: Problems) -> None:
    problems.warnings.extend(model.warnings)
    wanted = plan.engines[0].max_model_len
    try:
        longest = rotary.positions(model.config, plan.learner.override_config)
    except ConfigError as e:
        problems.take(e)
        longest = None
    if longest is not None and wanted > longest:
        problems.error(
            "model.max_model_len",
            f"is {wanted} tokens, but the model knows {longest} positions; see model.rope_scaling",
            given=wanted,
        )
    heads = model.config.get("num_key_value_heads") or model.config.get("num_attention_heads")
    tp = plan.engines[0].tensor_parallel_size
    if isinstance(heads, int) and tp > 1 and (model.config.get("num_attention_heads") or heads) % tp:
        problems.error(
            "explorer.rollout_model.tensor_parallel_size", f"is {tp}, which does not divide the attention heads", given=tp
        )
    texts = plan.trainer.given is not None and plan.trainer.given.kind == "texts"
    if model.chat_template is None and plan.engines[0].chat_template is None and not texts:
        problems.error("model.chat_template_path", f"{model.folder} has no chat template; write one here")


def _keys(config: RunConfig, plan: Plan) -> dict[str, str]:
    """Name of each taskset → its configuration key, in the order in which `resolve` makes them."""
    given, base = config.buffer.explorer_input, "buffer.explorer_input"
    train = [f"{base}.taskset"] if given.taskset is not None else [f"{base}.tasksets[{i}]" for i in range(len(given.tasksets))]
    if config.mode == "bench":
        train = []  # they are not played
    keys = [*train, *(f"{base}.eval_tasksets[{i}]" for i in range(len(given.eval_tasksets)))]
    return dict(zip((t.name for t in (*plan.explorer.tasksets, *plan.explorer.eval_tasksets)), keys, strict=True))


def _inline_secrets(config: RunConfig) -> list[str]:
    from rft.config.source import dotted

    def found(value: Any, loc: tuple[str | int, ...]) -> list[str]:
        if isinstance(value, dict):
            return [w for k, v in value.items() for w in found(v, (*loc, str(k)))]
        if isinstance(value, list):
            return [w for i, v in enumerate(value) for w in found(v, (*loc, i))]
        secret = (bool(loc) and is_secret(str(loc[-1]), value)) or (
            isinstance(value, str) and redact(value) != value and "://" in value
        )
        if secret and "$" not in config.source.where(loc):
            return [
                f"{dotted(loc)} is a secret in plain text; write ${{oc.env:NAME}} and set the variable.  It is shown as {REDACTED}"
            ]
        return []

    return found(dict(config.source.values), ())


def _listed(error: ConfigError) -> tuple[ConfigError, ...]:
    return tuple(error.errors) if isinstance(error, ConfigErrors) else (error,)


def plain(value: Any, key: str = "") -> Any:
    """Dataclasses, structs, paths → JSON values, secrets redacted."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name), f.name) for f in dataclasses.fields(value)}
    if isinstance(value, msgspec.Struct):
        return {n: plain(getattr(value, n), n) for n in value.__struct_fields__}
    if isinstance(value, dict):
        return {str(k): plain(v, str(k)) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v, key) for v in value]
    if is_secret(key, value):
        return REDACTED
    if isinstance(value, str | Path):
        return redact(str(value))
    return value if value is None or isinstance(value, bool | int | float) else redact(str(value))
