"""Ends what scripts are run in, after the tests of a process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rft.extras.migrate.convert import recording


@pytest.fixture(scope="session", autouse=True)
def _no_sandbox_is_left() -> Iterator[None]:
    yield
    recording.close()
