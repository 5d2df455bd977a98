"""pytest fixtures for authors of workflows; modules are imported when a test requests a fixture.

    def test_mine(run_workflow, scripted_model):
        assert run_workflow(Mine, "2+2?", scripted_model("4")).reward == 1.0

`run_workflow` prints each trace, which pytest shows when a test fails; in an async test await
`run_workflow_async`.  `recorded_model(model)` plays cassettes/FILE/TEST.json in the folder of the
test; --rft-record=all records again.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Awaitable, Callable
from typing import Any

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Silence pytest-asyncio's warning in folders without settings; its default fits our fixtures."""
    del config
    warnings.filterwarnings(
        "ignore", message="The configuration option .asyncio_default_fixture_loop_scope. is unset"
    )


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("rft").addoption(
        "--rft-record",
        choices=("once", "none", "all"),
        default="once",
        help="recorded_model: record where there is no cassette (once), never (none), everything "
        "(all)",
    )


@pytest.fixture
def scripted_model() -> Callable[..., Any]:
    """Return `rft.testing.ScriptedModel`, to be called with answers."""
    from rft.testing.fakes import ScriptedModel

    return ScriptedModel


@pytest.fixture
def recorded_model(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Return `recorded_model(model=None, name=None)`, which makes a RecordedModel with this test's
    cassette.
    """
    from rft.testing.fakes import RecordedModel

    def make(model: Any = None, name: str | None = None) -> RecordedModel:
        test = re.sub(r"[^\w.-]+", "_", request.node.name) if name is None else name
        path = request.path.parent / "cassettes" / request.path.stem / f"{test}.json"
        return RecordedModel(path, model, record=request.config.getoption("--rft-record"))

    return make


@pytest.fixture
def run_workflow() -> Callable[..., Any]:
    """Return `rft.testing.run_workflow`, with its trace printed."""
    from rft.testing import play

    return lambda *args, **more: _shown(play.run_workflow(*args, **more))


@pytest.fixture
def run_workflow_async() -> Callable[..., Awaitable[Any]]:
    """Return `rft.testing.run_workflow_async`, with its trace printed."""
    from rft.testing import play

    async def run(*args: Any, **more: Any) -> Any:
        return _shown(await play.run_workflow_async(*args, **more))

    return run


def _shown(result: Any) -> Any:
    print(result.trace())
    return result
