"""Endurance: two real programs run for an hour while their processes are killed or stopped, the
disk fills up and the clock jumps.

    python scripts/soak.py [--minutes 60] [--seed 1] [--keep FOLDER] [--write]

`train`: the tiny model with fully_async; two explorers, each with a vLLM engine and a judge, and
the process that trains are three commands on one Ray.  `serve`: rft serve in one process, for
clients that send each call again until it is answered.  A command that ends is started again.  At
each end the account is audited; over the whole, memory, descriptors and threads of each kind of
process, /dev/shm and temporary files are sampled.  A seed draws the faults, their order and their
lengths; where in its work a fault meets a process is chance.  `--write` puts the result into
docs/measured/soak.md.

Exit code 1: an account that does not balance, something acknowledged that is lost, growth, a hang
over HANG_S that nobody named, an end that no fault explains, or anything left behind.  Linux;
faults of the disk need the right to mount, jumps of the clock a C compiler.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import math
import os
import random
import re
import shutil
import signal
import socket
import sqlite3
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import bench_harness
import engine_memory
import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rft.extras.serve.access import ENVIRONMENT as SERVE_KEY  # noqa: E402
from rft.launch import leftovers  # noqa: E402
from rft.testing import tiny  # noqa: E402
from tests.extras.serve.serve_clients import Persistent  # noqa: E402
from tests.helpers import runs  # noqa: E402
from tests.helpers.lab.lab import build_shim  # noqa: E402

PAGE = ROOT / "docs" / "measured" / "soak.md"
BEGIN = "<!-- soak: written by scripts/soak.py -->"
END = "<!-- end of the soak -->"
HANG_S = 60.0  # without progress: has to be named; is an error in any case
LONGEST_S = 300.0
# a process is measured when it has worked for WARM_S: until then caches and allocators fill
SAMPLE_S = 3.0
WARM_S = 600.0
WINDOW_S = 300.0  # samples that are closer err together
BRIEF_S = 8.0  # a stop that nobody may take for a hang
EXPLORERS = ("one", "two")
CLIENTS = 4
ENDING = ("launcher", "trainer", "buffer", "coordinator")  # kinds whose death ends the program
KINDS = (*ENDING, "explorer's launcher", "explorer", "engine", "vLLM", "judge", "service")
OWN = ("memory, MiB", "descriptors", "threads")
SHARED = ("/dev/shm, files", "/dev/shm, MiB", "temporary files")
LIMITS = {
    **dict.fromkeys((*OWN, *SHARED), 6.0),
    "memory, MiB": 24.0,
}  # an hour's growth; an error where all of the interval is above
NAMED = re.compile(
    r"\bhangs|was restarted|is brought back|is gone|had to leave|has ended|DiskFull|No space "
    r"left|DeadlineExceeded"
)
ERROR = re.compile(r"[A-Z]\w+: ")  # what rft prints when it fails; libraries may print after it
DISK = "2g"
APART = "SOAK_IS_APART"


@dataclass(frozen=True)
class Fault:
    """`kind`: of process, or machine.  `action`: kill, stop, disk (full), clock.  It comes
    `after_s` of peace and lasts `for_s`.
    """

    kind: str
    action: str
    after_s: float
    for_s: float


def plan(seed: int, gap_s: float = 15.0) -> Iterator[Fault]:
    """Every kind of fault once, in an order of the seed; then again in another."""
    dice = random.Random(seed)
    cards = [
        *((k, a) for k in KINDS for a in ("kill", "stop")),
        ("machine", "disk"),
        ("machine", "clock"),
        ("machine", "clock"),
    ]
    while True:
        dice.shuffle(cards)
        for kind, action in cards:
            yield Fault(kind, action, dice.uniform(0.4, 1.6) * gap_s, dice.uniform(1.0, 30.0))


class Program:
    """A command that is started again whenever it ends.  With `ledger` it has an account of its
    own, which is audited at each end.
    """

    def __init__(
        self,
        name: str,
        kind: str,
        command: list[str],
        env: dict[str, str],
        folder: Path,
        *,
        ledger: bool,
    ) -> None:
        self.name = name
        self.kind = kind
        self.command = command
        self.env = env
        self.folder = folder
        self.ledger = ledger
        self.run: runs.Run | None = None
        # when, exit code, the error that it told, or its last line
        self.ends: list[tuple[float, int, str]] = []
        self.back_s: list[float] = []  # from an end to the next progress
        self.problems: list[str] = []
        self.audits = 0
        self.acked = 0
        self.progress = (0, 0)  # rows and uses, and when that was new
        self.since = time.monotonic()
        self._seen = 0  # lines that it had told then
        self.started = 0.0  # since when
        self.works = math.inf
        self.hangs: list[tuple[float, str]] = []

    def start(self) -> None:
        self.run = runs.Run(*self.command, env=self.env)
        self._seen = 0
        self.started = time.monotonic()

    def end(self, how: Callable[[runs.Run], object]) -> None:
        if self.run is not None and self.run.process.poll() is None:
            how(self.run)

    def phase(self) -> dict[str, object]:
        try:
            return dict(json.loads((self.folder / "state.json").read_text()))
        except (OSError, ValueError):
            return {}

    def look(self, faults: list[str]) -> None:
        """Has it done anything since it was looked at last?  `faults`: of the last minutes."""
        now = time.monotonic()
        lines = [] if self.run is None else self.run.lines
        found = (
            _rows(self.folder)
            if self.ledger
            else (int(now), 0)
            if self.phase().get("phase") == "running"
            else None
        )
        if found is None or found == self.progress:
            return
        gap = now - self.since
        told = [line.strip() for line in lines[self._seen :]]
        ended = [at for at, _, _ in self.ends if at >= self.since]
        if ended:
            self.back_s.append(now - ended[0])
        if ended or self.works == math.inf:
            self.works = now
        if gap > HANG_S and self.progress != (0, 0):  # else it is the first start
            names = [line for line in [*told, *_logged(self.folder, gap)] if NAMED.search(line)]
            name = (
                f"ended and started again: {self.ends[-1][2]}" if ended else next(iter(names), "")
            )
            self.hangs.append((gap, name))
            if not name or now - max(self.since, self.started) > LONGEST_S:
                self.problems.append(
                    f"{self.name} did nothing for {gap:.0f} s ({name or 'unnamed'}); faults: "
                    f"{faults}"
                )
        self.progress = found
        self.since = now
        self._seen = len(lines)

    def ended(self, code: int) -> None:
        assert self.run is not None
        said = [line.strip() for line in reversed(self.run.lines) if line.strip()]
        last = next((line for line in said if ERROR.match(line)), said[0] if said else "")
        self.ends.append(
            (time.monotonic(), code, "killed" if code == -signal.SIGKILL else last[:160])
        )
        if self.ledger:
            _, alive = psutil.wait_procs(runs.parts(self.phase().get("run_id", "none")), timeout=90)
            self.problems += [
                f"{self.name}: process {p.pid} {runs.role(p)} outlived its launcher by 90 s"
                for p in alive
            ]
            self.audit()

    def audit(self) -> None:
        if _rows(self.folder) is None:
            return
        ok, found = runs.audit(self.folder)
        self.audits += 1
        if not ok or found["used_twice"] or found["acked"] < self.acked:
            self.problems.append(
                f"{self.name}: the account does not balance, or has less than {self.acked} rows: "
                f"{found}"
            )
        self.acked = found["acked"]


def _rows(folder: Path) -> tuple[int, int] | None:
    """How many experiences a ledger holds, and uses of them.  None where it is not there yet, or
    being written.
    """
    file = folder / "buffer" / "experience_buffer.db"
    try:
        with contextlib.closing(
            sqlite3.connect(f"file:{file}?mode=ro", uri=True, timeout=0.5)
        ) as ledger:
            tables = ("experiences", "uses")
            counts = [
                ledger.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in tables
            ]
    except sqlite3.Error:
        return None
    return (counts[0], counts[1])


def _logged(folder: Path, within_s: float) -> list[str]:
    """The ends of the logs that were written in the last seconds."""
    files = [f for f in folder.rglob("*.log") if time.time() - f.stat().st_mtime < within_s]
    return [line for f in files for line in f.read_text(errors="replace").splitlines()[-40:]]


class Soak:
    """The programs, what happens to them, and what was measured; `home` is the temporary folder of
    all of it.
    """

    programs: list[Program]
    clients: Persistent

    def __init__(self, seed: int, minutes: float, home: Path) -> None:
        self.seed = seed
        self.minutes = minutes
        self.home = home
        self.mark = os.environ[leftovers.MARK]
        self.faults: list[tuple[float, Fault]] = []  # when, what
        self.lives: dict[tuple[str, str], dict[str, list[tuple[float, float]]]] = defaultdict(
            lambda: defaultdict(list)
        )
        self.problems: list[str] = []
        self.over = self.calm = False
        self.can = {"kill": True, "stop": True, "disk": False, "clock": False}
        self.took_s = 0.0
        self.space = asyncio.Event()
        self.space.set()
        self._first: dict[str, float] = {}

    # ------------------------------------------------------------ the programs

    def build(self, cluster: runs.Cluster, env: dict[str, str]) -> None:
        model = tiny.make(self.home / "tiny")
        judge = tiny.make(self.home / "judge", seed=1)
        disk = self.home / "disk"
        examples = ROOT / "examples"
        own = ROOT / "scripts" / "soak.yaml"
        env = {
            **env,
            "TINY_MODEL": str(model),
            "JUDGE_MODEL": str(judge),
            SERVE_KEY: uuid.uuid4().hex,
        }
        shared = {**env, **cluster.environment}
        folder = disk / "rft" / "examples" / "soak"
        train = [
            "run",
            "-c",
            str(own),
            f"checkpoint_root_dir={disk}",
            f"cluster.ray_address={cluster.address}",
        ]
        self.programs = [Program("train", "launcher", train, shared, folder, ledger=True)]
        for name in EXPLORERS:
            command = [*train, "mode=explore", f"explorer.name={name}"]
            place = folder / "explorers" / name
            self.programs.append(
                Program(name, "explorer's launcher", command, shared, place, ledger=False)
            )
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        small = (
            "buffer.batch_size=4",
            "algorithm.repeat_times=2",
            "trainer.total_steps=1000000",
            "trainer.save_interval=5",
        )
        more = (
            "trainer.max_checkpoints_to_keep=2",
            "trainer.save_hf_checkpoint=never",
            f"explorer.proxy_port={port}",
        )
        serve = [
            "serve",
            "--in-process",
            "-c",
            str(examples / "serve" / "config.yaml"),
            f"checkpoint_root_dir={disk}",
            *small,
        ]
        served = disk / "rft" / "examples" / "serve"
        env["MALLOC_ARENA_MAX"] = (
            # glibc's allocator, which is in no other part, would take half an hour to fill one for
            # each thread
            "1"
        )
        self.programs.append(Program("serve", "service", [*serve, *more], env, served, ledger=True))
        self.clients = Persistent(
            f"http://127.0.0.1:{port}", env[SERVE_KEY], clients=CLIENTS, pause_s=0.5
        )

    async def keep(self, program: Program) -> None:
        """Starts the program again whenever it ends."""
        quick = 0
        while not self.over:
            await self.space.wait()  # who starts a program on a full disk frees space first
            program.start()
            assert program.run is not None
            began = time.monotonic()
            code = await asyncio.to_thread(program.run.end, 1e6)
            (self.home / "said" / f"{program.name}-{len(program.ends)}").write_text(
                program.run.output
            )
            await asyncio.to_thread(program.ended, code)
            if program.kind == "service":
                program.problems += self.clients.lost(program.folder)
            self.say(f"{program.name} ended with {code}: {program.ends[-1][2]}")
            quick = quick + 1 if time.monotonic() - began < 20 else 0
            if self.over:
                return
            if quick > 5:
                raise RuntimeError(
                    f"{program.name} ends as soon as it is started:\n{program.run.output[-3000:]}"
                )
            if self.calm or not any(time.monotonic() - at < 150 for at, _ in self.faults):
                self.problems.append(f"{program.name} ended by itself: {program.ends[-1][2]}")

    # ------------------------------------------------------------ faults

    async def harm(self) -> None:
        """The faults, one after another.  In the second half no process ends, so that all grow old
        and can be measured.
        """
        await self.working()
        self.say("all programs work; faults begin")
        began = time.monotonic()
        until = began + self.minutes * 60
        for fault in plan(self.seed):
            if time.monotonic() + fault.after_s >= until:
                break
            await asyncio.sleep(fault.after_s)
            await self.working()
            self.calm = time.monotonic() > began + self.minutes * 30
            if self.calm:
                if fault.action in ("kill", "disk"):
                    continue
                fault = replace(fault, for_s=fault.for_s % BRIEF_S)
            if self.can[fault.action]:
                await self.strike(fault)
        await asyncio.sleep(max(0.0, until - time.monotonic()))
        await self.working()
        self.took_s = time.monotonic() - began

    async def working(self) -> None:
        """Until both programs get on; what does not for LONGEST_S is an error."""
        begun = time.monotonic()
        while slow := [
            p
            for p in self.programs
            if p.ledger and (p.progress <= (0, 0) or time.monotonic() - p.since > 20)
        ]:
            if time.monotonic() - begun > 2 * LONGEST_S:
                raise RuntimeError(
                    f"{[p.name for p in slow]} do not get on: {[p.phase() for p in self.programs]}"
                )
            await asyncio.sleep(0.5)

    async def strike(self, fault: Fault) -> None:
        if fault.kind == "machine":
            self.tell(fault)
            await (
                self.fill_disk(fault.for_s) if fault.action == "disk" else self.jump(fault.for_s)
            )
            return
        found = sorted(
            (p for p in self.processes() if self.kind(p) == fault.kind), key=lambda p: p.pid
        )
        if not found:
            return
        victim = found[int(fault.for_s * 1000) % len(found)]
        self.tell(fault)
        with contextlib.suppress(psutil.NoSuchProcess):  # its time has come anyway
            if fault.action == "kill":
                victim.kill()
                return
            victim.suspend()
            await asyncio.sleep(fault.for_s)
            victim.resume()

    def tell(self, fault: Fault) -> None:
        self.faults.append((time.monotonic(), fault))
        self.say(
            f"{fault.action} {fault.kind}"
            + ("" if fault.action == "kill" else f" for {fault.for_s:.0f} s")
        )

    async def fill_disk(self, for_s: float) -> None:
        disk = self.home / "disk"
        used = shutil.disk_usage(disk).used // 1024 + 64
        self.space.clear()
        _mount("-o", f"remount,size={used}k", str(disk))
        await asyncio.sleep(for_s)
        _mount("-o", f"remount,size={DISK}", str(disk))
        self.space.set()

    async def jump(self, for_s: float) -> None:
        for off_by in (3600 if for_s > 15 else -3600, 0):
            with (self.home / "clock").open("r+b") as file:
                file.write(struct.pack("q", off_by))
            await asyncio.sleep(for_s if off_by else 0)

    # ------------------------------------------------------------ what is measured

    def processes(self) -> Iterator[psutil.Process]:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if (
                    process.environ().get(leftovers.MARK) == self.mark
                    and process.pid != os.getpid()
                ):
                    yield process

    def kind(self, process: psutil.Process) -> str:
        """By the launcher that it is, or by its title."""
        mine = {p.run.process.pid: p.kind for p in self.programs if p.run is not None}
        role = runs.role(process) or (
            "vLLM" if process.name().startswith("VLLM") else "Ray and helpers"
        )
        return mine.get(process.pid, "judge" if role == "aux" else role)

    async def sample(self) -> None:
        while True:
            await asyncio.to_thread(self._sample)
            recent = [
                f"{f.action} {f.kind}" for at, f in self.faults if time.monotonic() - at < LONGEST_S
            ]
            for program in self.programs:
                await asyncio.to_thread(program.look, recent)
            await asyncio.sleep(SAMPLE_S)

    def _sample(self) -> None:
        now = time.monotonic()
        old = self._first
        warm = now - max(p.works for p in self.programs if p.ledger) >= WARM_S
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                life = f"{process.pid}:{process.create_time()}"
                kind = self.kind(process)
                if (
                    now - old.setdefault(life, now) >= WARM_S
                    and warm
                    and process.status() != psutil.STATUS_ZOMBIE
                ):
                    values = (
                        process.memory_info().rss / 2**20,
                        process.num_fds(),
                        process.num_threads(),
                    )
                    for figure, value in zip(OWN, values, strict=True):
                        self.lives[kind, figure][life].append((now, value))
        shm = [p.stat() for p in Path("/dev/shm").iterdir()]
        temporary = sum(1 for p in self.home.iterdir() if p.name not in ("disk", "said"))
        machine = (len(shm), sum(s.st_blocks for s in shm) * 512 / 2**20, temporary)
        if now - old.setdefault("machine", now) >= WARM_S:
            for figure, value in zip(SHARED, machine, strict=True):
                self.lives["machine", figure]["machine"].append((now, value))

    def grown(self) -> list[tuple[str, str, bench_harness.Growth, str]]:
        """Of whom, which figure, how much, and whether that is too much."""
        found = []
        for what in (*KINDS, "Ray and helpers", "machine"):
            for figure, limit in LIMITS.items():
                g = bench_harness.growth(self.lives[what, figure].values(), WINDOW_S)
                if g is not None:
                    found.append(
                        (what, figure, g, f"{limit:.0f}{' **exceeded**' if g.low > limit else ''}")
                    )
        return found

    def say(self, text: str) -> None:
        bench_harness.note(f"{time.strftime('%H:%M:%S')} {text}")


def _mount(*options: str) -> bool:
    done = subprocess.run(["mount", *options], capture_output=True, text=True, check=False)
    if done.returncode:
        bench_harness.note(f"mount {' '.join(options)}: {done.stderr.strip()}")
    return not done.returncode


async def play(soak: Soak) -> None:
    """From the first start to the last end.  What is wrong is in `soak.problems` and those of its
    programs.
    """
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(24))
    # full within minutes
    env = {"PYTHONPATH": str(ROOT), "TMPDIR": str(soak.home), engine_memory.CAPACITY: "64"}
    if library := build_shim(soak.home):
        (soak.home / "clock").write_bytes(struct.pack("q", 0))
        env |= {"LD_PRELOAD": str(library), "LAB_CLOCK": str(soak.home / "clock")}
    soak.can["clock"] = library is not None
    cluster = runs.Cluster(**env, RAY_worker_niceness="0")
    soak.build(cluster, env)
    keepers = [asyncio.ensure_future(soak.keep(p)) for p in soak.programs]
    clients = soak.clients
    players = [asyncio.ensure_future(clients.play(i)) for i in range(CLIENTS)]
    tasks = [
        *keepers,
        *players,
        asyncio.ensure_future(soak.sample()),
        asyncio.ensure_future(soak.harm()),
    ]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:  # only the faults come to an end
            if task.done() and (error := task.exception()) is not None:
                soak.problems.append(f"{type(error).__name__}: {error}")
        clients.stopped = True
        _, late = await asyncio.wait(players, timeout=LONGEST_S)
        soak.problems += [f"{len(late)} clients still wait for an answer"] if late else []
        soak.over = True
        for program in soak.programs:
            program.end(runs.Run.interrupt)
        _, late = await asyncio.wait(keepers, timeout=180)
        soak.problems += [f"{len(late)} programs do not end when they are asked to"] if late else []
    finally:
        for program in soak.programs:
            program.end(lambda run: run.process.kill())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        cluster.end()
    soak.problems += [line for program in soak.programs for line in program.problems]


# ---------------------------------------------------------------- what is told


def told(soak: Soak, command: str) -> str:
    """The section of the page."""
    train, *explorers, serve = soak.programs
    back = [s for p in (train, serve) for s in p.back_s] or [0.0]
    counts = (
        train.audits + serve.audits,
        train.acked + serve.acked,
        len(soak.clients.acknowledged),
        len(soak.clients.rewarded),
    )
    ends = (len(soak.faults), len(train.ends), sum(len(p.ends) for p in explorers), len(serve.ends))
    lines = [
        f"`{command}`; {bench_harness.machine()}; {datetime.date.today()}; {soak.took_s / 60:.0f} "
        f"minutes from the first step on.",
        "",
        "{} faults; `train` ended {} times, its explorers {}, `serve` {}.  The same command went "
        "on each time: from an end to the next row "
        "{:.0f} s (median), at most {:.0f} s.".format(*ends, statistics.median(back), max(back)),
        "{} audits; {:,} experiences acknowledged, {:,} answers and {:,} rewards of "
        "clients.".format(*counts),
        "",
        "| Fault | " + " | ".join((*KINDS, "machine")) + " |",
        "|---" * (len(KINDS) + 2) + "|",
    ]
    met = Counter((f.action, f.kind) for _, f in soak.faults)
    for action, name in (
        ("kill", "kill -9"),
        ("stop", "SIGSTOP"),
        ("disk", "disk full"),
        ("clock", "clock off by an hour"),
    ):
        lines.append(
            f"| {name} | "
            + " | ".join(str(met[action, kind] or "–") for kind in (*KINDS, "machine"))
            + " |"
        )
    if grown := soak.grown():
        lines += [
            "",
            "| Of | Figure | Lives | Minutes | Level | Growth per hour | 95 % interval | Allowed |",
            "|---" * 8 + "|",
        ]
    else:
        lines += ["", "Nothing worked long enough to tell whether it grows; that takes 50 minutes."]
    for what, figure, g, limit in grown:
        interval = f"{g.slope:+.1f} | {g.low:+.1f} to {g.high:+.1f} | {limit}"
        lines.append(
            f"| {what} | {figure} | {g.lives} | {g.minutes:.0f} | {g.level:,.1f} | {interval} |"
        )
    hangs = [(p.name, *hang) for p in soak.programs for hang in p.hangs]
    lines += [
        "",
        f"Longer than {HANG_S:.0f} s without a new row: {len(hangs)} times.",
        "",
        "| Program | s | Why, as it was told |",
    ]
    lines += [
        "|---|---|---|",
        *(f"| {name} | {s:.0f} | {why[:150].replace('|', '/')} |" for name, s, why in hangs),
    ]
    lines += [
        "",
        f"Problems: {len(soak.problems) or 'none'}.",
        *(f"\n- {line[:300]}" for line in soak.problems),
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="from the moment at which all programs work"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the faults")
    parser.add_argument(
        "--keep", type=Path, help="a folder for runs, what the programs said, and what was measured"
    )
    parser.add_argument(
        "--write", action="store_true", help=f"put the result into {PAGE.relative_to(ROOT)}"
    )
    options = parser.parse_args()
    # a /dev/shm and mounts of its own, which go with it
    if os.geteuid() == 0 and os.environ.setdefault(APART, "") != "yes":
        os.execvpe(
            "unshare",
            ["unshare", "--mount", sys.executable, *sys.argv],
            {**os.environ, APART: "yes"},
        )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the programs are ended
    os.environ[leftovers.MARK] = uuid.uuid4().hex
    # a short name: sockets are made in it
    home = Path(tempfile.mkdtemp(prefix="soak-", dir="/tmp"))
    soak = Soak(options.seed, options.minutes, home)
    for name in ("disk", "said"):
        (home / name).mkdir()
    if os.environ.get(APART) == "yes":
        _mount("-t", "tmpfs", "none", str(leftovers.SHM))
        soak.can["disk"] = _mount("-t", "tmpfs", "-o", f"size={DISK}", "none", str(home / "disk"))
    before = leftovers.snapshot()
    try:
        asyncio.run(play(soak))
    finally:
        if options.keep:
            (home / "measured.json").write_text(
                json.dumps({"; ".join(key): lives for key, lives in soak.lives.items()})
            )
            shutil.copytree(
                home,
                options.keep,
                dirs_exist_ok=True,
                ignore=shutil.ignore_patterns("sockets", "*.so"),
            )
        if soak.can["disk"]:
            subprocess.run(["umount", "-l", str(home / "disk")], check=True)
        shutil.rmtree(home)
    soak.problems += [f"left behind: {line}" for line in leftovers.compare(before)]
    soak.problems += [
        f"{what}: {figure} grow by {g.low:+.1f} to {g.high:+.1f}"
        for what, figure, g, limit in soak.grown()
        if "*" in limit
    ]
    made = told(soak, f"make soak MINUTES={options.minutes:g} SEED={options.seed}")
    print(made)
    if options.write:
        head, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        PAGE.write_text(
            f"{head}{BEGIN}\n\n{made}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8"
        )
    return int(bool(soak.problems))


if __name__ == "__main__":
    sys.exit(main())
