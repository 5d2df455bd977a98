"""Who sits where: pure placement of roles on nodes, and the Ray placement groups that hold it.

Order: explorer engines (tensor parallel inside one node), then auxiliary models, then the trainer's ranks.  `rft check` judges the
declared cluster with `placement`; `rft run` judges the real one and reserves it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rft.engine.settings import EngineSettings
from rft.errors import SetupError
from rft.trainer.settings import LearnerSettings


@dataclass(frozen=True)
class Seat:
    """One actor's place: `gpus` devices of one node."""

    role: str  # "engine" | "auxiliary" | "trainer"
    index: int
    gpus: int
    node: int  # number of the node in the declared or real cluster


def placement(
    engines: Sequence[EngineSettings], learner: LearnerSettings | None, gpus_per_node: list[int], auxiliary: Sequence[int] = ()
) -> list[Seat]:
    """Seats for all engines, auxiliary models (GPUs of each of their engines) and trainer ranks.

    Raises SetupError when the cluster is too small, naming role and numbers.
    """
    free = list(gpus_per_node)
    seats = [Seat("engine", i, e.gpus, 0) for i, e in enumerate(engines)]
    seats += [Seat("auxiliary", i, gpus, 0) for i, gpus in enumerate(auxiliary)]
    ranks = learner.world_size if learner is not None else 0
    seats += [Seat("trainer", rank, _need(learner.device, 1), 0) for rank in range(ranks) if learner is not None]
    placed = []
    for seat in seats:
        node = next((n for n, have in enumerate(free) if have >= seat.gpus), None)
        if node is None:
            wanted = sum(s.gpus for s in seats)
            raise SetupError(
                f"{seat.role} {seat.index} needs {seat.gpus} GPU(s) on one node, but the nodes have {free} left of {gpus_per_node}. "
                f"The plan needs {wanted} GPUs in all ({len(engines)} engine(s), {len(auxiliary)} auxiliary, {ranks} trainer rank(s)); "
                "lower explorer.rollout_model.engine_num or tensor_parallel_size, set device: cpu, or use a larger cluster."
            )
        free[node] -= seat.gpus
        placed.append(Seat(seat.role, seat.index, seat.gpus, node))
    return placed


def _need(device: str, count: int) -> int:
    return count if device == "cuda" else 0


class Places:
    """Reserved seats of a connected Ray; gives actor options per seat."""

    def __init__(self, seats: list[Seat], group: Any) -> None:
        self.seats, self._group = seats, group

    def options(self, role: str, index: int) -> dict[str, Any]:
        """Ray actor options that put the actor on its seat."""
        seat = next(s for s in self.seats if (s.role, s.index) == (role, index))
        if seat.gpus == 0:
            return {"num_gpus": 0}
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = [s for s in self.seats if s.gpus].index(seat)
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        return {"num_cpus": 0, "num_gpus": seat.gpus, "scheduling_strategy": strategy}


def here() -> dict[str, Any]:
    """Ray actor options that put it beside the process that asks, on whose disks and in whose memory its work lies."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    node = ray.get_runtime_context().get_node_id()
    return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}


async def reserve(seats: list[Seat], timeout_s: float = 60.0) -> Places:
    """One placement group with a bundle per seat that needs GPUs.  Raises SetupError when it is not ready in time."""
    wanted = [s for s in seats if s.gpus]
    if not wanted:
        return Places(seats, None)
    from ray.util.placement_group import placement_group

    group = placement_group([{"GPU": s.gpus} for s in wanted], strategy="PACK")
    try:
        await asyncio.wait_for(group.ready(), timeout_s)
    except TimeoutError:
        raise SetupError(
            f"the cluster did not reserve {sum(s.gpus for s in wanted)} GPUs within {timeout_s:.0f} s; other jobs hold them"
        ) from None
    return Places(seats, group)
