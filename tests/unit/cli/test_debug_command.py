"""`rft debug` plays one task without a run, and scores answers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rft.cli.new_command import skeleton
from rft.launch import debug_session, leftovers
from tests.helpers.command import forget_plugins, rft

PLUGINS = """
from rft.types.completion import Score
from rft.workflow.base import Workflow, workflow
from rft.reward.base import reward
from rft.types.ports import GenerateRequest


@workflow("test_debug_talk")
class Talk(Workflow):
    async def run(self, task, ctx):
        messages = task.chat()
        messages.append((await ctx.chat(messages)).message)
        if messages[-1]["content"] == "break":
            raise ValueError("it broke here")
        messages.append({"role": "user", "content": "and so?"})
        await ctx.chat(messages)
        return ctx.transcript(metrics={"calls": 2})


@reward("test_debug_judged")
class Judged:
    async def prepare(self, models):
        self.models = models

    async def __call__(self, task, transcript):
        if transcript.answer == "boom":
            raise ValueError("no such answer")
        question = ({"role": "user", "content": f"how good is {transcript.answer}?"},)
        (said,) = await self.models["judge"].generate(GenerateRequest(messages=question))
        return {"judged": float(said.text), "right": float(transcript.answer == task.truth)}
"""
CONFIG = """
name: talk
checkpoint_root_dir: runs
model: {model_path: MODEL, max_prompt_tokens: 60, max_response_tokens: 2}
algorithm: {repeat_times: 2}
buffer:
  batch_size: 2
  total_steps: 1
  explorer_input:
    default_workflow_type: test_debug_talk
    default_reward_fn_type: test_debug_judged
    taskset: {name: copy, path: "rft.testing.tiny:copy_tasks"}
explorer:
  rollout_model: {engine_type: transformers}
  auxiliary_models:
    - {name: judge, engine_type: transformers, model_path: MODEL, max_model_len: 128}
"""


@pytest.fixture
def folder(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "talk.py").write_text(PLUGINS)
    (tmp_path / "talk.yaml").write_text(CONFIG.replace("MODEL", str(tiny_model)))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    forget_plugins(tmp_path)


def debug(what: str, *more: str) -> Any:
    return rft("debug", what, "--config", "talk.yaml", "--plugin-dir", "mine", *more)


def test_a_script_plays_a_task(folder: Path) -> None:
    done = debug(
        "workflow",
        "--task",
        "3",
        "--judge",
        "scripted:0.5",
        "--say",
        "first",
        "--say",
        "3",
        "--tokens",
    )
    assert done.code == 0, done.output
    for line in (
        "test_debug_talk plays copy[3], run 0: complete",
        "truth      3",
        "assistant  first",
        "user       and so?",
        "judge is asked",
        "user       how good is 3?",
        "reward     1.5, judged 0.5, right 1",
        "metrics    calls 2",
        "not trained",
    ):
        assert line in done.output, (line, done.output)
    assert "for all runs" not in done.output and not (folder / "runs").exists()
    gold = debug("workflow", "--runs", "2", "--judge", "judge=scripted:1")
    assert "rewards 2, 2; all are equal" in gold.output, gold.output


def test_a_run_that_fails_shows_the_authors_lines(folder: Path) -> None:
    done = debug("workflow", "--say", "break", "--judge", "scripted:1")
    assert done.code == 4
    assert (
        "failed     ValueError: it broke here" in done.output
        and 'raise ValueError("it broke here")' in done.output
    )
    assert "rft/workflow/play_run.py" not in done.output and "assistant  break" in done.output


def test_answers_are_scored(folder: Path) -> None:
    done = debug(
        "reward",
        "--task",
        "3",
        "--answer",
        "3",
        "--answer",
        "a long answer, longer than the run's limit",
        "--judge",
        "scripted:0.25",
    )
    assert done.code == 0 and "rewards 1.25, 0.25; the group can be trained" in done.output, (
        done.output
    )
    wrong = debug("reward", "--answer", "boom", "--judge", "scripted:1")
    assert wrong.code == 4 and "ValueError: no such answer" in wrong.output
    none = debug("reward", "--answer", "3", "buffer.explorer_input.default_reward_fn_type=null")
    assert none.code == 2 and "rft debug workflow --say" in none.output


def test_a_reward_explains_what_it_reads(folder: Path) -> None:
    exact = "buffer.explorer_input.default_reward_fn_type=exact_answer"
    done = debug(
        "reward",
        "--explain",
        "--answer",
        "<think>it is 9</think>so 8/2",
        "--answer",
        "k</think>x",
        exact,
        "--task",
        "3",
    )
    assert done.code == 0, done.output
    lines = [line.strip() for line in done.output.splitlines()]
    seen = [
        line
        for line in lines
        if line.startswith(("answer ", "reads ", "as ", "truth as ", "verdict "))
    ]
    assert seen == [
        "answer     so 8/2  behind 22 characters of thought",
        "reads      last value: so 8/2",
        "as         4",
        "truth as   3",
        "verdict    wrong",
        "answer     x  behind 16 characters of thought",
        "reads      last value: x",
        "as         nothing that it knows",
        "truth as   3",
        "verdict    wrong",
    ]
    own = debug("reward", "--explain", "--answer", "3", "--judge", "scripted:1")
    assert "reads      in its own way" in own.output


def test_a_real_model_and_its_judge(folder: Path) -> None:
    """The judge is a model of random weights: what it says is no number, and that is what the
    reward raises.
    """
    done = debug(
        "workflow",
        "--engine",
        "transformers",
        "--tokens",
        "buffer.explorer_input.default_reward_fn_type=exact_answer",
    )
    assert (
        done.code == 0
        and "starting policy: transformers" in done.output
        and "starting aux" not in done.output
    ), done.output
    assert "<|im_start|>u" in done.output and "2 tokens" in done.output
    asked = debug("workflow", "--say", "x")
    assert (
        asked.code == 4
        and "starting aux-judge-0" in asked.output
        and "could not convert string to float" in asked.output
    ), asked.output


def test_a_model_whose_file_is_cut_short_is_named(folder: Path, tiny_model: Path) -> None:
    shutil.copytree(tiny_model, folder / "cut")
    weights = folder / "cut" / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    done = debug("workflow", "--engine", "transformers", "model.model_path=cut")
    assert (
        done.code == 2 and f"{weights} is damaged" in done.output and "Traceback" not in done.output
    ), done.output
    assert debug("workflow", "--judge", "scripted:1", "model.model_path=cut").code == 0, (
        "a script needs no model"
    )


def test_a_stage(folder: Path) -> None:
    (folder / "talk.yaml").write_text(
        (folder / "talk.yaml").read_text()
        + "stages:\n  - {stage_name: one}\n  - {stage_name: two}\n"
    )
    done = debug("workflow", "--stage", "two", "--judge", "scripted:1")
    assert done.code == 0 and "reward     2" in done.output, done.output
    without = debug("workflow")
    assert without.code == 2 and "the stages are: one, two" in without.output


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["--task", "100000"], "has no row"),
        (["--task", "-1"], "has no row"),
        (["--taskset", "cpoy"], "write one of copy"),
        (["--engine", "vlm"], "write one of scripted, transformers, vllm, openai"),
        (["--engine", "transformers", "--say", "x"], "only for --engine scripted"),
        (["--engine", "openai"], "name the server's model"),
        (["--engine", "openai", "--model", "m", "--tokens"], "a server gives no tokens"),
        (["--judge", "0.5"], "write scripted:TEXT, fake:NUMBER"),
        (["--judge", "fake:good"], "followed by the number"),
        (["--judge", "jugde=scripted:1"], "explorer.auxiliary_models has judge"),
    ],
)
def test_bad_options(more: list[str], why: str, folder: Path) -> None:
    done = debug("workflow", *more)
    assert done.code == 2 and why in done.output, done.output


class Server(BaseHTTPRequestHandler):
    asked: list[Any] = []  # noqa: RUF012  # of the one test that uses it

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        Server.asked.append((self.path, body, self.headers.get("Authorization")))
        answer = {
            "choices": [
                {
                    "message": {"role": "assistant", "content": f"said {len(body['messages'])}"},
                    "finish_reason": "stop",
                }
            ]
        }
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None: ...


def test_a_server_as_the_policy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-a-test")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/v1"
        done = debug(
            "workflow",
            "--engine",
            "openai",
            "--model",
            "some-model",
            "--base-url",
            url,
            "--judge",
            "scripted:1",
        )
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert (
        done.code == 0 and "assistant  said 1" in done.output and "assistant  said 3" in done.output
    ), done.output
    assert "sk-of-a-test" not in done.output
    assert [(p, b["model"], a) for p, b, a in Server.asked] == [
        ("/v1/chat/completions", "some-model", "Bearer sk-of-a-test")
    ] * 2


@pytest.mark.parametrize("whose", ["policy", "judge"])
def test_vllm_gets_its_environment(
    whose: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads variables when its process starts, so the command goes on in another;
    tests/integration/test_debug_vllm.py runs one.
    """
    started: list[Any] = []

    def run(command: list[str], *, env: dict[str, str], check: bool) -> Any:
        started.append((command, env))
        return subprocess.CompletedProcess(command, 4)

    monkeypatch.setattr("rft.launch.debug_session.subprocess.run", run)
    monkeypatch.setattr("sys.argv", ["rft", "debug", "workflow", "and", "so", "on"])
    more = (
        ["--engine", "vllm"]
        if whose == "policy"
        else ["explorer.auxiliary_models[0].engine_type=vllm"]
    )
    assert debug("workflow", *more).code == 4
    ((command, env),) = started
    assert command[1:] == ["-m", "rft", "debug", "workflow", "and", "so", "on"]
    assert (
        env["VLLM_NO_USAGE_STATS"] == "1"
        and env[leftovers.RUN_ID]
        and leftovers.RUN_ID not in os.environ
    )
    assert env["VLLM_LOGGING_LEVEL"] == "ERROR", "N11: thirty lines of vLLM's warnings"
    assert whose == "policy" or debug("workflow", *more, "--judge", "scripted:1").code == 0
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    debug("workflow", *more)
    assert started[-1][1]["VLLM_LOGGING_LEVEL"] == "DEBUG"


def test_the_verdict_of_a_judge(folder: Path) -> None:
    """A judge asks for a form; `fake` fills it in, which a fixed text cannot."""
    (folder / "mine" / "clear.py").write_text(
        skeleton("judge", "plugin.py.txt", "test_debug_clear")
    )
    clear = (
        "buffer.explorer_input.default_reward_fn_type=test_debug_clear",
        "buffer.explorer_input.default_workflow_type=simple_workflow",
    )
    done = debug("workflow", "--say", "It is three.", "--judge", "judge=fake:4", *clear)
    assert done.code == 0 and "reward     0.8" in done.output and "<<<answer" in done.output, (
        done.output
    )


def test_scripts() -> None:
    assert debug_session.scripted(["a"], "gold", 2).unused == ["a", "a"]
    assert debug_session.scripted([], 4, 1)._else([]) == "4"  # type: ignore[misc]
    assert debug_session.scripted([], None, 1)._else([{"role": "user", "content": "hi"}]) == "hi"  # type: ignore[misc]
