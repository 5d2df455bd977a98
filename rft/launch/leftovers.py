"""What a run left on the machine: processes, shared memory, temporary folders, listeners that others can reach.

Needs only the standard library and psutil, so scripts, tests and `rft doctor` can all use it.  The one invariant: a thing that a living
process of somebody else still uses is never reported and never removed.

In a shell:  python -m rft.launch.leftovers --before FILE; ...; python -m rft.launch.leftovers --after FILE   (exit 1 = something is left)

Whose a process is, is told by the environment it was started with: `RFT_RUN_ID` (set by a run for its parts) and `RFT_LEFTOVER_MARK`
(set by a test session).  Where this process has a mark, only things of that mark count; without one, everything that looks like ours.
"""

from __future__ import annotations

import argparse
import ipaddress
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import psutil

T = TypeVar("T")
RUN_ID = "RFT_RUN_ID"
PART = "RFT_PART"  # beside it in parts that may be restarted: which one
MARK = "RFT_LEFTOVER_MARK"
SHM = Path("/dev/shm")
SETTLED_S = 10.0
GRACE_S = 5.0  # how long processes that are ending may take
_SHM_NAMES = re.compile(r"psm_|__KMP_REGISTERED_LIB_|vllm_dist_|rft-|sem\.mp-|plasma|ray")
_OWNER_IN_NAME = re.compile(r"(?:__KMP_REGISTERED_LIB_|rft-weights-|rft-vllm-)(\d+)[_-]")
_TEMP_NAMES = re.compile(r"rft-|ray(_|$|-)|ray\.")
_PROCESS_NAMES = re.compile(r"raylet|gcs_server|ray::|VLLM::|vllm|rft\b")
_HELPERS = re.compile(r"multiprocessing\.(resource_tracker|forkserver)")  # live as long as the process they serve


@dataclass(frozen=True)
class Snapshot:
    """What is there at one moment; `processes` maps "pid:start time" to a description."""

    processes: dict[str, str]
    shm: tuple[str, ...]
    temp: tuple[str, ...]
    listeners: tuple[str, ...]

    @classmethod
    def load(cls, file: Path) -> Snapshot:
        data = json.loads(file.read_text())
        return cls(data["processes"], tuple(data["shm"]), tuple(data["temp"]), tuple(data["listeners"]))

    def save(self, file: Path) -> None:
        file.write_text(json.dumps(asdict(self), indent=1))


def snapshot() -> Snapshot:
    """What of ours is there now."""
    ours = _our_processes(os.environ.get(MARK))
    return Snapshot(
        {_key(p): _describe(p) for p in ours},
        tuple(sorted(p.name for p in _entries(SHM, _SHM_NAMES))),
        tuple(sorted(str(p) for p in _temp_folders())),
        tuple(sorted(_open_listeners({p.pid for p in ours}))),
    )


def compare(before: Snapshot, *, grace_s: float = GRACE_S) -> list[str]:
    """What is left of everything that came after `before`, one line each; empty = clean.  Waits up to `grace_s` for ending processes."""
    ours = [p for p in _our_processes(os.environ.get(MARK)) if _key(p) not in before.processes]
    psutil.wait_procs(ours, timeout=grace_s)
    ours = [p for p in _our_processes(os.environ.get(MARK)) if _key(p) not in before.processes]
    mine = {p.pid for p in ours}
    others = _Others(exclude=mine)
    found = [f"process {_describe(p)}" for p in ours]
    found += [
        f"shared memory {path}"
        for path in _entries(SHM, _SHM_NAMES)
        if path.name not in before.shm and not others.use(path) and not _owner_lives(path, exclude=mine)
    ]
    found += [
        f"temporary folder {path}"
        for path in _temp_folders()
        if str(path) not in before.temp and not others.use(path) and not _owner_lives(path, exclude=mine)
    ]
    new = set(_open_listeners({*mine, os.getpid()})) - set(before.listeners)
    return [*found, *(f"listener {line}" for line in sorted(new))]


def orphans() -> list[str]:
    """Parts of runs whose launcher is gone: processes with a RFT_RUN_ID below no living process without one, except init."""
    found = []
    for process in _all_processes():
        if RUN_ID in _environment(process):
            above = next((p for p in _quietly(process.parents) or [] if RUN_ID not in _environment(p)), None)
            if above is None or above.pid == 1:
                found.append(_describe(process))
    return found


def unused_shm() -> list[str]:
    """Names in /dev/shm that look like ours and that no living process has open."""
    others = _Others(exclude=set())
    return [p.name for p in _entries(SHM, _SHM_NAMES) if not others.use(p) and not _owner_lives(p, exclude=set())]


def clean(run_id: str) -> list[str]:
    """End and remove what the run `run_id`, and killed processes of this user, left; says what it did, one line each.

    Ends processes started with RFT_RUN_ID=run_id; removes shared memory whose owner is dead, or that nobody has open and that is
    not quite new; removes folders of a Ray that no process uses, and of vLLM's sockets whose owner is dead.
    """
    protected = {os.getpid(), *(p.pid for p in psutil.Process().parents())}
    found = [p for p in _all_processes() if p.pid not in protected and _environment(p).get(RUN_ID) == run_id]
    done = [f"ended process {_describe(p)}" for p in found]
    for process in found:
        _quietly(process.kill)
    psutil.wait_procs(found, timeout=GRACE_S)
    others = _Others(exclude=set())
    for path in _entries(SHM, _SHM_NAMES):
        stat = _stat(path)
        if stat is None or stat.st_uid != os.getuid() or others.use(path):
            continue
        # a file without its owner's name that is only just made may belong to a process that has not opened it yet
        settled = stat.st_mtime <= time.time() - SETTLED_S
        dead = not _owner_lives(path, exclude=set()) if _OWNER_IN_NAME.match(path.name) else settled
        if dead and path.is_file():
            path.unlink(missing_ok=True)
            done.append(f"removed shared memory {path}")
    for path in _temp_folders():
        stat = _stat(path)
        if (
            path.name.startswith("rft-")
            and stat is not None
            and stat.st_uid == os.getuid()
            and (_was_ray(path) or (_OWNER_IN_NAME.match(path.name) and not _owner_lives(path, exclude=set())))
            and not others.use(path)
        ):
            shutil.rmtree(path, ignore_errors=True)
            done.append(f"removed folder {path}")
    return done


def end_former() -> list[str]:
    """Ends what the process that was this part before left: memory of its engine, for example.  Says what it did, one line each.

    These have this process's RFT_RUN_ID and RFT_PART and stand no longer below its parent, as it and those beside it do.
    """
    mine = {name: os.environ.get(name) for name in (RUN_ID, PART)}
    parent = psutil.Process().parent()
    if parent is None or None in mine.values():
        return []
    placed = {parent.pid, *(p.pid for p in (*parent.parents(), *parent.children(recursive=True)))}
    found = [p for p in _all_processes() if p.pid not in placed and mine.items() <= _environment(p).items() and not _ending(p)]
    done = [f"ended process {_describe(p)}" for p in found]
    for process in found:
        _quietly(process.kill)
    psutil.wait_procs(found, timeout=GRACE_S)
    return done


# ------------------------------------------------------------ processes


def _our_processes(mark: str | None) -> list[psutil.Process]:
    """Descendants of this process; with a mark everything that carries it, without one everything that looks like ours."""
    me = psutil.Process()
    family = {me.pid, *(p.pid for p in me.parents())}
    found = {p.pid: p for p in me.children(recursive=True)}
    for process in _all_processes():
        if process.pid in found:
            continue
        environment = _environment(process)
        if environment.get(MARK) == mark if mark else RUN_ID in environment or _PROCESS_NAMES.match(_name(process)):
            found[process.pid] = process
    return [p for pid, p in sorted(found.items()) if pid not in family and not _ending(p) and not _HELPERS.search(_command(p))]


def _all_processes() -> list[psutil.Process]:
    return list(psutil.process_iter())


def _environment(process: psutil.Process) -> dict[str, str]:
    return _quietly(process.environ) or {}


def _name(process: psutil.Process) -> str:
    return _quietly(process.name) or ""


def _command(process: psutil.Process) -> str:
    return " ".join(_quietly(process.cmdline) or [])


def _ending(process: psutil.Process) -> bool:
    status = _quietly(process.status)
    return (
        status is None
        or status == psutil.STATUS_DEAD
        or (status == psutil.STATUS_ZOMBIE and _quietly(process.ppid) != os.getpid())
    )


def _key(process: psutil.Process) -> str:
    return f"{process.pid}:{_quietly(process.create_time)}"


def _describe(process: psutil.Process) -> str:
    return f"{process.pid} {_name(process)}: {_command(process)[:120]}"


def _quietly(ask: Callable[[], T]) -> T | None:
    """None for a process that has ended or belongs to somebody else."""
    try:
        return ask()
    except (psutil.Error, OSError):
        return None


# ------------------------------------------------------------ files


class _Others:
    """The files that living processes, except `exclude`, have open, mapped, or name in their command line."""

    def __init__(self, exclude: set[int]) -> None:
        self._paths: set[str] = set()
        self._commands: list[str] = []
        for process in _all_processes():
            if process.pid in exclude:
                continue
            self._commands.append(_command(process))
            self._paths.update(_open_paths(process.pid))

    def use(self, path: Path) -> bool:
        inside = f"{path}/"
        return (
            str(path) in self._paths
            or any(p.startswith(inside) for p in self._paths)
            or any(inside in c or c.endswith(str(path)) for c in self._commands)
        )


def _open_paths(pid: int) -> Iterable[str]:
    """Paths below /dev/shm and the temporary folder that process `pid` has open or mapped."""
    wanted = (str(SHM), tempfile.gettempdir())
    folder = Path(f"/proc/{pid}/fd")
    try:
        for link in folder.iterdir():
            target = str(link.readlink())
            if target.startswith(wanted):
                yield target
        for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
            if (at := line.find("/")) >= 0 and line.startswith(wanted, at):
                yield line[at:]
    except OSError:
        return  # it has ended, or is another user's: then its files are not ours to judge either


def _entries(folder: Path, names: re.Pattern[str]) -> list[Path]:
    return sorted(p for p in folder.iterdir() if names.match(p.name)) if folder.is_dir() else []


def _temp_folders() -> list[Path]:
    return [p for p in _entries(Path(tempfile.gettempdir()), _TEMP_NAMES) if p.is_dir() and not p.is_symlink()]


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.lstat()
    except FileNotFoundError:
        return None


def _owner_lives(path: Path, exclude: set[int]) -> bool:
    """Whether the process that the name of a file or folder tells is alive and not one of `exclude`."""
    owner = _OWNER_IN_NAME.match(path.name)
    return owner is not None and int(owner[1]) not in exclude and psutil.pid_exists(int(owner[1]))


def _was_ray(folder: Path) -> bool:
    return any(folder.glob("session_*"))


# ------------------------------------------------------------ listeners


def _open_listeners(pids: set[int]) -> list[str]:
    """ "address port" of TCP sockets of `pids` that listen beyond loopback."""
    return [
        f"{c.laddr.ip} port {c.laddr.port} of process {c.pid}"
        for c in _quietly(lambda: psutil.net_connections(kind="tcp")) or []
        if c.status == psutil.CONN_LISTEN and c.pid in pids and not ipaddress.ip_address(c.laddr.ip).is_loopback
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m rft.launch.leftovers", description="Checks that nothing is left on the machine."
    )
    choice = parser.add_mutually_exclusive_group(required=True)
    choice.add_argument("--before", type=Path, metavar="FILE", help="remember what is there")
    choice.add_argument("--after", type=Path, metavar="FILE", help="say what came since and is still there; exit 1 if anything")
    choice.add_argument("--clean", metavar="RUN_ID", help="remove what a dead run left")
    given = parser.parse_args(arguments)
    if given.before is not None:
        snapshot().save(given.before)
        return 0
    if given.clean is not None:
        print("\n".join(clean(given.clean)) or "nothing to clean")
        return 0
    began = time.monotonic()
    left = compare(Snapshot.load(given.after))
    print("\n".join(f"left over: {line}" for line in left) or f"nothing is left ({time.monotonic() - began:.1f} s)")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
