from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rft.trainer.rows import prefix

sequences = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=8)


def arrays(rows: list[list[int]]) -> list[np.ndarray]:
    return [np.array(r, np.int32) for r in rows]


def test_example_of_the_docstring() -> None:
    tree = prefix.build(arrays([[7, 8, 9], [7, 8, 10]]))
    assert tree.tokens.tolist() == [7, 8, 9, 10]
    assert tree.positions.tolist() == [0, 1, 2, 2]
    assert [p.tolist() for p in tree.paths] == [[0, 1, 2], [0, 1, 3]]
    assert [b.new_slots.tolist() for b in tree.branches] == [[0, 1, 2], [3]]


@given(sequences)
def test_paths_spell_their_rows_and_every_prefix_is_there_once(rows: list[list[int]]) -> None:
    given_rows = arrays(rows)
    tree = prefix.build(given_rows)
    for path, row in zip(tree.paths, given_rows, strict=True):
        assert tree.tokens[path].tolist() == row.tolist()
        assert tree.positions[path].tolist() == list(range(len(row)))
    distinct = {tuple(r[: n + 1]) for r in rows for n in range(len(r))}
    assert len(tree.tokens) == len(distinct) == prefix.shared_length(given_rows)
    assert sorted(np.concatenate([b.new_slots for b in tree.branches]).tolist()) == list(
        range(len(tree.tokens))
    )


@pytest.mark.e2e
@given(sequences)
def test_rows_whose_mask_would_be_too_large_share_nothing(rows: list[list[int]]) -> None:
    tree = prefix.build(arrays(rows), max_mask=0)
    assert all(b.start == 0 for b in tree.branches)
    for most in (0, 10, 40):
        assert prefix.shared_length(arrays(rows), max_mask=most) == len(
            prefix.build(arrays(rows), max_mask=most).tokens
        )
