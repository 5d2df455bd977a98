"""Agents that know only OpenAI's protocol, as workflows: their calls are recorded on the way.

    @workflow("my_agent")
    class MyAgent(AgentWorkflow):
        async def agent(self, task, base_url, api_key):
            client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
            ...
            return 1.0 if answer == task.truth else 0.0

An agent that is an ordinary function runs in a thread of its own; one that is a program, in a process group of its own.

Knows the endpoint, not the engine.  Invariant: when the run is over no call of its agent is under way, and its program is gone.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import signal
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from rft.reward.base import checked
from rft.threads import in_thread
from rft.types.completion import Layout, Transcript
from rft.types.task import Task
from rft.workflow.base import RunContext, Workflow
from rft.workflow.endpoint import Rule, RunDoor, serve

_TAIL = 16 << 10  # bytes of a program's output that are kept
_CLOSE_S = 1.0  # for a killed program to be gone
_TOLD = 2000  # characters of its error output in a failed record


class AgentFailed(Exception):
    """The agent's program ended with an error."""


class AgentWorkflow(Workflow):
    """Write `agent`.  What it returns is the run's reward: a number, a dict of parts, a `Score`.

    None: what was posted to /v1/reward, else the taskset's reward.  `layout`: how its calls become experiences.  `sampling`: whose
    sampling arguments hold; "request" lets the agent choose, which training on-policy does not allow (see docs/howto/agent.md).
    """

    layout: ClassVar[Layout] = "chains"
    sampling: ClassVar[Rule] = "taskset"

    def agent(self, task: Task, base_url: str, api_key: str) -> Any:
        """Plays one run; may be `async`."""
        raise NotImplementedError(f"{type(self).__name__} must have a method agent(self, task, base_url, api_key)")

    async def run(self, task: Task, ctx: RunContext) -> Transcript:
        async with serve(ctx, task, sampling=self.sampling) as door:
            returned = await door.watch(self._play(task, door))
            info: dict[str, Any] = {}
            if isinstance(returned, Said):
                returned, info = None, {"agent_output": str(returned)}
            score = door.score if returned is None else checked(returned)
        return ctx.transcript(score=score, info=info, layout=self.layout)

    async def _play(self, task: Task, door: RunDoor) -> Any:
        if inspect.iscoroutinefunction(self.agent):
            return await self.agent(task, door.base_url, door.api_key)
        return await in_thread(
            lambda: self.agent(task, door.base_url, door.api_key), f"agent-{door.id}", error=lambda e: _plain(e)
        )


class Said(str):
    """What a program printed; kept with the experience."""


class CommandArgs(BaseModel):
    """A program that is an agent."""

    model_config = ConfigDict(extra="forbid")

    command: list[str] = Field(min_length=1, description="program and arguments; no shell")
    env: dict[str, str] = Field(default_factory=dict, description="further environment variables")


class CommandAgent(AgentWorkflow):
    """A program as agent, one process (group) for each run.

    It finds OPENAI_BASE_URL and OPENAI_API_KEY in its environment and the task as one JSON object on its standard input: {prompt,
    messages, tools}; the truth stays here.  It posts its reward to
    /v1/reward, or the taskset's reward scores it.  Any exit code but 0 fails the run, with the end of its error output.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        self.command, self.env = list(command), dict(env or {})

    async def agent(self, task: Task, base_url: str, api_key: str) -> Said:
        given = {"prompt": task.prompt, "messages": task.chat(), "tools": list(task.tools)}
        env = {**os.environ, **self.env, "OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key}
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *self.command, stdin=pipe, stdout=pipe, stderr=pipe, env=env, start_new_session=True
        )
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        out, err = asyncio.ensure_future(_tail(process.stdout)), asyncio.ensure_future(_tail(process.stderr))
        feeding = asyncio.ensure_future(_feed(process.stdin, json.dumps(given)))
        try:
            code = await process.wait()
        finally:
            _kill(process)
            await asyncio.wait([asyncio.ensure_future(process.wait()), out, err, feeding], timeout=_CLOSE_S)
            feeding.cancel()
        if not (out.done() and err.done()):
            raise AgentFailed(f"{self.command[0]} has ended, but something it started outside its process group holds its output")
        if code != 0:
            said = err.result().strip()[-_TOLD:] or "no error output"
            raise AgentFailed(f"{self.command[0]} ended with exit code {code}: {said}")
        return Said(out.result())


def _kill(process: asyncio.subprocess.Process) -> None:
    """The program and everything it has started in its group."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # all of them have ended


async def _tail(stream: asyncio.StreamReader) -> str:
    kept = b""
    while chunk := await stream.read(1 << 16):
        kept = (kept + chunk)[-_TAIL:]
    return kept.decode(errors="replace")


async def _feed(stream: asyncio.StreamWriter, text: str) -> None:
    try:
        stream.write(text.encode())
        await stream.drain()
        stream.close()
        await stream.wait_closed()
    except (BrokenPipeError, ConnectionResetError):
        return  # it does not read its task


def _plain(error: BaseException) -> BaseException:
    """Something that a future can hold, and that ends the run alone."""
    if isinstance(error, StopIteration | SystemExit | KeyboardInterrupt):
        return AgentFailed(f"the agent raised {type(error).__name__}: {error}")
    return error
