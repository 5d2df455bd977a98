"""Write metrics to metrics.jsonl, and mirror them to any number of trackers.

metrics.jsonl is part of the run: failing to write it ends the run.  A failing tracker is disabled,
with an error in the log and `alarm/monitor_failed` in metrics.jsonl and the other trackers.
Invariant: every line of metrics.jsonl is one complete record; a line cut by a crash is removed when
the run resumes.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import logging
import math
import queue
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rft.errors import ConfigError, DeadlineExceeded, RunFailed, SetupError
from rft.files.disk import drop_cut_line, full, is_full, write_whole
from rft.monitor.base import Row, Tracker
from rft.monitor.settings import MonitorConfig, TrackedRun
from rft.plugins import REGISTRY, Plugin, checked_args
from rft.secrets import redact
from rft.types.metrics import MetricRecord

log = logging.getLogger(__name__)
FILE = "metrics.jsonl"
SAMPLES = "samples"
ALARM = "alarm/monitor_failed"
CLOSE_S = 120.0
Call = Callable[[Tracker], None]
CAPACITY = 10_000  # maximum waiting calls; a tracker further behind counts as failed


class Monitor:
    """Receives the records and tables of a run.  One process owns it; others send theirs to that
    process.
    """

    def __init__(self, config: MonitorConfig, run: TrackedRun) -> None:
        """Open metrics.jsonl in the run's folder; trackers open in their own threads."""
        self._folder = run.folder
        self._dump_dir = config.eval_dump_dir
        self._num_samples = config.log_eval_samples
        self._path = run.folder / FILE
        self._folder.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("a+b")
        if cut := drop_cut_line(self._file):
            log.warning(
                "%s ended in a line cut by a crash; its %d bytes are removed", self._path, cut
            )
        self._lock = threading.Lock()  # failures are reported from the trackers' threads
        self._last = MetricRecord(role="trainer", step=0, values={})
        makers = {
            kind: _maker(_plugin(kind, run.plugin_dirs), run, config.tracker_args(kind))
            for kind in config.monitor_type
        }
        self._mirrors = [Mirror(kind, make, self._tracker_failed) for kind, make in makers.items()]
        for mirror in self._mirrors:  # a failing tracker is logged to all others
            mirror.start()

    async def log(self, record: MetricRecord) -> None:
        """Log a record; on return it survives kill -9.  Raises RunFailed if it cannot be written."""
        values = {redact(k): float(v) for k, v in record.values.items()}
        record = msgspec.structs.replace(
            record, values=values, notes=tuple(map(redact, record.notes))
        )
        self._last = record
        self._append(record)
        self._mirror(lambda tracker: tracker.log(record))

    async def samples(self, name: str, step: int, rows: list[dict[str, Any]]) -> None:
        """Write samples/<name>_<step>.jsonl atomically, one row per line, and show the table in the
        trackers.

        Both get the first `log_eval_samples` rows; `eval_dump_dir` gets a file of the same name
        with all rows.
        """
        clean: list[Row] = [_redacted(row) for row in rows]
        file = f"{re.sub(r'[^A-Za-z0-9_.@-]', '_', name)}_{step}.jsonl"
        if self._dump_dir is not None:
            _write_rows(Path(self._dump_dir) / file, clean)
        if shown := clean[: self._num_samples]:
            _write_rows(self._folder / SAMPLES / file, shown)
            self._mirror(lambda tracker: tracker.table(name, step, shown))

    async def close(self, deadline_s: float = CLOSE_S) -> None:
        """Wait at most `deadline_s` for each tracker to finish.  Nothing may be logged afterwards."""
        for mirror in self._mirrors:
            await mirror.close(deadline_s)
        self._mirrors = []
        with self._lock:
            self._file.close()

    def _append(self, record: MetricRecord) -> None:
        with self._lock:
            try:
                self._file.write(msgspec.json.encode(record) + b"\n")
                self._file.flush()
            except OSError as e:
                if is_full(e):
                    raise full(e, str(self._path)) from e
                raise RunFailed(
                    f"cannot append to {self._path}: {e}.  Free space or restore the folder, then "
                    f"resume."
                ) from e

    def _mirror(self, call: Call) -> None:
        for mirror in self._mirrors:
            mirror.submit(call)

    def _tracker_failed(self, kind: str, error: BaseException) -> None:
        what = (
            f"monitor {kind} failed and is switched off for the rest of this run: "
            f"{type(error).__name__}: {error}"
        )
        log.error("%s; %s continues", what, self._path, exc_info=error)
        alarm = msgspec.structs.replace(
            self._last, time=time.time(), values={ALARM: 1.0}, notes=(redact(what),)
        )
        self._append(alarm)
        self._mirror(lambda tracker: tracker.log(alarm))


class Mirror:
    """One tracker in one thread: calls `make()` and everything submitted.

    A tracker may be slow, hang or fail; the run does not wait for it but reports its failure.
    After the first failure nothing is called any more, and `on_failure` has been called exactly
    once.
    """

    def __init__(
        self,
        kind: str,
        make: Callable[[], Tracker],
        on_failure: Callable[[str, BaseException], None],
    ) -> None:
        self.kind = kind
        self._on_failure = on_failure
        self._calls: queue.Queue[Call | None] = queue.Queue(CAPACITY)
        self._failed = threading.Event()
        self._lock = threading.Lock()
        # daemon: a hanging tracker must not keep the program alive; `close` waits for the others
        self._thread = threading.Thread(
            target=self._run, args=(make,), name=f"monitor-{kind}", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    @property
    def failed(self) -> bool:
        return self._failed.is_set()

    def submit(self, call: Call | None) -> None:
        """Queue a call, in order.  None ends the thread after all earlier calls."""
        if self.failed:
            return
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._fail(
                DeadlineExceeded(
                    f"monitor {self.kind} is {CAPACITY} records behind; is its server reachable?"
                )
            )

    async def close(self, deadline_s: float) -> None:
        """Wait for the tracker to finish, at most `deadline_s`; a timeout counts as a failure."""
        self.submit(None)
        await asyncio.to_thread(self._thread.join, deadline_s)
        if self._thread.is_alive() and not self.failed:
            self._fail(
                DeadlineExceeded(f"monitor {self.kind} did not finish within {deadline_s:g} s")
            )

    def _run(self, make: Callable[[], Tracker]) -> None:
        try:
            tracker = make()
            while not self.failed and (call := self._calls.get()) is not None:
                call(tracker)
            tracker.close()
        except BaseException as e:  # tracker libraries may raise anything, some call sys.exit
            self._fail(e)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            if self.failed:
                return
            self._failed.set()
        self._on_failure(self.kind, error)


def check_available(
    kinds: Iterable[str],
    args: Mapping[str, Mapping[str, Any] | None] | None = None,
    plugin_dirs: Sequence[str] = (),
) -> None:
    """Check trackers before a run: ConfigError for an unknown tracker or argument, SetupError if a
    library is missing.
    """
    for kind in kinds:
        plugin = _plugin(kind, plugin_dirs)
        missing = [m for m in plugin.obj.requires if importlib.util.find_spec(m) is None]
        if missing:
            raise SetupError(
                f"monitor {kind!r} needs {', '.join(missing)}, which is not installed: pip install "
                f"{' '.join(missing)}, "
                f"or take {kind!r} out of monitor.monitor_type.  metrics.jsonl is always written."
            )
        checked_args(plugin, (args or {}).get(kind) or {}, key=f"monitor.monitor_args.{kind}")


def _plugin(kind: str, plugin_dirs: Sequence[str]) -> Plugin:
    """Return a shipped tracker or a plugin.  Raises ConfigError unless it is a `Tracker`."""
    REGISTRY.scan_package("rft.monitor")
    if ":" not in kind and kind not in REGISTRY.names("monitor"):
        for folder in plugin_dirs:
            REGISTRY.scan_folder(Path(folder).expanduser())
        REGISTRY.scan_entry_points()
    plugin = REGISTRY.get("monitor", kind)
    if not inspect.isclass(plugin.obj) or not issubclass(plugin.obj, Tracker):
        raise ConfigError(
            f"monitor {kind!r} must be a class X(Tracker), see docs/howto/see-a-run.md",
            key="monitor.monitor_type",
        )
    return plugin


def _maker(plugin: Plugin, run: TrackedRun, args: Mapping[str, Any]) -> Callable[[], Tracker]:
    checked_args(plugin, args, key=f"monitor.monitor_args.{plugin.name}")
    return lambda: plugin.obj(run, plugin.obj.Args(**args))


def _write_rows(path: Path, rows: list[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, b"".join(msgspec.json.encode(row) + b"\n" for row in rows))


def _redacted(value: Any) -> Any:
    """Return a JSON value without secrets in any text; non-finite numbers become null, other
    objects their text.
    """
    if isinstance(value, Mapping):
        return {redact(str(k)): _redacted(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_redacted(v) for v in value]
    if value is None or type(value) in (bool, int):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else None
    if hasattr(value, "tolist"):  # of numpy or torch
        return _redacted(value.tolist())
    # lone surrogates cannot be written
    return redact(str(value)).encode("utf-8", "backslashreplace").decode()
