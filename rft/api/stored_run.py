"""What a notebook does with runs: start one, open one, look at its numbers, rollouts, tokens and
checkpoints.

Thin, over what the command line uses.  Reads files alone: the run may be alive, ended or broken,
and on another machine.  Loads no torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rft.errors import ConfigError
from rft.monitor.curves import Picture, evaluations, is_main, main_curves, svg
from rft.monitor.read import AllSeries, Records

if TYPE_CHECKING:
    from datasets import Dataset
    from pandas import DataFrame  # type: ignore[import-untyped]

    from rft.launch.drive import Outcome
    from rft.types.ids import Version
    from rft.types.metrics import MetricRecord

# without any, a folder holds no run
_MARKS = ("state.json", "metrics.jsonl", "config.resolved.yaml", "stages.json", "buffer")


class StoredRun:
    """The folder of a run.  Nothing is read before it is asked for, so every answer is the newest.

    `outcome` says how long the run took and what it went on from, where `rft.run` returned this.
    """

    def __init__(self, run_dir: str | Path, outcome: Outcome | None = None) -> None:
        """Raises ConfigError where `run_dir` is no folder of a run."""
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
        return f"<rft run {self.run_dir}>"

    @property
    def version(self) -> Version | None:
        """Weights of the newest checkpoint; None: nothing is saved yet."""
        from rft.trainer import manifest as manifests

        found = [
            manifests.read(f, verify=False).version
            for f in manifests.committed(self.run_dir / "checkpoints")
        ]
        return max(found, default=None)

    @property
    def seconds(self) -> float | None:
        """How long `rft.run` worked; None for a run that was opened."""
        return None if self.outcome is None else self.outcome.seconds

    @property
    def resumed_from(self) -> Version | None:
        """The checkpoint that `rft.run` went on from, if any."""
        return None if self.outcome is None else self.outcome.resumed_from

    def config(self) -> dict[str, Any]:
        """The whole configuration with all defaults, secrets replaced by ***.  Raises ConfigError
        where the folder holds none.
        """
        tree: dict[str, Any] = self.saved()["tree"]
        return tree

    def saved(self) -> dict[str, Any]:
        """All of config.json: beside the configuration the file it was read from, overrides and
        versions.  Raises ConfigError.
        """
        from rft.config.save import saved

        return saved(self.run_dir)

    def metrics(self) -> DataFrame:
        """One row for each record: role, step (of that role), time (seconds since the epoch), and a
        column for each metric.

        What a resumed run wrote twice stands there twice; the later row counts.
        """
        from pandas import DataFrame  # type: ignore[import-untyped]

        rows = [
            {"role": r.role, "step": r.step, "time": r.time, **r.values} for r in self._records()
        ]
        return DataFrame(rows, columns=None if rows else ["role", "step", "time"])

    def rollouts(self, where: str = "", *, step: int | None = None) -> Dataset:
        """One row for each experience, the columns of v_experiences, ordered by id.

        `where`: an SQL condition on these columns; `step`: only those that this train step used.
        Raises ConfigError where the run has no rollouts (offline data), or its ledger cannot be
        read.
        """
        import pyarrow as pa
        from datasets import Dataset

        from rft.buffer.experience_export import as_table, pages, schema
        from rft.buffer.query import open_run as questions_of

        conditions = [
            c
            for c in (
                f"({where}\n)" if where.strip() else "",
                "" if step is None else f"used_step = {step:d}",
            )
            if c
        ]
        self._has_rollouts()
        with questions_of(self.run_dir) as questions:
            header = schema(questions)
            found = [as_table(page, header) for page in pages(questions, " AND ".join(conditions))]
        return Dataset(pa.concat_tables(found) if found else header.empty_table())

    def tokens(self, id: str) -> DataFrame:
        """One row for each token of an experience: token, text, trained, logprob, trainer_logprob
        (nats), advantage (NaN where they are not known), version (of the weights that wrote it; ""
        for a prompt).

        Raises ConfigError for an unknown id, PayloadDamaged where its tokens are gone.
        """
        import numpy as np
        from pandas import DataFrame  # type: ignore[import-untyped]

        from rft.buffer.inspect import look
        from rft.buffer.query import open_run as questions_of
        from rft.buffer.token_texts import TokenTexts
        from rft.errors import PayloadDamaged

        self._has_rollouts()
        with questions_of(self.run_dir) as questions:
            (shown,) = look(questions, id=id)
        if (x := shown.payload) is None:
            raise PayloadDamaged(f"the tokens of {id} are gone: {shown.gone}")
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
        """The folder of a checkpoint: the newest, that of a train step, or the best of those that
        are there.

        Best by `metric` of metrics.jsonl, else by `trainer.checkpoint.best_metric`, else by the
        first evaluation (a loss: the least). Raises ConfigError, with what there is, where there is
        no such checkpoint.
        """
        from rft.trainer import manifest as manifests
        from rft.trainer.checkpoints import best_step

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
            which = best_step(file, metric, mode, folders) if metric else None  # type: ignore[assignment]
            if which is None:
                why = (
                    f"{metric} was measured at none of the steps"
                    if metric
                    else "the run has no evaluation; name a metric"
                )
                raise ConfigError(
                    f"{why}: checkpoints are of the steps {_listed(folders)}",
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
            given = self.config()["trainer"]["checkpoint"]
        except (ConfigError, KeyError, TypeError):  # of an earlier version
            given = {}
        if given.get("best_metric"):
            return given["best_metric"], given.get("best_mode", "max")
        names = evaluations(AllSeries(is_main, self._records()).names)
        return (names[0], "min" if names[0].endswith("/loss") else "max") if names else ("", "max")

    def plot(self, *names: str) -> Picture:
        """A picture of metrics by step; without names the training reward and every evaluation.
        Raises ConfigError for unknown names.
        """
        found = AllSeries((lambda name: name in names) if names else is_main, self._records())
        if missing := [n for n in names if n not in found.names]:
            raise ConfigError(
                f"was never measured; there are {', '.join(found.names) or 'no metrics yet'}",
                key=missing[0],
            )
        lines = {n: found.points(n) for n in names} or main_curves(found)
        return Picture(svg(lines, title=self.run_dir.resolve().name))

    def _records(self) -> Iterable[MetricRecord]:
        """Of metrics.jsonl; none where nothing has been measured.  Iterating raises RunFailed for a
        damaged line.
        """
        path = self.run_dir / "metrics.jsonl"
        return Records(path) if path.is_file() else ()

    def _has_rollouts(self) -> None:
        if not (self.run_dir / "buffer").is_dir():
            text = "it has no buffer: it trains on offline data, or has not begun to explore"
            raise ConfigError(
                f"{self.run_dir} has no rollouts; {text}", key="RUN", given=str(self.run_dir)
            )


def _listed(steps: dict[int, Path]) -> str:
    return ", ".join(map(str, sorted(steps)))


def open_run(run_dir: str | Path) -> StoredRun:
    """The run in a folder, for looking at it: `.metrics()`, `.rollouts()`, `.tokens(id)`,
    `.checkpoint("best")`, `.plot()`.

    Raises ConfigError where there is none.
    """
    return StoredRun(run_dir)


def run(
    config: str | Path,
    *overrides: str,
    plugin_dirs: Sequence[str | Path] = (),
    in_process: bool = False,
) -> StoredRun:
    """Trains as `rft run --config CONFIG key=value ...` does, and opens the run; a notebook waits
    for it too.  Raises RftError.
    """
    from rft.launch.execute import execute

    def work() -> Outcome:
        return execute(
            Path(config),
            list(overrides),
            plugin_dirs=[str(d) for d in plugin_dirs],
            in_process=in_process,
        )

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        outcome = work()
    else:  # a notebook's cell: its thread has a loop already
        outcome = _beside(work)
    return StoredRun(outcome.run_dir, outcome)


def _beside(work: Callable[[], Outcome]) -> Outcome:
    """In a thread of its own; Ctrl-C, or the notebook's stop button, ends the run as it ends `rft
    run`.
    """
    from rft.launch.signals import interrupt

    with ThreadPoolExecutor(1, thread_name_prefix="rft-run") as pool:
        future = pool.submit(work)
        while True:
            try:
                return future.result()
            except KeyboardInterrupt:
                interrupt()


def metrics(run_dir: str | Path) -> DataFrame:
    """`open_run(run_dir).metrics()`."""
    return open_run(run_dir).metrics()


def rollouts(run_dir: str | Path, where: str = "") -> Dataset:
    """`open_run(run_dir).rollouts(where)`."""
    return open_run(run_dir).rollouts(where)
