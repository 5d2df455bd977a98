"""What the ledger keeps of a row's tokens gives back every float32 as it was."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rft.testing.storage_contract import row
from rft.types import token_logprobs
from rft.types.completion import VersionSpan
from rft.types.ids import GroupId, Version

NAME = GroupId(1, 0, 0, 0).run(0)
LOGPROB = st.floats(max_value=0, allow_nan=False, allow_infinity=False, width=32)


def two_turns(**more: Any) -> Any:
    """Tokens 2 to 4 and 7 to 9 were generated; token 8 is not trained."""
    spans = (VersionSpan(Version(1, 0), 2, 4), VersionSpan(Version(1, 1), 7, 10))
    mask = np.isin(np.arange(10), (2, 3, 7, 9))
    logprobs = np.where(mask, -np.arange(10) / 7, 0).astype(np.float32)
    return msgspec.structs.replace(
        row(NAME, tokens=10), loss_mask=mask, logprobs=logprobs, version_spans=spans, **more
    )


@pytest.mark.e2e
@given(st.lists(LOGPROB, min_size=6, max_size=6), st.lists(LOGPROB, min_size=6, max_size=6))
def test_numbers_come_back_to_the_last_bit(engine: list[float], trainer: list[float]) -> None:
    x = row(NAME)
    x = msgspec.structs.replace(x, logprobs=np.array([0.0] * 6 + engine, np.float32))
    taught = np.array(engine[::-1], np.float32)
    made = token_logprobs.of_row(x, np.array(trainer, np.float32), taught)
    (back,) = token_logprobs.decode(token_logprobs.encode([made]))
    assert back == made
    read = token_logprobs.of_trainer(made.token_start, made.pairs)
    assert np.array_equal(read.logprobs, np.array([0.0] * 6 + trainer, np.float32))
    assert np.array_equal(read.advantages[6:], taught)
    theirs = np.array([pair[0] for pair in json.loads(made.pairs)], np.float32)
    assert np.array_equal(theirs, x.logprobs[6:])


def test_what_was_not_trained_is_null() -> None:
    made = token_logprobs.of_row(two_turns(), np.array([-1, -2, -3, -4], np.float32))
    found = json.loads(made.pairs)
    assert (made.id, made.token_start, len(found)) == (str(NAME), 2, 8)
    assert [None if p is None else p[1] for p in found] == [-1, -2, None, None, None, -3, None, -4]


def test_what_is_not_known_is_null() -> None:
    made = token_logprobs.of_row(
        two_turns(has_logprobs=False), np.array([-1, -np.inf, np.nan, -0.0], np.float32)
    )
    assert [p for p in json.loads(made.pairs) if p is not None] == [
        [None, -1, None],
        *[[None, None, None]] * 2,
        [None, 0, None],
    ]
    read = token_logprobs.of_trainer(made.token_start, made.pairs)
    assert np.array_equal(
        read.logprobs,
        np.array([0, 0, -1, np.nan, 0, 0, 0, np.nan, 0, 0], np.float32),
        equal_nan=True,
    )
    older = token_logprobs.of_trainer(1, "[[-1,-2],null]")  # of format 4
    assert np.array_equal(older.logprobs, np.array([0, -2, 0]))
    assert np.array_equal(older.advantages, np.array([0, np.nan, 0]), equal_nan=True)
