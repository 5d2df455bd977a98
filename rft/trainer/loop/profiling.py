"""Write traces of single train steps: a Chrome trace file for each traced rank and step, or phase.

Depends on torch's profiler.  Invariant: a step that is not listed runs without a profiler.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rft.trainer.settings import ProfilerConfig


@contextmanager
def traced(
    config: ProfilerConfig, folder: Path, rank: int, step: int, phase: str = ""
) -> Iterator[None]:
    """Trace the block if `config` lists this step and rank.

    `phase` is traced with `config.discrete`, the step as a whole without.
    """
    traces = step in (config.steps or ()) and rank in (config.ranks or (0,))
    if not traces or config.discrete != bool(phase):
        yield
        return
    import torch
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profile(
        activities=kinds, record_shapes=True, profile_memory=True, acc_events=True
    ) as trace:
        yield
    folder.mkdir(parents=True, exist_ok=True)
    trace.export_chrome_trace(
        str(folder / f"step_{step}{f'_{phase}' if phase else ''}_rank_{rank}.json")
    )
