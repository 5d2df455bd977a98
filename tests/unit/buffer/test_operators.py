"""The shipped operators, the order they may stand in, and what the pipeline lets an operator do."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from rft.buffer.operators.base import GroupView, Operator, Result, number_of, operator
from rft.buffer.operators.experience_pipeline import (
    ExperiencePipeline,
    OperatorFailed,
    Processed,
    build,
)
from rft.buffer.settings import OperatorSettings, PipelineSettings
from rft.errors import ConfigError, EngineFailed, RunFailed
from rft.plugins import REGISTRY, load_all
from rft.types.block import decode, encode
from rft.types.completion import VersionSpan
from rft.types.experience import Experience, failed
from rft.types.ids import ExperienceId, Version
from rft.types.metrics import Metric, reduce
from rft.types.task import Task
from rft.workflow.group import judge

load_all()
TASK = Task(taskset="sums", index=7, prompt="?", workflow="w", num_runs=4)


def row(run: int, reward: float | None, answer: str = "", **changes: Any) -> Experience:
    text = answer or f"a{run}"
    tokens = np.array([1, 2, *text.encode()], np.int32)
    mask = np.array([False] * 2 + [True] * len(text))
    return Experience(
        **{
            "id": ExperienceId(1, 0, 0, 7, run),
            "taskset": "sums",
            "task_index": 7,
            "workflow": "w",
            "status": "complete",
            "finish_reason": "stop",
            "tokens": tokens,
            "loss_mask": mask,
            "logprobs": np.where(mask, np.float32(-0.5), np.float32(0)),
            "version_spans": (VersionSpan(Version(1, 0), 0, len(tokens)),),
            "reward": reward,
            "response_text": text,
            **changes,
        }
    )


def rows(*rewards: float | None, **changes: Any) -> list[Experience]:
    return [row(i, r, **changes) for i, r in enumerate(rewards)]


def broken_run(run: int) -> Experience:
    return failed(
        ExperienceId(1, 0, 0, 7, run), taskset="sums", task_index=7, workflow="w", reason="it broke"
    )


def made(
    *operators: str | tuple[str, dict[str, Any]],
    deadline_s: float = 20.0,
    input_path: Path | None = None,
) -> ExperiencePipeline:
    named = [(o, {}) if isinstance(o, str) else o for o in operators]
    settings = tuple(
        OperatorSettings(name=n, args=a, key=f"operators[{i}]") for i, (n, a) in enumerate(named)
    )
    return ExperiencePipeline(
        PipelineSettings(operators=settings, input_path=input_path), judge, deadline_s
    )


async def after(
    given: list[Experience], *operators: str | tuple[str, dict[str, Any]], task: Task = TASK
) -> Processed:
    done = await made(*operators).process(msgspec.structs.replace(task, num_runs=len(given)), given)
    assert [r.id for r in done.rows] == [r.id for r in given]
    assert [r.tokens.tolist() for r in done.rows] == [r.tokens.tolist() for r in given]
    return done


def kept(done: Processed) -> list[int]:
    return [r.id.run for r in done.rows if r.trainable]


# ---------------------------------------------------------------- one by one


@pytest.mark.parametrize(
    ("name", "args", "rewards", "stay"),
    [
        ("reward_filter", {}, (-1.0, 0.0, 2.0), [1, 2]),
        ("reward_filter", {"threshold": 2}, (-1.0, 0.0, 2.0), [2]),
        ("reward_filter", {}, (None, 0.0, 2.0), [1, 2]),
        ("reward_std_filter", {}, (1.0, 0.0, 1.0), [0, 1, 2]),
        ("reward_std_filter", {}, (0.1, 0.1, 0.1), []),  # their mean is not 0.1 in floating point
        ("reward_std_filter", {}, (1.0,), []),
        ("reward_std_filter", {"threshold": 0.6}, (1.0, 0.0, 1.0), []),  # unbiased: 0.577
        ("dapo_dynamic_sampling", {}, (1.0, 0.0, 0.0), [0, 1, 2]),
        ("dapo_dynamic_sampling", {}, (1.0, 0.5, 1.0), []),
        ("dapo_dynamic_sampling", {}, (-1.0, 0.0), []),
        ("dapo_dynamic_sampling", {"correct_threshold": 0.5}, (1.0, 0.5), [0, 1]),
        ("invalid_reward_filter", {}, (None, 0.0, 2.0), [1, 2]),
    ],
)
async def test_filters_by_reward(
    name: str, args: dict[str, Any], rewards: tuple[float | None, ...], stay: list[int]
) -> None:
    done = await after(rows(*rewards), (name, args))
    assert kept(done) == stay and done.accepted == bool(stay)
    gone = [r for r in done.rows if r.reason]
    assert all(r.reason == name and r.status == "complete" for r in gone)
    # what is dropped keeps its reward: it counts in the statistics
    assert [r.reward for r in done.rows] == list(rewards)
    values = reduce(done.metrics)
    assert values["filtered_count"] == len(gone)
    assert values["experience_count"] == len(stay)
    assert f"time/operator/0_{name}" in values and values["time/total"] > 0
    if not stay:
        assert done.reason == "filtered"


async def test_runs_of_several_steps_count_once() -> None:
    """With the reward of their last step, as multi_step_grpo compares them."""
    given = [
        msgspec.structs.replace(r, id=ExperienceId(1, 0, 0, 7, i // 2, step=i % 2), credit="step")
        for i, r in enumerate(rows(0.0, 1.0, 0.5, 1.0))
    ]
    assert (await after(given, "reward_std_filter")).accepted
    assert not (await after(given, ("reward_std_filter", {"of_runs": True}))).accepted
    given[-1] = msgspec.structs.replace(given[-1], reward=0.0)
    assert (await after(given, ("reward_std_filter", {"of_runs": True}))).accepted


async def test_unscored_rows_are_not_zeros() -> None:
    """Neither wrong answers for DAPO, nor 0 in a statistic, nor rows below a threshold."""
    done = await after(rows(None, 1.0, 1.0), "dapo_dynamic_sampling")
    assert not done.accepted and reduce(done.metrics)["dropped_all_correct"] == 3
    done = await after(rows(None, 1.0, 1.0), "reward_filter")
    assert done.rows[0].reward is None and done.rows[0].reason == ""


async def test_dapo_goes_by_the_key_that_is_named() -> None:
    parts = [
        row(0, 0.4, reward_parts={"accuracy": 1.0, "overlong": -0.6}),
        row(1, -0.2, reward_parts={"accuracy": 0.0}),
    ]
    assert (await after(parts, "dapo_dynamic_sampling")).accepted
    right = [row(i, -0.2, reward_parts={"accuracy": 1.0}) for i in range(2)]
    done = await after(right, "dapo_dynamic_sampling")
    assert not done.accepted and reduce(done.metrics)["dropped_all_correct"] == 2
    by_metric = [row(i, 0.0, metrics={"solved": float(i)}) for i in range(2)]
    assert (await after(by_metric, ("dapo_dynamic_sampling", {"metric_key": "solved"}))).accepted
    for given, key in ((by_metric, "solvd"), ([parts[0], row(1, 0.0)], "accuracy")):
        with pytest.raises(OperatorFailed, match=f"has no '{key}'; it has"):
            await after(given, ("dapo_dynamic_sampling", {"metric_key": key}))


async def test_truncated_answers_are_masked_by_their_finish_reason() -> None:
    cut = row(1, 1.0, status="truncated", finish_reason="length")
    done = await after([row(0, 0.0), cut, row(2, 1.0)], "mask_response_truncated")
    assert kept(done) == [0, 2] and done.accepted
    assert (
        not done.rows[1].loss_mask.any()
        and not done.rows[1].logprobs.any()
        and done.rows[1].reason == "mask_response_truncated"
    )
    assert done.rows[1].reward == 1.0 and reduce(done.metrics)["masked_truncated_count"] == 1
    done = await after([cut, row(2, None)], "mask_response_truncated")
    assert not done.accepted and done.reason == "too_few"


async def test_a_teachers_likely_tokens_outlive_a_cleared_mask() -> None:
    cut = row(1, 1.0, status="truncated", finish_reason="length")
    count = sum(s.end - s.start for s in cut.version_spans)
    taught = msgspec.structs.replace(
        cut,
        teacher_logprobs=cut.logprobs,
        teacher_spans=cut.version_spans,
        teacher_top_ids=np.tile(np.arange(3, dtype=np.int32), (count, 1)),
        teacher_top_logprobs=np.full((count, 4), -1.5, np.float16),
    )
    done = await after([row(0, 0.0), taught, row(2, 1.0)], "mask_response_truncated")
    assert kept(done) == [0, 2] and not done.rows[1].loss_mask.any()
    assert np.array_equal(done.rows[1].teacher_top_ids, taught.teacher_top_ids)


@pytest.mark.parametrize(
    ("args", "answers", "stay"),
    [
        ({}, ("x", "y", "x", "x"), [0, 1]),
        ({"max_copies": 2}, ("x", "y", "x", "x"), [0, 1, 2]),
        ({"by": "text"}, ("x y", "X  y", "x y"), [0, 1]),
        ({"by": "text", "ignore_case": True, "ignore_space": True}, ("x y", "X  y", "x y "), [0]),
    ],
)
async def test_deduplicate(args: dict[str, Any], answers: tuple[str, ...], stay: list[int]) -> None:
    done = await after([row(i, float(i), a) for i, a in enumerate(answers)], ("deduplicate", args))
    assert kept(done) == stay and reduce(done.metrics)["duplicate_count"] == len(answers) - len(
        stay
    )


async def test_steps_of_a_run_that_are_alike_are_no_duplicates() -> None:
    left = [
        row(run, 1.0, "left", id=ExperienceId(1, 0, 0, 7, run, 0, step))
        for run in range(2)
        for step in range(3)
    ]
    done = await made("deduplicate").process(TASK, left)
    assert kept(done) == [0, 0, 0]


@pytest.mark.parametrize(
    ("op", "weight", "expected"),
    [("ADD", 2.0, 5.0), ("SUB", 2.0, -3.0), ("mul", 2, 4.0), ("DIV", 0.5, 1.0)],
)
async def test_reward_shaping(op: str, weight: float, expected: float) -> None:
    shaping = {
        "reward_shaping_configs": [{"stats_key": "quality", "op_type": op, "weight": weight}]
    }
    given = [row(0, 1.0, info={"quality": 2}), row(1, 1.0, metrics={"quality": 2.0}), row(2, None)]
    done = await after(given, ("reward_shaping_mapper", shaping))
    assert [r.reward for r in done.rows] == [expected, expected, None]
    values = reduce(done.metrics)
    assert (
        values["reward_diff/mean"]
        == values["reward_diff/max"]
        == values["reward_diff/min"]
        == expected - 1
    )


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (
            {"stats_key": "qualty"},
            "has no 'qualty' to shape its reward by; it has name, quality, zero",
        ),
        ({"stats_key": "zero", "op_type": "DIV"}, "cannot be divided by"),
        ({"stats_key": "quality", "op_type": "DIV", "weight": 0}, "cannot be divided by"),
        ({"stats_key": "name"}, "'name' is 'x'; it must be a finite number"),
        ({"stats_key": "quality", "op_type": "MUL", "weight": 1e308}, "makes its reward inf"),
    ],
)
async def test_reward_shaping_never_guesses(step: dict[str, Any], why: str) -> None:
    given = [row(i, 1.0, info={"quality": 3.0, "zero": 0, "name": "x"}) for i in range(2)]
    with pytest.raises(OperatorFailed, match=why) as caught:
        await after(given, ("reward_shaping_mapper", {"reward_shaping_configs": [step]}))
    assert (
        "ValueError" in caught.value.traceback and "built_in_operators.py" in caught.value.traceback
    )


async def test_pass_rates_are_of_all_scored_runs() -> None:
    values = reduce(
        (await after([*rows(1.0, 0.0, None), broken_run(3)], "pass_rate_calculator")).metrics
    )
    assert (
        values["selection/valid_ratio"]
        == values["selection/strict_valid_ratio"]
        == values["selection/<1_ratio"]
        == 1
    )
    values = reduce((await after(rows(1.0, 1.0), "pass_rate_calculator")).metrics)
    assert (
        values["selection/valid_ratio"] == values["selection/<15_16_ratio"] == 0
        and values["selection/>0_ratio"] == 1
    )


# ---------------------------------------------------------------- together


async def test_filters_see_the_statistics_of_all_scored_members() -> None:
    """reward_filter leaves equal rewards; the group's statistics still have the dropped row, so
    reward_std_filter keeps them.
    """
    done = await after(
        rows(-1.0, 1.0, 1.0), "reward_filter", "reward_std_filter", "dapo_dynamic_sampling"
    )
    assert kept(done) == [1, 2] and done.accepted


async def test_shaping_is_seen_by_the_filters_behind_it() -> None:
    given = [row(i, 1.0, metrics={"length": float(i)}) for i in range(2)]
    shaping = (
        "reward_shaping_mapper",
        {"reward_shaping_configs": [{"stats_key": "length", "op_type": "SUB", "weight": 0.1}]},
    )
    assert not (await after(given, "reward_std_filter")).accepted
    assert (await after(given, shaping, "pass_rate_calculator", "reward_std_filter")).accepted


async def test_failed_runs_are_not_shown_and_stay_failed() -> None:
    done = await after([broken_run(0), row(1, 1.0), row(2, 0.0)], "reward_filter", "deduplicate")
    assert done.accepted and done.rows[0].reason == "it broke" and kept(done) == [1, 2]
    done = await after([broken_run(0), broken_run(1)], "reward_filter")
    assert (done.accepted, done.reason) == (False, "failed")


def test_the_order_is_reward_statistics_drop() -> None:
    with pytest.raises(
        ConfigError,
        match=r"operators\[1\]: reward_shaping_mapper \(reward\) comes after an operator of stage "
        r"drop.*"
        r"Write them so: reward_shaping_mapper, pass_rate_calculator, reward_filter",
    ):
        made(
            "reward_filter",
            ("reward_shaping_mapper", {"reward_shaping_configs": [{"stats_key": "x"}]}),
            "pass_rate_calculator",
        )


@pytest.mark.extra
@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        (
            "reward_filtr",
            {},
            r"operators\[0\].name: unknown operator 'reward_filtr'.*Did you mean reward_filter",
        ),
        (
            "reward_filter",
            {"treshold": 1},
            r"operators\[0\].args: unknown argument 'treshold'.*Did you mean threshold",
        ),
        (
            "reward_filter",
            {"threshold": "high"},
            r"threshold: Input should be a valid number, given 'high'",
        ),
        (
            "reward_filter",
            {"threshold": float("nan")},
            "threshold: Input should be a finite number",
        ),
        ("reward_std_filter", {"threshold": -1}, "greater than or equal to 0"),
        ("deduplicate", {"by": "meaning"}, "'tokens' or 'text'"),
        ("reward_shaping_mapper", {}, "reward_shaping_configs: Field required"),
        (
            "reward_shaping_mapper",
            {"reward_shaping_configs": [{"stats_key": "x", "op_type": "POW"}]},
            "reward_shaping_configs.0.op_type",
        ),
        ("datajuicer", {}, "write data_juicer, or data_juicer_filter, which drops rows"),
        ("data_juicer", {}, "Data-Juicer needs operators, or config_path"),
        ("data_juicer", {"config_path": "no.yaml"}, "the recipe no.yaml cannot be read"),
        (
            "data_juicer",
            {"operators": [3]},
            "is no operator of Data-Juicer|should be a valid dictionary",
        ),
        ("no_class", {}, "must be a class"),
        ("no_stage", {}, "with `stage`, one of reward, statistics, drop"),
    ],
)
def test_what_is_refused(name: str, args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build([OperatorSettings(name=name, args=args, key="operators[0]")])


@operator("no_class")
def no_class(rows: object) -> None: ...


@operator("no_stage")
class NoStage(Operator):
    pass


# ---------------------------------------------------------------- one's own, and what it may not do


def own(stage: str, *processes: Any) -> ExperiencePipeline:
    """A pipeline of operators made of functions."""
    kinds = [
        type("Own", (Operator,), {"stage": stage, "process": process}) for process in processes
    ]
    names = [f"own_{id(kind)}" for kind in kinds]
    for name, kind in zip(names, kinds, strict=True):
        operator(name)(kind)
    try:
        return made(*names, deadline_s=0.5)
    finally:
        for name in names:
            del REGISTRY._plugins["operator", name]


def replaced(given: Sequence[Experience], **changes: Any) -> Result:
    return Result([msgspec.structs.replace(given[0], **changes), *given[1:]])


FAULTS = [
    ("drop", lambda s, r, g: r, "returned list; it must return Result"),
    ("drop", lambda s, r, g: None, "returned NoneType"),
    ("drop", lambda s, r, g: Result(None), "returned a NoneType among its rows"),  # type: ignore[arg-type]
    ("drop", lambda s, r, g: Result([*r, r[0]]), "twice; rows are never copied"),
    ("drop", lambda s, r, g: replaced(r, id=ExperienceId(1, 0, 0, 7, 9)), "which it was not given"),
    (
        "drop",
        lambda s, r, g: replaced(r, reward=9.0),
        "changed reward of .*; an operator of stage drop may change info",
    ),
    ("statistics", lambda s, r, g: Result(r[:1]), "left out .*; only operators of stage drop may"),
    ("reward", lambda s, r, g: Result([]), "left out"),
    ("reward", lambda s, r, g: replaced(r, tokens=r[0].tokens + 1), "changed tokens of"),
    ("reward", lambda s, r, g: replaced(r, logprobs=r[0].logprobs * 2), "changed logprobs of"),
    ("drop", lambda s, r, g: replaced(r, logprobs=r[0].logprobs * 2), "changed log-probs of"),
    (
        "drop",
        lambda s, r, g: replaced(r, loss_mask=np.ones(len(r[0].tokens), np.bool_)),
        "trains tokens of .* that were not to be",
    ),
    ("reward", lambda s, r, g: replaced(r, response_text="better"), "changed response_text of"),
    ("reward", lambda s, r, g: replaced(r, status="truncated"), "changed status of"),
    ("statistics", lambda s, r, g: Result(r, [Metric("x", float("nan"))]), "metrics are Metric"),
    ("statistics", lambda s, r, g: Result(r, [("x", 1.0)]), "metrics are Metric"),  # type: ignore[list-item]
    ("statistics", lambda s, r, g: Result(r, {"x": 1.0}), "metrics are Metric"),  # type: ignore[arg-type]
    ("statistics", lambda s, r, g: Result(r, None), "metrics are Metric"),  # type: ignore[arg-type]
    ("statistics", lambda s, r, g: Result(r, [Metric("x", 1.0, "median")]), "metrics are Metric"),  # type: ignore[arg-type]
    (
        "statistics",
        lambda s, r, g: replaced(r, metrics={"x": "high"}),
        "made .* invalid: metrics x are not finite",
    ),
    (
        "statistics",
        lambda s, r, g: replaced(r, metrics={"x": float("inf")}),
        "made .* invalid: metrics x are not finite",
    ),
]


@pytest.mark.parametrize(
    ("stage", "process", "why"), FAULTS, ids=[f"{s}-{w[:30]}" for s, _, w in FAULTS]
)
async def test_a_result_that_cannot_be_trusted_stops_the_run(
    stage: str, process: Any, why: str
) -> None:
    with pytest.raises(RunFailed, match=rf"operator own_\d+ .*{why}.*the run stops"):
        await own(stage, process).process(TASK, rows(1.0, 0.0))


async def test_what_an_operator_may_change() -> None:
    def better(self: Any, given: Sequence[Experience], group: GroupView) -> Result:
        assert (group.task, group.rewards, group.mean) == (TASK, [1.0], 1.0)
        return Result(
            [msgspec.structs.replace(r, reward=3.0, info={"judge": "x"}) for r in given],
            [Metric("judged", 2, "sum")],
        )

    done = await own("reward", better).process(TASK, rows(1.0, None))
    assert (
        [r.reward for r in done.rows] == [3.0, 3.0]
        and done.accepted
        and reduce(done.metrics)["judged"] == 2
    )

    async def unscored(self: Any, given: Sequence[Experience], group: GroupView) -> Result:
        return Result([msgspec.structs.replace(r, reward=None) for r in given])

    done = await own("reward", unscored).process(TASK, rows(1.0, 0.0))
    assert (done.accepted, done.reason) == (False, "unscored")


async def test_numbers_of_numpy_are_numbers() -> None:
    """A log-prob's mean is a float32; as a reward it was "not a finite number", as a metric it
    stopped the run.
    """

    async def numpys(self: Any, given: Sequence[Experience], group: GroupView) -> Result:
        low = np.float32(-0.25)
        made = [
            msgspec.structs.replace(
                r, reward=r.reward + low, reward_parts={"low": low}, metrics={"n": np.int64(2)}
            )
            for r in given
        ]
        return Result(made, [Metric("low", low)])

    done = await own("reward", numpys).process(TASK, rows(1.0, 0.0))
    assert reduce(done.metrics)["low"] == -0.25
    stored = decode(encode(done.rows))
    assert [(x.reward, x.reward_parts, x.metrics) for x in stored] == [
        (r, {"low": -0.25}, {"n": 2.0}) for r in (0.75, -0.25)
    ]
    assert all(type(x.reward) is float for x in stored)
    assert number_of(done.rows[0], "low") == -0.25


def raises(self: Any, given: Any, group: Any) -> Result:
    raise KeyError("no such column")


WRITES: list[Callable[[Experience], Any]] = [
    lambda row: row.tokens.fill(5),
    lambda row: row.tokens.setflags(write=True),
    lambda row: row.loss_mask.__setitem__(0, True),
    lambda row: row.messages[0].update(content="?"),
    lambda row: row.reward_parts.update(x=1.0),
    lambda row: row.info.update(x=1),
    lambda row: row.info["judge"].append({}),
    lambda row: row.metrics.update(x=1.0),
]


@pytest.mark.parametrize("write", WRITES)
async def test_rows_are_read_only_for_every_operator(write: Callable[[Experience], Any]) -> None:
    """Finding R1: also those that an operator before has made."""
    made: dict[str, Any] = {"info": {"judge": [1]}, "messages": ({"role": "user", "content": "?"},)}
    before = [msgspec.structs.replace(r, **made) for r in rows(1.0, 0.0)]

    def remakes(self: Any, given: Sequence[Experience], group: GroupView) -> Result:
        return Result(
            [msgspec.structs.replace(r, tokens=r.tokens.copy(), info={"judge": [1]}) for r in given]
        )

    def writes(self: Any, given: Sequence[Experience], group: GroupView) -> Result:
        write(given[0])
        return Result(given)

    for process in (own("reward", writes), own("reward", remakes, writes)):
        with pytest.raises(OperatorFailed, match=r"read-only|WRITEABLE") as caught:
            await process.process(TASK, before)
        assert "write(given[0])" in caught.value.traceback


async def not_finite(self: Any, given: Any, group: Any) -> Result:
    return replaced(given, reward=float("nan"))


async def hangs(self: Any, given: Any, group: Any) -> Result:
    await asyncio.Event().wait()
    raise AssertionError


def hangs_in_a_thread(self: Any, given: Any, group: Any) -> Result:
    STUCK.wait()
    return Result(given)


async def own_timeout(self: Any, given: Any, group: Any) -> Result:
    raise TimeoutError("the judge is slow")


STUCK = threading.Event()


@pytest.mark.parametrize(
    ("process", "why"),
    [
        (raises, "raised KeyError: 'no such column'"),
        (not_finite, "raised ValueError: reward: nan is not a finite number"),
        (hangs, "took longer than 0.5 s"),
        (hangs_in_a_thread, "took longer than 0.5 s"),
        (own_timeout, "raised TimeoutError: the judge is slow"),
        (lambda self, given, group: next(iter(())), "raised StopIteration"),
        (lambda self, given, group: exit(3), r"called sys.exit\(3\)"),
    ],
)
async def test_what_an_operator_raises_is_the_groups_failure(process: Any, why: str) -> None:
    STUCK.clear()
    try:
        with pytest.raises(OperatorFailed, match=rf"operator own_\d+ {why}") as caught:
            await own("reward", process).process(TASK, rows(1.0, 0.0))
        assert 'File "' in caught.value.traceback
    finally:
        STUCK.set()


async def test_an_engine_that_died_is_not_the_operators_fault() -> None:
    async def asks(self: Any, given: Any, group: Any) -> Result:
        raise EngineFailed("engine 0 is gone")

    with pytest.raises(EngineFailed, match="engine 0 is gone"):
        await own("reward", asks).process(TASK, rows(1.0, 0.0))


async def test_an_ordinary_function_runs_in_a_thread_and_sees_one_group_after_the_other() -> None:
    inside = 0
    seen = []
    here = threading.get_ident()

    def counts(self: Any, given: Sequence[Experience], group: GroupView) -> Result:
        nonlocal inside
        inside += 1
        assert inside == 1 and threading.get_ident() != here
        seen.append(len(given))
        inside -= 1
        return Result(given)

    pipeline = own("statistics", counts)
    await asyncio.gather(*(pipeline.process(TASK, rows(1.0, 0.0)) for _ in range(20)))
    assert seen == [2] * 20


async def test_prepare_and_close() -> None:
    events: list[str] = []

    class Life(Operator):
        stage = "drop"

        def __init__(self, name: str, bad: str = "") -> None:
            self.name = name
            self.bad = bad

        async def prepare(self, models: Any) -> None:
            events.append(f"{self.name} has {', '.join(models)}")
            if self.bad == "prepare":
                raise OSError("no table")

        async def close(self) -> None:
            events.append(f"{self.name} closed")
            if self.bad == "close":
                raise OSError("no room")

    operator("test_life")(Life)
    try:
        good = made(("test_life", {"name": "a"}), ("test_life", {"name": "b"}))
        await good.prepare({"rollout_model": None})  # type: ignore[dict-item]
        await good.close()
        await good.close()
        assert events == ["a has rollout_model", "b has rollout_model", "b closed", "a closed"]
        events.clear()
        bad = made(("test_life", {"name": "a"}), ("test_life", {"name": "b", "bad": "prepare"}))
        with pytest.raises(
            RunFailed,
            match=r"operator test_life failed to prepare:\nTraceback[\s\S]*OSError: no table",
        ):
            await bad.prepare({})
        await bad.close()
        assert events == ["a has ", "b has ", "a closed"]
        events.clear()
        bad = made(("test_life", {"name": "a"}), ("test_life", {"name": "b", "bad": "close"}))
        await bad.prepare({})
        with pytest.raises(RunFailed, match="failed to close"):
            await bad.close()
        assert events[-2:] == ["b closed", "a closed"]
    finally:
        del REGISTRY._plugins["operator", "test_life"]


# ---------------------------------------------------------------- the copy


async def test_the_copy_keeps_what_was_played(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "rows.jsonl"
    pipeline = made("reward_filter", input_path=path)
    await pipeline.prepare({})
    await asyncio.gather(
        *(pipeline.process(TASK, [row(0, -1.0), row(1, 1.0), broken_run(2)]) for _ in range(8))
    )
    await pipeline.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 24
    first = lines[0]
    assert (first["id"], first["reward"], first["reason"]) == (
        "0001.00.00000000.000007.0000.00.0000",
        -1.0,
        "",
    )
    assert first["tokens"] == [1, 2, 97, 48] and first["loss_mask"] == [False, False, True, True]
    assert (
        first["version_spans"] == [{"version": "1:0", "start": 0, "end": 4}]
        and lines[2]["reason"] == "it broke"
    )


async def test_a_line_that_a_crash_cut_off_is_taken_away(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"id": "x"}\n{"id": "y", "tok')
    pipeline = made(input_path=path)
    await pipeline.prepare({})
    await pipeline.process(TASK, rows(1.0, 0.0))
    await pipeline.close()
    assert [json.loads(line)["id"][0] for line in path.read_text().splitlines()] == ["x", "0", "0"]
    path.write_text("no end of a line")
    pipeline = made(input_path=path)
    await pipeline.prepare({})
    await pipeline.close()
    assert path.read_text() == ""


async def test_a_copy_that_cannot_be_written_stops_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        RunFailed,
        match=r"cannot be written: .*Make room, or set "
        r"data_processor.experience_pipeline.input_save_path",
    ):
        await made(input_path=tmp_path / "file" / "rows.jsonl").prepare({})
    full = made(input_path=Path("/dev/full"))
    with pytest.raises(RunFailed, match="/dev/full cannot be written"):
        await full.prepare({})
        await full.process(TASK, rows(1.0, 0.0))
    await full.close()
