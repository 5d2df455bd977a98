"""The three processes of the laboratory: a real buffer behind a socket, an explorer and a trainer
that speak to it.

Explorer and trainer are models: they make rows, chain hashes for weights, and write real
checkpoints.  What each was told is appended to `events/`, one JSON line per answer, so that a judge
can compare it with the files of the run.  Each returns an exit code.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from rft.buffer.buffer import Buffer
from rft.errors import Fenced, RftError
from rft.fault_injection import fault
from rft.trainer.checkpoint import manifest as manifests
from rft.trainer.checkpoint.checkpoints import Checkpoints
from rft.types.block import decode, encode
from rft.types.ids import Version
from rft.types.ports import Consumption, Lease
from tests.helpers.lab.plan import Plan, learn
from tests.helpers.lab.wire import Client, serve

TOLD = ("ready", "began", "finished")  # events that the supervisor learns of
SOCKET = "s"  # relative: the path of a socket is short
DONE, FENCED, LOST, FAILED = (
    0,
    71,
    72,
    73,
)  # exit codes: all done; another trainer took over; the buffer is gone; it gave an error


class Events:
    """What one process was told; a line is one write, so it is whole or absent."""

    def __init__(self, plan: Plan, role: str, tell: Callable[[str], None]) -> None:
        path = plan.events / f"{role}.jsonl"
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._tell = tell

    def say(self, event: str, **values: Any) -> None:
        os.write(
            self._fd,
            msgspec.json.encode({"event": event, "at": time.monotonic(), **values}) + b"\n",
        )
        if event in TOLD:
            self._tell(event)


# ---------------------------------------------------------------- buffer


async def buffer(plan: Plan, events: Events) -> int:
    """Serves the buffer until SIGTERM."""
    it = Buffer(plan.settings())
    await it.open()
    gate = Gate(plan)

    async def start_lineage(parent: list[int] | None, consumption: dict[str, Any] | None) -> Any:
        known = None if consumption is None else msgspec.convert(consumption, Consumption)
        start = await it.start_lineage(Version(*parent) if parent else None, known)
        await gate.begin(start.lineage, start.cursor)
        events.say(
            "lineage", lineage=start.lineage, orphaned=start.orphaned, available=start.available
        )
        return start

    methods = {
        "start_lineage": start_lineage,
        "publish": gate.publish,
        "join": gate.join,
        "may_explore": gate.may_explore,
        "replaced": gate.replaced,
        **{
            name: getattr(it, name)
            for name in (
                "append",
                "room",
                "close_batch",
                "stored_groups",
                "finish",
                "lease",
                "use",
                "discard",
                "consumption",
            )
        },
    }
    server = await serve(SOCKET, methods)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    events.say("ready")
    await stop.wait()
    server.close()
    await it.close()
    return DONE


class Gate:
    """What the synchronizer does in a real run: who is the trainer, which weights are served, who
    may go on.
    """

    def __init__(self, plan: Plan) -> None:
        self._offset = plan.offset
        self._changed = asyncio.Condition()
        self._lineage = self._cursor = 0
        self._version: Version | None = None

    async def begin(self, lineage: int, cursor: int) -> None:
        async with self._changed:
            self._lineage = lineage
            self._cursor = cursor
            self._version = None
            self._changed.notify_all()

    async def publish(self, lineage: int, step: int) -> None:
        self._fence(lineage)
        async with self._changed:
            self._version = Version(lineage, step)
            self._changed.notify_all()

    async def join(self, after: int) -> tuple[int, int]:
        """(lineage, cursor) of the first trainer later than `after` that has published its weights."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: self._lineage > after and self._version is not None
            )
            return self._lineage, self._cursor

    async def may_explore(self, lineage: int, batch: int) -> Version:
        def open_now() -> bool:
            self._fence(lineage)
            return self._version is not None and self._version.step >= batch - self._offset

        async with self._changed:
            await self._changed.wait_for(open_now)
            assert self._version is not None
            return self._version

    async def replaced(self, lineage: int) -> None:
        """Wait until another trainer has taken over; raises Fenced then."""
        async with self._changed:
            await self._changed.wait_for(lambda: lineage != self._lineage)
        self._fence(lineage)

    def _fence(self, lineage: int) -> None:
        if lineage != self._lineage:
            raise Fenced(f"lineage {lineage} is over, {self._lineage} has begun")


# ---------------------------------------------------------------- explorer


async def explorer(plan: Plan, events: Events, number: int) -> int:
    """Explores every batch that the trainer will ask for; what the buffer holds is not explored
    again.  It lives on until it is ended.
    """
    client = await Client.connect(
        SOCKET, name="explorer", duplicate=plan.duplicate, patience=plan.patience
    )
    line, cursor = await client.call("join", 0)
    held = {
        (b, t): ok for b, t, ok in await client.call("stored_groups", line, cursor, explorer=number)
    }
    events.say("joined", lineage=line, cursor=cursor, held=len(held))
    for batch in range(cursor, plan.steps):
        version = Version(*await client.call("may_explore", line, batch))
        await client.call("room", line, batch, explorer=number)
        todo = [(task, ok) for task, ok in plan.tasks(batch) if (batch, task) not in held]
        fault("lab.explorer.group")
        most = todo[:-1]
        last = todo[-1:]
        await asyncio.gather(
            *(_offer(plan, client, events, line, number, batch, task, version) for task in most)
        )
        fault("lab.explorer.mid_batch")
        for task in last:
            await _offer(plan, client, events, line, number, batch, task, version)
        fault("lab.explorer.batch")
        good = plan.groups
        bad = len(plan.tasks(batch)) - plan.groups
        reasons = {"filtered": bad} if bad else {}
        await client.call(
            "close_batch",
            line,
            batch,
            accepted=good,
            expected=good,
            reasons=reasons,
            explorer=number,
        )
        events.say("closed", lineage=line, batch=batch)
    await client.call("finish", line, "all batches are explored", explorer=number)
    events.say("finished", lineage=line)
    await client.call("replaced", line)
    return DONE


async def _offer(
    plan: Plan,
    client: Client,
    events: Events,
    line: int,
    number: int,
    batch: int,
    task: tuple[int, bool],
    version: Version,
) -> None:
    rows = plan.rows(line, number, batch, task[0], version)
    fault("lab.explorer.append.before")
    reason = "" if task[1] else "filtered"
    answer = await client.call(
        "append",
        line,
        encode(rows),
        accepted=task[1],
        reason=reason,
        explorer=number,
        images=plan.files([(batch, task[0])]),
    )
    events.say("acked", group=str(rows[0].group), rows=[str(x.id) for x in rows], **answer)
    fault("lab.explorer.append.after")


# ---------------------------------------------------------------- trainer


async def trainer(plan: Plan, events: Events) -> int:
    """From the newest whole checkpoint to the last step; a wait that ends without a batch ends the
    process.
    """
    client = await Client.connect(SOCKET, name="trainer", patience=plan.patience)
    found = manifests.latest(plan.checkpoints)
    parent = found.version if found else None
    weights = (found.folder / "trainer" / "weights").read_text() if found else "base"
    start = await client.call("start_lineage", parent, found.consumption if found else None)
    line = int(start["lineage"])
    step = parent.step if parent else 0
    events.say("began", lineage=line, parent=parent, step=step)
    if plan.duplicate:
        client = await Client.connect(
            SOCKET, name="trainer", duplicate=True, patience=plan.patience
        )
    store = Checkpoints(plan.checkpoints, keep=0)
    await client.call("publish", line, step)
    while step < plan.steps:
        step += 1
        lease = await _lease(plan, client, line, step)
        fault("lab.trainer.forward")
        rows = decode(lease.frame)
        events.say("leased", lineage=line, step=step, rows=len(rows))
        if plan.skipped(step):
            await client.call("discard", line, step, "nonfinite")
        else:
            weights = learn(weights, rows)
            fault("lab.trainer.optimizer")
            await client.call("use", line, step, logprobs=plan.logprobs(rows, step))
        events.say(
            "skipped" if plan.skipped(step) else "used",
            lineage=line,
            step=step,
            rows=[str(x.id) for x in rows],
        )
        fault("lab.trainer.used")
        if step % plan.save_interval == 0 or step == plan.steps:
            await _save(store, client, line, step, parent, weights)
            events.say("saved", lineage=line, step=step)
        await client.call("publish", line, step)
    return DONE


async def _lease(plan: Plan, client: Client, line: int, step: int) -> Lease:
    groups = plan.groups * plan.explorers
    answer = await client.call(
        "lease",
        line,
        step,
        groups=groups,
        rows=None,
        deadline_s=plan.deadline_s,
        max_staleness=None,
    )
    lease = msgspec.convert(answer, Lease)
    expected = sorted(
        (e, step - 1, t, r)
        for e in range(plan.explorers)
        for t in range(plan.groups)
        for r in range(plan.runs)
        if not plan.fails(step - 1, t, r)
    )
    given = [(x.id.explorer, x.id.batch, x.id.task, x.id.run) for x in decode(lease.frame)]
    assert given == expected, f"step {step} was given {given}, expected {expected}"
    files = plan.files((step - 1, task) for task in range(plan.groups))
    assert lease.images == files, f"step {step} was given the images {sorted(lease.images)}"
    return lease


async def _save(
    store: Checkpoints, client: Client, line: int, step: int, parent: Version | None, weights: str
) -> None:
    consumption = msgspec.convert(await client.call("consumption", line, step), Consumption)

    async def fill(folder: Path) -> dict[str, str]:
        (folder / "trainer").mkdir()
        (folder / "trainer" / "weights").write_text(weights)
        fault("lab.trainer.checkpoint.files")
        return {}

    await store.save(Version(line, step), parent, consumption, fill)
    fault("lab.trainer.checkpoint.saved")


async def guarded(role: Awaitable[int], events: Events) -> int:
    """The exit code of a role that may lose its buffer or be fenced off."""
    try:
        return await role
    except Fenced as e:
        events.say("fenced", why=str(e))
        return FENCED
    except ConnectionError as e:
        events.say("lost", why=str(e))
        return LOST
    except (RftError, OSError) as e:  # an OSError: the checkpoint could not be written
        events.say("failed", kind=type(e).__name__, why=str(e))
        return FAILED
