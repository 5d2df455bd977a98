"""How the calls of a run become rows, and who scores them."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rft.engine.scripted import ScriptedEngine
from rft.plugins import load_all
from rft.reward.base import reward
from rft.types.block import decode, encode
from rft.types.completion import Completion, Score, TokenScores, Transcript, Turn
from rft.types.ids import GroupId, Version
from rft.types.task import SamplingArgs, Task
from rft.workflow import run_rows
from rft.workflow.base import Workflow, workflow
from rft.workflow.group import run_group
from rft.workflow.play_run import RunLimits
from rft.workflow.recipes import Recipes
from rft.workflow.run_rows import cut
from tests.helpers.counted import Counted

ID = GroupId(1, 0, 3, 5)
LIMITS = RunLimits(max_timeout_s=20.0)


@pytest.fixture(scope="module", autouse=True)
def plugins():
    load_all()


def task(**changes):
    return Task(
        **{
            "taskset": "sums",
            "index": 7,
            "prompt": "2+2?",
            "truth": "4",
            "workflow": "simple_workflow",
            **changes,
        }
    )


async def play(engine, task, *, models=None):
    recipes = Recipes()
    recipes.find(task)
    await recipes.prepare(models or {})
    try:
        return await run_group(
            task, await recipes.get(task), engine, ID, limits=LIMITS, models=models or {}
        )
    finally:
        await recipes.close()


async def test_a_row_keeps_the_gold_answer_that_its_reward_compared_it_with():
    async def scores_itself(self, task, ctx):
        await ctx.chat(task.chat())
        return ctx.transcript(score=Score(value=1.0))

    reward("test_any")(lambda task, transcript: 1.0)
    asked = [
        task(reward="test_any", truth=truth)
        for truth in ("4", 4, "\ud800", "4" * 201, {"target": "4"})
    ]
    asked.append(task(workflow=custom(scores_itself)))
    kept = [(await play(ScriptedEngine(*["4"] * 8), a)).rows[0].info for a in asked]
    assert kept == [*({"gold_answer": x} for x in ("4", "4", "\\ud800")), {}, {}, {}]


async def test_rewards_of_calls_that_add_up_to_more_than_can_be_stored_are_an_error_of_their_run():
    async def asks_twice(self, task, ctx):
        first = await ctx.chat(task.chat())
        ctx.score_step(task.truth)
        await ctx.chat([*task.chat(), first.message, {"role": "user", "content": "Sure?"}])
        ctx.score_step(task.truth)
        return ctx.transcript()

    asked = [task(workflow=custom(asks_twice), truth=truth) for truth in (4e17, 6e17)]
    less, much = [(await play(ScriptedEngine("5", "4"), a)).rows[0] for a in asked]
    assert (less.status, less.reward) == ("complete", 8e17)
    assert (
        much.status == "failed"
        and "the reward of the calls of" in much.reason
        and "at most 1e+18" in much.reason
    )


def custom(run):
    workflow(f"test_{run.__name__}")(type(run.__name__, (Workflow,), {"run": run}))
    return f"test_{run.__name__}"


async def test_step_wise_rows_have_the_rewards_of_their_steps():
    async def walk(self, task, ctx):
        for state, points in (("a", 0.25), ("b", 1.0)):
            await ctx.chat([{"role": "user", "content": f"state {state}"}])
            ctx.score_step(points, parts={"points": points}, env_state_hash=state)
        return ctx.transcript(layout="steps", info={"map": 4})

    group = await play(
        ScriptedEngine("left", "right", "up", "down"), task(workflow=custom(walk), num_runs=2)
    )
    assert group.accepted and group.rewards == [1.25, 1.25], "the run's reward is the return"
    assert [str(r.id).split(".")[4:] for r in group.rows] == [
        [f"{run:04d}", "00", f"{s:04d}"] for run in (0, 1) for s in (0, 1)
    ]
    assert [r.reward for r in group.rows] == [0.25, 1.0] * 2
    assert [r.info for r in group.rows[:2]] == [
        {"map": 4, "env_state_hash": "a"},
        {"map": 4, "env_state_hash": "b"},
    ]
    assert [r.prompt_text for r in group.rows[:2]] == ["state a", "state b"]
    assert [x.id for x in decode(encode(group.rows))] == [r.id for r in group.rows]


async def test_one_reward_is_given_to_every_step():
    async def spread(self, task, ctx):
        await ctx.chat([{"role": "user", "content": "one"}])
        await ctx.chat([{"role": "user", "content": "two"}])
        return ctx.transcript(layout="steps")

    group = await play(
        ScriptedEngine("5", "4"), task(workflow=custom(spread), reward="exact_answer")
    )
    assert [r.reward for r in group.rows] == [1.0, 1.0] and group.rewards == [1.0]


@pytest.mark.parametrize(
    ("layout", "whole", "why"),
    [
        ("joined", 1.0, "give one of them"),
        ("chains", 1.0, "give one of them"),
        ("joined", 0.75, ""),
        ("steps", 1.0, ""),
    ],
)
async def test_a_row_has_one_reward(layout, whole, why):
    async def both(self, task, ctx):
        first = await ctx.chat(task.chat())
        ctx.score_step(0.25)
        await ctx.chat([*task.chat(), first.message, {"role": "user", "content": "Sure?"}])
        ctx.score_step(0.5)
        return ctx.transcript(score=Score(value=whole), layout=layout)

    group = await play(ScriptedEngine("5", "4"), task(workflow=custom(both)))
    assert why in group.rows[0].reason and group.accepted is not bool(why), group.rows[0].reason
    if not why:
        assert [r.reward for r in group.rows] == (
            [0.75] if layout == "joined" else [0.25, 0.5]
        ) and group.rewards == [whole]


@pytest.mark.extra("judge_lab")
async def test_reasoning_that_a_parser_cut_out_is_kept_beside_the_answer():
    """`rft replay` gives it to a reward, as the run did; the next call goes on from its tokens."""
    from rft.extras.judge_lab.rescore import transcript_of

    class Thinks(ScriptedEngine):
        async def generate(self, request):
            done = await super().generate(request)
            return [msgspec.structs.replace(c, reasoning=c.text[:3], text=c.text[3:]) for c in done]

    async def asks_twice(self, task, ctx):
        first = await ctx.chat(task.chat())
        await ctx.chat([*task.chat(), first.message, {"role": "user", "content": "Sure?"}])
        return ctx.transcript()

    given = task(workflow=custom(asks_twice), reward="exact_answer", truth="4")
    (row,) = (await play(Thinks("hm.5", "oh!4"), given)).rows
    assert row.reward == 1.0 and row.num_response_tokens == 10, row.reason
    assert row.messages[1] == {"role": "assistant", "content": "5", "reasoning_content": "hm."}
    assert [t.completion.reasoning for t in transcript_of(row, given).turns] == ["hm.", "oh!"]


@pytest.mark.parametrize("given", [lambda answer: answer, lambda answer: answer.text])
async def test_an_answer_is_given_back_as_a_message(given):
    async def forgets(self, task, ctx):
        answer = await ctx.chat(task.chat())
        await ctx.chat([*task.chat(), given(answer), {"role": "user", "content": "Sure?"}])
        return ctx.transcript()

    (row,) = (
        await play(ScriptedEngine("5", "4"), task(workflow=custom(forgets), reward="exact_answer"))
    ).rows
    assert "a message must be a dict" in row.reason and "answer.message" in row.reason


async def test_some_scored_steps_are_not_enough():
    async def half(self, task, ctx):
        await ctx.chat([{"role": "user", "content": "one"}])
        ctx.score_step(1.0)
        await ctx.chat([{"role": "user", "content": "two"}])
        return ctx.transcript(layout="steps")

    group = await play(ScriptedEngine("5", "4"), task(workflow=custom(half)))
    assert not group.accepted and "scored some of its calls" in group.rows[0].reason


async def test_a_call_that_could_not_be_scored_has_no_reward():
    """It was trained with 0."""

    async def judged(self, task, ctx):
        for n, score in enumerate(
            (Score(value=0.5), Score(value=None, reason="the verdict cannot be read"))
        ):
            (completion,) = await ctx.policy.generate(
                ctx.request([{"role": "user", "content": str(n)}])
            )
            ctx.record(Turn(messages=(), completion=completion, score=score))
        return ctx.transcript(layout="steps")

    group = await play(ScriptedEngine("5", "4"), task(workflow=custom(judged)))
    assert [r.reward for r in group.rows] == [0.5, None] and group.rewards == [0.5]


async def test_chains_join_the_calls_that_go_on_from_each_other():
    async def branches(self, task, ctx):
        first = await ctx.chat(task.chat())
        await ctx.chat([{"role": "user", "content": "another talk"}])
        await ctx.chat([*task.chat(), first.message, {"role": "user", "content": "Sure?"}])
        return ctx.transcript(layout="chains", score=Score(value=2.0))

    group = await play(ScriptedEngine("5", "x", "4"), task(workflow=custom(branches)))
    long, short = group.rows
    assert (len(long.sampling), len(short.sampling)) == (2, 1)
    assert bytes(long.tokens[long.loss_mask & (long.tokens < 256)].astype(np.uint8)) == b"54"
    assert [r.reward for r in group.rows] == [2.0, 2.0] and group.rewards == [2.0]


def turn(prompt, answer):
    completion = Completion(
        prompt_tokens=np.array(prompt, np.int32),
        tokens=np.array(answer, np.int32),
        logprobs=np.zeros(len(answer), np.float32),
        text="",
        finish_reason="stop",
        version_spans=(),
        sampling=SamplingArgs(),
    )
    return Turn(messages=(), completion=completion)


@pytest.mark.e2e
@given(st.data())
@settings(max_examples=300, deadline=None)
def test_a_call_joins_the_newest_chain_that_it_goes_on_from(data):
    few = st.lists(st.integers(0, 2), max_size=3)
    turns = []
    chains = []
    for _ in range(data.draw(st.integers(1, 12))):
        begin = data.draw(
            st.sampled_from(
                [[], *([*t.completion.prompt_tokens, *t.completion.tokens] for t in turns)]
            )
        )
        turns.append(turn([*begin, *data.draw(few)], data.draw(few)))
    for now in turns:
        prompt = now.completion.prompt_tokens.tolist()
        for chain in reversed(chains):
            before = [
                *chain[-1].completion.prompt_tokens.tolist(),
                *chain[-1].completion.tokens.tolist(),
            ]
            if prompt[: len(before)] == before:
                chain.append(now)
                break
        else:
            chains.append([now])
    found = cut(Transcript(turns=tuple(turns), layout="chains"))
    assert [[id(t) for t in c] for c in found] == [[id(t) for t in c] for c in chains]


def test_a_call_costs_the_same_however_many_a_run_has():
    """Lines of Python for each call that begins a chain of its own."""

    def lines(count):
        told = Transcript(
            turns=tuple(turn([i, *range(i % 7)], [1, 2]) for i in range(count)), layout="chains"
        )
        with Counted() as counted:
            assert len(cut(told)) == count
        return counted.lines / count

    few = lines(20)
    many = lines(400)
    assert many < 1.25 * few, (few, many)


def test_a_chat_that_goes_on_is_compared_with_its_last_call_alone(monkeypatch):
    summed = []
    sums = run_rows._prefix_sums
    monkeypatch.setattr(run_rows, "_prefix_sums", lambda turn: summed.append(turn) or sums(turn))
    grown = [turn(range(3 * i + 1), [3 * i + 1, 3 * i + 2]) for i in range(20)]
    assert [len(c) for c in cut(Transcript(turns=tuple(grown), layout="chains"))] == [20] and len(
        summed
    ) == 1
    told = [*grown, turn([7], [8]), turn(range(61), [1])]  # another talk, then back to the first
    assert [len(c) for c in cut(Transcript(turns=tuple(told), layout="chains"))] == [21, 1]


async def test_a_run_without_scores_of_its_calls_is_cut_once(monkeypatch):
    async def talks(self, task, ctx):
        first = await ctx.chat(task.chat())
        await ctx.chat([*task.chat(), first.message, {"role": "user", "content": "Sure?"}])
        return ctx.transcript(layout="chains")

    times = []
    monkeypatch.setattr(
        run_rows, "cut", lambda transcript: times.append(transcript) or cut(transcript)
    )
    group = await play(
        ScriptedEngine("5", "4"), task(workflow=custom(talks), reward="exact_answer")
    )
    assert group.rewards == [1.0] and len(times) == 1


async def test_the_traceback_of_a_failed_run_begins_at_the_authors_lines():
    def leaves(task, transcript):
        raise SystemExit(3)

    async def breaks(self, task, ctx):
        return {}["none"]

    reward("test_leaves")(leaves)
    (left,) = (await play(ScriptedEngine("4"), task(reward="test_leaves"))).rows
    (broken,) = (await play(ScriptedEngine("4"), task(workflow=custom(breaks)))).rows
    for row, name, says in (
        (left, "leaves", "called sys.exit(3)"),
        (broken, "breaks", "KeyError: 'none'"),
    ):
        first, place, *_, last = row.info["traceback"].splitlines()
        assert (
            first == "Traceback (most recent call last):"
            and place.endswith(f"in {name}")
            and says in last
        ), row.info


async def test_joined_calls_that_do_not_go_on_are_refused():
    async def disjoint(self, task, ctx):
        await ctx.chat(task.chat())
        await ctx.chat([{"role": "user", "content": "another talk"}])
        return ctx.transcript(score=Score(value=1.0))

    (row,) = (await play(ScriptedEngine("5", "x"), task(workflow=custom(disjoint)))).rows
    assert row.status == "failed" and "does not continue" in row.reason


@pytest.mark.parametrize("layout", ["joined", "chains"])
async def test_a_workflow_that_strips_thoughts_is_told_of_chains(layout):
    """Finding G16."""

    async def strips(self, task, ctx):
        first = await ctx.chat(task.chat())
        shown = {"role": "assistant", "content": first.answer}
        await ctx.chat([*task.chat(), shown, {"role": "user", "content": "Sure?"}])
        return ctx.transcript(score=Score(value=1.0), layout=layout)

    rows = (
        await play(ScriptedEngine("<think>2+2</think>4", "4"), task(workflow=custom(strips)))
    ).rows
    if layout == "chains":
        assert [r.status for r in rows] == ["complete", "complete"]
    else:
        assert [r.status for r in rows] == [
            "failed"
        ] and 'write ctx.transcript(layout="chains")' in rows[0].reason


@reward("test_ranks")
class Ranks:
    """Longer answers are better; asks nobody but wants the models."""

    whole_group = True
    prepared: object = None

    async def prepare(self, models):
        self.prepared = models

    async def __call__(self, task, transcripts):
        assert self.prepared is not None
        order = sorted(range(len(transcripts)), key=lambda i: len(transcripts[i].answer))
        return [{"rank": float(order.index(i))} for i in range(len(transcripts))]


async def test_a_group_reward_sees_all_runs_that_ended_well():
    async def may_fail(self, task, ctx):
        if ctx.run == 1:
            raise RuntimeError("no luck")
        await ctx.chat(task.chat())
        return ctx.transcript()

    name = custom(may_fail)
    group = await play(
        ScriptedEngine("aaa", "a"), task(workflow=name, reward="test_ranks", num_runs=3)
    )
    assert [r.reward for r in group.rows] == [1.0, None, 0.0] and group.rows[0].reward_parts == {
        "rank": 1.0
    }
    assert group.rows[1].reason == "RuntimeError: no luck" and group.accepted


@reward("test_short_list")
class ShortList:
    whole_group = True

    def __call__(self, task, transcripts):
        return [1.0]


async def test_a_group_reward_that_returns_too_little_fails_all_runs():
    group = await play(ScriptedEngine("a", "b"), task(reward="test_short_list", num_runs=2))
    assert {r.status for r in group.rows} == {
        "failed"
    } and "one result for each of 2 runs" in group.rows[0].reason


@workflow("test_tree")
class Tree:
    """One object that plays all runs."""

    async def run_group(self, task, contexts):
        for ctx in contexts:
            await ctx.chat(task.chat())
        return [ctx.transcript(score=Score(value=float(ctx.run))) for ctx in contexts]


@workflow("test_tree_blocking")
class BlockingTree:
    def run_group(self, task, contexts):
        for ctx in contexts:
            ctx.chat(task.chat())
        return [ctx.transcript(score=Score(value=float(ctx.run))) for ctx in contexts]


@workflow("test_tree_short")
class ShortTree:
    async def run_group(self, task, contexts):
        await contexts[0].chat(task.chat())
        return [contexts[0].transcript(score=Score(value=1.0))]


@pytest.mark.parametrize("name", ["test_tree", "test_tree_blocking"])
async def test_a_workflow_may_play_all_runs_of_a_task(name):
    group = await play(ScriptedEngine("a", "b", "c"), task(workflow=name, num_runs=3))
    assert [r.reward for r in group.rows] == [0.0, 1.0, 2.0]
    assert [r.response_text for r in group.rows] == ["a", "b", "c"]


async def test_a_workflow_that_returns_too_few_runs_fails_all():
    group = await play(ScriptedEngine("a"), task(workflow="test_tree_short", num_runs=2))
    assert {r.status for r in group.rows} == {"failed"} and "list of 2 transcripts" in group.rows[
        0
    ].reason


class Teacher:
    def __init__(self):
        self.temperatures = []

    async def score(self, row):
        self.temperatures.append(row.temperature)
        logprobs = -np.arange(1, len(row.tokens) - row.prompt_length + 1, dtype=np.float32)
        return TokenScores(logprobs=logprobs, version=Version(1, 0))


async def test_a_teacher_scores_every_token_that_was_written():
    async def taught(self, task, ctx):
        first = await ctx.chat(task.chat())
        await ctx.chat([*task.chat(), first.message, {"role": "user", "content": "Sure?"}])
        await ctx.teach("teacher")
        return ctx.transcript(score=Score(value=0.0))

    name = custom(taught)
    (row,) = (
        await play(ScriptedEngine("55", "4"), task(workflow=name), models={"teacher": Teacher()})
    ).rows
    assert row.teacher_logprobs is not None and row.teacher_logprobs[row.loss_mask].tolist() == [
        -1,
        -2,
        -3,
        -1,
        -2,
    ]
    assert not row.teacher_logprobs[~row.loss_mask].any()
    cool = task(workflow=name, sampling=SamplingArgs(temperature=0.7))
    await play(ScriptedEngine("55", "4"), cool, models={"teacher": (teacher := Teacher())})
    assert teacher.temperatures == [0.7, 0.7], "those of the student"
    (lost,) = (await play(ScriptedEngine("55", "4"), task(workflow=name))).rows
    assert lost.status == "failed" and "no auxiliary model 'teacher'" in lost.reason


async def test_a_call_that_goes_on_sends_the_tokens_before_it():
    async def thrice(self, task, ctx):
        messages = task.chat()
        for ask in ("Sure?", "Really?", None):
            messages.append((await ctx.chat(messages)).message)
            messages.append({"role": "user", "content": ask})
        return ctx.transcript(score=Score(value=0.0))

    engine = ScriptedEngine("5", "4", "4")
    (row,) = (await play(engine, task(workflow=custom(thrice)))).rows
    assert row.status == "complete", row.reason
    assert [c.prefix_messages for c in engine.calls] == [0, 2, 4]
    assert engine.calls[0].prefix_tokens is None
    for call in engine.calls[1:]:
        assert np.array_equal(row.tokens[: len(call.prefix_tokens)], call.prefix_tokens)


async def test_a_group_reward_that_is_late_ends_its_runs_by_their_deadline():
    @reward("test_never_compares")
    class Never:
        whole_group = True

        async def __call__(self, task, transcripts):
            await asyncio.Event().wait()

    asked = task(reward="test_never_compares", num_runs=2)
    group = await run_group(
        asked,
        Recipes().find(asked),
        ScriptedEngine("a", "b"),
        ID,
        limits=RunLimits(max_timeout_s=0.1),
    )
    assert [r.ended for r in group.runs] == ["timeout"] * 2, (
        "which the dynamic timeout and rollout/timeouts count"
    )
    assert group.rows[0].reason == "timeout: reward test_never_compares took longer than 0.1 s"


async def test_a_call_that_names_other_tools_tells_the_model_of_them():
    """It went on from the tokens of the call before, which tell of the tools of then."""
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {}}}
        for name in ("search", "pay")
    ]

    async def learns_tools(self, task, ctx):
        messages = task.chat()
        for told in (tools[:1], tools[:1], tools, []):
            answer = await ctx.chat(messages, tools=told)
            messages = [*messages, answer.message, {"role": "user", "content": "more"}]
        return ctx.transcript(layout="chains", score=Score(value=1.0))

    engine = ScriptedEngine("a", "b", "c", "d")
    group = await play(engine, task(workflow=custom(learns_tools)))
    assert [c.prefix_tokens is None for c in engine.calls] == [True, False, True, False]
    assert [(r.num_response_tokens, len(r.messages)) for r in group.rows] == [(4, 4), (4, 8)], (
        "two calls each, none trained twice"
    )
    assert b"pay" not in bytes(t for t in group.rows[0].tokens if t < 256) and b"pay" in bytes(
        t for t in group.rows[1].tokens if t < 256
    )


async def test_parts_of_text_are_joined_and_images_are_refused():
    """Templates wrote the list as code, or left the image out."""

    async def sends_parts(self, task, ctx):
        text = {"type": "text", "text": "2+2"}
        await ctx.chat([{"role": "user", "content": [text, {"type": "text", "text": "?"}]}])
        with pytest.raises(ValueError, match="images"):
            await ctx.chat(
                [
                    {
                        "role": "user",
                        "content": [text, {"type": "image_url", "image_url": {"url": "data:"}}],
                    }
                ]
            )
        return ctx.transcript(score=Score(value=1.0))

    group = await play(ScriptedEngine("4"), task(workflow=custom(sends_parts)))
    assert group.rows[0].messages[0]["content"] == "2+2?"


class CallsWithNan(ScriptedEngine):
    """Calls a tool with each answer."""

    async def generate(self, request):
        function = {"name": "f", "arguments": '{"a": NaN}'}
        call = {"id": "1", "type": "function", "function": function}
        return [
            msgspec.structs.replace(c, tool_calls=(call,)) for c in await super().generate(request)
        ]


async def test_an_answer_that_calls_with_nan_is_gone_on_from():
    """NaN is not equal to itself, so the run failed."""

    async def calls_tool(self, task, ctx):
        answer = await ctx.chat(task.chat())
        await ctx.chat([*task.chat(), answer.message, {"role": "tool", "content": "bad"}])
        return ctx.transcript(score=Score(value=0.0))

    group = await play(CallsWithNan("x", "y"), task(workflow=custom(calls_tool)))
    assert group.rows[0].reason == "" and group.rows[0].num_response_tokens == 4


async def test_an_answer_without_its_tool_calls_is_another_history():
    """The model saw the calls that the agent had removed."""

    async def removes_calls(self, task, ctx):
        answer = await ctx.chat(task.chat())
        said = {"role": "assistant", "content": answer.text}
        await ctx.chat([*task.chat(), said, {"role": "user", "content": "And?"}])
        return ctx.transcript(score=Score(value=0.0))

    engine = CallsWithNan("x", "y")
    await play(engine, task(workflow=custom(removes_calls)))
    assert [call.prefix_messages for call in engine.calls] == [0, 0]


async def test_a_reward_without_parts_is_no_reward():
    """It counted as 0."""
    reward("test_no_parts")(lambda task, transcript: {})
    group = await play(ScriptedEngine("4"), task(reward="test_no_parts"))
    assert (group.accepted, group.rows[0].reward) == (
        False,
        None,
    ) and "dict without parts" in group.rows[0].reason
