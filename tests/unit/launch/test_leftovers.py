"""The leftover check sees what is left, blames nobody else, and cleans only what is dead."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Collection, Iterator
from pathlib import Path

import psutil
import pytest

from rft.launch import leftovers
from tests.helpers import leftovers_command

SLEEPER = "import sys; print('up', flush=True); sys.stdin.read()"


def started(code: str = SLEEPER, **env: str) -> subprocess.Popen[str]:
    """A process that has said it is up and lives until its stdin is closed."""
    made = subprocess.Popen(
        [sys.executable, "-I", "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **env},
    )
    assert made.stdout is not None
    made.stdout.readline()
    return made


def ended(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


@pytest.fixture(autouse=True)
def own_world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A mark, a /dev/shm and a temporary folder of this test's own."""
    shm = tmp_path / "shm"
    temp = tmp_path / "temp"
    shm.mkdir()
    temp.mkdir()
    monkeypatch.setenv(leftovers.MARK, uuid.uuid4().hex)
    monkeypatch.setattr(leftovers, "SHM", shm)
    monkeypatch.setattr(tempfile, "tempdir", str(temp))
    yield


def test_a_clean_machine_is_clean() -> None:
    assert leftovers.compare(leftovers.snapshot(), grace_s=0) == []


def test_a_living_child_is_reported_and_an_ending_one_is_waited_for() -> None:
    before = leftovers.snapshot()
    child = started()
    try:
        (line,) = leftovers.compare(before, grace_s=0)
        assert line.startswith(f"process {child.pid} ")
        assert child.stdin is not None
        child.stdin.close()
        assert leftovers.compare(before, grace_s=20) == []
    finally:
        child.stdin = None
        ended(child)


def test_an_orphan_with_our_mark_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    before = leftovers.snapshot()
    # below this process, e.g. a test's database
    others = {p.pid for p in leftovers._our_processes()}
    code = (
        f"import subprocess,sys; "
        f"p=subprocess.Popen([sys.executable,'-I','-c',{SLEEPER!r}],stdin=subprocess.PIPE); "
    )
    child = started(code + "print(p.pid, flush=True); sys.stdin.read()")
    try:
        marked = [p.pid for p in leftovers._our_processes() if p.pid not in others]
        assert child.pid in marked and len(marked) == 2
        monkeypatch.setattr(leftovers.psutil.Process, "children", lambda self, recursive=False: [])
        assert len(leftovers.compare(before, grace_s=0)) == 2
    finally:
        ended(child)


def test_shared_memory_and_folders() -> None:
    before = leftovers.snapshot()
    temp = Path(tempfile.gettempdir())
    (leftovers.SHM / "psm_abc").write_bytes(b"x")
    (leftovers.SHM / "__KMP_REGISTERED_LIB_1_0").write_bytes(b"x")  # of process 1, which lives
    (leftovers.SHM / "somebody-elses").write_bytes(b"x")
    (temp / "rft-left").mkdir()
    (temp / "other").mkdir()
    assert leftovers.compare(before, grace_s=0) == [
        f"shared memory {leftovers.SHM / 'psm_abc'}",
        f"temporary folder {temp / 'rft-left'}",
    ]


def test_what_somebody_uses_is_not_left_over(monkeypatch: pytest.MonkeyPatch) -> None:
    before = leftovers.snapshot()
    folder = Path(tempfile.gettempdir()) / "rft-used"
    folder.mkdir()
    monkeypatch.setattr(
        leftovers, "_open_paths", lambda pid: [f"{folder}/socket"] if pid == os.getpid() else []
    )
    assert leftovers.compare(before, grace_s=0) == []


@pytest.mark.parametrize(
    ("command", "uses"), [("python -m somebody", True), ("ssh-agent -s", False)]
)
def test_a_python_of_this_account_that_cannot_be_looked_into_uses_what_bears_no_owners_name(
    monkeypatch: pytest.MonkeyPatch, command: str, uses: bool
) -> None:
    def open_paths(pid: int) -> list[str]:
        if pid == os.getppid():
            raise PermissionError(13, "Permission denied")
        return []

    real = leftovers._command
    monkeypatch.setattr(leftovers, "_open_paths", open_paths)
    monkeypatch.setattr(
        leftovers, "_command", lambda p: command if p.pid == os.getppid() else real(p)
    )
    monkeypatch.setattr(leftovers, "_name", lambda p: "")
    file = leftovers.SHM / "psm_abc"
    file.write_bytes(b"x")
    os.utime(file, (1, 1))
    assert leftovers.unused_shm() == ([] if uses else ["psm_abc"])
    # no process has that number
    of_dead = leftovers.SHM / "rft-weights-4194304_1", Path(tempfile.gettempdir(), "rft-dead")
    of_dead[0].write_bytes(b"x")
    (of_dead[1] / "ray" / "session_1").mkdir(parents=True)
    leftovers.clean("no such run")
    assert file.exists() is uses and not any(path.exists() for path in of_dead)


def test_listeners_beyond_loopback() -> None:
    before = leftovers.snapshot()
    with socket.socket() as inside, socket.socket() as outside:
        inside.bind(("127.0.0.1", 0))
        inside.listen()
        assert leftovers.compare(before, grace_s=0) == []
        outside.bind(("0.0.0.0", 0))
        outside.listen()
        (line,) = leftovers.compare(before, grace_s=0)
        assert line == f"listener 0.0.0.0 port {outside.getsockname()[1]} of process {os.getpid()}"


def test_clean_ends_and_removes_what_a_dead_run_left() -> None:
    run_id = uuid.uuid4().hex
    temp = Path(tempfile.gettempdir())
    dead = started()
    ended(dead)
    ours = started(RFT_RUN_ID=run_id)
    other = started(RFT_RUN_ID="another")
    try:
        gone = [
            leftovers.SHM / f"rft-weights-{dead.pid}-1-0.bin",
            leftovers.SHM / f"__KMP_REGISTERED_LIB_{dead.pid}_0",
        ]
        kept = [
            leftovers.SHM / f"rft-weights-{os.getpid()}-1-0.bin",
            leftovers.SHM / "psm_new",
            leftovers.SHM / "unknown",
        ]
        for file in (*gone, *kept):
            file.write_bytes(b"x")
        gone.append(leftovers.SHM / "psm_older")
        gone[-1].write_bytes(b"x")
        os.utime(gone[-1], (1, 1))
        (temp / "rft-ray" / "ray" / "session_1").mkdir(parents=True)
        (temp / "rft-just-made").mkdir()
        (temp / f"rft-vllm-{dead.pid}-a").mkdir()
        (temp / f"rft-vllm-{os.getpid()}-a").mkdir()
        later = time.time() + 3600  # new, however long this test takes
        for new in (leftovers.SHM / "psm_new", temp / "rft-just-made"):
            os.utime(new, (later, later))
        done = leftovers.clean(run_id)
        assert len(done) == 6 and done[0].startswith(f"ended process {ours.pid} ")
        assert not any(f.exists() for f in gone) and all(f.exists() for f in kept)
        assert not (temp / "rft-ray").exists() and (temp / "rft-just-made").exists()
        assert (
            not (temp / f"rft-vllm-{dead.pid}-a").exists()
            and (temp / f"rft-vllm-{os.getpid()}-a").exists()
        )
        assert other.poll() is None
        assert leftovers.clean(run_id) == []
    finally:
        ended(ours)
        ended(other)


def test_agents_of_a_ray_that_is_gone_end(tmp_path: Path) -> None:
    """They live for minutes and use its folder; their titles take the place of the environments
    that tell whose they are.
    """
    name = "ray::RuntimeEnvAgent"
    until = time.monotonic() + 60
    (raylet := tmp_path / "raylet").symlink_to("/bin/bash")
    (tmp_path / name).symlink_to("/bin/cat")
    (folder := Path(tempfile.gettempdir(), "rft-1", "ray", "session_1")).mkdir(parents=True)
    agent = f"exec -a {name} {tmp_path / name}"
    left, other = (
        subprocess.Popen(["/bin/bash", "-c", agent + log], stdin=subprocess.PIPE)
        for log in (f" 3>{folder}/log", "")
    )
    living = subprocess.Popen(
        [raylet, "-c", f"({agent} 3>{folder}/log) <&0 & wait"], stdin=subprocess.PIPE
    )
    try:
        agents: list[int] = []
        while len(agents) < 3:
            agents = [
                p.pid
                for p in psutil.Process().children(recursive=True)
                if leftovers._command(p) == name
            ]
            assert time.monotonic() < until
        assert [line.split()[2] for line in leftovers.clean("no such run")] == [str(left.pid)]
        assert [pid for pid in agents if psutil.pid_exists(pid)] == [
            pid for pid in agents if pid != left.pid
        ]
    finally:
        for process in (left, other, living):
            process.communicate()  # the end of its stdin is the end of an agent


def test_memory_of_a_process_that_ended_and_is_not_collected_yet() -> None:
    zombie = started()
    file = leftovers.SHM / f"__KMP_REGISTERED_LIB_{zombie.pid}_0"
    file.write_bytes(b"x")
    try:
        assert leftovers.clean("no such run") == [] and file.exists()
        zombie.kill()
        os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
        assert leftovers.clean("no such run") == [f"removed shared memory {file}"]
    finally:
        ended(zombie)


def test_memory_of_a_process_that_the_end_of_a_run_ends() -> None:
    with leftovers.collected() as done:
        child = started()
        file = leftovers.SHM / f"__KMP_REGISTERED_LIB_{child.pid}_0"
        file.write_bytes(b"x")
    ended(child)
    assert done[0].startswith(f"ended process {child.pid} ") and done[1:] == [
        f"removed shared memory {file}"
    ]


def test_an_orphan_that_ends_meanwhile_is_reaped(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the first process of each runtime; a child's exit code is still there for its Popen."""
    monkeypatch.setattr(leftovers, "REAP_S", 0.05)
    code = (
        "import os, subprocess, sys; os.setsid(); "
        "p = subprocess.Popen(['cat'], stdin=subprocess.PIPE); print(p.pid); sys.exit(7)"
    )
    with leftovers.collected():
        children = [
            subprocess.Popen([sys.executable, "-I", "-c", code], stdout=subprocess.PIPE, text=True)
            for _ in range(2)
        ]
        orphans = [int(child.stdout.readline()) for child in children if child.stdout]
        until = time.monotonic() + 60
        while any(map(psutil.pid_exists, orphans)):
            assert time.monotonic() < until
            threading.Event().wait(0.02)
        os.waitid(os.P_PID, children[0].pid, os.WEXITED | os.WNOWAIT)
        assert [(child.communicate(), child.returncode)[1] for child in children] == [7, 7]


def test_a_part_ends_what_it_was_before_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    run_id = uuid.uuid4().hex
    ours = started(RFT_RUN_ID=run_id, RFT_PART="engine-0")
    others = [
        started(RFT_RUN_ID=run_id, RFT_PART="engine-1"),
        started(RFT_RUN_ID="x", RFT_PART="engine-0"),
        started(),
    ]
    try:
        assert leftovers.end_former() == []  # this process is no part
        monkeypatch.setenv(leftovers.RUN_ID, run_id)
        monkeypatch.setenv(leftovers.PART, "engine-0")
        assert leftovers.end_former() == [] and ours.poll() is None  # it stands below this process
        monkeypatch.setattr(leftovers.psutil.Process, "children", lambda self, recursive=False: [])
        (line,) = leftovers.end_former()
        assert line.startswith(f"ended process {ours.pid} ") and ours.wait(120) is not None
        assert all(p.poll() is None for p in others)
    finally:
        for process in (ours, *others):
            ended(process)


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "before.json"
    assert leftovers_command.main(["--before", str(file)]) == 0
    assert leftovers_command.main(["--after", str(file)]) == 0
    (leftovers.SHM / "psm_abc").write_bytes(b"x")
    assert leftovers_command.main(["--after", str(file)]) == 1
    assert "left over: shared memory" in capsys.readouterr().out


def test_what_others_make_or_remove_while_they_are_looked_at_is_not_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leftovers, "SHM", tmp_path)
    before = leftovers.snapshot()
    gone = tmp_path / "sem.mp-gone"
    gone.touch()

    class Users(leftovers._Users):
        def __init__(self, exclude: Collection[int] = ()) -> None:
            super().__init__(exclude)
            (tmp_path / "sem.mp-new").touch()
            gone.unlink(missing_ok=True)

    monkeypatch.setattr(leftovers, "_Users", Users)
    assert leftovers.compare(before, grace_s=0) == []


def test_what_a_process_maps_is_found_although_it_closes_a_file_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used = leftovers.SHM / "sem.mp-used"
    used.write_bytes(b"x" * 64)
    code = (
        f"import mmap; file = open({str(used)!r}, 'r+b'); kept = mmap.mmap(file.fileno(), 64); "
        f"{SLEEPER}"
    )
    child = started(code)
    asked = []

    def closed(link: Path) -> Path:
        asked.append(link)
        raise FileNotFoundError(link)

    monkeypatch.setattr(Path, "readlink", closed)
    try:
        assert str(used) in set(leftovers._open_paths(child.pid))
        assert asked
    finally:
        ended(child)


@pytest.mark.skipif(
    not Path("/dev/shm").is_dir(), reason="semaphores have names in /dev/shm on Linux"
)
def test_a_semaphore_of_a_living_process_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The C library makes it under another name, which is the one that the process seems to map."""
    monkeypatch.setattr(leftovers, "SHM", Path("/dev/shm"))
    made = "import multiprocessing; made = multiprocessing.get_context('spawn').Lock(); "
    child = started(
        f"{made} import sys; print('up'); print(made._semlock.name, flush=True); sys.stdin.read()"
    )
    try:
        assert child.stdout is not None
        name = f"sem.{child.stdout.readline().strip().removeprefix('/')}"
        assert (leftovers.SHM / name).exists() and name not in leftovers.unused_shm()
    finally:
        ended(child)
