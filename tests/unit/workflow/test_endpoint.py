"""Agents that speak OpenAI's protocol: what they get, what is recorded, and what they cannot do."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import sys

import httpx
import msgspec
import numpy as np
import openai
import pytest

from rft.engine.scripted import ScriptedEngine
from rft.errors import ConfigError, EngineFailed, SetupError
from rft.plugins import REGISTRY, load_all
from rft.types.completion import Score
from rft.types.ids import GroupId
from rft.types.task import SamplingArgs, Task
from rft.workflow import endpoint
from rft.workflow.agent import AgentWorkflow
from rft.workflow.base import RunContext, seed_for, workflow
from rft.workflow.endpoint import public, serve
from rft.workflow.group import run_group
from rft.workflow.play_run import RunLimits
from rft.workflow.recipes import Recipes

ID = GroupId(1, 0, 3, 5)
HI = [{"role": "user", "content": "hi"}]
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
}


@pytest.fixture(scope="module", autouse=True)
def plugins():
    load_all()


def task(**changes):
    return Task(
        **{"taskset": "t", "index": 0, "prompt": "hi", "truth": "4", "workflow": "w", **changes}
    )


def agent(play, **flags):
    """The name of a workflow whose agent is `play`."""
    name = f"test_agent_{play.__name__}"
    workflow(name)(type(play.__name__, (AgentWorkflow,), {"agent": play, **flags}))
    return name


async def play(engine, workflow, *, timeout_s=20.0, **of_task):
    of = task(workflow=workflow, **of_task)
    return await run_group(
        of, Recipes().find(of), engine, ID, limits=RunLimits(max_timeout_s=timeout_s)
    )


def session(engine, **of_task):
    of = task(**of_task)
    ctx = RunContext(engine, of, run=0, request_id="run/0")
    return ctx, serve(ctx, of)


def client(d) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=d.base_url, headers={"Authorization": f"Bearer {d.api_key}"}, timeout=20
    )


class Calls(ScriptedEngine):
    """Its answers are tool calls."""

    async def generate(self, request):
        call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
        return [
            msgspec.structs.replace(c, text="", tool_calls=(call,))
            for c in await super().generate(request)
        ]


async def test_an_agent_is_recorded_token_by_token():
    async def chats(self, task, base_url, api_key):
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as c:
            first = await c.chat.completions.create(model="gpt-x", messages=HI, logprobs=True, n=1)
            choice = first.choices[0]
            assert (
                first.model == "gpt-x"
                and choice.finish_reason == "stop"
                and choice.logprobs is not None
            )
            content = choice.logprobs.content or []
            assert len(content) == first.usage.completion_tokens and all(
                c.token.startswith("token_id:") for c in content
            )
            more = [
                *HI,
                choice.message,
                {"role": "user", "content": [{"type": "text", "text": "more"}]},
            ]
            said = ""
            usage = None
            stream = await c.chat.completions.create(
                model="gpt-x", messages=more, stream=True, stream_options={"include_usage": True}
            )
            async for chunk in stream:
                said += (chunk.choices[0].delta.content or "") if chunk.choices else ""
                usage = chunk.usage or usage
            assert usage is not None and usage.completion_tokens == len(said) + 1
            other = await c.chat.completions.create(
                model="gpt-x", messages=[{"role": "user", "content": "else"}], n=2
            )
            assert [x.index for x in other.choices] == [0, 1]
        return {"right": float(said == "five"), "short": 0.5}

    engine = ScriptedEngine("four", "five", "six", "seven")
    group = await play(engine, agent(chats), num_runs=1)
    assert [r.reward for r in group.rows] == [1.5] * 3 and group.rewards == [1.5], (
        "chains: one talk of two turns, two others"
    )
    assert group.rows[0].reward_parts == {"right": 1.0, "short": 0.5}
    assert [r.num_response_tokens for r in group.rows] == [10, 4, 6]
    assert engine.calls[1].prefix_messages == 2 and engine.calls[1].prefix_tokens is not None, (
        "goes on from its own tokens"
    )
    assert engine.calls[2].n == 2
    calls = engine.calls[1]
    whole = np.concatenate([calls.prefix_tokens])
    assert np.array_equal(group.rows[0].tokens[: len(whole)], whole)


async def test_tool_calls_come_and_go_back():
    async def tools(self, task, base_url, api_key):
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as c:
            got = await c.chat.completions.create(model="m", messages=HI, tools=[TOOL])
            message = got.choices[0].message
            assert got.choices[0].finish_reason == "tool_calls" and message.content is None
            assert message.tool_calls[0].function.name == "add"
            back = {"role": "tool", "tool_call_id": "call_1", "content": "3"}
            stream = await c.chat.completions.create(
                model="m", messages=[*HI, message, back], tools=[TOOL], stream=True
            )
            names = [
                d.function.name
                async for chunk in stream
                for d in chunk.choices[0].delta.tool_calls or []
            ]
            assert names == ["add"]
            await c.chat.completions.create(
                model="m", messages=HI, tools=[TOOL], tool_choice="none"
            )
        return 1.0

    engine = Calls("x", "y", "z")
    group = await play(engine, agent(tools))
    assert group.rows[0].reason == "" and [len(r.messages) for r in group.rows] == [4, 2]
    assert [len(c.tools) for c in engine.calls] == [1, 1, 0] and engine.calls[
        1
    ].prefix_messages == 2


async def test_many_runs_share_a_server_and_nothing_else():
    seen = []

    async def own(self, task, base_url, api_key):
        seen.append((base_url, api_key))
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as c:
            for _ in range(3):
                await c.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": api_key}]
                )
        return 1.0

    group = await play(ScriptedEngine(answer=lambda m: m[-1]["content"]), agent(own), num_runs=8)
    assert len({u.split("/run/")[0] for u, _ in seen}) == 1 and len({k for _, k in seen}) == 8
    for run in range(8):
        rows = [r for r in group.rows if r.id.run == run]
        assert (
            len(rows) == 3
            and len({r.prompt_text for r in rows}) == 1
            and rows[0].response_text == rows[0].prompt_text
        )
    assert not endpoint._SHARED, "the server is gone with its last run"


async def test_keys_open_their_own_run_only():
    engine = ScriptedEngine(answer=lambda m: "a")
    (one, first), (two, second) = session(engine), session(engine)
    async with first as a, second as b, httpx.AsyncClient(timeout=20) as http:
        body = {"messages": HI, "model": "m"}
        root = a.base_url.split("/run/")[0]
        for url, key, status in [
            (a.base_url, a.api_key, 200),
            (f"{root}/v1", a.api_key, 200),
            (b.base_url, a.api_key, 401),
            (a.base_url, None, 401),
            (a.base_url, a.api_key[:-1], 401),
        ]:
            got = await http.post(
                f"{url}/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"}
            )
            assert got.status_code == status, got.text
        assert got.json()["error"]["code"] == "invalid_api_key"
        assert len(one.completions) == 2 and not two.completions
        async with serve(two, task()) as late:
            pass
        got = await http.post(
            f"{root}/v1/chat/completions",
            json=body,
            headers={"Authorization": f"Bearer {late.api_key}"},
        )
        assert got.status_code == 401, "a key dies with its run"
        assert (await http.get(f"{root}/health")).json() == {"status": "ok"}
        got = await http.get(
            f"{a.base_url}/models", headers={"Authorization": f"Bearer {a.api_key}"}
        )
        assert [m["id"] for m in got.json()["data"]] == ["policy"]
        got = await http.get(f"{root}/v2/nothing")
        assert got.status_code == 404 and got.json()["error"]["type"] == "invalid_request_error"


BAD = [
    ({}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "robot", "content": ""}]}, "messages[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"x": 1}]}]}, "messages[0].tool_calls[0]"),
    ({"messages": [*HI, {"role": "assistant", "content": "x", "weight": 0}, *HI]}, "messages[1]"),
    ({"n": 0}, "n"),
    ({"n": True}, "n"),
    ({"n": 1000}, "n"),
    ({"stream": "yes"}, "stream"),
    ({"temperature": "hot"}, "temperature"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"stop": [1]}, "stop"),
    ({"seed": "a"}, "seed"),
    ({"tools": {}}, "tools"),
    ({"tools": [{"type": "web"}]}, "tools[0]"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function"}}, "tool_choice"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": 2}, "logprobs"),
    ({"parallel_tool_calls": False}, "parallel_tool_calls"),
    ({"functions": []}, "functions"),
    ({"tempreature": 1}, "tempreature"),
]


async def test_what_cannot_be_served_is_refused_by_name():
    ctx, opened = session(ScriptedEngine(answer=lambda m: "a"))
    async with opened as d, client(d) as http:
        for body, param in BAD:
            whole = body if "messages" in body or not body else {"messages": HI, **body}
            got = await http.post("/chat/completions", json=whole)
            error = got.json()["error"]
            assert (got.status_code, error["param"], error["type"]) == (
                400,
                param,
                "invalid_request_error",
            ), (body, error)
        for content in (b"{", b"[]"):
            assert (await http.post("/chat/completions", content=content)).status_code == 400
        got = await http.post(
            "/chat/completions", json={"messages": [{"role": "user", "content": "x" * 5000}]}
        )
        assert got.status_code == 400 and got.json()["error"]["code"] == "context_length_exceeded"
        got = await http.post("/embeddings", json={"input": "hi"})
        assert got.status_code == 404 and "/v1/chat/completions" in got.json()["error"]["message"]
        assert not ctx.completions


async def test_completions_take_texts_and_tokens():
    ctx, opened = session(ScriptedEngine(answer=lambda m: "yes"))
    async with opened as d, client(d) as http:
        got = (
            await http.post("/completions", json={"prompt": ["a", "b"], "n": 2, "logprobs": 1})
        ).json()
        assert [c["index"] for c in got["choices"]] == [0, 1, 2, 3] and got[
            "object"
        ] == "text_completion"
        assert len(got["choices"][0]["logprobs"]["token_logprobs"]) == 4
        got = (
            await http.post("/completions", json={"prompt": [5, 6], "return_token_ids": True})
        ).json()["choices"][0]
        assert (
            got["prompt_token_ids"] == [5, 6]
            and got["token_ids"] == ctx.completions[-1].tokens.tolist()
        )
        stream = (await http.post("/completions", json={"prompt": "a", "stream": True})).text
        assert (
            stream.endswith("data: [DONE]\n\n")
            and json.loads(stream.splitlines()[0][6:])["choices"][0]["text"] == "yes"
        )
        for prompt in (None, "", [], [-1], [1.5]):
            assert (await http.post("/completions", json={"prompt": prompt})).status_code == 400, (
                prompt
            )
        got = await http.post("/completions", json={"prompt": "a", "tools": [TOOL]})
        assert (got.status_code, got.json()["error"]["param"]) == (400, "tools")
    assert len(ctx.completions) == 6


async def test_the_tasksets_sampling_wins_unless_the_agent_may_choose():
    wanted = {"temperature": 0.3, "top_p": 0.5, "max_tokens": 9, "stop": "\n", "seed": 5}
    sampling = SamplingArgs(temperature=1.0, max_tokens=7)
    for rule, same in (("taskset", (1.0, 1.0, 7)), ("request", (0.3, 0.5, 9))):
        engine = ScriptedEngine(answer=lambda m: "a")
        of = task(sampling=sampling)
        async with (
            serve(RunContext(engine, of, run=0, request_id="r"), of, sampling=rule) as d,
            client(d) as http,
        ):
            got = await http.post("/chat/completions", json={"messages": HI, **wanted})
        s = engine.calls[0].sampling
        assert (
            (s.temperature, s.top_p, s.max_tokens) == same
            and s.stop == ("\n",)
            and s.seed is not None
        )
        assert got.headers.get("x-rft-ignored") == (
            "temperature, top_p" if rule == "taskset" else None
        )


@pytest.mark.parametrize(
    ("rule", "both"), [("taskset", ("</answer>", "Observation:")), ("request", ("Observation:",))]
)
async def test_a_request_adds_to_the_tasksets_stops(rule, both):
    """They no longer ended an answer once a request named stops of its own."""
    engine, of = (
        ScriptedEngine(answer=lambda m: "a"),
        task(sampling=SamplingArgs(stop=("</answer>",), min_tokens=2)),
    )
    async with (
        serve(RunContext(engine, of, run=0, request_id="r"), of, sampling=rule) as d,
        client(d) as http,
    ):
        for more in ({}, {"stop": ["Observation:"]}):
            await http.post("/chat/completions", json={"messages": HI, **more})
    assert [c.sampling.stop for c in engine.calls] == [("</answer>",), both]
    assert all((c.sampling.min_tokens, c.sampling.max_tokens) == (2, 256) for c in engine.calls)


@pytest.mark.parametrize("rule", ["taskset", "request"])
async def test_an_agent_with_a_seed_of_its_own_plays_its_runs_differently(rule):
    """All runs of a task were the same, and had nothing to be compared by."""

    async def seeded(self, task, base_url, api_key):
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as c:
            for seed in (7, 7, 8):
                await c.chat.completions.create(model="m", messages=HI, seed=seed)
        return 1.0

    def drawn(engine):
        calls = sorted(engine.calls, key=lambda c: c.request_id)
        return [tuple(c.sampling.seed for c in calls[n : n + 3]) for n in (0, 3, 6)]

    found = []
    for place in (None, lambda run: seed_for(42, 3, 5, run)):
        engine, name = ScriptedEngine(answer=lambda m: "a"), agent(seeded, sampling=rule)
        of = task(workflow=name, num_runs=3)
        await run_group(
            of, Recipes().find(of), engine, ID, limits=RunLimits(max_timeout_s=20), seed=place
        )
        found.append(drawn(engine))
        assert len(set(found[-1])) == 3 and all(a == b != c for a, b, c in found[-1])
    assert found[1] == [
        tuple(seed_for(s, seed_for(42, 3, 5, run)(0))(0) for s in (7, 7, 8)) for run in range(3)
    ], "as the run's seed"


async def test_rewards_are_posted_for_the_run_or_a_step():
    def posts(self, task, base_url, api_key):
        with httpx.Client(
            base_url=base_url, headers={"Authorization": f"Bearer {api_key}"}, timeout=20
        ) as http:
            step = {"reward": 0.25, "target": "step"}
            assert http.post("/reward", json=step).status_code == 400, "no call yet"
            for bad in (
                {"reward": "x"},
                {"reward": float("1e400")},
                {"reward": 1e19},
                {"reward": 1, "target": "team"},
                {"rewrad": 1},
                {},
                3,
            ):
                assert http.post("/reward", content=json.dumps(bad)).status_code == 400, bad
            for reward in (0.25, 0.5):
                http.post(
                    "/chat/completions",
                    json={"messages": [{"role": "user", "content": str(reward)}]},
                )
                assert (
                    http.post(
                        "/reward", json={**step, "reward": reward, "info": {"state": "s"}}
                    ).status_code
                    == 200
                )
            assert http.post("/reward", json={"reward": {"a": 1, "b": 2}}).status_code == 200

    group = await play(ScriptedEngine(answer=lambda m: "a"), agent(posts))
    assert (
        [r.reward for r in group.rows] == [0.25, 0.5]
        and group.rewards == [3.0]
        and group.rows[0].info == {"state": "s"}
    )


async def test_a_run_past_its_deadline_has_no_open_calls():
    over = asyncio.Event()

    async def waits(self, task, base_url, api_key):
        async with httpx.AsyncClient(
            base_url=base_url, headers={"Authorization": f"Bearer {api_key}"}, timeout=20
        ) as http:
            try:
                await http.post("/chat/completions", json={"messages": HI})
            finally:
                over.set()

    engine = ScriptedEngine(answer=lambda m: "a")
    engine.hold()
    group = await play(engine, agent(waits), timeout_s=0.3)
    assert "timeout" in group.rows[0].reason and over.is_set()
    await engine.waiting(0)
    assert engine._under_way == 0 and not endpoint._SHARED
    engine.release()


async def test_a_client_that_goes_away_leaves_no_record():
    engine = ScriptedEngine(answer=lambda m: "a")
    engine.hold()
    ctx, opened = session(engine)
    async with opened as d, client(d) as http:
        with pytest.raises(httpx.ReadTimeout):
            await http.post("/chat/completions", json={"messages": HI}, timeout=0.2)
        async with asyncio.timeout(120), engine._changed:
            await engine._changed.wait_for(lambda: engine._under_way == 0)
        engine.release()
    assert not ctx.completions


async def test_an_engines_failure_is_not_the_agents():
    async def stubborn(self, task, base_url, api_key):
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=50) as c:
            await c.chat.completions.create(model="m", messages=HI)

    engine = ScriptedEngine(answer=lambda m: "a")
    engine.die("gone")
    with pytest.raises(EngineFailed, match="gone"):
        await play(engine, agent(stubborn))


async def test_an_agent_that_raises_fails_its_run():
    def broken(self, task, base_url, api_key):
        raise StopIteration("odd")

    group = await play(ScriptedEngine(answer=lambda m: "a"), agent(broken))
    assert "StopIteration: odd" in group.rows[0].reason


PROGRAM = """
import json, os, sys, httpx
task = json.load(sys.stdin)
with httpx.Client(base_url=os.environ["OPENAI_BASE_URL"], headers={"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}) as http:
    got = http.post("/chat/completions", json={"messages": task["messages"]}).json()
print(got["choices"][0]["message"]["content"])
assert "truth" not in task
sys.exit(int(os.environ.get("CODE", "0")))
"""


async def test_a_program_is_an_agent():
    command = [sys.executable, "-c", PROGRAM]
    engine = ScriptedEngine(answer=lambda m: "4")
    group = await play(
        engine, "agent_command_workflow", workflow_args={"command": command}, reward="exact_answer"
    )
    assert group.rewards == [1.0], group.rows[0].reason
    assert group.rows[0].info["agent_output"] == "4\n"
    args = {"command": command, "env": {"CODE": "3"}}
    group = await play(engine, "agent_command_workflow", workflow_args=args, reward="exact_answer")
    assert "exit code 3: 4" in group.rows[0].reason, "what it printed"
    talk = "import sys; print(1000 * 'y'); sys.exit('first ' + 1000 * 'x' + ' last')"
    args = {"command": [sys.executable, "-c", talk]}
    group = await play(engine, "agent_command_workflow", workflow_args=args, reward="exact_answer")
    reason = group.rows[0].reason
    assert "exit code 1" in reason and reason.endswith("x last") and len(reason) == 300


REFUSED = """
import os, httpx
key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
httpx.post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json={"messages": [{"role": "user", "content": 5000 * "x"}]}, headers=key)
"""
SILENT = [
    ("import sys; print('no provider'); print('set KEY', file=sys.stderr)", "no provider\nset KEY"),
    ("pass", "no output"),
    (REFUSED, "tokens, the engine takes at most"),
]


@pytest.mark.parametrize(("program", "why"), SILENT, ids=["errors", "silence", "refused"])
async def test_a_program_without_a_model_call_says_why(program, why):
    args = {"command": [sys.executable, "-c", program]}
    engine = ScriptedEngine(answer=lambda m: "4")
    group = await play(engine, "agent_command_workflow", workflow_args=args)
    assert "made no model call: " in group.rows[0].reason and why in group.rows[0].reason


async def test_an_unscored_programs_output_is_kept():
    args = {"command": [sys.executable, "-c", PROGRAM]}
    engine = ScriptedEngine(answer=lambda m: "4")
    (row,) = (await play(engine, "agent_command_workflow", workflow_args=args)).rows
    assert row.status == "failed" and "names no reward; name one in" in row.reason
    assert row.info["agent_output"] == "4\n" and "RunError" in row.info["traceback"]


HANGS = """
import os, subprocess, sys, httpx
child = subprocess.Popen(["sleep", "300"])
with open(sys.argv[1], "w") as file:
    file.write(str(child.pid))
key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
httpx.post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json={"messages": [{"role": "user", "content": "x"}]}, headers=key)
"""


async def test_a_program_that_hangs_is_killed_with_its_children(tmp_path):
    file = tmp_path / "pid"
    args = {"command": [sys.executable, "-c", HANGS, str(file)]}
    engine = ScriptedEngine("a")
    engine.hold()
    run = asyncio.ensure_future(
        play(engine, "agent_command_workflow", workflow_args=args, timeout_s=60)
    )
    await engine.waiting(1, timeout_s=30)
    child = os.pidfd_open(int(file.read_text()))
    run.cancel()
    ended, _, _ = await asyncio.to_thread(select.select, [child], [], [], 20)
    os.close(child)
    assert ended, "the child of the program lives on"
    await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()}, timeout=10)
    assert not endpoint._SHARED
    engine.release()


async def test_the_shipped_react_agent():
    engine = ScriptedEngine("I add.\nAction: 2 * (1 + 1)\n", "Answer: 4")
    group = await play(engine, "react_agent_workflow", reward="final_answer")
    (row,) = group.rows
    assert row.reward == 1.0 and row.messages[3] == {"role": "user", "content": "Observation: 4"}
    calculate = sys.modules[
        REGISTRY.get("workflow", "react_agent_workflow").obj.__module__
    ].calculate
    assert [
        calculate(x)
        for x in ("7/2", "-3+1", "1/0", "__import__('os')", "2**9", "1+" * 300, "1e999")
    ] == [
        "3.5",
        "-2",
        "error: division by zero",
        "error: only numbers and + - * / are allowed",
        "error: only numbers and + - * / are allowed",
        "error: the expression is too long",
        "error: cannot convert float infinity to integer",
    ]


def test_a_program_that_is_not_there_is_named_before_anything_runs(tmp_path):
    (program := tmp_path / "my-agent").write_text("#!/bin/sh\n")
    program.chmod(0o755)
    for args, there in (
        ({"command": ["my-agent"]}, False),
        ({"command": ["my-agent"], "env": {"PATH": str(tmp_path)}}, True),
        ({"command": [str(program)]}, True),
        ({"command": [str(tmp_path / "agent.py")]}, False),
    ):
        of = task(workflow="agent_command_workflow", workflow_args=args)
        with (
            contextlib.nullcontext()
            if there
            else pytest.raises(ConfigError, match="is no program here")
        ):
            Recipes().find(of)


def test_a_library_that_is_missing_is_named_before_anything_runs(monkeypatch):
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(
        SetupError, match=r"react_agent_workflow needs openai: pip install 'rft-platform\[agent\]'"
    ):
        Recipes().find(Task(taskset="t", index=0, prompt="?", workflow="react_agent_workflow"))


async def test_observers_ask_without_being_recorded():
    engine = ScriptedEngine(answer=lambda m: "seen")
    async with public(engine, "policy", port=None, key="sesame") as told:
        assert told["api_key"] == "sesame" and told["base_url"].startswith("http://127.0.0.1:")
        async with openai.AsyncOpenAI(**told) as c:
            got = await c.chat.completions.create(model="x", messages=HI, temperature=0.2)
            assert (
                got.choices[0].message.content == "seen"
                and engine.calls[0].sampling.temperature == 0.2
            )
            assert [m.id async for m in c.models.list()] == ["policy"]
        async with httpx.AsyncClient(timeout=20) as http:
            got = await http.post(
                f"{told['base_url']}/reward",
                json={"reward": 1},
                headers={"Authorization": "Bearer sesame"},
            )
            assert got.status_code == 404
        port = int(told["base_url"].split(":")[2].split("/")[0])
        with pytest.raises(SetupError, match="cannot listen"):
            async with public(engine, "other", port=port, key=None):
                pass


async def test_a_score_may_be_returned_or_left_to_the_taskset():
    async def unscored(self, task, base_url, api_key):
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as c:
            await c.chat.completions.create(model="m", messages=HI)
        return Score(value=None, reason="nobody knows")

    group = await play(ScriptedEngine("4"), agent(unscored))
    assert group.rows[0].reward is None and group.rows[0].info["reward_reason"] == "nobody knows"


async def test_a_real_engine_sees_exactly_the_text_of_a_completion(tiny_model):
    from rft.engine.settings import EngineSettings
    from rft.engine.transformers import TransformersEngine

    engine = await TransformersEngine.start(
        EngineSettings(
            engine_type="transformers",
            model_path=str(tiny_model),
            max_model_len=64,
            fixed_weights=True,
        )
    )
    try:
        ctx, opened = session(engine, sampling=SamplingArgs(max_tokens=3))
        async with opened as d, client(d) as http:
            body = {"prompt": "a<|im_start|>b", "n": 2, "return_token_ids": True}
            choices = (await http.post("/completions", json=body)).json()["choices"]
            chat = (
                await http.post(
                    "/chat/completions",
                    json={"messages": HI, "logprobs": True, "return_token_ids": True},
                )
            ).json()
    finally:
        await engine.close()
    assert [c["prompt_token_ids"] for c in choices] == [choices[0]["prompt_token_ids"]] * 2
    assert len(choices[0]["prompt_token_ids"]) == 3, "one byte, one mark, one byte"
    last = ctx.completions[-1]
    assert (
        chat["choices"][0]["token_ids"] == last.tokens.tolist()
        and chat["prompt_token_ids"] == last.prompt_tokens.tolist()
    )
    logprobs = [t["logprob"] for t in chat["choices"][0]["logprobs"]["content"]]
    assert np.allclose(logprobs, last.logprobs) and chat["usage"]["completion_tokens"] == len(
        last.tokens
    )


@pytest.mark.e2e
async def test_a_call_that_the_engine_aborted_is_asked_again_and_not_recorded():
    class Aborts(ScriptedEngine):
        async def generate(self, request):
            done = await super().generate(request)
            return [
                msgspec.structs.replace(c, finish_reason="abort") if c.text == "four" else c
                for c in done
            ]

    async def asks(self, task, base_url, api_key):
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=1) as c:
            said = await c.chat.completions.create(model="m", messages=HI)
        return float(said.choices[0].message.content == "five")

    (row,) = (await play(Aborts("four", "five"), agent(asks))).rows
    assert (row.reason, row.reward, row.response_text) == ("", 1.0, "five")


async def test_a_tool_call_that_a_client_writes_anew_is_still_the_answer():
    """As LangChain does, which reads the arguments and writes its own JSON."""

    class Compact(ScriptedEngine):
        async def generate(self, request):
            call = {
                "id": "call_1",
                "type": "function",
                "function": {"name": "add", "arguments": '{"a":1,"b":2}'},
            }
            return [
                msgspec.structs.replace(c, text="", tool_calls=(call,))
                for c in await super().generate(request)
            ]

    engine = Compact("x", "y", "z")
    _ctx, opened = session(engine)
    async with opened as d, client(d) as http:
        for arguments in ('{"b": 2, "a": 1}', '{"a": 1, "b": 3}'):
            call = {
                "id": "call_1",
                "type": "function",
                "function": {"name": "add", "arguments": arguments},
            }
            said = {"role": "assistant", "content": None, "tool_calls": [call]}
            if not engine.calls:
                assert (
                    await http.post("/chat/completions", json={"messages": HI, "tools": [TOOL]})
                ).status_code == 200
            more = [*HI, said, {"role": "tool", "tool_call_id": "call_1", "content": "3"}]
            assert (
                await http.post("/chat/completions", json={"messages": more, "tools": [TOOL]})
            ).status_code == 200
    assert [c.prefix_messages for c in engine.calls] == [0, 2, 0], (
        "the second one says something else"
    )
