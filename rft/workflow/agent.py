"""Workflows of agents that use OpenAI's or Anthropic's protocol; the endpoint records their calls.

    @workflow("my_agent")
    class MyAgent(AgentWorkflow):
        async def agent(self, task, base_url, api_key):
            client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
            ...
            return 1.0 if answer == task.truth else 0.0

An ordinary function runs in a thread; a program runs below a process that kills all its children.

Depends on the endpoint, not on the engine.
Invariant: after the run no call of the agent is in progress, and its program and all descendants
have ended.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from rft.images import data_url
from rft.reward.base import checked
from rft.types.completion import Layout, Score, Transcript
from rft.types.task import Task, plain_text
from rft.worker import keeper
from rft.worker.threads import unblocked
from rft.workflow.base import RunContext, Workflow
from rft.workflow.endpoint import serve
from rft.workflow.endpoint_sessions import Rule
from rft.workflow.tools import missing

_TAIL = 16 << 10  # last bytes of a program's output in the record
_CLOSE_S = 5.0  # time for a killed program and its children to end
_ERROR_CHARS = 2000  # of each of its outputs in a failed row
# environment variables that a program inherits; others may hold keys
_PASSED_ON = re.compile(
    r"PATH|PYTHONPATH|HOME|USER|LOGNAME|SHELL|LANG|LC_\w+|TZ|TERM|TMPDIR|VIRTUAL_ENV|LD_LIBRARY_PATH|SSL_CERT_\w+|REQUESTS_CA_BUNDLE|NO_PROXY|no_proxy"
    r"|OMP_NUM_THREADS|RFT_RUN_ID|RFT_LEFTOVER_MARK"
)
_PLACEHOLDER = re.compile(r"\{(prompt|base_url|api_key|home)\}")
_CLOSING: set[asyncio.Task[None]] = set()


class AgentFailed(Exception):
    """The agent's program ended with an error."""


class AgentWorkflow(Workflow):
    """Override `agent`.  It returns the run's reward: a number, a dict of parts, a `Score`, or None.

    None: the taskset's reward; the reward posted to /v1/reward where the taskset names none, or
    with `agent_reward`.  `layout`: which calls share an experience.  `sampling`: "request" lets the
    agent choose sampling arguments, which on-policy training does not allow (docs/howto/agent.md).
    """

    layout: ClassVar[Layout] = "chains"
    sampling: ClassVar[Rule] = "taskset"
    agent_reward: bool = False  # a posted reward replaces the taskset's

    def agent(self, task: Task, base_url: str, api_key: str) -> Any:
        """Play one run; may be `async`."""
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
            ends = "it sent no request"
            if isinstance(returned, ProcessOutput):
                info = {"agent_output": str(returned), **returned.info}
                ends = returned.ends or str(returned)
                returned = returned.score
            if not ctx.completions:
                raise AgentFailed(f"the agent made no model call: {session.refusal or ends}")
            if session.unused is not None:
                info["agent_reward"] = session.unused
            score = session.score if returned is None else checked(returned)
        return ctx.transcript(score=score, info=info, layout=self.layout)


class ProcessOutput(str):
    """The output of a program, for the experience's info, and more of it.

    `score`: of the run; None: the reward of the taskset or of the agent.  `ends`: the ends of
    standard output and error, for a reason; empty: the output itself.
    """

    score: Score | None = None
    info: Mapping[str, Any] = MappingProxyType({})
    ends: str = ""


def _relative(path: str) -> str:
    if (
        PurePosixPath(path).is_absolute()
        or ".." in PurePosixPath(path).parts
        or not path.strip("./")
    ):
        raise ValueError(f"{path!r} must be the path of a file below the home folder")
    return path


class ProgramArgs(BaseModel):
    """A program that is an agent.

    In `command`, `env`, `stdin` and the files of `home`, {prompt}, {base_url} (with /v1), {api_key}
    and {home} are replaced; other braces are not.
    """

    model_config = ConfigDict(extra="forbid")

    command: list[str] = Field(min_length=1, description="program and arguments; no shell")
    env: dict[str, str] = Field(default_factory=dict, description="further environment variables")
    stdin: str | None = Field(
        default=None, description="its standard input; default: the task as a JSON object"
    )
    home: dict[Annotated[str, AfterValidator(_relative)], str] | None = Field(
        default=None,
        description="texts by path: the files of a folder that is made for each run, is its HOME and "
        "working folder, and is removed after it; default: those of rft",
    )

    def placeholders(self) -> set[str]:
        """Return the names of the placeholders that are used."""
        files = (self.home or {}).values()
        texts = (*self.command, *self.env.values(), *files, self.stdin or "")
        return {name for text in texts for name in _PLACEHOLDER.findall(text)}

    def line(self, values: Mapping[str, str]) -> list[str]:
        """Return the command for these values of the placeholders."""
        return [_filled(word, values) for word in self.command]

    def variables(self, values: Mapping[str, str]) -> dict[str, str]:
        """Return the variables of `env`, then those that name the endpoint to usual clients."""
        return {
            **{name: _filled(value, values) for name, value in self.env.items()},
            "OPENAI_BASE_URL": values["base_url"],
            "OPENAI_API_KEY": values["api_key"],
            "ANTHROPIC_BASE_URL": values["base_url"].removesuffix("/v1"),
            "ANTHROPIC_API_KEY": values["api_key"],
        }

    def files(self, values: Mapping[str, str]) -> dict[str, str]:
        """Return the texts of `home`."""
        return {path: _filled(text, values) for path, text in (self.home or {}).items()}

    def input(self, task: Task, values: Mapping[str, str]) -> str:
        """Return the standard input."""
        if self.stdin is not None:
            return _filled(self.stdin, values)
        messages = data_url.as_urls(task.chat(), task.images)
        question = {"prompt": task.prompt, "messages": messages, "tools": list(task.tools)}
        return json.dumps(question)


class CommandArgs(ProgramArgs):
    """A program that runs beside rft, with its rights."""

    pass_env: list[str] = Field(
        default_factory=list,
        description="names of variables of rft's own environment that it gets too",
    )
    agent_reward: bool = Field(
        False, description="the reward that it posts counts before that of the taskset"
    )

    @model_validator(mode="after")
    def _check_program(self) -> CommandArgs:
        if reason := missing(self.command[0], self.env):
            raise ValueError(reason)
        if self.home is None and "home" in self.placeholders():
            raise ValueError("{home} needs `home: {}`, or files in it")
        return self


class CommandAgent(AgentWorkflow):
    """Runs a program as agent, one process (group) per run.

    Its environment has OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY and,
    of rft's own variables, only PATH, HOME, LANG and similar ones.  Its standard input is one JSON
    object, {prompt, messages, tools}, without the truth. The taskset's reward scores the run, or
    without one the reward posted to /v1/reward.  An exit code other than 0 fails the run, with the
    ends of its output and its error output.
    """

    def __init__(self, **args: Any) -> None:
        self.args = CommandArgs(**args)
        self.agent_reward = self.args.agent_reward

    async def agent(self, task: Task, base_url: str, api_key: str) -> ProcessOutput:
        values = {"base_url": base_url, "api_key": api_key}
        if "prompt" in self.args.placeholders():
            values["prompt"] = prompt_text(task)
        if self.args.home is None:
            return await self._play(task, values)
        with TemporaryDirectory(prefix="rft-agent-", ignore_cleanup_errors=True) as home:
            values["home"] = home
            await asyncio.to_thread(_write, self.args.files(values), home)
            return await self._play(task, values)

    async def _play(self, task: Task, values: Mapping[str, str]) -> ProcessOutput:
        """Run the program; `values`: of the placeholders."""
        stdin = self.args.input(task, values)
        inherited = {
            name: v
            for name, v in os.environ.items()
            if _PASSED_ON.fullmatch(name) or name in self.args.pass_env
        }
        home = values.get("home", "")
        env = {
            **inherited,
            **({"HOME": home} if home else {}),
            **self.args.variables(values),
        }
        command = self.args.line(values)
        pipe = asyncio.subprocess.PIPE
        keeper_end, lifeline = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", keeper.__file__, str(keeper_end), home, *command),
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                env=env,
                cwd=home or None,
                pass_fds=(keeper_end,),
            )
        except BaseException:
            os.close(lifeline)
            raise
        finally:
            os.close(keeper_end)
        assert process.stdin and process.stdout and process.stderr
        out = asyncio.ensure_future(_tail(process.stdout))
        err = asyncio.ensure_future(_tail(process.stderr))
        feeding = asyncio.ensure_future(_feed(process.stdin, stdin))
        try:
            code = await process.wait()
        finally:
            os.close(lifeline)
            closing = asyncio.ensure_future(_ended(process, out, err, feeding))
            _CLOSING.add(closing)  # also awaited after a cancelled run
            closing.add_done_callback(_CLOSING.discard)
            await asyncio.shield(closing)
        if out.cancelled() or err.cancelled():
            raise AgentFailed(
                f"{self.args.command[0]} has ended, but something that it has started holds its "
                f"output"
            )
        texts = [stream.result().strip()[-_ERROR_CHARS:] for stream in (out, err)]
        text = "\n".join(filter(None, texts)) or "no output"
        if code != 0:
            raise AgentFailed(f"{self.args.command[0]} ended with exit code {code}: {text}")
        output = ProcessOutput(out.result())
        output.ends = text
        return output


def prompt_text(task: Task) -> str:
    """Return the texts of a task's messages.  Raises ValueError for images."""
    texts = [plain_text(message.get("content")) for message in task.chat()]
    if None in texts:
        raise ValueError("a program that is an agent gets texts alone; the task has other parts")
    return "\n\n".join(filter(None, texts))


def _filled(text: str, values: Mapping[str, str]) -> str:
    return _PLACEHOLDER.sub(lambda found: values[found[1]], text)


def _write(files: Mapping[str, str], home: str) -> None:
    for path, text in files.items():
        file = Path(home, path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


async def _ended(process: asyncio.subprocess.Process, *streams: asyncio.Future[Any]) -> None:
    """Wait until the program and its children have ended, at most _CLOSE_S."""
    works = [asyncio.ensure_future(process.wait()), *streams]
    await asyncio.wait(works, timeout=_CLOSE_S)
    for work in works:
        work.cancel()
    if process.returncode is None:
        process.kill()
    await asyncio.gather(*works, return_exceptions=True)


async def _tail(stream: asyncio.StreamReader) -> str:
    tail = b""
    while chunk := await stream.read(1 << 16):
        tail = (tail + chunk)[-_TAIL:]
    return tail.decode(errors="replace")


async def _feed(stream: asyncio.StreamWriter, text: str) -> None:
    try:
        stream.write(text.encode())
        await stream.drain()
        stream.close()
        await stream.wait_closed()
    except (BrokenPipeError, ConnectionResetError):
        return  # the program does not read its task
