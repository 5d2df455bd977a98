"""Agents that know only OpenAI's protocol, as workflows: their calls are recorded on the way.

    @workflow("my_agent")
    class MyAgent(AgentWorkflow):
        async def agent(self, task, base_url, api_key):
            client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
            ...
            return 1.0 if answer == task.truth else 0.0

An agent that is an ordinary function runs in a thread of its own; one that is a program, below a
process that ends all it has started.

Knows the endpoint, not the engine.  Invariant: when the run is over no call of its agent is under
way, and its program is gone, with everything that it has started.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rft.reward.base import checked
from rft.types.completion import Layout, Transcript
from rft.types.task import Task
from rft.worker import keeper
from rft.worker.threads import unblocked
from rft.workflow.base import RunContext, Workflow
from rft.workflow.endpoint import serve
from rft.workflow.endpoint_sessions import Rule
from rft.workflow.tools import missing

_TAIL = 16 << 10  # bytes of a program's output that are kept
_CLOSE_S = 5.0  # for a killed program, and all that it has started, to be gone
_TOLD = 2000  # characters of its error output in a failed record
# of our environment; the rest holds keys and is none of a program's business
_PASSED_ON = re.compile(
    r"PATH|PYTHONPATH|HOME|USER|LOGNAME|SHELL|LANG|LC_\w+|TZ|TERM|TMPDIR|VIRTUAL_ENV|LD_LIBRARY_PATH|SSL_CERT_\w+|REQUESTS_CA_BUNDLE|NO_PROXY|no_proxy"
    r"|OMP_NUM_THREADS|RFT_RUN_ID|RFT_LEFTOVER_MARK"
)
_CLOSING: set[asyncio.Task[None]] = set()


class AgentFailed(Exception):
    """The agent's program ended with an error."""


class AgentWorkflow(Workflow):
    """Write `agent`.  What it returns is the run's reward: a number, a dict of parts, a `Score`.

    None: the taskset's reward; where the taskset names none, or with `agent_reward`, what was
    posted to /v1/reward. `layout`: how its calls become experiences.  `sampling`: whose sampling
    arguments hold; "request" lets the agent choose, which training on-policy does not allow (see
    docs/howto/agent.md).
    """

    layout: ClassVar[Layout] = "chains"
    sampling: ClassVar[Rule] = "taskset"
    agent_reward: bool = False  # what the agent posts counts before the taskset's reward

    def agent(self, task: Task, base_url: str, api_key: str) -> Any:
        """Plays one run; may be `async`."""
        raise NotImplementedError(
            f"{type(self).__name__} must have a method agent(self, task, base_url, api_key)"
        )

    async def run(self, task: Task, ctx: RunContext) -> Transcript:
        async with serve(
            ctx, task, sampling=self.sampling, agent_reward=self.agent_reward
        ) as session:
            returned = await session.watch(
                unblocked(self.agent, "the agent", task, session.base_url, session.api_key)
            )
            info: dict[str, Any] = {}
            if isinstance(returned, Said):
                returned, info = None, {"agent_output": str(returned)}
            if session.unused is not None:
                info["agent_reward"] = session.unused
            score = session.score if returned is None else checked(returned)
        return ctx.transcript(score=score, info=info, layout=self.layout)


class Said(str):
    """What a program printed; kept with the experience."""


class CommandArgs(BaseModel):
    """A program that is an agent."""

    model_config = ConfigDict(extra="forbid")

    command: list[str] = Field(min_length=1, description="program and arguments; no shell")
    env: dict[str, str] = Field(default_factory=dict, description="further environment variables")
    pass_env: list[str] = Field(
        default_factory=list,
        description="names of variables of rft's own environment that it gets too",
    )
    agent_reward: bool = Field(
        False, description="the reward that it posts counts before that of the taskset"
    )

    @model_validator(mode="after")
    def _there(self) -> CommandArgs:
        if why := missing(self.command[0], self.env):
            raise ValueError(why)
        return self


class CommandAgent(AgentWorkflow):
    """A program as agent, one process (group) for each run.

    It finds OPENAI_BASE_URL and OPENAI_API_KEY in its environment, of ours only what says where
    things are (PATH, HOME, LANG ...), and the task as one JSON object on its standard input:
    {prompt, messages, tools}; the truth stays here.  The taskset's reward scores it, or where there
    is none what it posts to /v1/reward.  Any exit code but 0 fails the run, with the end of its
    error output.
    """

    def __init__(self, **args: Any) -> None:
        self.args = CommandArgs(**args)
        self.agent_reward = self.args.agent_reward

    async def agent(self, task: Task, base_url: str, api_key: str) -> Said:
        given = {"prompt": task.prompt, "messages": task.chat(), "tools": list(task.tools)}
        ours = {
            name: v
            for name, v in os.environ.items()
            if _PASSED_ON.fullmatch(name) or name in self.args.pass_env
        }
        env = {**ours, **self.args.env, "OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key}
        pipe = asyncio.subprocess.PIPE
        held, lifeline = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", keeper.__file__, str(held), *self.args.command),
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                env=env,
                pass_fds=(held,),
            )
        except BaseException:
            os.close(lifeline)
            raise
        finally:
            os.close(held)
        assert (
            process.stdin is not None and process.stdout is not None and process.stderr is not None
        )
        out = asyncio.ensure_future(_tail(process.stdout))
        err = asyncio.ensure_future(_tail(process.stderr))
        feeding = asyncio.ensure_future(_feed(process.stdin, json.dumps(given)))
        try:
            code = await process.wait()
        finally:
            os.close(lifeline)
            closing = asyncio.ensure_future(_ended(process, out, err, feeding))
            _CLOSING.add(closing)  # it goes on where the run is given up
            closing.add_done_callback(_CLOSING.discard)
            await asyncio.shield(closing)
        if out.cancelled() or err.cancelled():
            raise AgentFailed(
                f"{self.args.command[0]} has ended, but something that it has started holds its "
                f"output"
            )
        if code != 0:
            said = err.result().strip()[-_TOLD:] or "no error output"
            raise AgentFailed(f"{self.args.command[0]} ended with exit code {code}: {said}")
        return Said(out.result())


async def _ended(process: asyncio.subprocess.Process, *streams: asyncio.Future[Any]) -> None:
    """Returns when the program and all that it has started are gone, or are left behind."""
    waiting = asyncio.ensure_future(process.wait())
    await asyncio.wait([waiting, *streams], timeout=_CLOSE_S)
    for work in (waiting, *streams):
        work.cancel()
    if process.returncode is None:
        process.kill()
    await asyncio.gather(waiting, *streams, return_exceptions=True)


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
