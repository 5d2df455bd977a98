"""Estimate the memory of a GPU that engines and trainer use in turns (mode: colocate): while
exploring, and while training.

Depends on the roles of `memory_estimate`, not on their computation.  Invariant: both phases are
judged, because either may be the larger.
"""

from __future__ import annotations

import math
from dataclasses import replace

from rft.config.plan import Derived, Plan
from rft.preflight.memory_terms import RoleMemory, Term
from rft.preflight.memory_trainer import canary
from rft.preflight.model_folder import ModelShape

# Terms that a rank keeps between its steps.  Terms in host memory (trainer.offload_policy) are not
# on the GPU.
_STAYS = (
    "CUDA context",
    "weights",
    "adapter",
    "moments",
    "reference model",
    "critic",
    "weights of the window's start",
)
KEY = "explorer.rollout_model.gpu_memory_utilization"
MOST = 0.9  # of a GPU that an engine takes, as where it is alone
LEFT = 0.04  # of a GPU that nobody takes: what the driver keeps, and blocks between tensors


def with_share(
    plan: Plan, roles: tuple[RoleMemory, ...], shape: ModelShape, gpu_memory: int
) -> Plan:
    """Return `plan` with the share of a GPU that the trainer at rest leaves to engines, where the
    configuration leaves it open.
    """
    if not plan.cluster.shared or all(d.key != KEY for d in plan.derived):
        return plan
    exploring = phases(plan, roles, shape)[0]
    others = sum(t.nbytes for t in exploring.terms if t.name != "engine")
    share = max(0.01, min(MOST, math.floor(100 * (1 - others / gpu_memory - LEFT)) / 100))
    derived = Derived(key=KEY, value=share, reason="what the trainer at rest and its canary leave")
    return replace(
        plan,
        engines=tuple(replace(e, gpu_memory_utilization=share) for e in plan.engines),
        derived=(*(d for d in plan.derived if d.key != KEY), derived),
    )


def phases(plan: Plan, roles: tuple[RoleMemory, ...], shape: ModelShape) -> tuple[RoleMemory, ...]:
    """Return the roles of one shared GPU in each phase, and the host copy of sleeping engines'
    weights; empty without shared GPUs.
    """
    if not plan.cluster.shared or not roles:
        return ()
    engines = [next(r for r in roles if r.role == e.name) for e in plan.engines]
    rank = next(r for r in roles if r.role == "trainer-0")
    engine = engines[0]
    level = plan.engines[0].sleep_level
    resting = sum(t.nbytes for t in rank.terms if t.name.endswith(_STAYS))
    asleep = sum(t.nbytes for t in engine.terms if t.name == "CUDA context" or not level)
    how = f"sleep level {level}: its context" if level else "it does not sleep"
    exploring = (
        Term("engine", engine.nbytes, engine.role),
        Term("trainer at rest", resting, "weights, moments and frozen models"),
        Term("canary", canary(plan, shape), "the trainer scores it while engines are awake"),
    )
    training = (Term("trainer", rank.nbytes, rank.role), Term("engine asleep", asleep, how))
    roles_of_phases = [
        RoleMemory(role="shared GPU, exploring", device="cuda", terms=exploring),
        RoleMemory(role="shared GPU, training", device="cuda", terms=training),
    ]
    if level == 1:
        weights = sum(
            t.nbytes * e.gpus
            for r, e in zip(engines, plan.engines, strict=True)
            for t in r.terms
            if t.name == "weights"
        )
        roles_of_phases.append(
            RoleMemory(
                role="sleeping engines",
                device="cpu",
                terms=(Term("weights", weights, "sleep level 1"),),
            )
        )
    return tuple(roles_of_phases)
