"""What every sandbox promises: `local`, closed off by the kernel alone, and `container`."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rft.extras.sandbox.code_sandbox import Sandbox, SandboxUnavailable
from rft.extras.sandbox.container import ContainerSandbox
from rft.extras.sandbox.processes import ProgramLimits, SandboxError
from rft.extras.sandbox.project import run_project
from tests.extras.sandbox import containers

LIMITS = ProgramLimits(timeout_s=20.0, memory_mb=256)


@pytest.fixture(params=["local", pytest.param("container", marks=pytest.mark.e2e)])
def sandbox(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    if request.param == "local":
        made: Any = Sandbox(level="namespaces")
        try:
            made.level()
        except SandboxUnavailable as e:
            pytest.skip(str(e))
        yield made
        made.close()
        return
    started = containers.command(monkeypatch)
    made = ContainerSandbox(containers.image(started, tmp_path))
    yield made
    made.close()
    left = subprocess.run(
        [*started, "ps", "--all", "--format", "{{.Names}}"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    # others are of other workers
    assert f"rft-{os.getpid()}-" not in left, "a container outlives its run"


async def test_what_a_program_reads_prints_and_ends_with(sandbox: Any) -> None:
    ran = await sandbox.run(
        "import sys; print(sys.stdin.read().upper(), end='')", LIMITS, b"said\n"
    )
    assert (ran.reason, ran.output) == ("", b"SAID\n")
    ran = await sandbox.run("import sys; print('why', file=sys.stderr); sys.exit(3)", LIMITS)
    assert (ran.reason, ran.detail) == ("error", "why")
    ran = await sandbox.run("raise ValueError('no')", LIMITS)
    assert (ran.reason, ran.detail) == ("error", "ValueError: no")


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("program", "limits", "reasons"),
    [
        # its processor time may be used up first
        ("while True: pass", ProgramLimits(timeout_s=1.0), {"timeout", "killed"}),
        ("import time; time.sleep(60)", ProgramLimits(timeout_s=1.0), {"timeout"}),
        ("x = bytearray(1 << 30)", ProgramLimits(timeout_s=20.0, memory_mb=128), {"memory"}),
        ("while True: print('x' * 1000)", ProgramLimits(timeout_s=20.0, output_kb=64), {"output"}),
        (
            "open('/tmp/big', 'wb').write(bytes(32 << 20))",
            ProgramLimits(timeout_s=20.0, file_mb=4),
            {"error", "crash"},
        ),
    ],
    ids=["computes", "sleeps", "memory", "prints", "writes"],
)
async def test_limits_end_it(
    sandbox: Any, program: str, limits: ProgramLimits, reasons: set[str]
) -> None:
    assert (await sandbox.run(program, limits)).reason in reasons


async def test_it_reaches_nothing_outside(
    sandbox: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret").write_text("found")
    monkeypatch.setenv("SECRET", "found")
    program = f"""
import os, socket
def told(what):
    try:
        return what()
    except OSError:
        return "closed"
print(told(lambda: open({str(tmp_path / "secret")!r}).read()))
print(told(lambda: socket.create_connection(("127.0.0.1", 22), 1) and "open"))
print(told(lambda: socket.create_connection(("192.0.2.1", 80), 1) and "open"))
print(os.environ.get("SECRET", "closed"))
print(told(lambda: open("/written", "w") and "open"))
print(told(lambda: [os.fork() or os._exit(0) for _ in range(64)] and "open") if {isinstance(sandbox, Sandbox)} else "closed")
"""
    ran = await sandbox.run(program, LIMITS)
    assert (ran.reason, ran.output.split()) == ("", [b"closed"] * 6)


async def test_what_one_writes_no_other_sees(sandbox: Any) -> None:
    found = []
    for _ in range(2):
        ran = await sandbox.run(
            "import os; print(os.path.exists('/tmp/left')); open('/tmp/left', 'w').write('x')",
            LIMITS,
        )
        found.append(ran.output)
    assert found == [b"False\n"] * 2


async def test_several_at_the_same_time(sandbox: Any) -> None:
    ran = await asyncio.gather(*(sandbox.run(f"print({i})", LIMITS) for i in range(4)))
    assert [r.output for r in ran] == [f"{i}\n".encode() for i in range(4)]


async def test_projects_have_files_and_folders(sandbox: Any) -> None:
    files = {
        "pack/__init__.py": "",
        "pack/sums.py": "def add(a, b):\n    return a - b\n",
        "data.txt": "5\n",
    }
    files["test_sums.py"] = (
        "import unittest\nfrom pack.sums import add\n\n\nclass Sums(unittest.TestCase):\n"
        "    def test_it(self):\n        self.assertEqual(add(2, 3), "
        "int(open('data.txt').read()))\n"
    )
    assert (await run_project(sandbox, files, ["-m", "unittest", "-q"], LIMITS)).reason == "error"
    files["pack/sums.py"] = "def add(a, b):\n    return a + b\n"
    assert (await run_project(sandbox, files, ["-m", "unittest", "-q"], LIMITS)).reason == ""
    with pytest.raises(ValueError, match="no path inside"):
        await run_project(sandbox, {"../x.py": ""}, ["x.py"], LIMITS)


async def test_an_image_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    containers.command(monkeypatch)
    missing = ContainerSandbox("localhost/rft-nothing:0")
    with pytest.raises(SandboxError, match="localhost/rft-nothing:0 could be started"):
        await missing.run("print(1)", LIMITS)
    missing.close()


@pytest.mark.e2e
@pytest.mark.parametrize(("failures", "ends"), [(2, True), (3, False)])
async def test_a_container_that_is_lost_at_its_start_is_started_again(
    failures: int, ends: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = containers.command(monkeypatch)
    image = containers.image(started, tmp_path)
    lost = tmp_path / "lost"
    engine = tmp_path / "engine"
    engine.write_text(
        f"""#!/bin/sh
if [ "$1" = run ] && [ "$(wc -l <{lost})" -lt {failures} ]; then
  echo >>{lost}; echo "cannot start a container that has stopped" >&2; exit 126
fi
exec {" ".join(started)} "$@"
"""
    )
    engine.chmod(0o755)
    lost.touch()
    made = ContainerSandbox(image, command=[str(engine)])
    if ends:
        assert (await made.run("print(1)", LIMITS)).output == b"1\n"
    else:
        with pytest.raises(SandboxError, match=r"status 126.*has stopped"):
            await made.run("print(1)", LIMITS)
    made.close()
    assert lost.read_text() == "\n" * failures
