"""Agents on the command line, unchanged, play a task by their recipes: the real programs against a
scripted engine behind the run's own endpoint.  Those that are not on PATH are skipped by name.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import pytest_asyncio

from rft.engine.built_in import make
from rft.engine.chat import load_tokenizer
from rft.engine.environment import cpu_environment
from rft.engine.settings import EngineSettings
from rft.preflight.check import check
from rft.taskset.settings import TasksetSettings
from rft.testing import run_workflow_async
from rft.testing.models import NAME, cache_root
from rft.testing.play import task_of
from rft.types.ports import Engine, GenerateRequest
from rft.types.task import SamplingArgs
from tests.helpers.calling_engine import Called, CallingEngine

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "examples" / "command_line_agents"
CAT = "cat numbers.txt"
SHELL = {
    "claude": ("Bash", {"command": CAT, "description": "read the numbers"}),
    "codex": ("exec_command", {"cmd": CAT}),
    "mini": ("bash", {"command": CAT}),
    "opencode": ("bash", {"command": CAT, "description": "read the numbers"}),
    "pi": ("bash", {"command": CAT}),
    "qwen": ("run_shell_command", {"command": CAT, "is_background": False}),
}
# the one that ends by a command
LAST = {"mini": ("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"})}


def shell_engine(program: str) -> CallingEngine:
    """Reads the numbers by a tool, then answers with the last of them."""

    def decide(request: GenerateRequest) -> tuple[str, Called | None]:
        last = request.messages[-1]
        if last["role"] != "tool":
            return "", SHELL[program]
        numbers = [
            line for line in last["content"].replace("\\n", "\n").split("\n") if line.isdigit()
        ]
        return f"Answer: {numbers[-1]}", LAST.get(program)

    return CallingEngine(decide)


def taskset(recipe: Path) -> TasksetSettings:
    """Return the taskset of a recipe."""
    plan = check(recipe, schema_only=True).plan
    assert plan is not None
    return plan.explorer.tasksets[0]


@pytest.fixture(params=sorted(SHELL))
def program(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    name: str = request.param
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed: make agents")
    monkeypatch.chdir(ROOT)
    return name


def homes() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("rft-agent-*"))


@pytest_asyncio.fixture
async def outside() -> AsyncIterator[tuple[str, list[bytes]]]:
    """Address of a proxy to the rest of the world, which is never there, and what it was asked."""
    asked: list[bytes] = []

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readline())
        writer.write(b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", asked


async def test_a_program_plays_a_task_unchanged(
    program: str, outside: tuple[str, list[bytes]]
) -> None:
    of = taskset(RECIPES / f"{program}.yaml")
    proxy, asked = outside
    env = {"HTTPS_PROXY": proxy, "HTTP_PROXY": proxy, "NO_PROXY": "127.0.0.1"}
    args = of.workflow_args | {"env": of.workflow_args.get("env", {}) | env}
    row = json.loads((await asyncio.to_thread(Path(of.path).read_text)).splitlines()[2])
    task = {"prompt": row["question"], "truth": row["answer"]}
    engine = shell_engine(program)
    before = homes()
    result = await run_workflow_async(
        of.workflow, task, engine, reward=of.reward, workflow_args=args, timeout_s=120
    )
    # run_workflow_async has compared tokens, log-probs and masks of the row with the engine's
    (run,), (experience,) = result.runs, result.group.rows
    assert run.transcript is not None and len(run.transcript.turns) == len(engine.calls) == 2
    assert [call.prefix_messages > 0 for call in engine.calls] == [False, True]
    assert experience.reward == 1.0 and run.transcript.answer == "Answer: 40"
    assert not asked
    assert homes() <= before
    assert not psutil.Process(os.getpid()).children(recursive=True)


# what ends an answer, also one without words; its tokens have it, its text does not
STOP = (".", "e")
CONTEXT = 32768  # tokens; programs begin with up to 20,000 of their own


@pytest.fixture(scope="module")
def smollm(tmp_path_factory: pytest.TempPathFactory) -> EngineSettings:
    """SmolLM2 with vLLM, with more places than it was trained for."""
    original = Path(os.environ.get("MODEL_PATH") or cache_root() / "models" / NAME)
    if not (original / "config.json").is_file():
        pytest.skip(f"{original} is no model: python scripts/fetch_model.py")
    folder = tmp_path_factory.mktemp("model")
    for file in original.iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((original / "config.json").read_text())
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": CONTEXT}))
    return EngineSettings(
        engine_type="vllm",
        model_path=str(folder),
        max_model_len=CONTEXT,
        max_num_seqs=2,
        kv_cache_bytes=3 << 30,
        fixed_weights=True,
        tool_call_parser="hermes",
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(smollm: EngineSettings, environment: pytest.MonkeyPatch) -> AsyncIterator[Engine]:
    for name, value in cpu_environment(smollm).items():
        environment.setenv(name, value)
    engine = await make(smollm)
    yield engine
    await engine.close()


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore")  # vLLM's imports are full of other people's deprecations
@pytest.mark.asyncio(loop_scope="module")
async def test_a_program_plays_a_task_with_vllm(
    program: str, engine: Engine, smollm: EngineSettings
) -> None:
    of = taskset(RECIPES / f"{program}.yaml")
    row = json.loads((await asyncio.to_thread(Path(of.path).read_text)).splitlines()[2])
    task = task_of(
        {"prompt": row["question"], "truth": row["answer"]},
        # an answer that is cut is an error to some of them
        sampling=SamplingArgs(max_tokens=512, stop=STOP, seed=1),
    )
    result = await run_workflow_async(
        of.workflow,
        task,
        engine,
        reward=of.reward,
        workflow_args=of.workflow_args,
        timeout_s=900,
    )
    (run,) = result.runs
    answers = [answer for call in result.calls for answer in call.answers]
    assert run.transcript is not None and answers
    turns = [turn.completion for turn in run.transcript.turns]
    assert len(turns) == len(answers)
    tokenizer = load_tokenizer(smollm)
    for turn, answer in zip(turns, answers, strict=True):
        assert np.array_equal(turn.tokens, answer.tokens) and turn.text == answer.text
        decoded = tokenizer.decode(turn.tokens, skip_special_tokens=True)
        assert re.split("[.e]", decoded)[0] == turn.text
    # each answer is trained once, in the row of its chain
    trained = sum(int(experience.loss_mask.sum()) for experience in result.group.rows)
    assert trained == sum(len(answer.tokens) for answer in answers)
