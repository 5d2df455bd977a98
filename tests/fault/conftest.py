"""The fault laboratory's processes, one nursery for a test run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.lab.lab import Nursery, build_shim, nursery


@pytest.fixture(scope="session")
def lab_nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    with nursery(build_shim(tmp_path_factory.mktemp("lab"))) as made:
        yield made
