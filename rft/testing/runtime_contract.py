"""The tests that every driver of runtimes must pass.  Ships to users.

    class TestMine(RuntimeContract):
        image = "python:3.12"

        def driver(self):
            return MyDriver()

The image needs `sh` and `python3`.  Whether a process is left is seen only where runtimes are
processes of this machine.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from rft.types.runtimes import (
    KEPT,
    AgentRuntime,
    RuntimeDriver,
    RuntimeFailed,
    RuntimeLimits,
    RuntimeSpec,
    packed,
    packed_file,
)

LIMIT_S = 60.0
_CONNECT = (
    "import socket, sys\ns = socket.create_connection(('127.0.0.1', int(sys.argv[1])), 5)\n"
    "s.sendall(b'hello')\nprint(s.recv(9).decode())"
)
_FORKS = (
    "import os\nn = 0\ntry:\n    while n < 5000:\n        if os.fork() == 0:\n"
    "            import time; time.sleep(60)\n            os._exit(0)\n        n += 1\n"
    "except OSError:\n    pass\nprint(n)"
)
# a process that has left its session and its parent
_LEAVES = (
    "import os, time\nif os.fork():\n    os._exit(0)\nos.setsid()\ntime.sleep(86400)  # {mark}"
)
_FILLS = (
    "try:\n    with open('/app/large', 'wb') as f:\n        for _ in range(96):\n"
    "            f.write(bytes(1 << 20))\nexcept OSError as e:\n    print('full')"
)


class RuntimeContract:
    """Override `driver`, and `image` where the driver needs one."""

    image = ""

    def driver(self) -> RuntimeDriver:
        raise NotImplementedError("return your driver")

    @pytest.fixture
    def start(self) -> Iterator[Callable[..., AgentRuntime]]:
        """Starts runtimes that are killed after the test."""
        runtimes: list[AgentRuntime] = []

        def start(files: object = None, **spec: object) -> AgentRuntime:
            full = RuntimeSpec(image=self.image, **spec)  # type: ignore[arg-type]
            runtimes.append(self.driver().start(full, files=files))  # type: ignore[arg-type]
            return runtimes[-1]

        yield start
        for runtime in runtimes:
            runtime.kill()

    def test_a_program_is_run(self, start: Callable[..., AgentRuntime]) -> None:
        runtime = start(env={"A": "1"}, workdir="/srv/here")
        script = "pwd; echo $A$B; cat; echo wrong >&2; exit 3"
        done = runtime.exec(
            ["sh", "-c", script], stdin=b"given\n", env={"B": "2"}, timeout_s=LIMIT_S
        )
        assert (done.code, done.output, done.errors) == (
            3,
            b"/srv/here\n12\ngiven\n",
            b"wrong\n",
        )
        assert runtime.exec(["no-such-program"], timeout_s=LIMIT_S).code == 127
        ended = runtime.exec(["sh", "-c", "kill -9 $$"], timeout_s=LIMIT_S)
        assert ended.code == 128 + signal.SIGKILL

    def test_the_end_of_a_long_output_is_kept(self, start: Callable[..., AgentRuntime]) -> None:
        script = "import sys\nsys.stdout.write('x' * 5_000_000 + 'end')"
        done = start().exec(["python3", "-c", script], timeout_s=LIMIT_S)
        assert done.code == 0
        assert len(done.output) == KEPT
        assert done.output.endswith(b"xend")

    def test_files_are_copied(self, start: Callable[..., AgentRuntime]) -> None:
        runtime = start()
        runtime.put(packed({"/app/in/a.sh": b"#!/bin/sh\necho ran > /app/out\n"}, mode=0o755))
        assert runtime.exec(["/app/in/a.sh"], timeout_s=LIMIT_S).code == 0
        assert packed_file(runtime.get("/app/out", most_bytes=1 << 20)) == b"ran\n"
        with pytest.raises(FileNotFoundError):
            runtime.get("/app/none", most_bytes=1 << 20)
        with pytest.raises(FileNotFoundError):
            packed_file(runtime.get("/app/in", most_bytes=1 << 20))
        with pytest.raises(RuntimeFailed):
            runtime.get("/app", most_bytes=100)

    @pytest.mark.parametrize("user", ["0", "65534"])
    def test_a_locked_folder_does_not_change(
        self, start: Callable[..., AgentRuntime], user: str
    ) -> None:
        if user != "0" and os.geteuid() != 0:
            pytest.skip("another account has one user inside")
        runtime = start()
        runtime.put(packed({"/tests/a": b"kept"}), read_only="/tests")
        script = (
            "cat /tests/a; echo x > /tests/a; rm /tests/a; echo x > /tests/b; mv /tests /t; "
            "chmod 777 /tests; umount /tests; mount -o remount,rw /tests; ls /tests"
        )
        done = runtime.exec(["sh", "-c", script], user=user, timeout_s=LIMIT_S)
        assert done.output == b"kepta\n"
        assert packed_file(runtime.get("/tests/a", most_bytes=1 << 20)) == b"kept"

    def test_one_network_path(self, start: Callable[..., AgentRuntime]) -> None:
        """The port leads to `listener`, no other to anything."""
        with socket.create_server(("127.0.0.1", 0)) as other:
            number = other.getsockname()[1]
            runtime = start(port=number)
            assert runtime.listener is not None
            answered = threading.Thread(target=_answer, args=(runtime.listener,))
            answered.start()
            line = ["python3", "-c", _CONNECT]
            assert runtime.exec([*line, str(number)], timeout_s=LIMIT_S).output == b"hello\n"
            answered.join()
            outside = start().exec([*line, str(number)], timeout_s=LIMIT_S)
            assert b"ConnectionRefusedError" in outside.errors
            routes = runtime.exec(["cat", "/proc/net/route"], timeout_s=LIMIT_S)
            assert (routes.code, routes.output.count(b"\n")) == (0, 1), routes  # its head
            assert not select.select([other], [], [], 0)[0]

    def test_what_is_outside_is_not_seen(
        self, start: Callable[..., AgentRuntime], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("RFT_TEST_SECRET", "secret-value")
        (tmp_path / "secret").write_text("secret-value")
        runtime = start(shown=())
        script = f"env; cat {tmp_path}/secret; cat /proc/*/environ; ls /proc; id"
        seen_inside = runtime.exec(["sh", "-c", script], timeout_s=LIMIT_S)
        assert b"secret-value" not in seen_inside.output
        assert str(os.getpid()).encode() not in seen_inside.output.split()

    def test_shown_folders_are_read_only(self, start: Callable[..., AgentRuntime]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder).chmod(0o755)
            tool = Path(folder, "tool")
            tool.write_text("shown")
            tool.chmod(0o644)
            runtime = start(shown=[folder])
            script = f"cat {tool}; echo x > {tool}; rm {tool}"
            done = runtime.exec(["sh", "-c", script], timeout_s=LIMIT_S)
            assert done.output == b"shown", done
            assert tool.read_text() == "shown"
            runtime.kill()

    def test_processes_and_files_are_bounded(self, start: Callable[..., AgentRuntime]) -> None:
        runtime = start(limits=RuntimeLimits(processes=40, disk_mb=32))
        done = runtime.exec(["python3", "-c", _FILLS], timeout_s=LIMIT_S)
        assert done.output == b"full\n", done
        forked = runtime.exec(["python3", "-c", _FORKS], timeout_s=LIMIT_S)
        assert 10 < int(forked.output) < 40
        runtime.stop()
        assert runtime.exec(["sh", "-c", "rm /app/large; echo on"], timeout_s=LIMIT_S).code == 0

    def test_a_deadline_and_the_end_of_all(self, start: Callable[..., AgentRuntime]) -> None:
        """`stop` also ends what has left its session and its parent; the files stay."""
        runtime = start()
        mark = _mark()
        _leave(runtime, mark)
        script = f"echo kept > /app/a; trap '' TERM; sleep 86400; : {mark}"
        assert runtime.exec(["sh", "-c", script], timeout_s=2.0).code is None
        assert len(_marked(mark)) >= 2
        ends = [os.pidfd_open(pid) for pid in _marked(mark)]
        runtime.stop()
        _wait(ends)
        assert packed_file(runtime.get("/app/a", most_bytes=1 << 20)) == b"kept\n"

    def test_a_snapshot_starts_others(self, start: Callable[..., AgentRuntime]) -> None:
        runtime = start()
        runtime.exec(["sh", "-c", "echo first > /app/a; mkdir /new"], timeout_s=LIMIT_S)
        snapshot = runtime.snapshot()
        try:
            runtime.exec(["sh", "-c", "echo second > /app/a"], timeout_s=LIMIT_S)
            for _ in range(2):
                other = start(files=snapshot)
                done = other.exec(["sh", "-c", "cat a; ls -d /new; rm a"], timeout_s=LIMIT_S)
                assert (done.code, done.output) == (0, b"first\n/new\n")
        finally:
            snapshot.drop()

    def test_a_kill_ends_a_call_and_every_process(self, start: Callable[..., AgentRuntime]) -> None:
        runtime = start()
        mark = _mark()
        _leave(runtime, mark)
        ends = [os.pidfd_open(pid) for pid in _marked(mark)]
        assert ends
        killer = threading.Timer(0.5, runtime.kill)
        killer.start()
        with pytest.raises(RuntimeFailed):
            runtime.exec(["sleep", "60"], timeout_s=LIMIT_S)
        killer.join()
        _wait(ends)
        runtime.kill()
        with pytest.raises(RuntimeFailed):
            runtime.exec(["true"], timeout_s=LIMIT_S)

    def test_nothing_outlives_a_killed_owner(self) -> None:
        mark = _mark()
        read, write = os.pipe()
        owner = os.fork()
        if owner == 0:
            try:
                runtime = self.driver().start(RuntimeSpec(image=self.image, port=4000))
                _leave(runtime, mark)
                os.write(write, b".")
                signal.pause()
            finally:
                os._exit(1)
        os.close(write)
        assert os.read(read, 1) == b"."
        os.close(read)
        ends = [os.pidfd_open(pid) for pid in _marked(mark)]
        os.kill(owner, signal.SIGKILL)
        os.waitpid(owner, 0)
        assert ends
        _wait(ends)
        self.nothing_is_left(owner)

    def nothing_is_left(self, owner: int) -> None:
        """Check what a driver keeps for the killed process `owner` beside processes."""


def _answer(listener: socket.socket) -> None:
    with listener.accept()[0] as connection:
        connection.sendall(connection.recv(9))


def _mark() -> str:
    return f"mark-{uuid.uuid4()}"


def _leave(runtime: AgentRuntime, mark: str) -> None:
    line = ["python3", "-c", _LEAVES.format(mark=mark)]
    assert runtime.exec(line, timeout_s=LIMIT_S).code == 0


def _marked(mark: str) -> list[int]:
    """Return the processes of this machine with `mark` on their command lines."""
    processes = psutil.process_iter(["cmdline"])
    return [p.pid for p in processes if mark in " ".join(p.info["cmdline"] or ())]


def _wait(ends: list[int]) -> None:
    """Wait until the processes of these descriptors have ended."""
    for end in ends:
        assert select.select([end], [], [], LIMIT_S)[0], "a process is left"
        os.close(end)
