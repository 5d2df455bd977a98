"""The task pipeline: apply operators to rows of files once before the run, order and cut the rows,
and write the file that a taskset reads.

Depends on neither engine nor buffer.
Invariant: the file appears complete or not at all, next to a note of its inputs; a file made from
other inputs is never used and never overwritten.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

from rft.errors import ConfigError, PluginError
from rft.files.disk import write_whole
from rft.plugins import REGISTRY, Plugin, checked_args, load_all
from rft.taskset import parallel, row_operators
from rft.taskset.base import Row, RowSource, Taskset
from rft.taskset.files import open_path
from rft.taskset.open_source import open_taskset
from rft.taskset.row_operators import RowOperator, SetOperator
from rft.taskset.settings import TaskOperatorSettings, TaskPipelineSettings, TasksetSettings

KEY = "data_processor.task_pipeline"
_FORMAT = 1  # of results; increase when a built-in operator changes its results
_ASKS = ("llm_", "human_", "generate_", "optimize_")
_DATA_JUICER = ("_filter", "_mapper", "_deduplicator", "_selector", "_aggregator", "_grouper")


@dataclass(frozen=True)
class PreparedRows:
    """The result: `rows` in order, the row count after each step, and the fingerprint of the
    inputs.
    """

    rows: Sequence[Row]
    steps: tuple[tuple[str, int], ...]  # (step, rows left)
    fingerprint: str
    reused: bool = False

    def __str__(self) -> str:
        if self.reused:
            return f"{len(self.rows)} rows, made before from the same inputs and operators"
        return " → ".join(f"{what} {count}" for what, count in self.steps)

    def source(self, settings: TaskPipelineSettings) -> RowSource:
        """Return the rows as a source for a taskset."""
        return RowSource(
            rows=self.rows,
            where=lambda i: f"{settings.output}:{i + 1}",
            fingerprint=self.fingerprint,
            check_all=True,
        )


def prepare(settings: TaskPipelineSettings) -> PreparedRows:
    """Compute the result without writing it, or read it from an existing file.  Plugins must be
    loaded.

    Raises ConfigError naming the operator, row and column of an error, or an existing output that
    is not this result.
    """
    operators = [_build(o) for o in settings.operators]
    sources = [
        open_path(TasksetSettings(name="inputs", path=path, workflow=""))
        for path in settings.inputs
    ]
    fingerprint = _fingerprint(settings, sources)
    output = Path(settings.output)
    if output.exists():
        return PreparedRows(_read(output, fingerprint), (), fingerprint, reused=True)
    if (cached := _KEPT.get(fingerprint)) is not None:
        return cached
    rows = [dict(row) for source in sources for row in source.rows]
    places = [source.where(i) for source in sources for i in range(len(source.rows))]
    steps = [("inputs", len(rows))]
    for written, operator in zip(settings.operators, operators, strict=True):
        rows, places = _step(settings, written, operator, rows, places)
        steps.append((written.name.rpartition("/")[2], len(rows)))
    if settings.order != "keep":
        rows = [rows[i] for i in _ordered(settings, rows)]
        steps.append((settings.order, len(rows)))
    if settings.top_k >= 0:
        rows = rows[: settings.top_k]
        steps.append((f"top {settings.top_k}", len(rows)))
    if not rows:
        counts = " → ".join(f"{what} {count}" for what, count in steps)
        raise ConfigError(
            f"no row is left: {counts}.  Widen the bounds of the operator that removes the last ones",
            key=KEY,
        )
    prepared = PreparedRows(rows, tuple(steps), fingerprint)
    _KEPT.clear()
    _KEPT[fingerprint] = prepared
    return prepared


def opened(
    settings: TasksetSettings,
    pipeline: TaskPipelineSettings | None,
    prepared: PreparedRows | None = None,
) -> Taskset:
    """Open a taskset of a run; a taskset that reads the pipeline's output gets the rows (`prepared`
    if given) even before the file is written.
    """
    if pipeline is None or settings.path != pipeline.output:
        return open_taskset(settings)
    return Taskset(settings, (prepared or prepare(pipeline)).source(pipeline))


def write(settings: TaskPipelineSettings) -> PreparedRows:
    """Write the result to its file (temporary file, then rename); keep a file made from the same
    inputs.
    """
    prepared = prepare(settings)
    if not prepared.reused:
        output = Path(settings.output)
        output.parent.mkdir(parents=True, exist_ok=True)
        data = b"".join(_line(row, i) for i, row in enumerate(prepared.rows))
        note = {
            "fingerprint": prepared.fingerprint,
            "rows": len(prepared.rows),
            "xxh3": xxhash.xxh3_128_hexdigest(data),
        }
        write_whole(
            _note(output), json.dumps({**note, "steps": prepared.steps}, indent=1), mode=0o666
        )
        write_whole(output, data, mode=0o666)
        _KEPT.clear()
    return prepared


# the last result of a check by fingerprint, until the following run writes it
_KEPT: dict[str, PreparedRows] = {}


def check_operator(written: TaskOperatorSettings) -> tuple[Plugin, dict[str, Any]]:
    """Return the operator's plugin and its checked arguments.  Raises ConfigError with the
    operator's configuration key.
    """
    name = written.name
    key = written.key
    try:
        plugin = REGISTRY.get("task_operator", name)
    except PluginError as e:
        message = e.message
        if name.startswith(_ASKS):
            message = (
                f"{name} of Data-Juicer asks a service or a person; do so beforehand and "
                f"name the file in inputs"
            )
        elif "juicer" in name.lower() or name.endswith(_DATA_JUICER):
            names = ", ".join(REGISTRY.names("task_operator"))
            message = (
                f"{name} is none of the operators here ({names}).  A filter of Data-Juicer's is "
                f"{{name: data_juicer_filter, args: "
                f"{{operators: [{{name: {name}}}]}}}}; write other operators yourself "
                f"(@task_operator in --plugin-dir)"
            )
        raise ConfigError(message, key=f"{key}.name", given=name) from None
    if not (inspect.isclass(plugin.obj) and issubclass(plugin.obj, RowOperator | SetOperator)):
        raise ConfigError(
            f"{name} must be a subclass of RowOperator or SetOperator of rft.taskset.row_operators",
            key=f"{key}.name",
            given=name,
        )
    for library, extra in plugin.obj.needs.items():
        if importlib.util.find_spec(library) is None:
            raise ConfigError(
                f"{name} needs the package {library}: pip install 'rft-platform[{extra}]'",
                key=f"{key}.name",
                given=name,
            )
    return plugin, checked_args(plugin, written.args, key=f"{key}.args")


def operate(common: dict[str, Any], part: dict[str, Any]) -> list[Row | None]:
    """Apply a row operator to a part of the rows, in a worker process."""
    written = TaskOperatorSettings(**common["operator"])
    if ":" not in written.name and written.name not in REGISTRY.names("task_operator"):
        load_all(common["plugin_dirs"])
    operator = _build(written)
    assert isinstance(operator, RowOperator)
    return _applied(operator, written, part["rows"], part["places"].__getitem__)


def _build(written: TaskOperatorSettings) -> RowOperator | SetOperator:
    plugin, args = check_operator(written)
    operator: RowOperator | SetOperator = plugin.obj(**args)
    return operator


def _step(
    settings: TaskPipelineSettings,
    written: TaskOperatorSettings,
    operator: RowOperator | SetOperator,
    rows: list[Row],
    places: list[str],
) -> tuple[list[Row], list[str]]:
    visible = (
        rows
        if not settings.target_fields
        else [_part_of(row, settings, p) for row, p in zip(rows, places, strict=True)]
    )
    if isinstance(operator, SetOperator):
        stay = _arranged(operator, written, visible)
        return [rows[i] for i in stay], [places[i] for i in stay]
    if settings.num_process > 1 and len(rows) > parallel.AT_ONCE:
        common = {"operator": asdict(written), "plugin_dirs": list(settings.plugin_dirs)}
        size = parallel.AT_ONCE
        parts = (
            {"rows": visible[i : i + size], "places": places[i : i + size]}
            for i in range(0, len(visible), size)
        )
        outputs = [
            row
            for part in parallel.spread(
                "task_pipeline:operate", common, parts, settings.num_process
            )
            for row in part
        ]
    else:
        outputs = _applied(operator, written, visible, places.__getitem__)
    remaining = [i for i, row in enumerate(outputs) if row is not None]
    return [{**rows[i], **(outputs[i] or {})} for i in remaining], [places[i] for i in remaining]


def _part_of(row: Row, settings: TaskPipelineSettings, place: str) -> Row:
    try:
        return {name: row[name] for name in settings.target_fields}
    except KeyError as e:
        raise ConfigError(
            f"{place}: there is no column {e}; there are {', '.join(map(str, row))}",
            key=f"{KEY}.target_fields",
            given=e.args[0],
        ) from None


def _applied(
    operator: RowOperator,
    written: TaskOperatorSettings,
    rows: Sequence[Row],
    where: Callable[[int], str],
) -> list[Row | None]:
    outputs: list[Row | None] = []
    for i, row in enumerate(rows):
        output = _guarded(written, partial(operator.apply, dict(row)), where(i))
        if output is not None and not isinstance(output, dict):
            raise _error(
                written,
                f"{where(i)}: apply returned {type(output).__name__}; it must return the row or "
                f"None",
            )
        outputs.append(output)
    return outputs


def _arranged(
    operator: SetOperator, written: TaskOperatorSettings, rows: Sequence[Row]
) -> list[int]:
    stay = [
        int(i)
        for i in _guarded(
            written, lambda: operator.arrange([dict(row) for row in rows]), "all rows"
        )
    ]
    if len(set(stay)) != len(stay) or not all(0 <= i < len(rows) for i in stay):
        raise _error(
            written,
            f"arrange must return numbers of rows (0 to {len(rows) - 1}), each at most once",
        )
    return stay


def _guarded(written: TaskOperatorSettings, call: Callable[[], Any], where: str) -> Any:
    try:
        return call()
    except ConfigError as e:
        raise _error(written, f"{where}: {e.message}") from None
    except Exception as e:  # an operator may raise anything; the error names the row
        raise _error(written, f"{where}: {type(e).__name__}: {e}") from e


def _error(written: TaskOperatorSettings, message: str) -> ConfigError:
    return ConfigError(f"{written.name}: {message}", key=written.key, given=written.name)


def _ordered(settings: TaskPipelineSettings, rows: Sequence[Row]) -> list[int]:
    if settings.order == "shuffle":
        return [int(i) for i in np.random.default_rng(settings.seed).permutation(len(rows))]
    return [int(i) for i in np.argsort(-_priority(settings, rows), kind="stable")] if rows else []


def _priority(settings: TaskPipelineSettings, rows: Sequence[Row]) -> np.ndarray:
    """Return the sum of weight x score, float64 [rows]; each score column is scaled to 0 to 1."""
    total = np.zeros(len(rows))
    used = False
    for name, weight in settings.priority_weights.items():
        if weight == 0 or not any(name in row for row in rows):
            continue
        written = TaskOperatorSettings(name="order", key=f"{KEY}.priority_weights.{name}")
        score = np.array(
            [
                _guarded(written, partial(row_operators.number, row, name), f"row {i}")
                for i, row in enumerate(rows)
            ]
        )
        low = score.min()
        high = score.max()
        total += weight * (score - low) / (high - low if high > low else 1)
        used = True
    if not used:
        raise ConfigError(
            f"rows can be sorted by {', '.join(settings.priority_weights)}, but there is no column "
            f"for any weight; the columns are "
            f"{', '.join(map(str, rows[0]))}.  Let an operator write one (pass_rate_score), or "
            f"write order: keep",
            key=f"{KEY}.order",
            given="sort",
        )
    return total


def _fingerprint(settings: TaskPipelineSettings, sources: Sequence[RowSource]) -> str:
    """Hash all inputs of the result: rows, operators with arguments and the source code of custom
    ones, order.
    """
    package = str(Path(row_operators.__file__).parent)
    custom_sources = {}
    for o in settings.operators:
        source = Path(REGISTRY.get("task_operator", o.name).source)
        if not str(source).startswith(package) and source.is_file():
            custom_sources[o.name] = xxhash.xxh3_128_hexdigest(source.read_bytes())
    result_settings = replace(
        settings, inputs=(), output="", num_process=1, plugin_dirs=(), operators=()
    )
    what = [(o.name, o.args) for o in settings.operators]
    # earlier versions hashed only the last part of each fingerprint
    marks = [s.fingerprint.rpartition("-") for s in sources]
    facts = (_FORMAT, [end for *_, end in marks], what, custom_sources, asdict(result_settings))
    digest = xxhash.xxh3_128_hexdigest(
        msgspec.json.encode(facts, enc_hook=repr, order="deterministic")
    )
    return "-".join([*(prefix for prefix, *_ in marks if prefix), digest])


def _read(output: Path, fingerprint: str) -> Sequence[Row]:
    note = _note(output)
    record = json.loads(note.read_text(encoding="utf-8")) if note.is_file() else {}
    data = output.read_bytes()
    same = fingerprint.endswith(record.get("fingerprint", "none"))
    if same and record.get("xxh3") == xxhash.xxh3_128_hexdigest(data):
        return [msgspec.json.decode(line) for line in data.splitlines()]
    reason = "there is no record of what it was made from"
    if record:
        reason = "it was changed since" if same else "it was made from other inputs or operators"
    raise ConfigError(
        f"{output} exists, and {reason}; it is not overwritten.  Remove or rename it, or name another "
        f"path; to use it as it is, take "
        "data_processor.task_pipeline out",
        key=f"{KEY}.output",
        given=str(output),
    )


def _note(output: Path) -> Path:
    return output.with_name(f"{output.name}.pipeline.json")


def _line(row: Row, number: int) -> bytes:
    try:
        return msgspec.json.encode(row) + b"\n"
    except (TypeError, ValueError) as e:
        raise ConfigError(
            f"row {number} of the result cannot be written as JSON: {e}", key=f"{KEY}.output"
        ) from None
