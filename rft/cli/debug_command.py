"""`rft debug`: play one task, score one answer, or repeat one train step, with all details.

Without Ray, in this process, so breakpoints work.  Exit code 4 if a run failed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from rft.cli.options import Config, Json, Overrides, PluginDirs, one_of, planned, task_of, tasksets
from rft.engine.settings import EngineSettings
from rft.errors import ConfigError
from rft.secrets import learn_environment

if TYPE_CHECKING:
    from rft.config.plan import Plan
    from rft.testing.trace import WorkflowResult
    from rft.types.ports import ChatModel
    from rft.types.task import Task

debug = typer.Typer(
    no_args_is_help=True,
    help="Play one task of a configuration, or score one answer, and show what happens.",
)
ENGINES = ("scripted", "transformers", "vllm", "openai")
_JUDGE = re.compile(r"(?:(?P<name>[^:=]+)=)?(?P<how>scripted|fake):(?P<says>.*)", re.DOTALL)

Number = Annotated[int, typer.Option("--task", help="row of the task in its taskset, from 0")]
Name = Annotated[
    str | None,
    typer.Option("--taskset", help="name of the taskset; default: the first", show_default=False),
]
Stage = Annotated[str, typer.Option(help="which of the configuration's stages", show_default=False)]
Judges = Annotated[
    list[str] | None,
    typer.Option(
        "--judge",
        help="scripted:TEXT: what every auxiliary model says; fake:NUMBER: the verdict of judges; "
        "NAME=... for one model; repeatable",
        show_default=False,
    ),
]
Limit = Annotated[
    float, typer.Option("--timeout", help="seconds for each run; long enough for a breakpoint")
]


@debug.command("workflow")
def workflow(
    config: Config,
    overrides: Overrides = None,
    task: Number = 0,
    taskset: Name = None,
    stage: Stage = "",
    engine: Annotated[str, typer.Option(help=", ".join(ENGINES))] = "scripted",
    say: Annotated[
        list[str] | None,
        typer.Option(
            help="scripted: the model's answers in each run, call by call, the last one repeated; "
            "default: the gold answer",
            show_default=False,
        ),
    ] = None,
    runs: Annotated[int, typer.Option(help="runs of the task at the same time")] = 1,
    tokens: Annotated[
        bool,
        typer.Option("--tokens", help="show which tokens are trained, and how likely each was"),
    ] = False,
    judge: Judges = None,
    model: Annotated[
        str | None, typer.Option(help="openai: the model's name on the server", show_default=False)
    ] = None,
    base_url: Annotated[
        str | None,
        typer.Option(help="openai: address; default: OPENAI_BASE_URL", show_default=False),
    ] = None,
    timeout: Limit = 3600.0,
    plugin_dir: PluginDirs = None,
) -> None:
    """Play one task and show messages, tool calls, rewards by part, and times.

    `scripted` needs no model; `transformers` and `vllm` serve the configuration's model as it is;
    `openai` asks a server (its key is in OPENAI_API_KEY).  Auxiliary models are started when they
    are first called.
    """
    from rft.launch import debug_session
    from rft.preflight.second_stage import policy_files

    one_of(engine, ENGINES, "--engine")
    if say and engine != "scripted":
        raise ConfigError("is only for --engine scripted", key="--say", given=say[0])
    learn_environment()
    plan = planned(config, overrides, plugin_dir, stage)
    settings: EngineSettings | None = None
    if engine == "openai":
        if not model:
            raise ConfigError("name the server's model with --model", key="--model")
        if tokens:
            raise ConfigError(
                "a server gives no tokens; use transformers or vllm",
                key="--tokens",
                given="--engine openai",
            )
        settings = debug_session.server_settings(model, base_url)
    elif engine != "scripted":
        policy_files(plan)
        settings = debug_session.policy_settings(plan, engine)
    played = _task(plan, taskset, task, counts=engine in ("transformers", "vllm"))
    if settings is None:
        played = _unlimited(played)
    policy = settings or debug_session.scripted(say or (), played.truth, runs)
    _play(plan, played, policy, runs, judge or (), timeout, tokens=tokens)


@debug.command("reward")
def reward(
    config: Config,
    answer: Annotated[
        list[str],
        typer.Option(
            help="an answer to score; repeatable: several runs of the task", show_default=False
        ),
    ],
    overrides: Overrides = None,
    task: Number = 0,
    taskset: Name = None,
    stage: Stage = "",
    explain: Annotated[
        bool,
        typer.Option(
            "--explain",
            help="show what the reward reads in the answer and in the truth, and its verdict",
        ),
    ] = False,
    judge: Judges = None,
    timeout: Limit = 3600.0,
    plugin_dir: PluginDirs = None,
) -> None:
    """Score answers to one task with its reward, as if the model had given them, and show the
    parts.
    """
    from rft.testing.fakes import ScriptedModel
    from rft.testing.play import OneAnswer

    learn_environment()
    plan = planned(config, overrides, plugin_dir, stage)
    scored = _unlimited(_task(plan, taskset, task, counts=False))
    if scored.reward is None:
        raise ConfigError(
            "names no reward, so its workflow scores itself; use `rft debug workflow --say TEXT`",
            key=f"taskset {scored.taskset}",
        )
    policy = ScriptedModel(per_run=[[a] for a in answer])
    _play(
        plan, scored, policy, len(answer), judge or (), timeout, workflow=OneAnswer, explain=explain
    )


def _task(plan: Plan, name: str | None, number: int, *, counts: bool) -> Task:
    """Return task `number`; `counts`: limit prompts by the tokens of the model."""
    from rft.taskset.task_pipeline import opened

    by_name = tasksets(plan)
    if not by_name:
        raise ConfigError("has no taskset to take a task from", key="buffer.explorer_input")
    settings = by_name[one_of(name or next(iter(by_name)), list(by_name), "--taskset")]
    settings = settings if counts else dataclasses.replace(settings, prompt_limit=None)
    return task_of(opened(settings, plan.task_pipeline), number, "--task")


def _unlimited(task: Task) -> Task:
    """Remove limits of tokens, because the tokens of a script are bytes."""
    return msgspec.structs.replace(
        task, sampling=msgspec.structs.replace(task.sampling, max_tokens=1 << 20, min_tokens=0)
    )


def _judges(plan: Plan, options: Sequence[str]) -> dict[str, ChatModel]:
    """Return replacements of auxiliary models by name, from values of --judge."""
    replaced: dict[str, ChatModel] = {}
    for text in options:
        match = _JUDGE.fullmatch(text)
        if match is None:
            raise ConfigError(
                "write scripted:TEXT, fake:NUMBER, or NAME= and one of these",
                key="--judge",
                given=text,
            )
        names = [match["name"]] if match["name"] else [n for m in plan.auxiliary for n in m.names]
        replaced |= dict.fromkeys(names, _stand_in(match["how"], match["says"]))
    return replaced


def _stand_in(kind: str, text: str) -> ChatModel:
    from rft.testing.fakes import ScriptedModel
    from rft.testing.judge import FakeJudge

    if kind == "scripted":
        return ScriptedModel(answer=lambda _: text)
    try:
        return FakeJudge(float(text))
    except ValueError:
        raise ConfigError(
            "fake: is followed by the number that the judge gives", key="--judge", given=text
        ) from None


def _play(
    plan: Plan,
    task: Task,
    policy: ChatModel | EngineSettings,
    runs: int,
    judges: Sequence[str],
    timeout_s: float,
    *,
    workflow: Any = None,
    tokens: bool = False,
    explain: bool = False,
) -> None:
    from rft.launch import debug_session
    from rft.testing.play import run_workflow_async
    from rft.testing.trace import console, show

    replaced = _judges(plan, judges)
    _in_vllms_environment(plan, policy, replaced)

    async def play() -> WorkflowResult:
        models = debug_session.Models(
            plan, lambda text: print(f"starting {text}", file=sys.stderr, flush=True)
        )
        try:
            model = await models.policy(policy) if isinstance(policy, EngineSettings) else policy
            return await run_workflow_async(
                workflow,
                task,
                model,
                models=models.auxiliary(replaced),
                n=runs,
                workflow_args={} if workflow is not None else None,
                timeout_s=timeout_s,
                may_fail=True,
            )
        finally:
            await models.close()

    result = asyncio.run(play())
    decoding: Mapping[str, Any] = (
        {"decode": _decoder(policy)} if tokens and isinstance(policy, EngineSettings) else {}
    )
    show(result, console(), tokens=tokens, explain=explain, **decoding)
    if result.failed:
        raise typer.Exit(4)


def _decoder(settings: EngineSettings) -> Any:
    from rft.engine.chat import load_tokenizer

    tokenizer = load_tokenizer(settings)
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))


def _in_vllms_environment(
    plan: Plan, policy: ChatModel | EngineSettings, replaced: Mapping[str, Any]
) -> None:
    """If a model is vLLM's, run this command in a process with vLLM's environment, and exit."""
    from rft.launch import debug_session, leftovers

    engines = [policy] if isinstance(policy, EngineSettings) else []
    engines += [m.engines[0] for m in plan.auxiliary if not set(m.names) & set(replaced)]
    vllm = next((e for e in engines if e.engine_type == "vllm"), None)
    if vllm is not None and leftovers.RUN_ID not in os.environ:
        sys.stdout.flush()
        raise typer.Exit(
            debug_session.in_vllms_environment(vllm, [sys.executable, "-m", "rft", *sys.argv[1:]])
        )


@debug.command("step")
def step(
    run: Annotated[Path, typer.Argument(help="folder of the run", show_default=False)],
    number: Annotated[
        int, typer.Argument(metavar="STEP", help="train step, from 1", min=1, show_default=False)
    ],
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Train one step of a run again, from the checkpoint before it and on its rows, and show the
    loss of every row.
    """
    from rft.cli import show
    from rft.launch.step_again import again

    learn_environment()
    repeated = again(
        run, number, overrides or (), lambda text: print(text, file=sys.stderr, flush=True)
    )
    if as_json:
        print(show.as_json(dataclasses.asdict(repeated)))
        return
    heads = ("row", "reward", "advantage", "tokens", "loss", "new - sampler's log-prob")
    cells = [
        [
            r.id,
            "" if r.reward is None else f"{r.reward:g}",
            f"{r.advantage:.4f}",
            str(r.tokens),
            f"{r.loss:.6f}",
            f"{r.apart:.2e}",
        ]
        for r in sorted(repeated.rows, key=lambda r: -abs(r.loss))
    ]
    print("\n".join(show.table(heads, cells, (False, True, True, True, True, True))))
    print(
        f"\nstep {repeated.step}, trained again from {repeated.begun_from}; losses of its rows add up "
        f"to {sum(r.loss for r in repeated.rows):.6f}"
    )
    for name, (now, then) in repeated.numbers.items():
        print(f"  {name:26} {now:.8g}" + ("" if then is None else f"  the run wrote {then:.8g}"))
