"""The notebook interface: start or open a run, and look at its metrics, rollouts, tokens and
checkpoints.

A thin layer over the code of the command line.  Reads files only: the run may be alive, ended or
broken, and on another machine.  Loads no torch.
"""

from __future__ import annotations

import asyncio
import textwrap
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from rft.errors import ConfigError, nearest
from rft.monitor.curves import Picture, evaluations, is_main, main_curves, svg
from rft.monitor.read import AllSeries, Records
from rft.plugins import extra_entry

if TYPE_CHECKING:
    from datasets import Dataset
    from pandas import DataFrame  # type: ignore[import-untyped]

    from rft.buffer.query import Questions
    from rft.launch.drive import Outcome
    from rft.types.ids import Version
    from rft.types.metrics import MetricRecord

T = TypeVar("T")

# a folder without any of these is not a run
_MARKS = ("state.json", "metrics.jsonl", "config.resolved.yaml", "stages.json", "buffer")


class StoredRun:
    """The folder of a run.  Every call reads the newest files.

    `outcome`: duration and origin of the run, if `rft.run` returned this object.
    """

    def __init__(self, run_dir: str | Path, outcome: Outcome | None = None) -> None:
        """Raises ConfigError if `run_dir` is not the folder of a run."""
        self.run_dir = Path(run_dir)
        self.outcome = outcome
        if not any((self.run_dir / name).exists() for name in _MARKS):
            below = (
                sorted({str(p.parent) for p in self.run_dir.glob("**/state.json")})[:5]
                if self.run_dir.is_dir()
                else []
            )
            hint = f"; runs below it: {', '.join(below)}" if below else ""
            raise ConfigError(
                f"{self.run_dir} is not the folder of a run{hint}", key="RUN", given=str(run_dir)
            )

    def __repr__(self) -> str:
        from rft.launch.rundir import RunDir

        phase = RunDir(self.run_dir).read_state().get("phase", "not begun")
        series = AllSeries(is_main, self._records())
        newest = [f"{n} {points[-1][1]:.4g}" for n in series.names if (points := series.points(n))]
        return f"<rft run {', '.join([str(self.run_dir), phase, *newest])}>"

    @property
    def version(self) -> Version | None:
        """Version of the newest checkpoint; None: no checkpoint yet."""
        from rft.trainer.checkpoint import manifest as manifests

        runs = [
            manifests.read(f, verify=False).version
            for f in manifests.committed(self.run_dir / "checkpoints")
        ]
        return max(runs, default=None)

    @property
    def seconds(self) -> float | None:
        """Seconds that `rft.run` took; None for an opened run."""
        return None if self.outcome is None else self.outcome.seconds

    @property
    def resumed_from(self) -> Version | None:
        """Version of the checkpoint from which `rft.run` continued, if any."""
        return None if self.outcome is None else self.outcome.resumed_from

    def config(self) -> dict[str, Any]:
        """Return the complete configuration with all defaults, secrets replaced by ***.

        Raises ConfigError if the folder has none.
        """
        tree: dict[str, Any] = self.saved()["tree"]
        return tree

    def saved(self) -> dict[str, Any]:
        """Return all of config.json: the configuration, its source file, overrides and versions.

        Raises ConfigError.
        """
        from rft.config.save import saved

        return saved(self.run_dir)

    def metrics(self) -> DataFrame:
        """Return a row per record: role, step (of that role), time (epoch seconds), and each
        metric.

        A resumed run may write a record twice; both rows are returned, and the later row counts.
        """
        from pandas import DataFrame  # type: ignore[import-untyped]

        rows = [
            {"role": r.role, "step": r.step, "time": r.time, **r.values} for r in self._records()
        ]
        return DataFrame(rows, columns=None if rows else ["role", "step", "time"])

    def rollouts(
        self, where: str = "", *, step: int | None = None, order: str | None = None
    ) -> Dataset:
        """Return one row per experience, with the columns of v_experiences.

        `where`: an SQL condition on these columns; `step`: only rows that this train step used;
        `order`: a column, "-reward" for the largest first, None for id.
        Raises ConfigError if the run has no rollouts (offline data), or its ledger cannot be read.
        """
        import pyarrow as pa
        from datasets import Dataset

        from rft.buffer.experience_export import as_table, pages, schema

        conditions = [
            c
            for c in (
                f"({where}\n)" if where.strip() else "",
                "" if step is None else f"used_step = {step:d}",
            )
            if c
        ]
        with self._questions() as questions:
            header = schema(questions)
            tables = [as_table(page, header) for page in pages(questions, " AND ".join(conditions))]
        table = pa.concat_tables(tables) if tables else header.empty_table()
        if order is not None:
            column = order.removeprefix("-")
            if column not in table.column_names:
                raise ConfigError(
                    f"is no column.{nearest(column, table.column_names)}",
                    key="order",
                    given=order,
                )
            down = "descending" if order.startswith("-") else "ascending"
            table = table.sort_by([(column, down), ("id", "ascending")])
        return Dataset(table)

    def samples(
        self,
        where: str = "",
        *,
        id: str | None = None,
        step: int | None = None,
        num: int = 3,
        order: Literal["random", "best", "worst"] = "random",
    ) -> list[dict[str, Any]]:
        """Return experiences whole: the columns of v_experiences, `messages`, `gold_answer` (None if
        not recorded), `judges` with their question and reply, `metrics` and the rest of `info`.

        The experience `id`, or `num` that fulfil `where` and were trained in `step`, by reward.  Raises ConfigError.
        """
        from rft.buffer.inspect import judge_exchanges, look

        with self._questions() as questions:
            found = look(questions, num=num, id=id, where=where, step=step, order=order)
        samples = []
        for x in found:
            payload = x.payload
            info = {} if payload is None else dict(payload.info)
            samples.append(
                {
                    **x.row,
                    "messages": [] if payload is None else list(payload.messages),
                    "gold_answer": info.pop("gold_answer", None),
                    "judges": judge_exchanges(info),
                    "metrics": {} if payload is None else dict(payload.metrics),
                    "info": info,
                }
            )
        return samples

    def tokens(self, id: str) -> DataFrame:
        """Return one row per token of an experience: token, text, trained, logprob, trainer_logprob
        (nats), advantage (NaN if unknown), version (of the weights that wrote it; "" for a prompt).

        Raises ConfigError for an unknown id, PayloadDamaged if its tokens are lost.
        """
        import numpy as np
        from pandas import DataFrame  # type: ignore[import-untyped]

        from rft.buffer.inspect import look
        from rft.buffer.token_texts import TokenTexts
        from rft.errors import PayloadDamaged

        with self._questions() as questions:
            (shown,) = look(questions, id=id)
        if (x := shown.payload) is None:
            raise PayloadDamaged(f"the tokens of {id} are gone: {shown.missing_reason}")
        texts = TokenTexts(self.run_dir)
        versions = np.full(len(x.tokens), "", dtype=object)
        for span in x.version_spans:
            versions[span.start : span.end] = str(span.version)
        nothing = np.full(len(x.tokens), np.nan, np.float32)
        return DataFrame(
            {
                "token": x.tokens,
                "text": [texts(int(t)) for t in x.tokens],
                "trained": x.loss_mask,
                "logprob": np.where(x.loss_mask, x.logprobs, np.nan) if x.has_logprobs else nothing,
                "trainer_logprob": nothing if shown.trainer is None else shown.trainer.logprobs,
                "advantage": nothing if shown.trainer is None else shown.trainer.advantages,
                "version": versions,
            }
        )

    def checkpoint(
        self,
        which: Literal["last", "best"] | int = "last",
        *,
        metric: str = "",
        mode: Literal["max", "min"] = "max",
    ) -> Path:
        """Return the folder of a checkpoint: the newest, of a train step, or the best existing.

        Best by `metric` of metrics.jsonl, else by `trainer.checkpoint.best_metric`, else by the
        first evaluation (a loss: the least). Raises ConfigError, listing the existing steps, if no
        checkpoint matches.
        """
        from rft.trainer.checkpoint import manifest as manifests
        from rft.trainer.checkpoint.checkpoints import BestSteps

        folders = {
            manifests.step_of(f): f for f in manifests.committed(self.run_dir / "checkpoints")
        }
        if not folders:
            raise ConfigError(
                f"{self.run_dir} has no checkpoint yet", key="RUN", given=str(self.run_dir)
            )
        if which == "last":
            return manifests.read(
                max(folders.values(), key=lambda f: manifests.read(f, verify=False).version)
            ).folder
        if which == "best":
            metric, mode = (metric, mode) if metric else self._best_metric()
            file = self.run_dir / "metrics.jsonl"
            which = BestSteps(file, metric, mode).best(folders) if metric else None  # type: ignore[assignment]
            if which is None:
                text = (
                    f"{metric} was measured at none of the steps"
                    if metric
                    else "the run has no evaluation; name a metric"
                )
                raise ConfigError(
                    f"{text}: checkpoints are of the steps {_listed(folders)}",
                    key="checkpoint",
                    given="best",
                )
        if which not in folders:
            raise ConfigError(
                f"there is none of step {which}; there are {_listed(folders)}",
                key="checkpoint",
                given=which,
            )
        return folders[which]

    def _best_metric(self) -> tuple[str, Literal["max", "min"]]:
        try:
            checkpoint = self.config()["trainer"]["checkpoint"]
        except (ConfigError, KeyError, TypeError):  # written by an earlier version
            checkpoint = {}
        if checkpoint.get("best_metric"):
            return checkpoint["best_metric"], checkpoint.get("best_mode", "max")
        names = evaluations(AllSeries(is_main, self._records()).names)
        return (names[0], "min" if names[0].endswith("/loss") else "max") if names else ("", "max")

    def plot(self, *names: str) -> Picture:
        """Plot metrics by step; without names the training reward and every evaluation.

        Raises ConfigError for unknown names.
        """
        series = AllSeries((lambda name: name in names) if names else is_main, self._records())
        if missing := [n for n in names if n not in series.names]:
            raise ConfigError(
                f"was never measured.{nearest(missing[0], series.names)}  There are "
                f"{len(series.names)}: {textwrap.shorten(', '.join(series.names), 300)}",
                key=missing[0],
            )
        lines = {n: series.points(n) for n in names} or main_curves(series)
        return Picture(svg(lines, title=self.run_dir.resolve().name))

    def report(self, out: str | Path = "report.html") -> Path:
        """Write `rft report`'s page, replacing `out`, and return its path."""
        write: Callable[..., object] = extra_entry("stored_run", "report", key="report")
        write(self, Path(out))
        return Path(out)

    def compare(self, *others: StoredRun | str | Path) -> dict[str, dict[str, dict[str, Any]]]:
        """Return the tables of `rft compare` by title: name, then run, to value."""
        runs = [self, *(o if isinstance(o, StoredRun) else StoredRun(o) for o in others)]
        table: dict[str, dict[str, dict[str, Any]]]
        table = extra_entry("stored_run", "compare", key="compare")(runs)
        return table

    def replay(
        self,
        reward: str,
        reward_args: dict[str, Any] | None = None,
        *,
        where: str = "",
        step: int | None = None,
        limit: int = 0,
    ) -> DataFrame:
        """Score stored rollouts with another reward, as `rft replay`: a row per answer, `old` beside
        `new`.  `limit`: most groups, 0: all.

        Raises ConfigError.
        """
        from pandas import DataFrame

        rescored: Callable[..., Coroutine[Any, Any, list[Any]]]
        rescored = extra_entry("stored_run", "replay", key="replay")
        with _said_in_python():
            call = rescored(self.run_dir, reward, reward_args or {}, where, step, limit)
            return DataFrame([vars(r) for r in waited(lambda: asyncio.run(call))])

    def _records(self) -> Iterable[MetricRecord]:
        """Return the records of metrics.jsonl, none without the file.

        Iterating raises RunFailed for a damaged line.
        """
        path = self.run_dir / "metrics.jsonl"
        return Records(path) if path.is_file() else ()

    @contextmanager
    def _questions(self) -> Iterator[Questions]:
        from rft.buffer.query import open_run as questions_of

        if not (self.run_dir / "buffer").is_dir():
            text = "it has no buffer: it trains on offline data, or has not begun to explore"
            raise ConfigError(
                f"{self.run_dir} has no rollouts; {text}", key="RUN", given=str(self.run_dir)
            )
        with _said_in_python(), questions_of(self.run_dir) as questions:
            yield questions


def _listed(steps: dict[int, Path]) -> str:
    return ", ".join(map(str, sorted(steps)))


def open_run(run_dir: str | Path) -> StoredRun:
    """Open the run in a folder: `.metrics()`, `.rollouts()`, `.tokens(id)`, `.checkpoint("best")`,
    `.plot()`.

    Raises ConfigError if the folder has no run.
    """
    return StoredRun(run_dir)


def run(
    config: str | Path,
    *overrides: str,
    plugin_dirs: Sequence[str | Path] = (),
    in_process: bool = False,
) -> StoredRun:
    """Train like `rft run --config CONFIG key=value ...`, wait for the end, and open the run.

    Works in a notebook, too.  Raises RftError.
    """
    from rft.launch.execute import execute

    def work() -> Outcome:
        return execute(
            Path(config),
            list(overrides),
            plugin_dirs=[str(d) for d in plugin_dirs],
            in_process=in_process,
        )

    outcome = waited(work)
    return StoredRun(outcome.run_dir, outcome)


def waited(work: Callable[[], T]) -> T:
    """Return the result of `work`, in another thread if this one has an event loop, as in a cell."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return work()
    return _in_thread(work)


@contextmanager
def _said_in_python() -> Iterator[None]:
    """Name arguments in errors as Python does: `id` for `--id`."""
    try:
        yield
    except ConfigError as e:
        key = e.key.lstrip("-").replace("-", "_")
        raise ConfigError(e.message, key=key, given=e.given) from e


def _in_thread(work: Callable[[], T]) -> T:
    """Run in a separate thread; Ctrl-C, or the notebook's stop button, ends the run like `rft run`."""
    from rft.launch.signals import interrupt

    with ThreadPoolExecutor(1, thread_name_prefix="rft-run") as pool:
        future = pool.submit(work)
        while True:
            try:
                return future.result()
            except KeyboardInterrupt:
                interrupt()


def metrics(run_dir: str | Path) -> DataFrame:
    """Return `open_run(run_dir).metrics()`."""
    return open_run(run_dir).metrics()


def rollouts(run_dir: str | Path, where: str = "") -> Dataset:
    """Return `open_run(run_dir).rollouts(where)`."""
    return open_run(run_dir).rollouts(where)
