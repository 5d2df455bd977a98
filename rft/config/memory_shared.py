"""What a GPU holds that engines and trainer have in turns (mode: colocate): while it explores, and
while it trains.

Knows the roles of `memory_estimate`, not how they were counted.  Invariant: both phases are judged,
because either may be the larger.
"""

from __future__ import annotations

from rft.config.memory_estimate import RoleMemory, Term
from rft.config.plan import Plan

# What a rank keeps between its steps.  What is in host memory (trainer.param_offload) is none of
# its terms.
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
    """One shared GPU in each phase, and the weights that sleeping engines keep on the host; nothing
    where no GPU is shared.
    """
    if not plan.cluster.shared or not roles:
        return ()
    engines = [next(r for r in roles if r.role == e.name) for e in plan.engines]
    rank = next(r for r in roles if r.role == "trainer-0")
    engine = engines[0]
    level = plan.engines[0].sleep_level
    kept = sum(t.nbytes for t in rank.terms if t.name.endswith(_STAYS))
    asleep = sum(t.nbytes for t in engine.terms if t.name == "CUDA context" or not level)
    how = f"sleep level {level}: its context" if level else "it does not sleep"
    exploring = (
        Term("engine", engine.nbytes, engine.role),
        Term("trainer at rest", kept, "weights, moments and frozen models"),
    )
    training = (Term("trainer", rank.nbytes, rank.role), Term("engine asleep", asleep, how))
    found = [
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
        found.append(
            RoleMemory(
                role="sleeping engines",
                device="cpu",
                terms=(Term("weights", weights, "sleep level 1"),),
            )
        )
    return tuple(found)
