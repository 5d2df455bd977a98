"""Starts the laboratory's processes in milliseconds: one process imports everything once and forks
the others.

    python -m tests.helpers.lab.nursery      stdin: JSON orders; stdout: what happens to them, as JSON; both in frames

A child that was killed by a signal has the code -signal.  All children end with the nursery, and
the nursery with its stdin.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import selectors
import signal
import sys
import traceback
from typing import Any, NoReturn

import msgspec

from rft import fault_injection as faults
from rft.worker import framing
from rft.worker.parent import die_with_parent
from tests.helpers.lab import roles
from tests.helpers.lab.plan import Plan


class Order(msgspec.Struct, kw_only=True):
    """Start one process: `role` is buffer, explorer or trainer."""

    tag: str
    role: str
    plan: Plan
    number: int = 0  # of the explorer
    fault: str = ""  # for RFT_FAULT
    # die at this database event (before or after a statement, or at a commit); 0 = never
    sql: int = 0
    # these writes below the run's folder fail with `error` (0: are torn, and kill); 0 = none
    first_write: int = 0
    last_write: int = 0
    error: int = 0


def say(**values: Any) -> None:
    # by one write, so that processes do not get between each other's
    framing.send(1, msgspec.json.encode(values))


def main() -> None:
    children: dict[int, str] = {}
    events = selectors.DefaultSelector()
    read_end, write_end = os.pipe()
    for fd in (read_end, write_end):
        os.set_blocking(fd, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(write_end)
    events.register(0, selectors.EVENT_READ)
    events.register(read_end, selectors.EVENT_READ)
    while True:
        for key, _ in events.select():
            if key.fd == read_end:
                os.read(read_end, 4096)
                _reap(children)
                continue
            try:
                order = msgspec.json.decode(framing.receive(0), type=Order)
            except framing.ChannelClosed:
                return
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                events.close()
                _child(order)
            children[pid] = order.tag
            say(born=order.tag, pid=pid)


def _reap(children: dict[int, str]) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
        if not pid:
            return
        if os.WIFSTOPPED(status):
            say(stopped=children[pid])
            continue
        say(exit=children.pop(pid), code=os.waitstatus_to_exitcode(status))


def _child(order: Order) -> NoReturn:
    code = 1
    try:
        die_with_parent()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.environ[faults.VARIABLE] = order.fault
        plan = order.plan
        os.chdir(plan.root)
        log = os.open(
            f"{order.role}{order.number}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600
        )
        os.dup2(log, 2)
        if order.first_write or plan.power_loss or plan.clock:
            shadow = str(plan.shadow) if plan.power_loss else ""
            writes = (ctypes.c_long(order.first_write), ctypes.c_long(order.last_write))
            ctypes.CDLL(None).lab_arm(
                str(plan.run).encode(), shadow.encode(), *writes, order.error, plan.clock
            )
        if order.sql:
            die_at(order.sql)
        events = roles.Events(
            plan, order.tag.split("|")[1], lambda event: say(told=order.tag, event=event)
        )
        code = asyncio.run(roles.guarded(_role(order, events), events))
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stderr.flush()
        os._exit(code)


async def _role(order: Order, events: roles.Events) -> int:
    if order.role == "buffer":
        return await roles.buffer(order.plan, events)
    if order.role == "explorer":
        return await roles.explorer(order.plan, events, order.number)
    return await roles.trainer(order.plan, events)


def die_at(nth: int) -> None:
    """SIGKILL to this process at the nth database event: before or after a statement, or at a
    commit.
    """
    from sqlalchemy import event
    from sqlalchemy.engine import Engine

    seen = 0

    def count(*_: Any) -> None:
        nonlocal seen
        seen += 1
        if seen == nth:
            os.kill(os.getpid(), signal.SIGKILL)

    for name in ("before_cursor_execute", "after_cursor_execute", "commit"):
        event.listen(Engine, name, count)


if __name__ == "__main__":
    main()
