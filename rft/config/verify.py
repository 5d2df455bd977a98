"""What a configuration will do, told before anything starts.  Two stages: the file by itself, then
what it names.

Stage 1 loads no torch and opens nothing but the file; a file that is wrong by itself does not load
numpy either.  Stage 2 imports plugins and opens tasksets and the model's files.  Invariant: what
passes here fails later only because of the machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rft.config.check_report import Report
from rft.config.extends import rekey
from rft.config.load import load, stage_names
from rft.config.plan import Derived, Facts, Plan
from rft.config.schema.root import RunConfig
from rft.config.schema.source import Source, undotted
from rft.errors import ConfigError, ConfigErrors


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
    """The configuration and its complete Plan, ready to run.  Raises ConfigErrors with all that is
    wrong.

    `plugin_dirs` are further folders with plugins; `name` replaces the run's name; `stage` and
    `model_path` as for `check`.
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
    """Both stages, or with `schema_only` the first.  Never raises for a configuration that is
    wrong: it reports.

    Of a program of several stages, `stage` says which one, and `model_path` is what the one before
    has exported; where nothing has been exported yet, the program's own model stands in for it.
    """
    facts = replace(facts or Facts(), plugin_dirs=tuple(plugin_dirs))
    try:
        written = load(path, overrides, stage=stage)
    except ConfigError as e:
        return Report(errors=tuple(e.errors), schema_only=schema_only)
    from rft.config.second_stage import checked

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
        why = Derived(
            key="model.model_path", value=model_path, why="what the stage before exported"
        )
        plan = replace(plan, derived=(*plan.derived, why))
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
    """With the line that wrote the key, as errors of the schema have it."""
    where = source.where(undotted(error.key)) if error.key else ""
    if not where or where in error.message:
        return error
    return ConfigError(f"{error.message}  ({where})", key=error.key, given=error.given)
