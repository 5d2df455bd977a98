"""Seeds of model calls, from the place of the call in the run and from nothing else."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b


def seed_for(seed: int, *place: int | str) -> Callable[[int], int]:
    """Gives, for turn 0, 1, ... of the run at `place` (batch, task, run), the seed in [0, 2**31): blake2b over everything.

    The attempt is left out on purpose: a run that is played again draws the same tokens.
    """

    def turn_seed(turn: int) -> int:
        digest = blake2b(repr((seed, *place, turn)).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") % 2**31

    return turn_seed
