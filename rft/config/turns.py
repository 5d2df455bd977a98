"""`mode: colocate`: engines and trainer share the same cores and never compute at the same time.

Part of `resolve`.  Invariant: with a schedule that passes, no batch is explored while a step is trained, so both may use every core.
"""

from __future__ import annotations

from rft.config.active import GPUS_IN_TURNS
from rft.config.problems import Problems
from rft.config.schema.root import RunConfig


def check(config: RunConfig, devices: tuple[str, ...], p: Problems) -> None:
    """What lets both sides work at the same time is refused by its key.  `devices`: of engines and trainer."""
    if config.mode != "colocate":
        return
    if "cuda" in devices:
        p.error("mode", f"colocate on GPUs comes later; {GPUS_IN_TURNS}", given="colocate")
    s, e = config.synchronizer, config.explorer
    wanted = (
        ("synchronizer.sync_style", s.sync_style, "fixed"),
        ("synchronizer.sync_interval", s.sync_interval, 1),
        ("synchronizer.sync_offset", s.sync_offset, 0),
        ("explorer.eval_in_background", e.eval_in_background, False),
    )
    for key, given, value in wanted:
        if given != value:
            text = str(value).lower() if isinstance(value, bool) else value
            p.error(
                key,
                f"must be {text} with mode: colocate, where exploring and training take turns; mode: both overlaps them",
                given=given,
            )


def threads(config: RunConfig, cpus: int, engines: int) -> int:
    """Threads of each engine on a CPU, where none are written: of all cores, or a share where several take their turn together."""
    return max(1, cpus // engines) if config.mode == "colocate" else cpus
