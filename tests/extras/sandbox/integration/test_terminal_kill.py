"""kill -9 at random moments of a run with agents in runtimes: nothing is lost, used twice or left."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from rft.extras.sandbox.local_runtime import MachineDriver
from rft.extras.sandbox.processes import SandboxUnavailable
from rft.types.runtimes import RuntimeSpec
from tests.extras.sandbox import agent_kills, containers


@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("sandbox", "kills"),
    [
        ("container", 1),
        pytest.param("container", 20, marks=pytest.mark.slow),
        pytest.param("local", 20, marks=pytest.mark.slow),
    ],
)
def test_kills_lose_nothing_and_leave_nothing(
    sandbox: str, kills: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack:
        engine: tuple[str, ...] = ()
        if sandbox == "container":
            engine = containers.command(monkeypatch)
            stack.enter_context(containers.built_images(engine, tmp_path))
        else:
            try:
                MachineDriver().start(RuntimeSpec()).kill()
            except SandboxUnavailable as e:
                pytest.skip(str(e))
        killed = agent_kills.play(tmp_path, kills=kills, sandbox=sandbox, engine=engine)
    assert killed.parts.total() == kills
    assert killed.balanced and killed.used_twice == 0, killed
    assert killed.used > 0
    assert killed.left == []
