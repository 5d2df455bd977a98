"""Runtimes of this machine and of containers pass the contract; a pool bounds them."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from rft.extras.sandbox.container import (
    COMMAND,
    EngineCommand,
    container_name,
    remove_ownerless,
)
from rft.extras.sandbox.container_runtime import ContainerDriver
from rft.extras.sandbox.local_runtime import MachineDriver
from rft.extras.sandbox.processes import SandboxUnavailable
from rft.extras.sandbox.runtime_pool import RuntimeLease, RuntimePool
from rft.testing.runtime_contract import LIMIT_S, RuntimeContract
from rft.types.runtimes import AgentRuntime, RuntimeFailed, RuntimeSpec, packed
from tests.extras.sandbox import containers

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module", autouse=True)
def offered() -> None:
    try:
        MachineDriver().start(RuntimeSpec()).kill()
    except SandboxUnavailable as e:
        pytest.skip(str(e))


class TestOnThisMachine(RuntimeContract):
    def driver(self) -> MachineDriver:
        return MachineDriver()


class TestContainers(RuntimeContract):
    command: tuple[str, ...] = ()

    @pytest.fixture(autouse=True)
    def made(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.command = containers.command(monkeypatch)
        self.image = containers.image(self.command, tmp_path)

    def driver(self) -> ContainerDriver:
        return ContainerDriver(command=self.command)

    def test_copying_leaves_no_file(
        self, start: Callable[..., AgentRuntime], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        runtime = start()
        before = set(tmp_path.iterdir())
        runtime.put(packed({"/app/a": b"1"}))
        runtime.get("/app/a", most_bytes=1 << 20)
        assert set(tmp_path.iterdir()) == before

    def nothing_is_left(self, owner: int) -> None:
        line = [*self.command, "ps", "--all", "--quiet", "--filter", f"name=rft-{owner}-"]
        for name in subprocess.run(line, capture_output=True, check=True, text=True).stdout.split():
            waited = subprocess.run([*self.command, "wait", name], capture_output=True, check=False)
            assert waited
        found = subprocess.run(line, capture_output=True, check=True, text=True).stdout
        assert found == ""


def test_containers_of_killed_processes_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of an explorer that was killed with the engine's monitors, or while a container started."""
    engine = EngineCommand(containers.command(monkeypatch))
    image = containers.image(engine.command, tmp_path)
    own = container_name()
    _, pid, began, space, number = own.split("-")
    names = {
        own: True,
        f"rft-{pid}-{int(began) - 1}-{space}-{number}": False,  # its number has another process
        f"rft-{pid}-{began}-{int(space) + 1}-{number}": True,  # of another process space
        f"rft-{2**22 + 1}-{began}-{space}-{number}": False,
    }
    # as Podman's monitor of each
    waiting = [sys.executable, "-c", "input()"]
    monitors = {
        name: subprocess.Popen([*waiting, "-n", name], stdin=subprocess.PIPE) for name in names
    }
    try:
        for name in names:
            engine.run("create", "--network", "none", "--name", name, image, "true")
        remove_ownerless.__wrapped__(engine)
        left = engine.run("ps", "--all", "--format", "{{.Names}}").decode().split()
        assert {name: name in left for name in names} == names
        for name, stays in names.items():
            monitors[name].communicate(b"\n")
            assert monitors[name].returncode == (0 if stays else -signal.SIGKILL)
    finally:
        for name in names:
            engine.remove(name)


async def test_a_pool_has_at_most_so_many() -> None:
    pool = RuntimePool(MachineDriver(), size=2)
    together = threading.Barrier(2)
    alive: set[int] = set()
    most = 0

    def work(lease: RuntimeLease) -> int:
        nonlocal most
        runtime = lease.start(RuntimeSpec())
        alive.add(id(lease))
        most = max(most, len(alive))
        together.wait(LIMIT_S)
        code = runtime.exec(["sh", "-c", "exit 5"], timeout_s=LIMIT_S).code
        alive.discard(id(lease))
        together.wait(LIMIT_S)
        return code or 0

    assert await asyncio.gather(*(pool.use(work) for _ in range(4))) == [5, 5, 5, 5]
    assert most == 2
    pool.close()


async def test_a_cancelled_call_leaves_no_runtime() -> None:
    pool = RuntimePool(MachineDriver(), size=1)
    loop = asyncio.get_running_loop()
    begun = asyncio.Event()
    failed: list[Exception] = []

    def work(lease: RuntimeLease) -> None:
        runtime = lease.start(RuntimeSpec())
        loop.call_soon_threadsafe(begun.set)
        try:
            runtime.exec(["sleep", "600"], timeout_s=600)
        except RuntimeFailed as e:
            failed.append(e)
            raise

    using = asyncio.ensure_future(pool.use(work))
    await begun.wait()
    using.cancel()
    with pytest.raises(asyncio.CancelledError):
        await using
    assert len(failed) == 1  # the work has ended when the call has

    assert await pool.use(lambda lease: lease.start(RuntimeSpec()).workdir) == "/app"
    pool.close()


def test_an_engine_without_snapshots_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COMMAND, "/usr/bin/apptainer --quiet")
    with pytest.raises(SandboxUnavailable, match=r"apptainer --quiet: it has no `cp`.* podman or"):
        ContainerDriver()


def test_another_image_needs_containers() -> None:
    with pytest.raises(SandboxUnavailable, match="in place of an image"):
        MachineDriver().start(RuntimeSpec(image="python:3.12"))


def test_a_busy_machine_fails_a_run_and_not_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = b'{"error": "[Errno 11] Resource temporarily unavailable", "busy": true}'
    monkeypatch.setattr(socket, "recv_fds", lambda *arguments: (answer, [], 0, None))
    with pytest.raises(RuntimeFailed, match="too busy to start a runtime"):
        MachineDriver().start(RuntimeSpec())
