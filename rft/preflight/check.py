"""Check a configuration before anything starts, in two stages: the file alone, then everything that
it names.

Stage 1 loads no torch and opens only the file; for a file that is invalid by itself not even numpy
is loaded. Stage 2 imports plugins and opens tasksets and the model's files.  Invariant: a
configuration that passes here fails later only because of the machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rft.config.extends import rekey
from rft.config.load import load, stage_names
from rft.config.plan import Derived, Facts, Plan
from rft.config.schema.root import RunConfig
from rft.config.schema.source import Source, undotted
from rft.errors import ConfigError, ConfigErrors
from rft.preflight.check_report import Report
from rft.worker.waiting import works


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
    """Return the configuration and its complete Plan, ready to run.

    `plugin_dirs`: further plugin folders; `name` replaces the run's name; `stage` and `model_path`
    as for `check`. Raises ConfigErrors with all errors.
    """
    report = check(
        path,
        overrides,
        plugin_dirs=plugin_dirs,
        facts=facts,
        name=name,
        stage=stage,
        model_path=model_path,
    )
    if report.errors:
        raise ConfigErrors(list(report.errors))
    assert report.config is not None and report.plan is not None
    return report.config, replace(report.plan, warnings=report.warnings, notes=report.notes)


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
    """Run both stages, or with `schema_only` the first; report errors of the configuration instead
    of raising.

    In a program of several stages, `stage` names the stage and `model_path` the model exported by
    the stage before; without an export, the program's own model replaces it.
    """
    facts = replace(facts or Facts(), plugin_dirs=tuple(plugin_dirs))
    with works(f"checking {path}"):
        return _checked(path, overrides, facts, schema_only, name, stage, model_path)


def _checked(
    path: str | Path,
    overrides: Sequence[str],
    facts: Facts,
    schema_only: bool,
    name: str,
    stage: str,
    model_path: str,
) -> Report:
    try:
        written = load(path, overrides, stage=stage)
    except ConfigError as e:
        return Report(errors=tuple(e.errors), schema_only=schema_only)
    from rft.preflight.second_stage import checked

    config = written
    if model_path:
        config = written.model_copy(
            update={"model": written.model.model_copy(update={"model_path": model_path})}
        )
    report = checked(
        config, facts, f"{name or config.name}/{stage}" if stage else name, schema_only
    )
    plan = report.plan
    if plan is not None and model_path:
        derived = Derived(
            key="model.model_path", value=model_path, reason="what the stage before exported"
        )
        plan = replace(plan, derived=(*plan.derived, derived))
    errors = [_located(e, written.source) for e in report.errors]
    if any(x.path for x in config.model.lora_configs or ()) and stage not in (
        *stage_names(path, overrides)[:1],
        "",
    ):
        text = (
            f"stage {stage} begins with the model of the one before, to which this adapter is "
            f"added already; begin with a model that "
        )
        text += (
            "holds it (model.model_path), or train what begins with the adapter in a run of its own"
        )
        errors.append(_located(ConfigError(text, key="model.lora_configs[0].path"), written.source))
    return replace(report, config=written, plan=plan, errors=tuple(rekey(errors, written.source)))


def _located(error: ConfigError, source: Source) -> ConfigError:
    """Return the error with the line that wrote the key, as in errors of the schema."""
    where = source.where(undotted(error.key)) if error.key else ""
    if not where or where in error.message:
        return error
    return ConfigError(f"{error.message}  ({where})", key=error.key, given=error.given)
