"""What a run left on the machine: processes, shared memory, temporary folders, listeners that
others can reach.

Needs the standard library, psutil and a file of rft that needs nothing, so scripts, tests and `rft
doctor` can all use it.  The one invariant: what another living process still uses is never reported
and never removed.

Whose a process is, is told by the environment it was started with: `RFT_RUN_ID` (set by a run for
its parts) and `RFT_LEFTOVER_MARK` (set by a test session).  Where this process has a mark, only
things of that mark count; without one, everything that looks like ours.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil

from rft.worker.keeper import adopt_orphans

T = TypeVar("T")
RUN_ID = "RFT_RUN_ID"
PART = "RFT_PART"  # beside it in parts that may be restarted: which one
MARK = "RFT_LEFTOVER_MARK"
SHM = Path("/dev/shm")
SETTLED_S = 10.0
GRACE_S = 5.0  # how long processes that are ending may take
_SHM_NAMES = re.compile(r"psm_|__KMP_REGISTERED_LIB_|vllm_dist_|rft-|sem\.mp-|plasma|ray")
_OWNER_IN_NAME = re.compile(r"(?:__KMP_REGISTERED_LIB_|rft-weights-|rft-vllm-|rft-pg-)(\d+)[_-]")
_TEMP_NAMES = re.compile(r"rft-|ray(_|$|-)|ray\.")
_PROCESS_NAMES = re.compile(r"raylet|gcs_server|ray::|VLLM::|vllm|rft\b")
# their titles take the place of their environments
_AGENTS = re.compile(r"ray::(DashboardAgent|RuntimeEnvAgent)\b")
# live as long as the process they serve
_HELPERS = re.compile(r"multiprocessing\.(resource_tracker|forkserver)")


@dataclass(frozen=True)
class Snapshot:
    """What is there at one moment: processes as "pid:start time", paths, listeners."""

    processes: frozenset[str]
    paths: frozenset[str]
    listeners: frozenset[str]


def snapshot() -> Snapshot:
    """What of ours exists now."""
    ours = _our_processes()
    paths = map(str, (*_shm(), *_temp_folders()))
    return Snapshot(
        frozenset(map(_key, ours)),
        frozenset(paths),
        frozenset(_open_listeners({p.pid for p in ours})),
    )


def compare(before: Snapshot, *, grace_s: float = GRACE_S) -> list[str]:
    """What is left of everything that came after `before`, one line each; empty = clean.  Waits up
    to `grace_s` for ending processes.
    """

    def new() -> list[psutil.Process]:
        return [p for p in _our_processes() if _key(p) not in before.processes]

    psutil.wait_procs(new(), timeout=grace_s)
    ours = new()
    mine = {p.pid for p in ours}
    found = [f"process {_describe(p)}" for p in ours]
    there = [
        *(("shared memory", p) for p in _shm()),
        *(("temporary folder", p) for p in _temp_folders()),
    ]
    others = _Others(exclude=mine)  # after the lists
    found += [
        f"{what} {p}"
        for what, p in there
        if str(p) not in before.paths and not others.use(p) and p.exists()
    ]
    listeners = set(_open_listeners({*mine, os.getpid()})) - before.listeners
    return [*found, *(f"listener {line}" for line in sorted(listeners))]


def orphans() -> list[str]:
    """Parts of runs whose launcher is gone: processes with a RFT_RUN_ID below no living process
    without one, except init.
    """
    found = []
    for process in psutil.process_iter():
        if RUN_ID in _environment(process):
            above = next(
                (p for p in _quietly(process.parents) or [] if RUN_ID not in _environment(p)), None
            )
            if above is None or above.pid == 1:
                found.append(_describe(process))
    return found


def unused_shm() -> list[str]:
    """Names in /dev/shm that look like ours and that no living process has open."""
    there = _shm()
    others = _Others()
    return [p.name for p in there if not others.use(p) and p.exists()]


def clean(run_id: str) -> list[str]:
    """End and remove what the run `run_id`, and killed processes of this user, left; says what it
    did, one line each.

    Ends processes started with RFT_RUN_ID=run_id, and Ray's agents here whose raylet is gone;
    removes shared memory whose owner is dead, or that no process has open and that is not quite
    new; removes folders of a Ray that nobody uses, of vLLM's sockets whose owner is dead.
    """
    protected = {os.getpid(), *(p.pid for p in psutil.Process().parents())}
    ended = _end(
        [
            p
            for p in psutil.process_iter()
            if p.pid not in protected and _environment(p).get(RUN_ID) == run_id
        ]
    )
    agents = [
        p
        for p in psutil.process_iter()
        if _AGENTS.match(_command(p)) and _may_be_ours(p) and any(_open_paths(p.pid))
    ]
    ended += _end([p for p in agents if _name(_quietly(p.parent) or p) != "raylet"])
    return [*ended, *_remove_files()]


def _remove_files() -> list[str]:
    """Removes shared memory and folders of processes of this user that are dead; says what, one
    line each.
    """
    files = _shm()
    folders = _temp_folders()
    done = []  # after the lists: what they make meanwhile is not in them
    others = _Others()
    for path in files:
        # a file without its owner's name that is only just made may belong to a process that has
        # not opened it yet
        dead = (
            not others.own(path) if _OWNER_IN_NAME.match(path.name) else _age_s(path) >= SETTLED_S
        )
        if dead and path.is_file() and _is_mine(path) and not others.use(path):
            path.unlink(missing_ok=True)
            done.append(f"removed shared memory {path}")
    for path in folders:
        of_ray = any(any(path.glob(name)) for name in ("ray/session_*", "session_*"))
        dead = of_ray or (_OWNER_IN_NAME.match(path.name) is not None and not others.own(path))
        if dead and path.name.startswith("rft-") and _is_mine(path) and not others.use(path):
            shutil.rmtree(path, ignore_errors=True)
            done.append(f"removed folder {path}")
    return done


def end_former() -> list[str]:
    """Ends what the process that was this part before left: memory of its engine, for example.
    Says what it did, one line each.

    These have this process's RFT_RUN_ID and RFT_PART and stand no longer below its parent, as it
    and those beside it do.
    """
    mine = {name: os.environ.get(name) for name in (RUN_ID, PART)}
    parent = psutil.Process().parent()
    if parent is None or None in mine.values():
        return []
    placed = {parent.pid, *(p.pid for p in (*parent.parents(), *parent.children(recursive=True)))}
    return _end(
        [
            p
            for p in psutil.process_iter()
            if p.pid not in placed and mine.items() <= _environment(p).items() and not _ending(p)
        ]
    )


def _end(processes: list[psutil.Process]) -> list[str]:
    done = [f"ended process {_describe(p)}" for p in processes]
    for process in processes:
        _quietly(process.kill)
    psutil.wait_procs(processes, timeout=GRACE_S)
    return done


@contextlib.contextmanager
def collected() -> Iterator[list[str]]:
    """What is started in the block and below it is ended behind it, daemons too; the list then says
    what that was, one line each.

    The kernel gives orphans to this process (PR_SET_CHILD_SUBREAPER) instead of init, so none of
    them gets lost.
    """
    ended: list[str] = []
    me = psutil.Process()
    before = {_key(p) for p in psutil.Process().children()}
    adopt_orphans(True)
    try:
        yield ended
    finally:
        until = time.monotonic() + GRACE_S
        while found := [
            p for p in me.children() if _key(p) not in before and not _HELPERS.search(_command(p))
        ]:
            ended += [
                f"ended process {_describe(p)}"
                for p in found
                if _quietly(p.status) != psutil.STATUS_ZOMBIE
            ]
            for process in found:
                _quietly(process.kill)
            psutil.wait_procs(found, timeout=max(0.0, until - time.monotonic()))
            if time.monotonic() > until:
                ended.append(
                    f"{len(found)} processes could not be ended: {', '.join(map(_describe, found))}"
                )
                break
        adopt_orphans(False)
        ended += _remove_files()


# ------------------------------------------------------------ processes


def _our_processes() -> list[psutil.Process]:
    """Descendants of this process; with a mark everything that carries it, without one everything
    that looks like ours.
    """
    me = psutil.Process()
    mark = os.environ.get(MARK)
    family = {me.pid, *(p.pid for p in me.parents())}
    found = {p.pid: p for p in me.children(recursive=True)}
    for process in psutil.process_iter():
        if process.pid in found:
            continue
        environment = _environment(process)
        if (
            environment.get(MARK) == mark
            if mark
            else RUN_ID in environment or _PROCESS_NAMES.match(_name(process))
        ):
            found[process.pid] = process
    return [
        p
        for pid, p in sorted(found.items())
        if pid not in family and not _ending(p) and not _HELPERS.search(_command(p))
    ]


def _environment(process: psutil.Process) -> dict[str, str]:
    return _quietly(process.environ) or {}


def _name(process: psutil.Process) -> str:
    return _quietly(process.name) or ""


def _command(process: psutil.Process) -> str:
    return " ".join(_quietly(process.cmdline) or [])


def _ending(process: psutil.Process) -> bool:
    status = _quietly(process.status)
    return status in (None, psutil.STATUS_DEAD) or (
        status == psutil.STATUS_ZOMBIE and _quietly(process.ppid) != os.getpid()
    )


def began(pid: int | str) -> int | None:
    """When a process began, in ticks since the machine did, which no change of the clock alters;
    None for one that is gone, or a zombie.

    On systems other than Linux in seconds since the epoch.
    """
    if sys.platform != "linux":
        process = _quietly(lambda: psutil.Process(int(pid)))
        ended = process is None or _quietly(process.status) in (
            None,
            psutil.STATUS_DEAD,
            psutil.STATUS_ZOMBIE,
        )
        return None if process is None or ended else int(process.create_time())
    stat = (_quietly(Path(f"/proc/{pid}/stat").read_bytes) or b") X").rpartition(b")")[2].split()
    return None if stat[0] in (b"Z", b"X") else int(stat[19])


def _key(process: psutil.Process) -> str:
    return f"{process.pid}:{_quietly(process.create_time)}"


def _describe(process: psutil.Process) -> str:
    return f"{process.pid} {_name(process)}: {_command(process)[:120]}"


def _quietly(ask: Callable[[], T]) -> T | None:
    """None for a process that has ended or belongs to another user."""
    try:
        return ask()
    except (psutil.Error, OSError):
        return None


# ------------------------------------------------------------ files


class _Others:
    """The files that living processes, except `exclude`, have open, mapped, or name in their
    command line.
    """

    def __init__(self, exclude: Collection[int] = ()) -> None:
        self._exclude = exclude
        self._paths: set[str] = set()
        self._commands: list[str] = []
        self._hidden: list[psutil.Process] = []  # ours; they may have any semaphore open
        for process in (p for p in psutil.process_iter() if p.pid not in exclude):
            self._commands.append(_command(process))
            try:
                self._paths.update(_open_paths(process.pid))
            except PermissionError:
                if _may_be_ours(process):
                    self._hidden.append(process)

    def use(self, path: Path) -> bool:
        inside = f"{path}/"
        stat = _quietly(path.lstat)
        return (
            (
                path.parent == SHM
                and not _OWNER_IN_NAME.match(path.name)
                and any(not _ending(p) for p in self._hidden)
            )
            or (
                stat is not None
                and f"{os.major(stat.st_dev):02x}:{os.minor(stat.st_dev):02x} {stat.st_ino}"
                in self._paths
            )
            or self.own(path)
            or any(f"{p}/".startswith(inside) for p in self._paths)
            or any(inside in c or c.endswith(str(path)) for c in self._commands)
        )

    def own(self, path: Path) -> bool:
        """Whether the process that the name of a file or folder tells is alive and one of these."""
        owner = _OWNER_IN_NAME.match(path.name)
        return (
            owner is not None and int(owner[1]) not in self._exclude and began(owner[1]) is not None
        )


def _open_paths(pid: int) -> Iterable[str]:
    """Paths below /dev/shm and the temporary folder that process `pid` has open or mapped; device
    and inode of what is mapped, too, since a semaphore is mapped under a name that it had only
    while it was made.

    Raises PermissionError for a process of another user, and for one that hides its memory, as rft
    does where it runs programs.
    """
    wanted = (str(SHM), tempfile.gettempdir())
    folder = Path(f"/proc/{pid}/fd")
    try:
        for link in folder.iterdir():
            with contextlib.suppress(FileNotFoundError):  # it closed that one meanwhile
                if (target := str(link.readlink())).startswith(wanted):
                    yield target
        for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
            if (at := line.find("/")) >= 0 and line.startswith(wanted, at):
                yield line[at:]
                yield " ".join(line.split(None, 5)[3:5])  # device and inode
    except (FileNotFoundError, ProcessLookupError):
        return  # it has ended


def _may_be_ours(process: psutil.Process) -> bool:
    """Whether it is a Python, Ray or vLLM of this account (it may use any of our files), and not
    just any program that hides its memory.
    """
    account = _quietly(process.uids)
    named = "python" in _command(process) or _PROCESS_NAMES.match(_name(process)) is not None
    return account is not None and account.real == os.getuid() and named


def _shm() -> list[Path]:
    return _entries(SHM, _SHM_NAMES)


def _entries(folder: Path, names: re.Pattern[str]) -> list[Path]:
    return sorted(p for p in folder.iterdir() if names.match(p.name)) if folder.is_dir() else []


def _temp_folders() -> list[Path]:
    return [
        p
        for p in _entries(Path(tempfile.gettempdir()), _TEMP_NAMES)
        if p.is_dir() and not p.is_symlink()
    ]


def _is_mine(path: Path) -> bool:
    return (stat := _quietly(path.lstat)) is not None and stat.st_uid == os.getuid()


def _age_s(path: Path) -> float:
    """Since it was changed; 0 where it is gone."""
    return time.time() - stat.st_mtime if (stat := _quietly(path.lstat)) is not None else 0.0


# ------------------------------------------------------------ listeners


def _open_listeners(pids: set[int]) -> list[str]:
    """ "address port" of TCP sockets of `pids` that listen beyond loopback."""
    return [
        f"{c.laddr.ip} port {c.laddr.port} of process {c.pid}"
        for c in _quietly(lambda: psutil.net_connections(kind="tcp")) or []
        if c.status == psutil.CONN_LISTEN
        and c.pid in pids
        and not ipaddress.ip_address(c.laddr.ip).is_loopback
    ]
