"""Estimate the memory of a GPU that engines and trainer use in turns (mode: colocate): while
exploring, and while training.

Depends on the roles of `memory_estimate`, not on their computation.  Invariant: both phases are
judged, because either may be the larger.
"""

from __future__ import annotations

from rft.config.plan import Plan
from rft.preflight.memory_terms import RoleMemory, Term

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


def phases(plan: Plan, roles: tuple[RoleMemory, ...]) -> tuple[RoleMemory, ...]:
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
