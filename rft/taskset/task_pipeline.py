"""The task pipeline: rows of files through operators, ordered and cut, once before the run, into
the file that a taskset reads.

Knows neither engine nor buffer.  Invariant: the file appears whole or not at all, beside a note of
what it was made from; a file that was made from something else is never used and never overwritten.
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
_FORMAT = 1  # of results; raised when a built-in operator gives other rows than before
_ASKS = ("llm_", "human_", "generate_", "optimize_")
_DATA_JUICER = ("_filter", "_mapper", "_deduplicator", "_selector", "_aggregator", "_grouper")


@dataclass(frozen=True)
class PreparedRows:
    """The result: `rows` in order, how many there were after each step, and what it depends on."""

    rows: Sequence[Row]
    steps: tuple[tuple[str, int], ...]  # (what was done, rows left)
    fingerprint: str
    reused: bool = False

    def __str__(self) -> str:
        if self.reused:
            return f"{len(self.rows)} rows, made before from the same inputs and operators"
        return " → ".join(f"{what} {count}" for what, count in self.steps)

    def source(self, settings: TaskPipelineSettings) -> RowSource:
        """The rows as a source that a taskset can be made of."""
        return RowSource(
            rows=self.rows,
            where=lambda i: f"{settings.output}:{i + 1}",
            fingerprint=self.fingerprint,
            check_all=True,
        )


def prepare(settings: TaskPipelineSettings) -> PreparedRows:
    """The result, without writing it; read from the file if it exists.  Plugins must be loaded.

    Raises ConfigError naming the operator, row and column of what is wrong, or an output that
    exists and is not this result.
    """
    made = [_build(o) for o in settings.operators]
    sources = [
        open_path(TasksetSettings(name="inputs", path=path, workflow=""))
        for path in settings.inputs
    ]
    fingerprint = _fingerprint(settings, sources)
    output = Path(settings.output)
    if output.exists():
        return PreparedRows(_read(output, fingerprint), (), fingerprint, reused=True)
    if (kept := _KEPT.get(fingerprint)) is not None:
        return kept
    rows = [dict(row) for source in sources for row in source.rows]
    places = [source.where(i) for source in sources for i in range(len(source.rows))]
    steps = [("inputs", len(rows))]
    for written, operator in zip(settings.operators, made, strict=True):
        rows, places = _step(settings, written, operator, rows, places)
        steps.append((written.name.rpartition("/")[2], len(rows)))
    if settings.order != "keep":
        rows = [rows[i] for i in _ordered(settings, rows)]
        steps.append((settings.order, len(rows)))
    if settings.top_k >= 0:
        rows = rows[: settings.top_k]
        steps.append((f"top {settings.top_k}", len(rows)))
    if not rows:
        told = " → ".join(f"{what} {count}" for what, count in steps)
        raise ConfigError(
            f"no row is left: {told}.  Widen the bounds of the operator that removes the last ones",
            key=KEY,
        )
    found = PreparedRows(rows, tuple(steps), fingerprint)
    _KEPT.clear()
    _KEPT[fingerprint] = found
    return found


def opened(
    settings: TasksetSettings,
    pipeline: TaskPipelineSettings | None,
    prepared: PreparedRows | None = None,
) -> Taskset:
    """A taskset of a run; one that takes the pipeline's result (`prepared`, where it is known) has
    it before its file is written, too.
    """
    if pipeline is None or settings.path != pipeline.output:
        return open_taskset(settings)
    return Taskset(settings, (prepared or prepare(pipeline)).source(pipeline))


def write(settings: TaskPipelineSettings) -> PreparedRows:
    """The result in its file, written aside and renamed; a file that was made from the same inputs
    is kept.
    """
    found = prepare(settings)
    if not found.reused:
        output = Path(settings.output)
        output.parent.mkdir(parents=True, exist_ok=True)
        data = b"".join(_line(row, i) for i, row in enumerate(found.rows))
        note = {
            "fingerprint": found.fingerprint,
            "rows": len(found.rows),
            "xxh3": xxhash.xxh3_128_hexdigest(data),
        }
        write_whole(_note(output), json.dumps({**note, "steps": found.steps}, indent=1), mode=0o666)
        write_whole(output, data, mode=0o666)
        _KEPT.clear()
    return found


# what a check has made, until the run that it comes before writes it; by its fingerprint
_KEPT: dict[str, PreparedRows] = {}


def check_operator(written: TaskOperatorSettings) -> tuple[Plugin, dict[str, Any]]:
    """The operator's plugin and its checked arguments.  Raises ConfigError with the operator's
    configuration key.
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
            known = ", ".join(REGISTRY.names("task_operator"))
            message = (
                f"{name} is none of the operators here ({known}).  A filter of Data-Juicer's is "
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
    """A row operator on a part of the rows, in another process."""
    written = TaskOperatorSettings(**common["operator"])
    if ":" not in written.name and written.name not in REGISTRY.names("task_operator"):
        load_all(common["plugin_dirs"])
    operator = _build(written)
    assert isinstance(operator, RowOperator)
    return _applied(operator, written, part["rows"], part["places"].__getitem__)


def _build(written: TaskOperatorSettings) -> RowOperator | SetOperator:
    plugin, args = check_operator(written)
    made: RowOperator | SetOperator = plugin.obj(**args)
    return made


def _step(
    settings: TaskPipelineSettings,
    written: TaskOperatorSettings,
    operator: RowOperator | SetOperator,
    rows: list[Row],
    places: list[str],
) -> tuple[list[Row], list[str]]:
    seen = (
        rows
        if not settings.target_fields
        else [_part_of(row, settings, p) for row, p in zip(rows, places, strict=True)]
    )
    if isinstance(operator, SetOperator):
        stay = _arranged(operator, written, seen)
        return [rows[i] for i in stay], [places[i] for i in stay]
    if settings.num_process > 1 and len(rows) > parallel.AT_ONCE:
        common = {"operator": asdict(written), "plugin_dirs": list(settings.plugin_dirs)}
        size = parallel.AT_ONCE
        parts = (
            {"rows": seen[i : i + size], "places": places[i : i + size]}
            for i in range(0, len(seen), size)
        )
        given = [
            row
            for part in parallel.spread(
                "task_pipeline:operate", common, parts, settings.num_process
            )
            for row in part
        ]
    else:
        given = _applied(operator, written, seen, places.__getitem__)
    kept = [i for i, row in enumerate(given) if row is not None]
    return [{**rows[i], **(given[i] or {})} for i in kept], [places[i] for i in kept]


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
    found: list[Row | None] = []
    for i, row in enumerate(rows):
        given = _guarded(written, partial(operator.apply, dict(row)), where(i))
        if given is not None and not isinstance(given, dict):
            raise _error(
                written,
                f"{where(i)}: apply returned {type(given).__name__}; it must return the row or "
                f"None",
            )
        found.append(given)
    return found


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
    except Exception as e:  # an operator may raise anything; the row is named
        raise _error(written, f"{where}: {type(e).__name__}: {e}") from e


def _error(written: TaskOperatorSettings, message: str) -> ConfigError:
    return ConfigError(f"{written.name}: {message}", key=written.key, given=written.name)


def _ordered(settings: TaskPipelineSettings, rows: Sequence[Row]) -> list[int]:
    if settings.order == "shuffle":
        return [int(i) for i in np.random.default_rng(settings.seed).permutation(len(rows))]
    return [int(i) for i in np.argsort(-_priority(settings, rows), kind="stable")] if rows else []


def _priority(settings: TaskPipelineSettings, rows: Sequence[Row]) -> np.ndarray:
    """Sum of weight x score; each score column is scaled to 0 to 1 over all rows.  float64 [rows]"""
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
    """What the result depends on: the inputs, the operators with their arguments and the source of
    custom ones, the order.
    """
    package = str(Path(row_operators.__file__).parent)
    own = {}
    for o in settings.operators:
        source = Path(REGISTRY.get("task_operator", o.name).source)
        if not str(source).startswith(package) and source.is_file():
            own[o.name] = xxhash.xxh3_128_hexdigest(source.read_bytes())
    plain = replace(settings, inputs=(), output="", num_process=1, plugin_dirs=(), operators=())
    what = [(o.name, o.args) for o in settings.operators]
    # earlier versions knew the end of each alone
    marks = [s.fingerprint.rpartition("-") for s in sources]
    facts = (_FORMAT, [end for *_, end in marks], what, own, asdict(plain))
    made = xxhash.xxh3_128_hexdigest(
        msgspec.json.encode(facts, enc_hook=repr, order="deterministic")
    )
    return "-".join([*(whole for whole, *_ in marks if whole), made])


def _read(output: Path, fingerprint: str) -> Sequence[Row]:
    note = _note(output)
    made = json.loads(note.read_text(encoding="utf-8")) if note.is_file() else {}
    data = output.read_bytes()
    same = fingerprint.endswith(made.get("fingerprint", "none"))
    if same and made.get("xxh3") == xxhash.xxh3_128_hexdigest(data):
        return [msgspec.json.decode(line) for line in data.splitlines()]
    why = "there is no record of what it was made from"
    if made:
        why = "it was changed since" if same else "it was made from other inputs or operators"
    raise ConfigError(
        f"{output} exists, and {why}; it is not overwritten.  Remove or rename it, or name another "
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
