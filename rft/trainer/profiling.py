"""Traces of single train steps, one Chrome trace file for each traced rank and step (or phase of
it).

Knows torch's profiler.  Invariant: a step that is not named runs without a profiler.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rft.trainer.settings import ProfilerSettings


@contextmanager
def traced(settings: ProfilerSettings, rank: int, step: int, phase: str = "") -> Iterator[None]:
    """Trace what happens inside, if this rank and step are named and the phases are what is asked
    for.
    """
    if step not in settings.steps or rank not in settings.ranks or settings.discrete != bool(phase):
        yield
        return
    import torch
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profile(
        activities=kinds, record_shapes=True, profile_memory=True, acc_events=True
    ) as trace:
        yield
    settings.folder.mkdir(parents=True, exist_ok=True)
    trace.export_chrome_trace(
        str(settings.folder / f"step_{step}{f'_{phase}' if phase else ''}_rank_{rank}.json")
    )
