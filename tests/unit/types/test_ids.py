"""Labels of weight versions: lineage, step and attempt."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest

from rft.types.ids import Version


@pytest.mark.parametrize(
    ("text", "version"),
    [("2:30", Version(2, 30)), ("2:30.1", Version(2, 30, 1)), ("1:0", Version(1, 0))],
)
def test_a_label_reads_as_it_was_written(text: str, version: Version) -> None:
    assert str(version) == text and Version.parse(text) == version
    assert Version.parse("2:30.0") == Version(2, 30), "the first attempt may be written, too"


def test_versions_are_ordered_by_lineage_step_and_attempt() -> None:
    ordered = [Version(1, 9, 5), Version(2, 0), Version(2, 1), Version(2, 1, 1), Version(2, 2)]
    assert all(a < b for a, b in pairwise(ordered))
    assert Version(2, 1, 1).published == Version(2, 1) == Version(2, 1).published


def test_what_was_stored_before_there_were_attempts_is_a_first_attempt() -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode([2, 30]), type=Version) == Version(2, 30)


@pytest.mark.parametrize("wrong", [(0, 1, 0), (1, -1, 0), (1, 0, -1)])
def test_numbers_that_cannot_be_are_refused(wrong: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="lineage counts from 1, step and attempt from 0"):
        Version(*wrong)
