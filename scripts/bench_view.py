"""`rft view` on a run of a million rollouts, and beside a run that goes on.

Depends on addresses of pages.  Invariant: the run is written through the buffer as every run is,
and what a page shows is compared with `rft buffer query` before its time counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import bench_harness as harness
import numpy as np
import psutil
from bench_race import within

from rft.buffer.buffer import Buffer
from rft.buffer.query import open_run
from rft.buffer.settings import BufferSettings
from rft.types.block import encode
from rft.types.completion import VersionSpan
from rft.types.experience import Experience, SamplingRecord
from rft.types.ids import GroupId, Version
from rft.types.task import SamplingArgs

GROUP = 8  # a batch, and a step, of 256 rollouts
GROUPS = 32
PAGE_S = 0.2
PAINT_S = 1.0
MEMORY_MB = 300
TASKS = 5000
ROUNDS = 12  # each page so often, in turn
REAL = 64  # steps that the buffer has written
PROMPT = 40  # tokens
RESPONSE = 60


def view_million(quick: bool) -> harness.Result:
    """Pages of `rft view` on a run of 1,000,000 rollouts (quick: 50,000), each limit / what was
    measured; at least 1.

    `page_p95_at_most`: 0.2 s for each page, asked for in turn; `paint_at_most`: 1 s from opening a
    page to its first content in Chromium, where there is one, the first page after the viewer has
    begun included; `memory_at_most`: 300 MB, the server's peak.  `index_s` is from the start of the
    viewer to the first answer that needs the index of all rollouts.
    """
    steps = (50_000 if quick else 1_000_000) // (GROUP * GROUPS)
    with tempfile.TemporaryDirectory(prefix="rft-bench-") as name:
        run_dir = Path(name) / "run"
        began = time.perf_counter()
        asyncio.run(written(run_dir, steps))
        harness.note(f"written in {time.perf_counter() - began:.0f} s")
        with Viewer(run_dir, visited=False) as viewer:
            painted = first_paints(viewer)
        with Viewer(run_dir) as viewer:
            compared(run_dir, viewer)
            seconds: dict[str, list[float]] = {page: [] for page in pages(steps)}
            for _ in range(ROUNDS):
                for page, path in pages(steps).items():
                    seconds[page].append(viewer.get(path)[1])
            peak = viewer.peak_mb()
            index_s = viewer.index_s
    every = [s for page in seconds.values() for s in page]
    low = round(MEMORY_MB / peak, 3)
    checks = [
        within("page_p95_at_most_200_ms", every, PAGE_S, 0.95),
        *([within("paint_at_most_1_s", list(painted.values()), PAINT_S, 1.0)] if painted else []),
        harness.Check("memory_at_most_300_mb", low, low, low, 1.0),
    ]
    ours = {
        "rollouts": steps * GROUP * GROUPS,
        "index_s": round(index_s, 1),
        "peak_mb": round(peak),
        "p95_ms": {page: round(1e3 * float(np.quantile(s, 0.95))) for page, s in seconds.items()},
        "paint_ms": {page: round(1e3 * s) for page, s in painted.items()},
    }
    return harness.Result(
        "view_million",
        checks,
        ours,
        {},
        {},
        versions=harness.versions("aiohttp", "sqlalchemy", "numpy"),
    )


def view_beside_a_run(quick: bool) -> harness.Result:
    """Seconds of the train steps of a small run alone / with `rft view` beside it; at least 0.98.

    An open overview is read anew at each change, at most once a second, as a browser does;
    `share_of_a_core` is what the viewer took.
    """
    with tempfile.TemporaryDirectory(prefix="rft-bench-") as name:
        live, share = beside_a_run(Path(name), 2 if quick else 6)
    return harness.Result("view_beside_a_run", [live], {"share_of_a_core": round(share, 3)}, {}, {})


# ---------------------------------------------------------------- the run


async def written(run_dir: Path, steps: int) -> None:
    """A run of `steps` train steps, each trained on its batch as soon as that was stored.

    The first `REAL` are written through the buffer; the others are copies of their rows in the
    ledger's tables, with ids, batches, steps and weights of their own, and without a payload that
    could be shown.
    """
    buffer = Buffer(
        BufferSettings(folder=run_dir / "buffer", capacity=1 << 20, capacity_bytes=1 << 40)
    )
    await buffer.open()
    await buffer.start_lineage(None, None)
    writer = buffer.writer(1)
    reader = buffer.reader(1)
    rng = np.random.default_rng(0)
    lines: list[dict[str, Any]] = []
    for batch in range(REAL):
        rows = [experience(rng, batch, task, run) for task in range(GROUPS) for run in range(GROUP)]
        frames = (encode(rows[at : at + GROUP]) for at in range(0, len(rows), GROUP))
        await asyncio.gather(*(writer.append(frame, accepted=True) for frame in frames))
        await writer.close_batch(batch, accepted=GROUPS, expected=GROUPS, reasons={})
        await reader.lease(batch + 1, groups=GROUPS, rows=None, deadline_s=60, max_staleness=None)
        await reader.use(batch + 1)
        lines += records(rows, batch + 1)
    await buffer.close()
    with (
        contextlib.closing(
            sqlite3.connect(run_dir / "buffer" / "experience_buffer.db")
        ) as database,
        database,
    ):
        copied(database, steps)
    for batch in range(REAL, steps):
        at = 3 * (batch % REAL)
        lines += [
            {**line, "step": batch + 1, "time": 1.0e9 + 10.0 * (batch + 1)}
            for line in lines[at : at + 3]
        ]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run_dir / "state.json").write_text(
        json.dumps({"phase": "done", "pid": 1, "time": time.time(), "version": f"1:{steps}"})
    )


def copied(database: sqlite3.Connection, steps: int) -> None:
    """Rows of batch b become those of b + REAL, b + 2 REAL, ... below `steps`, in this order."""
    later = "(t.batch + k.number * :real)"
    group = f"printf('0001.00.%08d.%06d', {later}, t.task)"
    row = f"printf('0001.00.%08d.%06d.%04d.%02d.%04d', {later}, t.task, t.run, t.attempt, t.step)"
    moved = {name: f"t.{name} + k.number * :real" for name in ("oldest_step", "newest_step")}
    index = {"task_index": f"({later} * {GROUPS} + t.task) % {TASKS}"}
    uses = {"experience": row, "step": "s.step + k.number * :real"}
    beside = {"texts": {"experience": row}, "uses": uses, "leases": uses}
    itself = {
        "groups": {"id": group, "batch": later},
        "batches": {"batch": later},
        "experiences": {"id": row, "group_id": group, "batch": later, **index, **moved},
    }
    numbers = (
        "WITH RECURSIVE k(number) AS (SELECT 1 UNION ALL SELECT number + 1 FROM k WHERE "
        "number < :most)"
    )
    given = {"real": REAL, "most": steps // REAL, "steps": steps}
    for table, new in (beside | itself).items():
        names = [name for _, name, *_ in database.execute(f"PRAGMA table_info({table})")]
        old, source = (
            ("t", f"{table} t")
            if table in itself
            else ("s", f"{table} s JOIN experiences t ON t.id = s.experience")
        )
        chosen = ", ".join(new.get(name, f"{old}.{name}") for name in names)
        where = f"t.batch < :real AND {later} < :steps ORDER BY k.number, {old}.rowid"
        database.execute(
            f"INSERT INTO {table} {numbers} SELECT {chosen} FROM {source} CROSS JOIN k WHERE "
            f"{where}",
            given,
        )


def experience(rng: np.random.Generator, batch: int, task: int, run: int) -> Experience:
    """One rollout: most are complete, some truncated, some scored between 0 and 1."""
    tokens = rng.integers(0, 49_000, PROMPT + RESPONSE).astype(np.int32)
    mask = np.arange(len(tokens)) >= PROMPT
    index = (batch * GROUPS + task) % TASKS
    reward = float(rng.random()) if run % 4 == 0 else float(run % 2)
    answer = " ".join(f"w{t}" for t in tokens[PROMPT:])
    return Experience(
        id=GroupId(1, 0, batch, task).run(run),
        taskset=f"set{index % 7}",
        task_index=index,
        workflow="math",
        status="truncated" if run == 7 and task % 8 == 0 else "complete",
        finish_reason="stop",
        tokens=tokens,
        loss_mask=mask,
        logprobs=np.where(mask, -rng.exponential(1.0, len(tokens)), 0.0).astype(np.float32),
        version_spans=(VersionSpan(Version(1, batch), PROMPT, len(tokens)),),
        sampling=(
            SamplingRecord(
                start=PROMPT, end=len(tokens), sampling=SamplingArgs(), engine="engine-0"
            ),
        ),
        reward=reward,
        reward_parts={"accuracy": reward},
        prompt_text=f"question {index}",
        response_text=answer,
        messages=(
            {"role": "user", "content": f"question {index}"},
            {"role": "assistant", "content": answer},
        ),
    )


def records(rows: Sequence[Experience], step: int) -> Iterator[dict[str, Any]]:
    """What explorer, trainer and synchronizer say of a step: the usual number of metrics."""
    mean = statistics.fmean(x.reward or 0.0 for x in rows)
    now = 1.0e9 + 10.0 * step
    explorer = {
        "rollout/reward/mean": mean,
        "rollout/response_length/mean": float(RESPONSE),
        "rollout/time/batch": 4.0,
    }
    trainer = {
        "experience/reward/mean": mean,
        "experience/response_tokens": float(RESPONSE * len(rows)),
        "perf/step_s": 5.0,
        "time/train_s": 4.0,
    }
    sync = {"sync/total_s": 1.0, "sync/load_s": 0.5}
    for role, values, metrics in (
        ("explorer", explorer, 40),
        ("trainer", trainer, 70),
        ("synchronizer", sync, 25),
    ):
        values |= {f"{role}/metric_{i}": (step * (i + 1)) % 97 / 97 for i in range(metrics)}
        yield {"role": role, "step": step, "time": now, "values": values}


# ---------------------------------------------------------------- the viewer


class Viewer:
    """`rft view` in a process of its own."""

    def __init__(self, folder: Path, *, visited: bool = True) -> None:
        """`visited`: pages of the run have been opened before, and its index is read."""
        self._visited = visited
        self._began = time.perf_counter()
        command = [sys.executable, "-m", "rft.cli.main", "view", str(folder), "--port", "0"]
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, cwd=harness.ROOT, text=True
        )
        assert self._process.stdout is not None
        self.address = re.split(r"\s+", self._process.stdout.readline())[1]
        self.index_s = 0.0
        self.run = f"{self.address}run/{folder.name}/"

    def __enter__(self) -> Self:
        if self._visited:
            self.get("")
            self.get("rollouts?order=worst")
        self.index_s = time.perf_counter() - self._began
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(30)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def get(self, path: str) -> tuple[str, float]:
        """A page, and its seconds to the last byte."""
        url = path if path.startswith("http") else self.run + path
        began = time.perf_counter()
        with urllib.request.urlopen(url, timeout=120) as answer:
            text = answer.read().decode()
        return text, time.perf_counter() - began

    def peak_mb(self) -> float:
        """Largest resident memory so far."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) / 1000  # type: ignore[index]

    def cpu_s(self) -> float:
        used = psutil.Process(self._process.pid).cpu_times()
        return float(used.user + used.system)


def pages(steps: int) -> dict[str, str]:
    """What a person opens."""
    last = steps - 1
    row = f"0001.00.{REAL // 2:08d}.000003.0002.00.0000"
    return {
        "overview": "",
        "curves": "curves.json",
        "curves by time": "curves.json?x=time",
        "timeline": "timeline.svg",
        "newest": "rollouts",
        "worst of step": f"rollouts?step={last // 2}&order=worst",
        "batch": f"rollouts?batch={last // 3}",
        "best of all": "rollouts?order=best",
        "best, page 2": f"rollouts?order=best&after={steps * 128}",
        "taskset, worst": "rollouts?taskset=set3&order=worst",
        "truncated, longest": "rollouts?status=truncated&order=longest",
        "reward range": "rollouts?low=0.4&high=0.40001",
        "weights": f"rollouts?version={last // 2}",
        "none": "rollouts?taskset=nothing",
        "text": "rollouts?text=w48999+w1",
        "text in a step": f"rollouts?text=w1&step={last // 2}",
        "rollout": f"rollout/{row}",
        "by weights": f"rollout/{row}?colour=version",
        "group": f"group/{row[:27]}",
        "task": "task?taskset=set3&task=3",
        "sql": "sql?q=SELECT+*+FROM+v_experiences+LIMIT+100",
    }


def compared(run_dir: Path, viewer: Viewer) -> None:
    """Raises AssertionError where a page shows other rows than SQL gives."""
    with open_run(run_dir) as questions:
        for path, sql in (
            (
                "rollouts?step=5&order=worst",
                "SELECT id FROM v_experiences WHERE used_step = 5 ORDER BY reward, id LIMIT 50",
            ),
            (
                "rollouts?order=best",
                "SELECT id FROM experiences ORDER BY reward DESC, rowid LIMIT 50",
            ),
            (
                "rollouts?status=truncated&order=worst",
                "SELECT id FROM experiences WHERE status = 'truncated' ORDER BY reward, rowid "
                "LIMIT 50",
            ),
        ):
            with questions.ask(sql) as answer:
                expected = [id for (id,) in answer.rows]
            assert re.findall(r'/rollout/([\d.]+)"', viewer.get(path)[0]) == expected, path
        with questions.ask(
            "SELECT count(*) FROM v_experiences WHERE taskset = 'set3' AND reward >= 0.5"
        ) as answer:
            ((count,),) = answer.rows
    assert f"{count} rollouts" in viewer.get("rollouts?taskset=set3&low=0.5")[0], count


def first_paints(viewer: Viewer) -> dict[str, float]:
    """Seconds from navigation to the first content in a real browser; {} where there is none."""
    if shutil.which("chromium") is None or shutil.which("chromedriver") is None:
        harness.note("no chromium with its driver: nothing was painted")
        return {}
    with chromium() as window:
        found = {}
        for page in (
            "",
            "rollouts",
            "rollouts?step=5&order=worst",
            f"rollout/0001.00.{REAL // 2:08d}.000003.0002.00.0000",
        ):
            window.get(viewer.run + page)
            script = (
                "return (performance.getEntriesByName('first-contentful-paint')[0] || {}).startTime"
            )
            ends = time.monotonic() + 20
            while (at := window.execute_script(script)) is None and time.monotonic() < ends:
                window.execute_async_script("setTimeout(arguments[0], 50)")
            found[page or "overview"] = at / 1000
        return found


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """A window of Debian's Chromium."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--disable-gpu",
        "--hide-scrollbars",
    ):
        options.add_argument(argument)
    window = webdriver.Chrome(
        options=options, service=webdriver.ChromeService(shutil.which("chromedriver"))
    )
    try:
        yield window
    finally:
        window.quit()


# ---------------------------------------------------------------- beside a run


def beside_a_run(folder: Path, rounds: int) -> tuple[harness.Check, float]:
    """Seconds of the train steps of a small run without and with a viewer, and the part of a core
    that the viewer took.
    """
    model = folder / "model"
    subprocess.run(
        [sys.executable, "-m", "rft.testing.tiny", model],
        check=True,
        cwd=harness.ROOT,
        stdout=subprocess.DEVNULL,
    )
    number = 0
    shares = []

    def run(viewed: bool) -> float:
        nonlocal number
        number += 1
        name = f"live{number}"
        command = [
            sys.executable,
            "-m",
            "rft.cli.main",
            "run",
            "--in-process",
            "--config",
            "examples/tiny/config.yaml",
            f"name={name}",
            f"checkpoint_root_dir={folder}",
            f"model.model_path={model}",
            "trainer.total_steps=40",
            "explorer.eval_interval=1000",
            "explorer.eval_on_startup=false",
        ]
        started = threading.Event()
        with (
            subprocess.Popen(
                command, cwd=harness.ROOT, stdout=subprocess.PIPE, text=True
            ) as process,
            contextlib.ExitStack() as stack,
        ):
            assert process.stdout is not None
            run_dir = folder / "rft" / "examples" / name
            for line in process.stdout:
                if viewed and line.startswith("step 1/") and not started.is_set():
                    started.set()
                    viewer = stack.enter_context(Viewer(run_dir))
                    began = time.perf_counter()
                    before = viewer.cpu_s()
                    threading.Thread(target=_watches, args=(viewer,), daemon=True).start()
            if viewed:
                shares.append((viewer.cpu_s() - before) / (time.perf_counter() - began))
        records = [
            json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()
        ]
        steps = [r["values"]["perf/step_s"] for r in records if r["role"] == "trainer"]
        return float(sum(steps[10:]))

    seconds = harness.all_in_turn(
        {"alone": lambda: run(False), "viewed": lambda: run(True)}, rounds
    )
    return harness.speed_ratio(
        "live", seconds["viewed"], seconds["alone"], 0.98
    ), statistics.median(shares)


def _watches(viewer: Viewer) -> None:
    """What an open page of the overview does: hear of a change, read facts, curves and the
    timeline.
    """
    with (
        contextlib.suppress(OSError, ValueError),
        urllib.request.urlopen(f"{viewer.run}events", timeout=60) as events,
    ):
        for line in events:
            if line.startswith(b"event: changed"):
                for page in ("facts", "curves.json", "timeline.svg"):
                    viewer.get(page)
