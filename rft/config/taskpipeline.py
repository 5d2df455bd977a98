"""The written task pipeline → its settings: which files go in, which taskset's file comes out.

Part of `resolve`; the same rules hold here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rft.config.plan import Facts
from rft.config.problems import Problems
from rft.config.schema.data_processor import PriorityWeightsConfig, TaskPipelineConfig
from rft.config.schema.root import RunConfig
from rft.config.yamlfile import parse
from rft.errors import ConfigError
from rft.plugins import REGISTRY, may_come
from rft.taskset.settings import TaskOperatorSettings, TaskPipelineSettings, TasksetSettings

KEY = "data_processor.task_pipeline"
Tasksets = tuple[TasksetSettings, ...]


def num_process(config: RunConfig, facts: Facts) -> int:
    """Processes that work on rows: as many as are written, else the default but no more than there are cores."""
    given = config.data_processor.task_pipeline
    return given.num_process if given is not None else min(TaskPipelineConfig().num_process, facts.cpus)


def task_pipeline(
    config: RunConfig,
    facts: Facts,
    train: Tasksets,
    evals: Tasksets,
    plugin_dirs: tuple[str, ...],
    find: Callable[[str], str],
    p: Problems,
) -> tuple[TaskPipelineSettings | None, Tasksets, Tasksets]:
    """The pipeline, and the tasksets; those that read its result do so by its absolute path.  None where nothing is to be done."""
    given = config.data_processor.task_pipeline
    if given is None or given == TaskPipelineConfig(num_process=given.num_process):
        return None, train, evals
    operators = _operators(given, facts, plugin_dirs, find, p)
    before = len(p.errors)
    if not given.inputs:
        p.error(f"{KEY}.inputs", "name the files whose rows are worked on; the result goes into the path of the training taskset")
    if given.output is None and not train:
        p.error(f"{KEY}.output", "there is no training taskset whose path could take the result; name one")
    if len(p.errors) > before:
        return None, train, evals
    written = given.output.path if given.output is not None else train[0].path
    output = Path(find(written)).expanduser().absolute()
    if output.suffix != ".jsonl" or "://" in written:
        where = f"{KEY}.output.path" if given.output is not None else "buffer.explorer_input"
        p.error(where, f"takes the result of {KEY} and must be a file that ends with .jsonl", given=written)
    inputs = tuple(str(Path(find(path)).expanduser().absolute()) for path in given.inputs)
    if str(output) in inputs:
        p.error(f"{KEY}.inputs", "the result cannot go into one of the inputs; give the taskset another path", given=str(output))
    if given.output is not None:
        for name, field in type(given.output).model_fields.items():
            if name != "path" and (value := getattr(given.output, name)) != field.get_default(call_default_factory=True):
                p.note(f"{KEY}.output.{name} ({value}) has no effect: write it in the taskset that reads {written}")
    weights = {name: getattr(given.priority_weights, name) for name in PriorityWeightsConfig.model_fields}
    order = given.order or ("sort" if given.priority_weights != PriorityWeightsConfig() or given.top_k >= 0 else "keep")
    if given.order is None:
        p.derive(
            f"{KEY}.order",
            order,
            "priority_weights or top_k is written" if order == "sort" else "neither priority_weights nor top_k is",
        )

    def reads(t: TasksetSettings) -> TasksetSettings:
        return replace(t, path=str(output)) if _same(t.path, output) else t

    train, evals = tuple(map(reads, train)), tuple(map(reads, evals))
    if not any(t.path == str(output) for t in (*train, *evals)):
        p.warn(f"{KEY}.output: no taskset of the run reads {output}")
    pipeline = TaskPipelineSettings(
        inputs=inputs,
        output=str(output),
        operators=operators,
        target_fields=given.target_fields,
        order=order,
        priority_weights=weights,
        top_k=given.top_k,
        seed=config.seed,
        num_process=given.num_process,
        plugin_dirs=plugin_dirs,
    )
    return pipeline, train, evals


def _same(path: str, output: Path) -> bool:
    return "://" not in path and Path(path).expanduser().absolute() == output


def _operators(
    given: TaskPipelineConfig, facts: Facts, plugin_dirs: tuple[str, ...], find: Callable[[str], str], p: Problems
) -> tuple[TaskOperatorSettings, ...]:
    """Those of config_path, then the written ones; what is known already is checked."""
    written = [(o.name, dict(o.args), f"{KEY}.operators[{i}]") for i, o in enumerate(given.operators)]
    if given.config_path is not None:
        try:
            written = [*_from_file(given.config_path, find, facts), *written]
        except ConfigError as e:
            p.take(e)
        except OSError as e:
            p.error(f"{KEY}.config_path", f"cannot be read: {e.strerror or e}", given=given.config_path)
    made = tuple(
        TaskOperatorSettings(name=find(name) if ":" in name else name, args=args, key=key) for name, args, key in written
    )
    from rft.taskset import pipeline

    known = REGISTRY.names("task_operator")
    for o in made:
        if facts.plugins_loaded or o.name in known or not may_come(o.name, plugin_dirs):
            try:
                pipeline.check_operator(o)
            except ConfigError as e:
                p.take(e)
    return made


def _from_file(path: str, find: Callable[[str], str], facts: Facts) -> list[tuple[str, dict[str, Any], str]]:
    key = f"{KEY}.config_path"
    value, _ = parse(facts.read_text(find(path)), path)
    if isinstance(value, dict) and "process" in value:
        raise ConfigError(
            f"{path} is a recipe of data-juicer, whose operators are not offered; run data-juicer beforehand and name its output in inputs",
            key=key,
            given=path,
        )
    listed = value.get("operators") if isinstance(value, dict) and set(value) == {"operators"} else None
    if not isinstance(listed, list) or not all(
        isinstance(o, dict) and set(o) <= {"name", "args"} and "name" in o for o in listed
    ):
        raise ConfigError(
            f"{path} must hold the key operators alone, a list of {{name: ..., args: {{...}}}}", key=key, given=path
        )
    return [(str(o["name"]), dict(o.get("args") or {}), f"{key}, operator {i}") for i, o in enumerate(listed)]
