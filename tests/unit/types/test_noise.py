"""What the noise of a model allows: neither one seed's worst token nor a fixed number of nats
decides.
"""

from __future__ import annotations

import numpy as np
import pytest

from rft.types.noise import Difference, allowed

SEEDS = 2000
TOKENS = 64


def drawn(seed: int, scale: float) -> np.ndarray:
    """As rounding moves log-probs: most by little, a few by much (kurtosis of 5, as measured)."""
    draw = np.random.default_rng(seed)
    return draw.laplace(scale=scale, size=TOKENS)


@pytest.mark.parametrize("scale", [0.01, 0.06, 0.5])
def test_rounding_is_never_refused_and_twice_the_limit_always(scale: float) -> None:
    """U1: whatever the size of the noise is, which a fixed limit of 0.25 nats on the largest cannot
    do.
    """
    refused = 0
    missed = 0
    above = 0
    for seed in range(SEEDS):
        limit = allowed(Difference.from_values(drawn(seed, scale)), "bfloat16")
        right = drawn(SEEDS + seed, scale)
        refused += not Difference.from_values(right).within(limit)
        missed += Difference.from_values(drawn(2 * SEEDS + seed, 2.5 * limit.mean)).within(limit)
        above += np.abs(right).max() > 0.25
    assert refused == missed == 0
    assert scale < 0.06 or above > SEEDS / 4


def test_one_token_that_is_far_off_is_refused() -> None:
    """A row of the embeddings that was not loaded moves no mean."""
    limit = allowed(Difference(0.06, 0.25), "bfloat16")
    tokens = np.full(TOKENS, 0.06)
    assert Difference.from_values(tokens).within(limit)
    tokens[7] = 5.0
    assert Difference.from_values(tokens).mean < limit.mean and not Difference.from_values(
        tokens
    ).within(limit)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused(bad: float) -> None:
    endless = allowed(Difference(np.inf, np.inf), "bfloat16")
    assert not Difference.from_values(np.array([0.0, bad])).within(endless)
    assert allowed(Difference(np.nan, np.nan), "bfloat16") == Difference(0.02, 1.0)
