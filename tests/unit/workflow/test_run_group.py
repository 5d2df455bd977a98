from __future__ import annotations

import asyncio
import threading
import time

import numpy as np
import pytest
from pydantic import BaseModel

from rft.engine.scripted import ScriptedEngine
from rft.errors import ConfigError, EngineFailed
from rft.plugins import load_all
from rft.reward.base import reward
from rft.types.block import decode, encode
from rft.types.completion import Score
from rft.types.ids import GroupId, Version
from rft.types.task import SamplingArgs, Task
from rft.workflow.base import Workflow, seed_for, workflow
from rft.workflow.group import run_group
from rft.workflow.play_run import RunLimits
from rft.workflow.recipes import Recipes

ID = GroupId(1, 0, 3, 5)
LIMITS = RunLimits(max_timeout_s=20.0, max_retry_times=0)


@pytest.fixture(scope="module", autouse=True)
def plugins():
    load_all()


def task(truth="4", *, num_runs=1, **changes):
    return Task(
        **{
            "taskset": "sums",
            "index": 7,
            "prompt": "2+2?",
            "truth": truth,
            "workflow": "simple_workflow",
            "reward": "exact_answer",
            "num_runs": num_runs,
            **changes,
        }
    )


async def play(engine, task, *, limits=LIMITS, **more):
    return await run_group(task, Recipes().find(task), engine, ID, limits=limits, **more)


def custom(run):
    """A workflow class around one function, named after it."""
    cls = type(run.__name__, (Workflow,), {"run": run})
    return workflow(f"test_{run.__name__}")(cls)


async def test_a_group_is_scored_run_by_run():
    engine = ScriptedEngine("4", "5", "It is 4.")
    group = await play(engine, task(num_runs=3))
    assert [r.reward for r in group.rows] == [1.0, 0.0, 1.0]
    assert group.accepted and group.versions == [Version(1, 0)]
    row = group.rows[2]
    assert str(row.id) == "0001.00.00000003.000005.0002.00.0000"
    assert (row.status, row.finish_reason, row.prompt_text, row.response_text) == (
        "complete",
        "stop",
        "2+2?",
        "It is 4.",
    )
    assert row.messages[-1] == {"role": "assistant", "content": "It is 4."}
    assert row.taskset == "sums" and row.task_index == 7 and row.workflow == "simple_workflow"
    assert [c.request_id for c in engine.calls] == [f"{r.id}-0" for r in group.rows]
    assert [x.id for x in decode(encode(group.rows))] == [r.id for r in group.rows]


async def test_truncated_and_empty_answers_are_kept():
    group = await play(
        ScriptedEngine("4 and more", "4 and more"),
        task(num_runs=2, sampling=SamplingArgs(max_tokens=2)),
    )
    assert [r.status for r in group.rows] == ["truncated", "truncated"] and group.accepted
    empty = await play(ScriptedEngine("", ""), task(num_runs=2))
    assert [(r.status, r.reward, r.num_response_tokens) for r in empty.rows] == [
        ("complete", 0.0, 1)
    ] * 2


async def test_multi_turn_is_one_sequence():
    async def twice(self, task, ctx):
        first = await ctx.chat(task.chat())
        await ctx.chat(
            [
                *task.chat(),
                {"role": "assistant", "content": first.text},
                {"role": "user", "content": "Sure?"},
            ]
        )
        return ctx.transcript(
            score=Score(value=0.5, parts={"sure": 0.5}), metrics={"turns": 2}, info={"note": "x"}
        )

    custom(twice)
    (row,) = (await play(ScriptedEngine("5", "4"), task(workflow="test_twice"))).rows
    assert (
        row.reward == 0.5
        and row.reward_parts == {"sure": 0.5}
        and row.metrics == {"turns": 2.0}
        and row.info == {"note": "x"}
    )
    assert len(row.sampling) == 2 and row.num_response_tokens == 4
    assert bytes(row.tokens[row.loss_mask & (row.tokens < 256)].astype(np.uint8)) == b"54"


async def test_what_user_code_raises_becomes_a_record_with_its_traceback():
    async def broken(self, task, ctx):
        await ctx.chat(task.chat())
        raise KeyError("no such thing")

    custom(broken)
    engine = ScriptedEngine(answer=lambda m: "4")
    group = await play(
        engine, task(workflow="test_broken", num_runs=2), limits=RunLimits(20.0, max_retry_times=2)
    )
    assert not group.accepted and group.reason == "failed" and group.wholly_failed
    row = group.rows[1]
    assert (row.status, row.reason, row.reward, row.num_tokens) == (
        "failed",
        "KeyError: 'no such thing'",
        None,
        0,
    )
    assert (
        row.id.attempt == 2
        and row.info["attempts"] == 3
        and 'raise KeyError("no such thing")' in row.info["traceback"]
    )
    assert len(engine.calls) == 6 and len({c.request_id for c in engine.calls}) == 6


async def test_a_retry_can_succeed():
    tries = []

    async def flaky(self, task, ctx):
        tries.append(1)
        if len(tries) == 1:
            raise OSError("connection reset")
        await ctx.chat(task.chat())
        return ctx.transcript()

    custom(flaky)
    group = await play(
        ScriptedEngine("4"), task(workflow="test_flaky"), limits=RunLimits(20.0, max_retry_times=1)
    )
    assert group.accepted and group.rows[0].id.attempt == 1 and group.runs[0].attempts == 2


async def wrong_type(self, task, ctx):
    return "4"


async def no_call(self, task, ctx):
    return ctx.transcript()


async def no_score(self, task, ctx):
    await ctx.chat(task.chat())
    return ctx.transcript()


async def bad_metric(self, task, ctx):
    await ctx.chat(task.chat())
    return ctx.transcript(metrics={"x": float("nan")})


async def bad_info(self, task, ctx):
    await ctx.chat(task.chat())
    return ctx.transcript(info={"x": object()})


async def bad_score(self, task, ctx):
    await ctx.chat(task.chat())
    return ctx.transcript(score=Score(value=float("nan")))


async def bad_part(self, task, ctx):
    await ctx.chat(task.chat())
    return ctx.transcript(score=Score(value=1.0, parts={"format": float("nan")}))


async def no_layout(self, task, ctx):
    await ctx.chat(task.chat())
    return ctx.transcript(layout="step")


async def stop_of_letters(self, task, ctx):
    await ctx.chat(task.chat(), stop="END")
    return ctx.transcript()


async def leaves(self, task, ctx):
    raise SystemExit(3)


async def cancels_itself(self, task, ctx):
    raise asyncio.CancelledError


async def changes_the_past(self, task, ctx):
    await ctx.chat(task.chat())
    await ctx.chat([{"role": "user", "content": "another prompt"}])
    return ctx.transcript(score=Score(value=1.0))


def blocking_stop(self, task, ctx):
    raise StopIteration


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (wrong_type, r"returned str; it must return ctx\.transcript\(\)"),
        (no_call, "made no model call"),
        (no_score, "gave no score and taskset sums names no reward"),
        (bad_metric, "metric 'x' is nan; it must be a finite number"),
        (bad_info, "info must be JSON values"),
        (no_layout, "layout is 'step'; it must be one of joined, steps, chains"),
        (stop_of_letters, r"stop 'END': must be a list of texts, \['END'\]"),
        (bad_score, "reward is nan; it must be a finite number"),
        (bad_part, "reward part 'format' is nan; it must be a finite number"),
        (leaves, r"called sys\.exit\(3\)"),
        (cancels_itself, "was cancelled from inside"),
        (changes_the_past, "model call 1: its prompt does not continue"),
        (blocking_stop, "raised StopIteration"),
    ],
)
async def test_bad_workflows_are_named(run, reason):
    custom(run)
    (row,) = (
        await play(
            ScriptedEngine(answer=lambda m: "4"), task(workflow=f"test_{run.__name__}", reward=None)
        )
    ).rows
    assert row.status == "failed"
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(row.reason)


async def test_a_reward_that_raises_leaves_the_run_unscored_and_is_not_played_again():
    @reward("test_broken_judge")
    def broken_judge(task, transcript):
        raise ConnectionError("judge is gone")

    engine = ScriptedEngine(answer=lambda m: "4")
    group = await play(
        engine,
        task(reward="test_broken_judge", num_runs=2),
        limits=RunLimits(20.0, max_retry_times=3),
    )
    assert [r.reward for r in group.rows] == [None, None] and group.rows[
        0
    ].reason == "ConnectionError: judge is gone"
    assert len(engine.calls) == 2


@pytest.mark.parametrize(
    ("values", "accepted", "reason"),
    [((1.0, None), False, "too_few"), ((None, None), False, "unscored"), ((1.0, 0.0), True, "")],
)
async def test_groups_need_two_scored_members(values, accepted, reason):
    @reward(f"test_values_{values}")
    def by_answer(task, transcript):
        return Score(value=values[int(transcript.answer)])

    group = await play(ScriptedEngine("0", "1"), task(reward=f"test_values_{values}", num_runs=2))
    assert (group.accepted, group.reason) == (accepted, reason)


@pytest.mark.e2e
async def test_deadline():
    forever = asyncio.Event()

    async def stuck(self, task, ctx):
        await forever.wait()

    async def stubborn(self, task, ctx):
        while not forever.is_set():
            try:
                await forever.wait()
            except asyncio.CancelledError:
                continue
        return ctx.transcript()

    custom(stuck)
    custom(stubborn)
    (row,) = (
        await play(ScriptedEngine(), task(workflow="test_stuck"), limits=RunLimits(0.05))
    ).rows
    assert row.reason == "timeout: workflow test_stuck took longer than 0.05 s"
    began = asyncio.get_running_loop().time()
    (row,) = (
        await play(ScriptedEngine(), task(workflow="test_stubborn"), limits=RunLimits(0.05))
    ).rows
    assert row.reason.startswith("timeout") and asyncio.get_running_loop().time() - began < 2.0
    forever.set()


async def test_blocking_workflows_play_in_threads_of_their_own():
    here = threading.get_ident()
    free = threading.Event()

    def blocking(self, task, ctx):
        assert threading.get_ident() != here
        first = ctx.chat(task.chat(), max_tokens=1)
        assert ctx.completions == [first]
        return ctx.transcript()

    def hangs(self, task, ctx):
        free.wait()
        ctx.chat(task.chat())

    custom(blocking)
    custom(hangs)
    group = await play(ScriptedEngine("4", "5"), task(workflow="test_blocking", num_runs=2))
    assert sorted(r.reward for r in group.rows) == [0.0, 1.0]
    engine = ScriptedEngine("4")
    (row,) = (await play(engine, task(workflow="test_hangs"), limits=RunLimits(0.05))).rows
    (thread,) = [t for t in threading.enumerate() if t.name == f"run-{row.id}"]
    free.set()
    await asyncio.to_thread(thread.join, 10)
    # a run past its deadline cannot call the model any more
    assert row.reason.startswith("timeout") and engine.calls == []


async def test_a_blocking_run_that_is_over_has_no_call_under_way():
    def asks(self, task, ctx):
        ctx.chat(task.chat())
        return ctx.transcript()

    custom(asks)
    engine = ScriptedEngine("4")
    engine.hold()
    (row,) = (await play(engine, task(workflow="test_asks"), limits=RunLimits(0.2))).rows
    assert row.reason.startswith("timeout") and len(engine.calls) == 1 and engine.running == 0


async def test_several_answers_to_one_question():
    async def samples(self, task, ctx):
        await ctx.sample(task.chat(), n=2)
        return ctx.transcript(layout="chains")

    def blocking_samples(self, task, ctx):
        assert len(ctx.sample(task.chat(), n=2)) == 2 and ctx.policy is not None
        return ctx.transcript(layout="chains")

    async def chats(self, task, ctx):
        await ctx.chat(task.chat(), n=2)

    for run in (samples, blocking_samples):
        custom(run)
        rows = (await play(ScriptedEngine("4", "5"), task(workflow=f"test_{run.__name__}"))).rows
        assert [r.response_text for r in rows] == ["4", "5"]
    custom(chats)
    (row,) = (await play(ScriptedEngine("4", "5"), task(workflow="test_chats"))).rows
    assert "ctx.sample" in row.reason


async def test_a_dead_engine_is_no_failed_run():
    engine = ScriptedEngine()
    engine.die()
    with pytest.raises(EngineFailed, match="killed by the test"):
        await play(engine, task(num_runs=4), limits=RunLimits(20.0, max_retry_times=5))


async def test_a_prompt_that_is_too_long_is_not_tried_again():
    engine = ScriptedEngine()
    (row,) = (
        await play(engine, task(prompt="x" * 5000), limits=RunLimits(20.0, max_retry_times=5))
    ).rows
    assert row.reason.startswith("PromptTooLong: ") and row.id.attempt == 0


async def test_seeds_depend_on_the_place_alone():
    a, b = ScriptedEngine(answer=lambda m: "4"), ScriptedEngine(answer=lambda m: "4")
    for engine in (a, b):
        await play(engine, task(num_runs=3), seed=lambda run: seed_for(42, 3, 5, run))
    seeds = [c.sampling.seed for c in a.calls]
    assert (
        seeds == [c.sampling.seed for c in b.calls]
        and len(set(seeds)) == 3
        and all(0 <= s < 2**31 for s in seeds)
    )
    assert seed_for(42, 3, 5, 0)(0) != seed_for(42, 3, 5, 0)(1) != seed_for(43, 3, 5, 0)(1)
    await play(a, task())
    assert a.calls[-1].sampling.seed is None


def test_recipes_check_names_and_arguments():
    recipes = Recipes()
    assert recipes.find(task()) is recipes.find(task(truth="5"))
    with pytest.raises(
        ConfigError,
        match=r"unknown argument .stile. for workflow .math_workflow.\.  Known: style, "
        r"system_prompt\.  Did you mean style",
    ):
        recipes.find(task(workflow="math_workflow", workflow_args={"stile": "tags"}))
    with pytest.raises(ConfigError, match="Did you mean simple_workflow"):
        recipes.find(task(workflow="simpel_workflow"))


def test_a_workflow_that_cannot_be_made_is_refused_before_a_run():
    async def run(self, task, ctx): ...

    class Takes(BaseModel):
        size: int = 1

    workflow("test_wants")(
        type("Wants", (Workflow,), {"run": run, "__init__": lambda self, instruction: None})
    )
    workflow("test_takes_none", args=Takes)(type("TakesNone", (Workflow,), {"run": run}))
    with pytest.raises(
        ConfigError,
        match=r"sums\.workflow_args: .*test_wants' cannot be called .*missing a required argument: "
        r"'instru",
    ):
        Recipes().find(task(workflow="test_wants"))
    Recipes().find(task(workflow="test_wants", workflow_args={"instruction": "x"}))
    with pytest.raises(ConfigError, match="got an unexpected keyword argument 'size'"):
        Recipes().find(task(workflow="test_takes_none"))


async def test_shipped_workflows():
    engine = ScriptedEngine(answer=lambda m: "<think>x</think><answer>4</answer>")
    (row,) = (await play(engine, task(workflow="math_workflow"))).rows
    assert row.reward == 1.0 and "<think>" in engine.calls[0].messages[0]["content"]
    await play(engine, task(workflow="math_workflow", workflow_args={"style": "boxed"}))
    assert "boxed" in engine.calls[1].messages[0]["content"]
    await play(engine, task(workflow="math_workflow", system_prompt="Mine."))
    assert [m["content"] for m in engine.calls[2].messages] == ["Mine.", "2+2?"]
    await play(engine, task(workflow_args={"system_prompt": "Short."}))
    assert [m["content"] for m in engine.calls[3].messages] == ["Short.", "2+2?"]


@pytest.mark.e2e
@pytest.mark.parametrize("how", ["alone", "weighted", "penalty"])
async def test_a_reward_that_waits_for_its_turn_is_not_late(how):
    @reward("test_takes_its_time")
    def takes_its_time(task, transcript):
        time.sleep(0.15)
        return 1.0

    name, args = {
        "alone": ("test_takes_its_time", {}),
        "weighted": ("weighted_reward", {"rewards": {"slow": {"reward": "test_takes_its_time"}}}),
        "penalty": ("test_takes_its_time", {"enable_overlong_penalty": True, "cache_length": 10}),
    }[how]
    group = await play(
        ScriptedEngine(answer=lambda m: "4"),
        task(reward=name, reward_args=args, num_runs=5),
        limits=RunLimits(0.5),
    )
    assert [r.reason for r in group.rows] == [""] * 5, "five times 0.15 s is more than 0.5 s"
    (late,) = (
        await play(ScriptedEngine("4"), task(reward=name, reward_args=args), limits=RunLimits(0.05))
    ).rows
    assert late.reason == f"timeout: reward {name} took longer than 0.05 s"


async def test_numbers_of_numpy_are_metrics():
    async def counts(self, task, ctx):
        await ctx.chat(task.chat())
        return ctx.transcript(metrics={"a": np.float32(0.5), "b": np.int64(3), "c": np.array(2.0)})

    custom(counts)
    (row,) = (await play(ScriptedEngine("4"), task(workflow="test_counts"))).rows
    assert (
        row.metrics == {"a": 0.5, "b": 3.0, "c": 2.0}
        and decode(encode([row]))[0].metrics == row.metrics
    )


@pytest.mark.parametrize(
    "overrides", [{"temperature": 0}, {"top_p": 0.9}, {"repetition_penalty": 1.1}]
)
async def test_a_call_whose_log_probs_no_trainer_can_compute_fails_its_run_alone(overrides):
    async def draws(self, task, ctx):
        first = await ctx.chat(task.chat(), temperature=0.5, max_tokens=4, stop=["x"])
        messages = [*task.chat(), first.message, {"role": "user", "content": "Sure?"}]
        if ctx.run == 1:
            await ctx.chat(messages, **overrides)
        # is not recorded, and not trained
        await ctx.policy.generate(ctx.request(messages, **overrides))
        return ctx.transcript()

    custom(draws)
    asked, answers = task(workflow="test_draws", num_runs=3), ScriptedEngine(answer=lambda m: "4")
    group = await play(answers, asked, limits=RunLimits(20.0, reproducible=True))
    assert [r.status for r in group.rows] == ["complete", "failed", "complete"] and group.accepted
    assert (
        "model call 1 has temperature 0, or a top_p" in group.rows[1].reason
        and "ctx.policy.generate" in group.rows[1].reason
    )
    assert not any(r.failed for r in (await play(answers, asked)).runs), (
        "an evaluation, or a loss that reads no log-probs"
    )
    rejecting = [
        r.status for r in (await play(answers, asked, limits=RunLimits(20.0, sampled=True))).rows
    ]
    assert rejecting[1] == ("failed" if overrides.get("temperature") == 0 else "complete"), (
        "a correction knows no greedy tokens"
    )
    greedy = task(workflow="test_draws", sampling=SamplingArgs(temperature=0))
    assert (await play(answers, greedy, limits=RunLimits(20.0, reproducible=True))).rows[
        0
    ].status == "complete"


async def test_what_a_run_or_its_reward_changes_in_a_task_is_changed_for_no_other():
    async def eats(self, task, ctx):
        messages = task.chat()
        messages[0]["content"].append({"type": "text", "text": task.truth.pop()})
        task.tools[0]["function"]["name"] = task.row["more"].pop("name")
        await ctx.chat(messages)
        return ctx.transcript(info={"asked": ctx.transcript().turns[0].messages[0]["content"]})

    async def later(task, transcript):
        return (
            float(len(task.truth) + len(task.row["more"]))
            + len(task.truth.pop())
            + 0 * len(task.row.pop("more"))
        )

    custom(eats)
    reward("test_eats")(
        lambda task, transcript: (
            10.0 * task.row["more"].pop("points") + len(task.truth.pop() + task.truth.pop())
        )
    )
    reward("test_eats_later")(later)
    given = {
        "truth": ["a", "bc"],
        "row": {"more": {"name": "f", "points": 7}},
        "tools": ({"function": {"name": "g"}},),
    }
    asked = task(
        **given,
        messages=({"role": "user", "content": [{"type": "text", "text": "?"}]},),
        workflow="test_eats",
        num_runs=3,
    )
    for name, value in (("test_eats", 73.0), ("test_eats_later", 6.0)):
        made = Task(**{**{f: getattr(asked, f) for f in asked.__struct_fields__}, "reward": name})
        group = await play(ScriptedEngine(answer=lambda m: "4"), made)
        assert [r.reward for r in group.rows] == [value] * 3 and [
            r.info["asked"] for r in group.rows
        ] == ["?bc"] * 3
    assert asked.truth == ["a", "bc"] and asked.tools == ({"function": {"name": "g"}},)


async def test_a_group_that_fails_is_played_again():
    attempts = []

    class Together(Workflow):
        async def run_group(self, task, contexts):
            attempts.append([c.request_id for c in contexts])
            if len(attempts) == 1:
                raise RuntimeError("once")
            return [
                c.transcript(score=Score(value=float(len((await c.chat(task.chat())).text))))
                for c in contexts
            ]

    workflow("test_together")(Together)
    asked = task(workflow="test_together", num_runs=2, reward=None)
    group = await play(ScriptedEngine("a", "b"), asked, limits=RunLimits(20.0, max_retry_times=1))
    assert (
        group.accepted
        and group.rewards == [1.0, 1.0]
        and [r.attempts for r in group.runs] == [2, 2]
    )
    assert [str(r.id) for r in group.rows] == attempts[1] and attempts[0] != attempts[1]
