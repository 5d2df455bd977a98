"""Start of a run: its lineage, checkpoint and next explore batch; prompts of the canary."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs

from rft.buffer.base import LineageStart
from rft.config.plan import Plan
from rft.errors import ConfigError
from rft.launch.progress import STARTING
from rft.monitor.monitor import FILE as METRICS
from rft.monitor.read import read, series
from rft.sync.schedule import Schedule
from rft.trainer.checkpoint import manifest as manifests
from rft.trainer.checkpoint.manifest import Manifest
from rft.types import modelfiles
from rft.types.ids import Version

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Start:
    """Start of a run: a new model, or a checkpoint folder with version and next explore batch."""

    lineage: int
    step: int = 0
    parent: Version | None = None
    cursor: int = 0
    checkpoint: str | None = None

    @property
    def version(self) -> Version:
        return Version(self.lineage, self.step)


def schedule(plan: Plan, start: Start) -> Schedule:
    """Return the schedule that coordinator and trainer both follow."""
    return dataclasses.replace(plan.schedule, start_step=start.step)


def windows(plan: Plan) -> Callable[[int], bool]:
    """Return a test whether `replay_run` began a window with the weights of a step.

    Replay can start only there, because no checkpoint inside a window contains the window's first
    weights.  Always true for a loss that does not read these.  Raises ConfigError if that run has
    no metrics.
    """
    if (run := plan.trainer.replay_run) is None or not plan.learner.algorithm.proximal_window:
        return lambda step: True
    try:
        served = dict(series(read(run / METRICS), "sync/version"))
    except OSError as e:
        message = (
            f"the loss reads the first weights of each window, and which steps begin one is in "
            f"its {METRICS}: {e.strerror}"
        )
        raise ConfigError(message, key="buffer.trainer_input.replay_run", given=str(run)) from e
    return served.__contains__


def checkpoints(path: Path) -> list[Path]:
    """Return the checkpoint at `resume_from_path`, or all checkpoints of the run there, by step.

    Raises ConfigError without any checkpoint.
    """
    if (path / manifests.NAME).is_file() or manifests.is_name(path.name):
        return [path]
    if folders := manifests.committed(path) or manifests.committed(path / "checkpoints"):
        return folders
    message = (
        "holds no checkpoint; name a folder global_step_N, or the folder of a run (a model's "
        "folder is for model.model_path)"
    )
    raise ConfigError(message, key="resume_from_path", given=str(path))


def origin(path: Path | None) -> Manifest | None:
    """Return the newest valid checkpoint of another run at `path`.

    Raises CheckpointInvalid or ConfigError.
    """
    if path is None:
        return None
    first, *_ = checkpoints(path)
    if first == path:
        return manifests.read(path)
    return manifests.latest(first.parent)


async def begin(
    buffer: Any,
    checkpoint: Manifest | None,
    other: Manifest | None = None,
    sizes: tuple[int, int] = (1, 1),
) -> Start:
    """Start the next lineage of the buffer, from this run's `checkpoint` if given.

    `other`: another run's checkpoint to start from otherwise.  Its weights, optimizer and step are
    used, but not its rows; the explore batch is the one that this run, with `sizes` of a batch and
    a step, reaches by that step.
    """
    if checkpoint is None:
        step = 0 if other is None else other.version.step
        place = (
            None
            if other is None
            else structs.replace(other.consumption, cursor=step * sizes[1] // sizes[0])
        )
        started = await buffer.start_lineage(None, place, step)
        lineage = started.lineage
        if lineage > 1:
            _log_start(
                f"no checkpoint was saved before the stop; starting again at step {step}", started
            )
        if other is None or place is None:
            return Start(lineage)
        log.info(
            "lineage %d begins with %s of another run, at explore batch %d",
            lineage,
            other.folder,
            place.cursor,
        )
        return Start(lineage, step, None, place.cursor, str(other.folder))
    started = await buffer.start_lineage(checkpoint.version, checkpoint.consumption)
    _log_start(f"resumes from the checkpoint of step {checkpoint.version.step}", started)
    return Start(
        started.lineage,
        checkpoint.version.step,
        checkpoint.version,
        started.cursor,
        str(checkpoint.folder),
    )


def _log_start(begins: str, started: LineageStart) -> None:
    """Log the start of the run and the state of experiences after it."""
    counts = (
        (started.orphaned, "set aside: lost weights wrote them"),
        (started.available, "in the buffer, to be trained"),
    )
    rest = [f"{n} experiences {what}" for n, what in counts if n]
    log.info("%s", "; ".join([begins, *rest]), extra=STARTING)


def begin_offline(checkpoint: Manifest | None, other: Manifest | None) -> Start:
    """Return the start of training on a data set: the checkpoint's step is the place in the data."""
    if checkpoint is not None:
        return Start(
            checkpoint.version.lineage + 1,
            checkpoint.version.step,
            checkpoint.version,
            checkpoint=str(checkpoint.folder),
        )
    if other is not None:
        return Start(1, other.version.step, None, checkpoint=str(other.folder))
    return Start(1)


_LENGTH = 8  # log-probs after two tokens are less exact, see decision 4
_ALIKE = 4  # probes of one prompt, computed once


def probe_prompts(model_path: str, count: int, seed: int) -> list[list[int]]:
    """Draw `count` prompts from the middle half of the vocabulary, away from special tokens; four in
    a row are equal.
    """
    vocabulary = modelfiles.vocab_size(Path(model_path))
    draw = np.random.default_rng(seed)
    ids = draw.integers(
        vocabulary // 4,
        max(vocabulary * 3 // 4, vocabulary // 4 + 1),
        size=(-(-count // _ALIKE), _LENGTH),
    )
    prompts: list[list[int]] = ids.repeat(_ALIKE, axis=0)[:count].tolist()
    return prompts
