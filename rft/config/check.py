"""What a configuration will do, told before anything starts.  In two stages: the file by itself, then what it names.

Stage 1 (`plan_of`) loads no torch and opens nothing but the file.  Stage 2 (`complete`) imports plugins and opens tasksets and the
model's files.  Invariant: what passes here fails later only because of the machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rft.config.load import load
from rft.config.plan import Facts, Plan
from rft.config.resolve import resolve
from rft.config.schema.root import RunConfig
from rft.taskset.settings import TasksetSettings


def load_plan(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    plugin_dirs: Sequence[str] = (),
    facts: Facts | None = None,
    name: str = "",
) -> tuple[RunConfig, Plan]:
    """The configuration and its complete Plan, ready to run.  Raises ConfigErrors with all that is wrong.

    `plugin_dirs` are further folders with plugins; `name` replaces the run's name.
    """
    from dataclasses import replace

    from rft import plugins

    config = load(path, overrides)
    facts = replace(facts or Facts(), plugin_dirs=tuple(plugin_dirs))
    first = resolve(config, facts, name=name)
    plugins.load_all(first.plugin_dirs)
    return config, resolve(config, replace(facts, plugins_loaded=True), num_batches=_num_batches, name=name)


def _num_batches(tasksets: tuple[TasksetSettings, ...], batch_size: int, epochs: int) -> int:
    from rft.taskset.base import open_taskset
    from rft.taskset.order import Order

    return Order([open_taskset(t) for t in tasksets], batch_size, 0).num_batches(epochs)
