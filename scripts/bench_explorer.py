"""Thousands of runs in one explorer: what playing, scoring, recording and encoding cost beside
engines that take their time.
"""

from __future__ import annotations

import asyncio
import cProfile
import heapq
import json
import pstats
import random
import selectors
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import bench_harness as harness

from rft.engine.scripted import ScriptedEngine
from rft.explorer.explorer import Explorer
from rft.explorer.settings import ExplorerSettings
from rft.taskset.settings import TasksetSettings
from rft.types.completion import Completion
from rft.types.ids import Version
from rft.types.ports import (
    NO_IMAGES,
    AppendResult,
    Assignment,
    GenerateRequest,
    StoredGroup,
    TaskOutcome,
)

IN_FLIGHT = 1000
GROUP = 8
LATENCY_S = (0.2, 2.0)
ANSWER = "4"


class Slow(ScriptedEngine):
    """Answers after a drawn time; the n-th call always after the same."""

    def __init__(self, seed: int) -> None:
        super().__init__(answer=lambda messages: ANSWER)
        self._draw = random.Random(seed)

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        await asyncio.sleep(self._draw.uniform(*LATENCY_S))
        done = await super().generate(request)
        self.calls.clear()
        return done


class Writer:
    """A buffer that takes everything and keeps nothing."""

    def __init__(self) -> None:
        self.runs = self.nbytes = 0
        self.rss: list[tuple[int, int]] = []  # (runs so far, bytes of memory) at every closed batch

    async def append(
        self,
        frame: bytes,
        *,
        accepted: bool,
        reason: str = "",
        images: Mapping[str, bytes] = NO_IMAGES,
    ) -> AppendResult:
        self.runs += GROUP
        self.nbytes += len(frame)
        return AppendResult(appended=GROUP, duplicates=0)

    async def room(self, batch: int) -> None: ...
    async def stored_groups(self, first_batch: int) -> list[StoredGroup]:
        return []

    async def outcomes(self, first_batch: int, end_batch: int) -> list[TaskOutcome]:
        return []

    async def check_taskset_fingerprints(self, fingerprints: dict[str, str]) -> list[str]:
        return []

    async def finish(self, reason: str) -> None: ...
    async def close_batch(
        self, batch: int, *, accepted: int, expected: int, reasons: dict[str, int]
    ) -> None:
        self.rss.append((self.runs, _rss()))


class Gate:
    """Everything may start, every version is proven."""

    def __init__(self) -> None:
        self._next = 0

    async def next_batch(
        self, *, lag: int | None, fingerprint: str, total: int | None
    ) -> Assignment | str:
        self._next += 1
        more = total is None or self._next <= total
        return (
            Assignment(batch=self._next - 1, version=Version(1, 0)) if more else "all are explored"
        )

    async def evaluates(self) -> bool:
        return True

    async def wait_verified(self, version: Version) -> bool:
        return True

    async def acquire_group(self, batch: int, group: int | None) -> bool:
        return True

    async def release_group(self) -> None: ...
    async def explored(self, batch: int) -> None: ...
    async def wait_final(self) -> Version:
        return Version(1, 0)


class Sink:
    async def log(self, record: Any) -> None: ...
    async def samples(self, name: str, step: int, rows: list[dict[str, Any]]) -> None: ...
    async def progress(self, text: str) -> None: ...


def rollout_many(quick: bool) -> harness.Result:
    """1,000 runs in flight over answers that take 0.2 to 2 s: seconds that the answers alone need /
    seconds of the explorer, and the memory that 1,000 runs leave behind (the limit, 1 MB / what was
    measured).  By its own clock the process is alone on the machine.
    """
    measured = harness.probes()
    rounds, runs = (3, 6000) if quick else (5, 12000)
    seconds = []
    growth = []
    busy = []
    nbytes = 0
    for i in range(rounds):
        writer = Writer()
        began = time.process_time()
        seconds.append(play(runs, seed=i, writer=writer))
        busy.append((time.process_time() - began) / runs * 1e3)
        growth.append(_growth(writer.rss))
        nbytes = writer.nbytes // runs
    alone = [play(runs, seed=i, writer=Writer(), loop=OwnClock) for i in range(rounds)]
    best = [ideal(runs, seed=i) for i in range(rounds)]
    leak = statistics.median(growth)
    ratio = 1.0 / max(leak, 1e-3)
    return harness.Result(
        "rollout_many",
        [
            harness.speed_ratio("throughput_of_ideal", seconds, best, 0.95),
            harness.speed_ratio("throughput_of_ideal_by_own_clock", alone, best, 0.95),
            harness.Check(
                "growth_at_most_1_mb",
                round(ratio, 3),
                round(1.0 / max(*growth, 1e-3), 3),
                round(ratio, 3),
                1.0,
            ),
        ],
        harness.summary(
            seconds,
            runs=runs,
            cpu_ms_per_run=round(statistics.median(busy), 3),
            mb_per_1000_runs=round(leak, 3),
            bytes_per_run=nbytes,
        ),
        harness.summary(best, what="the same answers with no work between them"),
        measured,
    )


def play(
    runs: int,
    *,
    seed: int,
    writer: Writer,
    loop: Callable[[], asyncio.AbstractEventLoop] | None = None,
    in_flight: int = IN_FLIGHT,
) -> float:
    """Seconds that `runs` runs take, `in_flight` of them at a time, by the clock of `loop`; without
    one by the wall.
    """
    with tempfile.TemporaryDirectory(prefix="rft-bench-") as name:
        file = Path(name) / "sums.jsonl"
        file.write_text(
            "".join(
                json.dumps({"prompt": f"{i}+{i}?", "response": str(2 * i)}) + "\n"
                for i in range(500)
            )
        )
        taskset = TasksetSettings(
            name="sums",
            path=str(file),
            workflow="simple_workflow",
            reward="exact_answer",
            num_runs=GROUP,
        )
        per_batch = in_flight // GROUP
        settings = ExplorerSettings(
            tasksets=(taskset,),
            batch_size=per_batch,
            total_batches=runs // in_flight,
            total_epochs=None,
            max_concurrent_runs=in_flight,
        )
        explorer = Explorer(
            settings, model=Slow(seed), buffer=writer, gate=Gate(), sink=Sink(), lineage=1
        )

        async def timed() -> float:
            clock = asyncio.get_running_loop().time
            began = clock()
            await explorer.run()
            return clock() - began

        with asyncio.Runner(loop_factory=loop) as runner:
            return runner.run(timed())


class OwnClock(asyncio.SelectorEventLoop):
    """A loop whose time is this process's own processor time, plus the waits in which it had
    nothing to do: these it skips.

    So what is measured does not depend on who else uses the machine.
    """

    def __init__(self) -> None:
        self._selector_ = _Skipping()
        super().__init__(self._selector_)

    def time(self) -> float:
        return time.process_time() + self._selector_.skipped_s


class NoTimeForWork(OwnClock):
    """A clock that only the waits advance: what it shows is the order of the work, and always the
    same.
    """

    def time(self) -> float:
        return self._selector_.skipped_s


class _Skipping(selectors.DefaultSelector):
    skipped_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(None if timeout is None else 0)
        if not ready and timeout:
            self.skipped_s += timeout
        return ready


def ideal(runs: int, *, seed: int) -> float:
    """Seconds until the last of these answers, where each begins the moment one of the IN_FLIGHT
    places is free.
    """
    draw = random.Random(seed)
    free = [0.0] * IN_FLIGHT
    last = 0.0
    for _ in range(runs):
        end = heapq.heappop(free) + draw.uniform(*LATENCY_S)
        heapq.heappush(free, end)
        last = max(last, end)
    return last


def _growth(rss: Sequence[tuple[int, int]]) -> float:
    """MB per 1,000 runs, from the second third of a run to its end: before that caches fill."""
    (runs, before), (more, after) = rss[len(rss) // 3], rss[-1]
    return (after - before) / 1e6 / (more - runs) * 1000


def _rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


if __name__ == "__main__":
    profile = cProfile.Profile()
    writer = Writer()
    taken = profile.runcall(
        play, int(sys.argv[1]) if len(sys.argv) > 1 else 4000, seed=0, writer=writer
    )
    print(
        f"{taken:.2f} s, ideal {ideal(writer.runs, seed=0):.2f} s, {_growth(writer.rss):.3f} MB "
        f"per 1,000 runs"
    )
    pstats.Stats(profile).sort_stats("tottime").print_stats(35)
