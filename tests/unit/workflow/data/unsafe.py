"""Workflows that do what none should, each in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time

from rft.types.completion import Score
from rft.workflow.base import Workflow, workflow
from rft.workflow.isolation_wire import Isolation


@workflow("unsafe_twice")
class Twice(Workflow):
    isolated = True

    def __init__(self, tail: str = "") -> None:
        self.tail = tail

    async def run(self, task, ctx):
        messages = [*task.chat()]
        messages.append((await ctx.chat(messages, max_tokens=4)).message)
        ctx.score_step(0.5, state="first")
        messages.append({"role": "user", "content": "Sure?" + self.tail})
        await ctx.chat(messages)
        ctx.score_step(1.0, parts={"sure": 1.0})
        assert [c.text for c in ctx.completions] == ["4", "4"]
        return ctx.transcript(metrics={"pid": os.getpid()}, info={"run": ctx.run}, layout="steps")


@workflow("unsafe_samples")
class Samples(Workflow):
    isolated = True

    async def run(self, task, ctx):
        await ctx.sample(task.chat(), n=2)
        return ctx.transcript(layout="steps", score=Score(value=float(len(ctx.completions))))


@workflow("unsafe_numbers")
class Numbers(Workflow):
    isolated = True

    async def run(self, task, ctx):
        answer = await ctx.chat(task.chat())
        if ctx.run == 1:
            ctx.score_step(1.0, parts={"right": answer.text == task.truth})
            return ctx.transcript(metrics={"right": answer.text == task.truth})
        return ctx.transcript(
            score={"right": answer.text == task.truth, "short": 0.5} if ctx.run == 0 else 0.25
        )


@workflow("unsafe_impatient")
class Impatient(Workflow):
    isolated = True

    async def run(self, task, ctx):
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ctx.model("judge").generate(ctx.request(task.chat())), 0.05)
        # the late answer to the first question comes before that to the last one
        for _ in range(2):
            await ctx.chat(task.chat())
        return ctx.transcript(score=Score(value=1.0), layout="steps")


@workflow("unsafe_blocking")
class Blocking(Workflow):
    isolated = Isolation(memory_mb=256, file_mb=1)

    def __init__(self, what: str) -> None:
        self.what = what

    def run(self, task, ctx):
        ctx.chat(task.chat())
        getattr(self, self.what)()
        return ctx.transcript(score=Score(value=1.0))

    def nothing(self):
        pass

    def spins(self):
        while True:
            pass

    def sleeps_in_c(self):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
        time.sleep(10**6)

    def eats_memory(self):
        self.kept = bytearray(10**9)

    def crashes(self):
        os.kill(os.getpid(), signal.SIGSEGV)

    def leaves(self):
        os._exit(3)

    def exits(self):
        sys.exit(3)

    def writes_much(self):
        with tempfile.TemporaryFile() as file:
            file.write(bytes(2 << 20))

    def prints_much(self):
        for _ in range(1000):
            print("x" * 100_000)

    def leaks_children(self):
        subprocess.Popen(["sleep", "86399"])

    def raises(self):
        raise KeyError("my bug")


@workflow("unsafe_together")
class Together(Workflow):
    isolated = True

    async def run_group(self, task, contexts):
        await asyncio.gather(*(c.chat(task.chat()) for c in contexts))
        return [c.transcript(score=Score(value=float(c.run))) for c in contexts]
