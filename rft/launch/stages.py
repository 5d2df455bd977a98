"""A program of several runs (stages), each starting from the model exported by the one before.

Depends on configurations, run folders and checkpoints.  `stages.json` in the program's folder
records finished stages; stages run in folders below it.  Invariant: a stage starts only from the
verified model of the stage before.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rft.config.load import stage_names
from rft.config.plan import Plan
from rft.config.roles import apart
from rft.config.save import refuse_changes, start_command
from rft.config.schema.root import RunConfig
from rft.errors import ConfigError, ConfigErrors, SetupError
from rft.launch.drive import Outcome
from rft.launch.rundir import RunDir, write_json
from rft.preflight.check import load_plan
from rft.trainer.checkpoint import manifest as manifests
from rft.types.ids import Version

RECORD = "stages.json"
_LENGTHS = {
    "buffer.total_epochs",
    "buffer.total_steps",
    "buffer.total_tasks",
    "trainer.total_steps",
}
RunStage = Callable[[RunConfig, Plan], Outcome]


@dataclass(frozen=True)
class Done:
    """A finished stage."""

    name: str
    version: Version
    # model of its last checkpoint, relative to the program's folder, which may be moved
    model: str


class Program:
    """The stages of one configuration file."""

    def __init__(self, config: Path, overrides: Sequence[str], plugin_dirs: Sequence[str]) -> None:
        self._config = config
        self._overrides = list(overrides)
        self._plugin_dirs = list(plugin_dirs)
        self._names = stage_names(config, overrides)

    def run(self, run: RunStage) -> Outcome:
        """Run unfinished stages; return the outcome of the last.  Raises a stage's error."""
        plans = self._plans("")
        folder = plans[0][1].run_dir.parent
        if not plans[0][1].continue_from_checkpoint and folder.exists():
            plans = self._plans(f"{folder.name}_{time.strftime('%Y%m%d_%H%M%S')}")
            folder = plans[0][1].run_dir.parent
        if manifests.committed(folder / "checkpoints"):
            raise ConfigError(
                "its folder holds a run without stages; give this program another name",
                key="name",
                given=folder.name,
            )
        done = self._done(folder, plans)
        rundir = RunDir.claim(folder)
        with rundir.record_outcome():
            rundir.goes_on(start_command("both", self._config, self._overrides, self._plugin_dirs))
            last = self._remaining(run, rundir, done, plans)
            rundir.state("done", stage=self._names[-1], version=str(last.version))
            return last

    def _plans(self, name: str) -> list[tuple[RunConfig, Plan]]:
        """Return checked configurations and plans of all stages.  Raises ConfigErrors by stage."""
        plans = []
        errors = []
        for stage in self._names:
            try:
                loaded, plan = self._plan(stage, name, "")
                if not plan.trains or apart(loaded):
                    raise ConfigError(
                        "is for a run of its own; a stage hands on its model",
                        key="mode",
                        given=plan.mode,
                    )
                plans.append((loaded, plan))
            except ConfigError as e:
                errors += [
                    ConfigError(f"{x.message}  (stage {stage})", key=x.key, given=x.given)
                    for x in e.errors
                ]
        if errors:
            raise ConfigErrors(errors)
        return plans

    def _plan(self, stage: str, name: str, model: str) -> tuple[RunConfig, Plan]:
        folders = self._plugin_dirs
        loaded, plan = load_plan(
            self._config,
            self._overrides,
            plugin_dirs=folders,
            name=name,
            stage=stage,
            model_path=model,
        )
        return loaded.model_copy(update={"plugin_dirs": plan.plugin_dirs}), plan

    def _done(self, folder: Path, plans: list[tuple[RunConfig, Plan]]) -> list[Done]:
        """Return finished stages, without a last stage that was made longer.

        Raises ConfigError if the configuration does not fit the finished stages.
        """
        done = read(folder)
        if (names := tuple(d.name for d in done)) != self._names[: len(done)]:
            raise ConfigError(
                f"begin with {', '.join(names)} in {folder}, where they are done; keep them first "
                f"in the list, or choose another `name`",
                key="stages",
                given=list(self._names),
            )
        for d, (loaded, plan) in zip(done, plans, strict=False):
            changed = refuse_changes(loaded, plan.run_dir)
            if plan.trainer.total_steps > d.version.step and any(
                c.key in _LENGTHS for c in changed
            ):
                if d is done[-1] and not any(p.run_dir.exists() for _, p in plans[len(done) :]):
                    return done[:-1]
                raise ConfigError(
                    f"stage {d.name} is done at step {d.version.step} and the next one began with "
                    f"its model; choose another `name`",
                    key="trainer.total_steps",
                    given=plan.trainer.total_steps,
                )
            for c in changed:
                print(
                    f"stage {d.name} is done; that {c.key} is {c.new!r} now (was {c.old!r}) has no "
                    f"effect on it",
                    flush=True,
                )
        return done

    def _remaining(
        self, run: RunStage, rundir: RunDir, done: list[Done], plans: list[tuple[RunConfig, Plan]]
    ) -> Outcome:
        last = (
            Outcome(done[-1].version, plans[len(done) - 1][1].run_dir, 0.0, done[-1].version)
            if done
            else None
        )
        for d in done:
            print(f"stage {d.name} is done at step {d.version.step}", flush=True)
        _write(rundir.path, self._names, done)
        for stage in self._names[len(done) :]:
            model = str(_verified(rundir.path, done[-1])) if done else ""
            loaded, plan = self._plan(stage, plans[0][1].run_dir.parent.name, model)
            print(f"stage {stage} begins{f' with {model}' if model else ''}", flush=True)
            rundir.state("running", stage=stage)
            last = run(loaded, plan)
            exported = (
                last.run_dir
                / "checkpoints"
                / manifests.folder_name(last.version.step)
                / "huggingface"
            )
            done = [*done, Done(stage, last.version, str(exported.relative_to(rundir.path)))]
            _verified(rundir.path, done[-1])
            _write(rundir.path, self._names, done)
        assert last is not None, "a program has a stage"
        return last


def read(folder: Path) -> list[Done]:
    """Return finished stages of the program in `folder`.  Raises ConfigError for a damaged record."""
    return [
        Done(s["stage_name"], Version.parse(s["version"]), s["model"])
        for s in record(folder)
        if s["version"]
    ]


def record(folder: Path) -> list[dict[str, Any]]:
    """Return the stored record of a program, one entry per stage; empty without one."""
    file = folder / RECORD
    try:
        return list(json.loads(file.read_text(encoding="utf-8"))["stages"])
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError) as e:
        raise ConfigError(
            f"{file} is damaged ({e}); restore it, or choose another `name` for this run"
        ) from None


def began_with(run_dir: Path) -> str:
    """Return the initial model of the stage in `run_dir`; "" for a first stage or no stage."""
    before = ""
    for stage in record(run_dir.parent):
        if stage["stage_name"] == run_dir.name:
            return before
        before = str(run_dir.parent / str(stage["model"]))
    return ""


def refuse_program(run_dir: Path) -> None:
    """Raise ConfigError if `run_dir` is the folder of a program."""
    if record(run_dir):
        raise ConfigError(
            "its folder holds a program of stages; give this run another name",
            key="name",
            given=run_dir.name,
        )


def _write(folder: Path, names: tuple[str, ...], done: list[Done]) -> None:
    entries: list[dict[str, Any]] = [
        {"stage_name": d.name, "version": str(d.version), "model": d.model} for d in done
    ]
    entries += [{"stage_name": n, "version": None, "model": None} for n in names[len(done) :]]
    write_json(folder / RECORD, {"stages": entries})


def _verified(folder: Path, done: Done) -> Path:
    """Return the exported model of a finished stage after hashing its files.

    Raises CheckpointInvalid, or SetupError for a missing model.
    """
    model = folder / done.model
    if not (model / "config.json").is_file():
        raise SetupError(
            f"stage {done.name} is done, but its model {model} is not there; bring it back, or "
            f"remove {done.name} and {RECORD} "
            f"from {folder} to train it again"
        )
    manifests.read(model.parent)
    return model
