"""`rft log`: a run's logs, merged by time, filtered, and followed without polling."""

from __future__ import annotations

import heapq
import os
import re
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import typer

LEVELS = ("debug", "info", "warning", "error", "critical")
# 2026-11-21 10:15:28,123 I rft.launch.drive: text
_HEAD = re.compile(r"(?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) (?P<level>[DIWEC]) ")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # model output must not drive the terminal
Entry = tuple[str, str, str]  # time, file, text of one or more lines


def log(
    run_dir: Annotated[Path, typer.Argument(help="folder of the run", show_default=False)],
    keyword: Annotated[
        str | None, typer.Option("-k", help="only entries that contain this text, in any case", show_default=False)
    ] = None,
    level: Annotated[str, typer.Option("-l", help=f"lowest level: {', '.join(LEVELS)}")] = "info",
    last: Annotated[int | None, typer.Option("-n", help="only so many of the newest entries", show_default=False)] = None,
    follow: Annotated[bool, typer.Option("-f", help="go on as the run writes; Ctrl-C ends it")] = False,
) -> None:
    """Show a run's logs, merged by time."""
    from rft.errors import ConfigError

    if level.lower() not in LEVELS:
        raise ConfigError(f"{level!r} is none of {', '.join(LEVELS)}", key="-l", given=level)
    if not (run_dir / "logs").is_dir():
        raise ConfigError(f"{run_dir} has no folder `logs`; give the folder of a run", key="RUN_DIR", given=str(run_dir))
    tails = _Tails(run_dir / "logs")
    watch = _Watch(run_dir / "logs") if follow else None  # before the first read, so that nothing falls between
    wanted = (e for e in heapq.merge(*tails.new()) if matches(e, keyword, level.lower()))
    for entry in deque(wanted, maxlen=last) if last is not None else wanted:
        show(entry)
    while watch is not None:
        watch.wait()
        for entry in heapq.merge(*tails.new()):
            if matches(entry, keyword, level.lower()):
                show(entry)


def matches(entry: Entry, keyword: str | None, level: str) -> bool:
    """Whether an entry is of `level` or above and holds `keyword`; text without a head counts as info."""
    head = _HEAD.match(entry[2])
    letters = [name[0].upper() for name in LEVELS]
    rank = letters.index(head["level"] if head else "I")
    return rank >= LEVELS.index(level) and (keyword is None or keyword.lower() in entry[2].lower())


def show(entry: Entry) -> None:
    """Print one entry with the name of its file, control characters escaped."""
    _, name, text = entry
    print(_CONTROL.sub(lambda m: f"\\x{ord(m[0]):02x}", f"{name:12} {text}"), flush=True)


class _Tails:
    """What was added to each *.log of a folder since it was asked last."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}  # bytes taken so far

    def new(self) -> list[list[Entry]]:
        paths = sorted(self._folder.rglob("*.log"))  # with log.group_by_node each machine has a folder
        return [list(entries(str(p.relative_to(self._folder).with_suffix("")), self._lines(p))) for p in paths]

    def _lines(self, path: Path) -> Iterator[str]:
        start = self._read.get(path, 0)
        with path.open("rb") as file:
            if start > os.fstat(file.fileno()).st_size:
                start = 0  # it was begun anew
            file.seek(start)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # being written
                start += len(line)
                yield line.decode("utf-8", "replace").rstrip("\n")
        self._read[path] = start


def entries(name: str, lines: Iterable[str]) -> Iterator[Entry]:
    """Lines joined into entries: one that does not begin with a time belongs to the one before (tracebacks)."""
    time, text = "", ""
    for line in lines:
        if head := _HEAD.match(line):
            if text:
                yield time, name, text
            time, text = head["time"], line
        else:
            text = f"{text}\n{line}" if text else line
    if text:
        yield time, name, text


class _Watch:
    """Tells that something in a folder was written, by inotify; raises SetupError where the system has none."""

    _IN_MODIFY, _IN_CREATE, _IN_MOVED_TO = 0x2, 0x100, 0x80

    def __init__(self, folder: Path) -> None:
        import ctypes

        from rft.errors import SetupError

        self._libc = ctypes.CDLL(None, use_errno=True)
        if not hasattr(self._libc, "inotify_init1"):
            raise SetupError("this system cannot tell when a file changes (no inotify); use `tail -f` on the files in `logs`")
        self._folder, self._fd = folder, int(self._libc.inotify_init1(os.O_CLOEXEC))
        self._cover()

    def wait(self) -> None:
        """Until something has changed since the last call; Ctrl-C raises KeyboardInterrupt."""
        os.read(self._fd, 65536)
        self._cover()

    def _cover(self) -> None:
        """Also the folders of machines that have joined (log.group_by_node); one that is watched already stays as it is."""
        import ctypes

        from rft.errors import SetupError

        events = self._IN_MODIFY | self._IN_CREATE | self._IN_MOVED_TO
        for watched in (self._folder, *(p for p in self._folder.rglob("*") if p.is_dir())):
            if self._fd < 0 or self._libc.inotify_add_watch(self._fd, os.fsencode(watched), events) < 0:
                raise SetupError(
                    f"{watched} cannot be watched: {os.strerror(ctypes.get_errno())}; see fs.inotify.max_user_watches"
                )
