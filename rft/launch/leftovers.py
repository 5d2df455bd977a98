"""Leftovers of runs: processes, shared memory, temporary folders, listeners beyond loopback.

Needs psutil and `rft.worker` only, so scripts, tests and `rft doctor` can use it.
Invariant: nothing in use by another living process is reported or removed.

Processes are recognised by the environment of their start: `RFT_RUN_ID` (set by a run for its
parts) and `RFT_LEFTOVER_MARK` (set by a test session).  With a mark in this process, only processes
with that mark count; without a mark, all processes that look like those of a run.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil

from rft.worker.keeper import adopt_orphans, children
from rft.worker.waiting import works

T = TypeVar("T")
RUN_ID = "RFT_RUN_ID"
PART = "RFT_PART"  # name of a part that may be restarted
MARK = "RFT_LEFTOVER_MARK"
SHM = Path("/dev/shm")
SETTLED_S = 10.0
GRACE_S = 5.0  # for processes to end
REAP_S = 10.0  # between two looks for orphans that have ended
_SHM_NAMES = re.compile(r"psm_|__KMP_REGISTERED_LIB_|vllm_dist_|rft-|sem\.mp-|plasma|ray")
_OWNER_IN_NAME = re.compile(
    r"(?:__KMP_REGISTERED_LIB_|rft-weights-|rft-vllm-|rft-pg-|rft-engine-)(\d+)[_-]"
)
_TEMP_NAMES = re.compile(r"rft-|ray(_|$|-)|ray\.")
_PROCESS_NAMES = re.compile(r"raylet|gcs_server|ray::|VLLM::|vllm|rft\b")
# their titles overwrite their environments
_AGENTS = re.compile(r"ray::(DashboardAgent|RuntimeEnvAgent)\b")
# these end with the process they serve
_HELPERS = re.compile(r"multiprocessing\.(resource_tracker|forkserver)")


@dataclass(frozen=True)
class Snapshot:
    """Processes ("pid:start time"), paths and listeners at one moment."""

    processes: frozenset[str]
    paths: frozenset[str]
    listeners: frozenset[str]


def snapshot() -> Snapshot:
    """Return all present processes, paths and listeners of runs."""
    ours = _our_processes()
    paths = map(str, (*_shm(), *_temp_folders()))
    return Snapshot(
        frozenset(map(_key, ours)),
        frozenset(paths),
        frozenset(_open_listeners({p.pid for p in ours})),
    )


def compare(before: Snapshot, *, grace_s: float = GRACE_S) -> list[str]:
    """Describe everything new since `before`, one line each; empty = clean.

    Waits up to `grace_s` for ending processes.
    """

    def new() -> list[psutil.Process]:
        return [p for p in _our_processes() if _key(p) not in before.processes]

    psutil.wait_procs(new(), timeout=grace_s)
    ours = new()
    pids = {p.pid for p in ours}
    lines = [f"process {_describe(p)}" for p in ours]
    paths = [
        *(("shared memory", p) for p in _shm()),
        *(("temporary folder", p) for p in _temp_folders()),
    ]
    users = _Users(exclude=pids)  # after the lists
    lines += [
        f"{kind} {p}"
        for kind, p in paths
        if str(p) not in before.paths and not users.use(p) and p.exists()
    ]
    listeners = set(_open_listeners({*pids, os.getpid()})) - before.listeners
    return [*lines, *(f"listener {line}" for line in sorted(listeners))]


def orphans() -> list[str]:
    """Describe parts without a launcher: processes with RFT_RUN_ID, directly below init."""
    lines = []
    for process in psutil.process_iter():
        if RUN_ID in _environment(process):
            above = next(
                (p for p in _quietly(process.parents) or [] if RUN_ID not in _environment(p)), None
            )
            if above is None or above.pid == 1:
                lines.append(_describe(process))
    return lines


def unused_shm() -> list[str]:
    """Return names in /dev/shm that look like those of a run and that no living process uses."""
    paths = _shm()
    users = _Users()
    return [p.name for p in paths if not users.use(p) and p.exists()]


def clean(run_id: str) -> list[str]:
    """End and remove leftovers of run `run_id` and of this user's dead processes, a line for each.

    Ends processes started with RFT_RUN_ID=run_id, and Ray's agents without a raylet.  Removes
    shared memory of dead owners, or old shared memory without a user; unused folders of Ray, and of
    vLLM's sockets with a dead owner.
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
    """Remove shared memory and folders of this user's dead processes; return one line for each."""
    files = _shm()
    folders = _temp_folders()
    done = []
    users = _Users()  # after the lists: they lack files created later
    for path in files:
        # the owner of a new file without a name in it may not have opened it yet
        dead = (
            not users.owns(path) if _OWNER_IN_NAME.match(path.name) else _age_s(path) >= SETTLED_S
        )
        if dead and path.is_file() and _is_of_this_user(path) and not users.use(path):
            path.unlink(missing_ok=True)
            done.append(f"removed shared memory {path}")
    for path in folders:
        of_ray = any(any(path.glob(name)) for name in ("ray/session_*", "session_*"))
        dead = of_ray or (_OWNER_IN_NAME.match(path.name) is not None and not users.owns(path))
        if dead and path.name.startswith("rft-") and _is_of_this_user(path) and not users.use(path):
            shutil.rmtree(path, ignore_errors=True)
            done.append(f"removed folder {path}")
    return done


def end_former() -> list[str]:
    """End processes left by an earlier process of this part, e.g. its engine core; a line for each.

    They have this process's RFT_RUN_ID and RFT_PART, and are not descendants of its parent.
    """
    identity = {name: os.environ.get(name) for name in (RUN_ID, PART)}
    parent = psutil.Process().parent()
    if parent is None or None in identity.values():
        return []
    placed = {parent.pid, *(p.pid for p in (*parent.parents(), *parent.children(recursive=True)))}
    return _end(
        [
            p
            for p in psutil.process_iter()
            if p.pid not in placed
            and identity.items() <= _environment(p).items()
            and not _ending(p)
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
    """On exit, end all descendants started in the block, also daemons; yield their descriptions.

    The kernel makes orphans children of this process (PR_SET_CHILD_SUBREAPER) instead of init.
    """
    ended: list[str] = []
    me = psutil.Process()
    before = {_key(p) for p in psutil.Process().children()}
    adopt_orphans(True)
    try:
        with _reaping():
            yield ended
    finally:
        with works("ending what the run left"):
            until = time.monotonic() + GRACE_S
            while remaining := [
                p
                for p in me.children()
                if _key(p) not in before and not _HELPERS.search(_command(p))
            ]:
                ended += [
                    f"ended process {_describe(p)}"
                    for p in remaining
                    if _quietly(p.status) != psutil.STATUS_ZOMBIE
                ]
                for process in remaining:
                    _quietly(process.kill)
                psutil.wait_procs(remaining, timeout=max(0.0, until - time.monotonic()))
                if time.monotonic() > until:
                    names = ", ".join(map(_describe, remaining))
                    ended.append(f"{len(remaining)} processes could not be ended: {names}")
                    break
            adopt_orphans(False)
            ended += _remove_files()


@contextlib.contextmanager
def _reaping() -> Iterator[None]:
    """Reap adopted orphans: each runtime of an agent leaves one, and process numbers are few."""
    over = threading.Event()

    def reap() -> None:
        while not over.wait(REAP_S):
            for pid in filter(_is_ended_orphan, children()):
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)

    thread = threading.Thread(target=reap, name="reap-orphans", daemon=True)
    if sys.platform == "linux":
        thread.start()
    try:
        yield
    finally:
        over.set()
        if thread.ident is not None:
            thread.join()


def _is_ended_orphan(pid: int) -> bool:
    """Return whether a child that has ended was certainly started by another process, so that no
    code here waits for it: a child of ours has our session or leads its own.
    """
    stat = _quietly(Path(f"/proc/{pid}/stat").read_text) or "0 () X 0 0 0"
    name, _, rest = stat.partition("(")[2].rpartition(")")
    state, _, _, session, *_ = rest.split()
    return state == "Z" and (int(session) not in (os.getsid(0), pid) or name == "conmon")


# ------------------------------------------------------------ processes


def _our_processes() -> list[psutil.Process]:
    """Return descendants of this process, and all processes with its mark, or without a mark all
    that look like those of a run.
    """
    me = psutil.Process()
    mark = os.environ.get(MARK)
    family = {me.pid, *(p.pid for p in me.parents())}
    ours = {p.pid: p for p in me.children(recursive=True)}
    for process in psutil.process_iter():
        if process.pid in ours:
            continue
        environment = _environment(process)
        if (
            environment.get(MARK) == mark
            if mark
            else RUN_ID in environment or _PROCESS_NAMES.match(_name(process))
        ):
            ours[process.pid] = process
    return [
        p
        for pid, p in sorted(ours.items())
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
    """Return the start of a process in ticks since boot, which clock changes do not affect.

    None for a zombie or ended process.  Not on Linux: seconds since the epoch.
    """
    if sys.platform != "linux":
        process = _quietly(lambda: psutil.Process(int(pid)))
        ended = process is None or _quietly(process.status) in (
            None,
            psutil.STATUS_DEAD,
            psutil.STATUS_ZOMBIE,
        )
        if process is None or ended:
            return None
        return int(process.create_time())
    stat = (_quietly(Path(f"/proc/{pid}/stat").read_bytes) or b") X").rpartition(b")")[2].split()
    if stat[0] in (b"Z", b"X"):
        return None
    return int(stat[19])


def _key(process: psutil.Process) -> str:
    return f"{process.pid}:{_quietly(process.create_time)}"


def _describe(process: psutil.Process) -> str:
    return f"{process.pid} {_name(process)}: {_command(process)[:120]}"


def _quietly(ask: Callable[[], T]) -> T | None:
    """Call `ask`; None for a process that has ended or belongs to another user."""
    try:
        return ask()
    except (psutil.Error, OSError):
        return None


# ------------------------------------------------------------ files


class _Users:
    """Files that living processes, except `exclude`, have open, mapped, or in their command line."""

    def __init__(self, exclude: Collection[int] = ()) -> None:
        self._exclude = exclude
        self._paths: set[str] = set()
        self._commands: list[str] = []
        self._hidden: list[psutil.Process] = []  # unreadable, so they may use any semaphore
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
            or self.owns(path)
            or any(f"{p}/".startswith(inside) for p in self._paths)
            or any(inside in c or c.endswith(str(path)) for c in self._commands)
        )

    def owns(self, path: Path) -> bool:
        """Return whether the owner in a file's or folder's name is one of these processes."""
        owner = _OWNER_IN_NAME.match(path.name)
        return (
            owner is not None and int(owner[1]) not in self._exclude and began(owner[1]) is not None
        )


def _open_paths(pid: int) -> Iterable[str]:
    """Yield paths below /dev/shm and the temporary folder that process `pid` has open or mapped.

    Also yields "device inode" of mapped files, because a semaphore is mapped under a temporary
    name. Raises PermissionError for a process of another user, or that hides its memory, as rft
    does to run programs.
    """
    folders = (str(SHM), tempfile.gettempdir())
    folder = Path(f"/proc/{pid}/fd")
    try:
        for link in folder.iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                if (target := str(link.readlink())).startswith(folders):
                    yield target
        for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
            if (at := line.find("/")) >= 0 and line.startswith(folders, at):
                yield line[at:]
                yield " ".join(line.split(None, 5)[3:5])  # device and inode
    except (FileNotFoundError, ProcessLookupError):
        return  # it has ended


def _may_be_ours(process: psutil.Process) -> bool:
    """Return whether it is a Python, Ray or vLLM process of this user."""
    account = _quietly(process.uids)
    named = "python" in _command(process) or _PROCESS_NAMES.match(_name(process)) is not None
    return account is not None and account.real == os.getuid() and named


def _shm() -> list[Path]:
    return _entries(SHM, _SHM_NAMES)


def _entries(folder: Path, names: re.Pattern[str]) -> list[Path]:
    if folder.is_dir():
        return sorted(p for p in folder.iterdir() if names.match(p.name))
    return []


def _temp_folders() -> list[Path]:
    return [
        p
        for p in _entries(Path(tempfile.gettempdir()), _TEMP_NAMES)
        if p.is_dir() and not p.is_symlink()
    ]


def _is_of_this_user(path: Path) -> bool:
    return (stat := _quietly(path.lstat)) is not None and stat.st_uid == os.getuid()


def _age_s(path: Path) -> float:
    """Return seconds since the file's last change; 0 for a missing file."""
    if (stat := _quietly(path.lstat)) is not None:
        return time.time() - stat.st_mtime
    return 0.0


# ------------------------------------------------------------ listeners


def _open_listeners(pids: set[int]) -> list[str]:
    """Return TCP sockets of `pids` that listen beyond loopback."""
    return [
        f"{c.laddr.ip} port {c.laddr.port} of process {c.pid}"
        for c in _quietly(lambda: psutil.net_connections(kind="tcp")) or []
        if c.status == psutil.CONN_LISTEN
        and c.pid in pids
        and not ipaddress.ip_address(c.laddr.ip).is_loopback
    ]
