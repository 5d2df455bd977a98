"""Disks that are full: the same named error everywhere, told on the terminal, and the same command
goes on.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rft import secrets as logs
from rft.buffer.settings import BufferSettings
from rft.errors import DiskFull
from rft.files.disk import full, is_full, write_whole
from rft.launch.part_host import MOST_LINES, ErrorLines
from rft.monitor.monitor import Monitor
from rft.monitor.settings import MonitorConfig, TrackedRun
from rft.types.metrics import MetricRecord
from tests.attacks.table import attack
from tests.attacks.test_run_folders import start
from tests.helpers.command import Done


def _sizes(form: str, quick: tuple[int, ...], slow: tuple[int, ...]) -> list[Any]:
    return [form.format(n) for n in quick] + [
        pytest.param(form.format(n), marks=pytest.mark.slow) for n in slow
    ]


def assert_full(done: Done) -> None:
    assert done.code == 4, done.output
    assert "Traceback" not in done.output and "bug in rft" not in done.output
    last = done.output.strip().splitlines()[-1]
    assert last.startswith("DiskFull: ") and "the same command then goes on" in last, done.output


@pytest.fixture(autouse=True)
def _no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ledger without space is not waited for: nobody makes any here."""
    monkeypatch.setitem(BufferSettings.__init__.__kwdefaults__, "full_disk_wait_s", 0.0)


@pytest.fixture
def small_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A file system with room for so many bytes, or files."""
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", request.param, "none", place],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        pytest.skip(f"no file system can be mounted here: {made.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


@pytest.mark.e2e
@attack(
    "L",
    "no file can be created any more, from the run folder to the last checkpoint",
    "DiskFull, exit 4; with space the same command finishes",
)
@pytest.mark.parametrize(
    "small_disk", _sizes("nr_inodes={}", (3, 8, 20), (6, 7, 10, 13, 16)), indirect=True
)
def test_no_inodes(small_disk: Path, tiny_model: Path) -> None:
    assert_full(start(tiny_model, small_disk))
    subprocess.run(["mount", "-o", "remount,nr_inodes=10000", small_disk], check=True)
    done = start(tiny_model, small_disk)
    assert done.code == 0 and "done  step 2" in done.output, done.output


@pytest.mark.e2e
@attack(
    "L",
    "no byte can be written any more: log, configuration, ledger, metrics, checkpoint",
    "DiskFull, exit 4; with space the same command finishes",
)
@pytest.mark.parametrize(
    "small_disk", _sizes("size={}k", (4, 32, 2000), (16, 400, 4000, 5000, 6500)), indirect=True
)
def test_no_bytes(small_disk: Path, tiny_model: Path) -> None:
    assert_full(start(tiny_model, small_disk))
    subprocess.run(["mount", "-o", "remount,size=1g", small_disk], check=True)
    done = start(tiny_model, small_disk)
    assert done.code == 0 and "done  step 2" in done.output, done.output


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file may have more than 100 kB, for any account."""
    had = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, had[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, had)


@attack(
    "L",
    "files may not grow beyond a limit of the account",
    "DiskFull, exit 4, in the middle of a run",
)
def test_limited_files(small_files: None, tiny_model: Path, tmp_path: Path) -> None:
    assert_full(start(tiny_model, tmp_path))


ERRORS = {
    "no space": OSError(errno.ENOSPC, "No space left on device", "/data/x"),
    "no quota": OSError(errno.EDQUOT, "Disk quota exceeded", "/data/x"),
    "too large": OSError(errno.EFBIG, "File too large", "/data/x"),
    "a library that hides the number": RuntimeError(
        "Error while serializing: IoError: No space left on device (os error 28)"
    ),
}


@attack("L", "libraries that say in their own ways that a disk is full", "the same named error")
@pytest.mark.parametrize("name", ERRORS)
def test_one_name(name: str) -> None:
    error = ERRORS[name]
    try:
        try:
            raise error
        except Exception as e:
            raise ValueError("cannot save") from e
    except ValueError as wrapped:
        assert is_full(error) and is_full(wrapped)
    assert isinstance(full(error), DiskFull) and "the same command then goes on" in str(full(error))
    hidden = RuntimeError()
    hidden.__context__ = error
    assert str(full(hidden)) == str(full(error)), (
        "the error that names the file, not what it led to"
    )
    assert not is_full(OSError(errno.EACCES, "Permission denied"))


@attack(
    "L",
    "a log that cannot be written any more",
    "told once on the terminal, without a traceback; the run's own error counts",
)
def test_a_full_log(capsys: pytest.CaptureFixture[str]) -> None:
    handler = logs.to_file(Path("/dev/full"))
    try:
        for _ in range(3):
            logging.getLogger("x").warning("y")
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()
    assert (
        capsys.readouterr().err
        == "/dev/full cannot be written: No space left on device.  What follows is not logged "
        "there.\n"
    )


@attack("L", "numbers of a run that cannot be written", "DiskFull that names the file")
async def test_full_metrics(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    monitor = Monitor(MonitorConfig(), TrackedRun(folder=tmp_path))
    with pytest.raises(DiskFull, match=r"metrics\.jsonl cannot be written: No space left"):
        await monitor.log(MetricRecord(role="trainer", step=1, time=0.0, values={"x": 1.0}))
    with pytest.raises(OSError, match="No space left"):
        await monitor.close()


@attack(
    "L",
    "a file that is replaced while the disk is full",
    "the old one stays, whole; nothing is left beside it",
)
def test_the_old_file_stays(small_files: None, tmp_path: Path) -> None:
    write_whole(tmp_path / "a", "old")
    with pytest.raises(OSError, match="File too large"):
        write_whole(tmp_path / "a", bytes(200_000))
    assert (tmp_path / "a").read_text() == "old" and os.listdir(tmp_path) == ["a"]


@attack(
    "L",
    "a part of the run waits for space",
    "what it logs as an error is told on the terminal, some lines of it",
)
async def test_errors_of_parts_are_told() -> None:
    lines = ErrorLines()
    handler = logs.ErrorTeller(lines.add)
    logging.getLogger("part").addHandler(handler)
    waiting = asyncio.ensure_future(lines.after(0))
    await asyncio.sleep(0)
    logging.getLogger("part").warning("not this")
    thread = threading.Thread(
        target=lambda: logging.getLogger("part").error("no space\x1b[2J\nTraceback")
    )
    thread.start()
    assert await waiting == ["no space\\x1b[2J"]
    thread.join()
    for i in range(100):
        logging.getLogger("part").error("more %d", i)
    assert (await lines.after(1))[-1] == "further errors are in its log" and len(
        await lines.after(0)
    ) == MOST_LINES
    logging.getLogger("part").removeHandler(handler)
