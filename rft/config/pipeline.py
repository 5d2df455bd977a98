"""The experience pipeline: which operators a run has, with which arguments, in which order; where the copy of their input goes.

Part of `resolve`; the same rules hold here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rft.buffer.operators.settings import ROLLOUT_MODEL, OperatorSettings, PipelineSettings
from rft.config.plan import Facts
from rft.config.problems import Problems
from rft.config.schema.root import RunConfig
from rft.config.served import auxiliary_names
from rft.errors import ConfigError
from rft.plugins import REGISTRY
from rft.trainer.settings import AlgorithmSettings

_KEY = "data_processor.experience_pipeline"


def pipeline(
    config: RunConfig,
    facts: Facts,
    run_dir: Path,
    algorithm: AlgorithmSettings,
    batch_rows: int | None,
    find: Callable[[str], str],
    p: Problems,
) -> PipelineSettings:
    """`batch_rows`: rows of a train step, where it counts rows.  `find` makes a path of what is written, path/file.py:Name too."""
    given = config.data_processor.experience_pipeline
    written = tuple(
        OperatorSettings(name=find(o.name) if ":" in o.name else o.name, args=dict(o.args), key=f"{_KEY}.operators[{i}]")
        for i, o in enumerate(given.operators)
    )
    operators = (*written, *of_algorithm(algorithm))
    if operators:
        _check(operators, (ROLLOUT_MODEL, *auxiliary_names(config)), facts.plugins_loaded, p)
    if operators and batch_rows is not None:
        p.warn(
            f"buffer.train_batch_size {batch_rows} counts rows, and a row that an operator leaves out is missing then (see "
            "on_short_batch).  Leave it out to train whole groups"
        )
    return PipelineSettings(operators=operators, input_path=_input_path(config, run_dir, p))


def of_algorithm(algorithm: AlgorithmSettings) -> list[OperatorSettings]:
    """Operators that an algorithm's arguments stand for; they drop groups, so they come last."""
    threshold = algorithm.advantage_fn_args.get("std_threshold")
    if algorithm.advantage_fn != "grpo" or threshold is None:
        return []
    return [
        OperatorSettings(name="reward_std_filter", args={"threshold": threshold}, key="algorithm.advantage_fn_args.std_threshold")
    ]


def _check(operators: Sequence[OperatorSettings], engines: Sequence[str], plugins_loaded: bool, p: Problems) -> None:
    """Every fault of the list, not only the first; the order where each operator is right by itself.

    Names that are not known yet wait until the plugins are loaded.
    """
    from rft.buffer.operators.build import REFUSED, build

    REGISTRY.scan_package("rft.buffer.operators")
    shipped = {*REGISTRY.names("operator"), *REFUSED}
    found = [o for o in operators if plugins_loaded or o.name in shipped]
    before = len(p.errors)
    for one in found:
        try:
            build([one], engines)
        except ConfigError as e:
            p.take(e)
    if len(p.errors) == before:
        try:
            build(found, engines)
        except ConfigError as e:
            p.take(e)


def _input_path(config: RunConfig, run_dir: Path, p: Problems) -> Path | None:
    given, key = config.data_processor.experience_pipeline, f"{_KEY}.input_save_path"
    if given.input_save_path is not None and "://" in given.input_save_path:
        p.error(
            key,
            "a database is not written; name a .jsonl file or a folder.  What the buffer keeps of each experience can be asked with SQL: "
            "rft buffer query",
            given=given.input_save_path,
        )
        return None
    if not given.save_input:
        if given.input_save_path is not None:
            p.note(f"{key} has no effect: save_input is false")
        return None
    if given.input_save_path is None:
        path = run_dir / "buffer" / "explorer_output.jsonl"
        p.derive(key, str(path), "in the run folder")
        return path
    path = Path(given.input_save_path).expanduser().absolute()
    return path if path.suffix in (".jsonl", ".json") else path / "explorer_output.jsonl"
