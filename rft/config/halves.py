"""A run in several processes: `mode: train` and `mode: explore` on one Ray.  What each needs to find the other.

Part of `resolve`; the same rules hold here.
"""

from __future__ import annotations

from pathlib import Path

import xxhash

from rft.algorithm.catalog import algorithm_defaults
from rft.config.problems import Problems
from rft.config.schema.root import RunConfig
from rft.errors import ConfigError
from rft.taskset.settings import TasksetSettings

_FOUND = "auto"  # RAY_ADDRESS, or the Ray that was started on this machine


def apart(config: RunConfig) -> bool:
    """Whether this process is one half of a run."""
    return config.mode == "explore" or (config.mode == "train" and not _reads_data(config))


def samples(config: RunConfig) -> bool:
    """Whether the run, here or in another process, plays training tasks."""
    return config.mode in ("both", "colocate") or apart(config)


def namespace(config: RunConfig) -> str:
    """Where the processes of this run meet: what is written, or the same for the same folder."""
    folder = str(Path(config.checkpoint_root_dir).expanduser().absolute())
    return config.ray_namespace or f"rft-{config.project}-{xxhash.xxh3_64_hexdigest(folder.encode())}"


def ray_address(config: RunConfig) -> str | None:
    """The Ray to join; None: one of its own."""
    return config.cluster.ray_address or (_FOUND if apart(config) else None)


def elsewhere(config: RunConfig, repeat_times: int, p: Problems) -> tuple[TasksetSettings, ...]:
    """What the process that trains knows of tasks that only the files of those that explore name: the size of a group."""
    if config.mode != "train" or _reads_data(config):
        return ()
    if config.trainer.total_steps is None and config.buffer.total_steps is None and config.buffer.total_tasks is None:
        p.error(
            "trainer.total_steps",
            "is required where no taskset is named: only the processes of mode: explore know how many tasks there are.  Or name the "
            "same buffer.explorer_input here as there",
        )
    return (TasksetSettings(name="elsewhere", path="", workflow="", reward=None, num_runs=repeat_times),)


def check(config: RunConfig, p: Problems) -> None:
    """What two processes need that one does not."""
    if not apart(config):
        if config.mode != "serve" and config.explorer.name != "explorer":
            p.warn(f"explorer.name has no effect with mode: {config.mode}: there is one explorer")
        return
    if config.cluster.ray_address is None:
        other = "explore" if config.mode == "train" else "train"
        p.derive("cluster.ray_address", _FOUND, f"the Ray of this machine (ray start), to meet the process of mode: {other}")


def _reads_data(config: RunConfig) -> bool:
    try:
        return algorithm_defaults(config.algorithm.algorithm_type).data is not None
    except ConfigError:
        return True  # told by `resolve`
