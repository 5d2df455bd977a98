"""Where a run begins or goes on: the next lineage, the checkpoint it starts from, the next explore
batch; what the canary asks.
"""

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
from rft.config.plan import schedule as planned
from rft.errors import ConfigError
from rft.launch.progress import STARTING
from rft.monitor.monitor import FILE as METRICS
from rft.monitor.read import read, series
from rft.sync.schedule import Schedule
from rft.trainer import manifest as manifests
from rft.trainer.manifest import Manifest
from rft.types import modelfiles
from rft.types.ids import Version

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Start:
    """Where a run begins: a fresh model, or the checkpoint folder of version `parent` with its next
    explore batch `cursor`.
    """

    lineage: int
    step: int = 0
    parent: Version | None = None
    cursor: int = 0
    checkpoint: str | None = None

    @property
    def version(self) -> Version:
        return Version(self.lineage, self.step)


def schedule(plan: Plan, start: Start) -> Schedule:
    """The schedule that coordinator and trainer both follow; it knows how many explore batches a
    train step consumes.
    """
    return dataclasses.replace(planned(plan.sync), start_step=start.step)


def windows(plan: Plan) -> Callable[[int], bool]:
    """Of a step: does a window begin with its weights, as with those that `replay_run` served?
    From there its steps can be trained again: no checkpoint holds the first weights of a window
    that it is inside.  Without a loss that reads these: always.

    Raises ConfigError where that run does not tell.
    """
    if (run := plan.trainer.replay_run) is None or not plan.learner.algorithm.proximal_window:
        return lambda step: True
    try:
        served = dict(series(read(run / METRICS), "sync/version"))
    except OSError as e:
        why = (
            f"the loss reads the first weights of each window, and which steps begin one is in "
            f"its {METRICS}: {e.strerror}"
        )
        raise ConfigError(why, key="buffer.trainer_input.replay_run", given=str(run)) from e
    return served.__contains__


def checkpoints(path: Path) -> list[Path]:
    """What `resume_from_path` names: a checkpoint, or all of a run by step.  Raises ConfigError
    where there is none.
    """
    if (path / manifests.NAME).is_file() or manifests.is_name(path.name):
        return [path]
    if found := manifests.committed(path) or manifests.committed(path / "checkpoints"):
        return found
    why = (
        "holds no checkpoint; name a folder global_step_N, or the folder of a run (a model's "
        "folder is for model.model_path)"
    )
    raise ConfigError(why, key="resume_from_path", given=str(path))


def origin(path: Path | None) -> Manifest | None:
    """The checkpoint of another run to begin with, of several the newest whole one.  Raises
    CheckpointInvalid or ConfigError.
    """
    if path is None:
        return None
    first, *_ = checkpoints(path)
    return manifests.read(path) if first == path else manifests.latest(first.parent)


async def begin(
    buffer: Any,
    found: Manifest | None,
    other: Manifest | None = None,
    sizes: tuple[int, int] = (1, 1),
) -> Start:
    """Take the next lineage of the buffer, going on from the checkpoint `found` if there is one.

    `other`: another run's checkpoint to begin with where there is none.  Its weights, optimizer and
    step are taken; the explore batch is the one that this run, with `sizes` of a batch and a step,
    reaches by that step.  Its rows stay where they are: none is used here.
    """
    if found is None:
        step = 0 if other is None else other.version.step
        place = (
            None
            if other is None
            else structs.replace(other.consumption, cursor=step * sizes[1] // sizes[0])
        )
        started = await buffer.start_lineage(None, place, step)
        lineage = started.lineage
        if lineage > 1:
            _say(f"no checkpoint was saved before the stop; starting again at step {step}", started)
        if other is None or place is None:
            return Start(lineage)
        log.info(
            "lineage %d begins with %s of another run, at explore batch %d",
            lineage,
            other.folder,
            place.cursor,
        )
        return Start(lineage, step, None, place.cursor, str(other.folder))
    started = await buffer.start_lineage(found.version, found.consumption)
    _say(f"resumes from the checkpoint of step {found.version.step}", started)
    return Start(
        started.lineage, found.version.step, found.version, started.cursor, str(found.folder)
    )


def _say(begins: str, started: LineageStart) -> None:
    """Where the run begins, and what becomes of the experiences beyond it."""
    counts = (
        (started.orphaned, "set aside: lost weights wrote them"),
        (started.available, "in the buffer, to be trained"),
    )
    rest = [f"{n} experiences {what}" for n, what in counts if n]
    log.info("%s", "; ".join([begins, *rest]), extra=STARTING)


def begin_offline(found: Manifest | None, other: Manifest | None) -> Start:
    """Where training on a data set goes on.  There is no ledger: the checkpoint's step is the place
    in the data.
    """
    if found is not None:
        return Start(
            found.version.lineage + 1,
            found.version.step,
            found.version,
            checkpoint=str(found.folder),
        )
    if other is not None:
        return Start(1, other.version.step, None, checkpoint=str(other.folder))
    return Start(1)


_LENGTH = 8  # what follows two tokens is computed less exactly, see decision 4
_ALIKE = 4  # probes of one prompt, which engine and trainer compute once


def probe_prompts(model_path: str, count: int, seed: int) -> list[list[int]]:
    """`count` prompts of token ids from the middle half of the vocabulary (special tokens live at
    its ends); four in a row are equal.
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
