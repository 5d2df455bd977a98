"""What the process of each mode does in its run.  Torch-free; depends on no machine."""

from __future__ import annotations

from rft.algorithm.catalog import algorithm_defaults
from rft.config.schema.root import RunConfig
from rft.errors import ConfigError


def explores(mode: str) -> bool:
    """Whether a program of this mode has engines."""
    return mode != "train"


def trains(config: RunConfig) -> bool:
    """Whether this program has trainer ranks."""
    return config.mode in ("both", "train", "colocate", "serve") and not joins(config)


def joins(config: RunConfig) -> bool:
    """Whether this process joins a run whose trainer is another one."""
    return config.mode == "explore" or (
        config.mode == "serve" and config.explorer.serve.trainer_apart
    )


def apart(config: RunConfig) -> bool:
    """Whether this process is one half of a run."""
    return joins(config) or (config.mode == "train" and not reads_data(config))


def serves(config: RunConfig) -> bool:
    """Whether what is trained comes from a service, here or in another process."""
    return config.mode == "serve" or (
        config.mode == "train" and config.explorer.serve.trainer_apart and not reads_data(config)
    )


def samples(config: RunConfig) -> bool:
    """Whether the run, here or in another process, plays training tasks."""
    return config.mode in ("both", "colocate", "serve") or apart(config)


def reads_data(config: RunConfig) -> bool:
    """Whether its rows are there before it begins: a data set, or what another run has sampled."""
    if config.buffer.trainer_input.replay_run is not None:
        return True
    try:
        return algorithm_defaults(config.algorithm.algorithm_type).data is not None
    except ConfigError:
        return True  # told by `resolve`
