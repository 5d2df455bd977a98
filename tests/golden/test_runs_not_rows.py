"""Cutting a run into more rows changes nothing: every registered advantage and aggregation, through
the trainer's own path from a lease to the gradient of each token's loss.  A part that is registered
later is covered without a change here.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from rft.algorithm.args import AGG_MODES, Args, Computed
from rft.algorithm.base import Denominators, LossInputs, StepInputs, StepRow
from rft.algorithm.catalog import losses, shipped
from rft.algorithm.composition import build
from rft.algorithm.settings import AlgorithmSettings, CorrectionConfig
from rft.plugins import REGISTRY
from rft.testing.algorithm import gradients
from rft.trainer.rows.batch_builder import build_step, decode_lease
from rft.trainer.rows.pack import Budget
from rft.types.block import encode
from rft.types.completion import Credit, VersionSpan
from rft.types.credit import group_statistics
from rft.types.experience import Experience, scored_members
from rft.types.ids import ExperienceId, GroupId, Version
from rft.types.ports import Lease

REGISTRY.scan_package("rft.algorithm")
ADVANTAGES = REGISTRY.names("advantage_fn")
PROMPT = 2
LENGTHS = ((5, 7, 4), (6, 3, 8))  # of the runs of two groups, in trained tokens
REWARDS = ((1.0, 0.0, 0.25), (0.0, 1.0, 0.0))
COMPUTED: tuple[Computed, ...] = (
    "old",
    "ref",
    "entropy",
    "sum_squares",
    "discriminator_mean",
    "values",
)
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "grpo": [{"norm_by_std": False}, {"std_cal_level": "batch"}, {"rank_penalty": 0.5}],
    "opmd": [{"opmd_baseline": "logavgexp"}],
    "rec": [{"drop": "balance"}],
    "ppo": [{"gamma": 0.9, "lam": 0.8}],
    "reinforceplusplus": [{"gamma": 0.9}],
}


def _args_of(name: str) -> type[Args]:
    return shipped()["advantage_fn", name]


CASES = [(name, args) for name in ADVANTAGES for args in ({}, *VARIANTS.get(name, ()))]
SEQUENCES = {
    "gspo": "the ratio of a sequence, which is a row",
    "vespo": "the ratio of a sequence, which is a row",
    "geo_mean": "the ratio of a sequence, which is a row",
}
EXCEPTIONS = {
    "gigpo": "its rows are steps with states of their own, so a cut makes other steps: "
    "docs/algorithms/agents.md",
    "seq-mean-token-mean": "a mean over rows, as veRL has it; run-mean is the mean over runs: "
    "docs/algorithms/parts.md",
}
WHOLE = Budget(10_000)  # one micro-batch
# (group, run) -> trained tokens of each of its rows; else it is one row
Cut = dict[tuple[int, int], Sequence[int]]
REJECTS = CorrectionConfig(rollout_rs="token_k2", rollout_rs_threshold=50.0)
FAR = 15.0  # nats, beyond that threshold


@dataclass(frozen=True)
class Drawn:
    """Trained tokens and rewards of the runs of each group."""

    lengths: Sequence[Sequence[int]] = LENGTHS
    rewards: Sequence[Sequence[float]] = REWARDS


@st.composite
def steps(draw: st.DrawFn) -> Drawn:
    run = st.tuples(st.integers(1, 6), st.sampled_from([0.0, 0.25, 1.0, 1.5]))
    groups = draw(st.lists(st.lists(run, min_size=1, max_size=4), min_size=1, max_size=3))
    lengths, rewards = ([[run[i] for run in group] for group in groups] for i in range(2))
    return Drawn(lengths, rewards)


@st.composite
def cuts(draw: st.DrawFn, drawn: Drawn) -> Cut:
    cut = {}
    for g, runs in enumerate(drawn.lengths):
        for run, length in enumerate(runs):
            inner = st.sets(st.integers(1, max(length - 1, 1)), max_size=min(length - 1, 3))
            ends = [0, *sorted(draw(inner) if length > 1 else ()), length]
            cut[g, run] = [b - a for a, b in itertools.pairwise(ends)]
    return cut


def _stream(group: int, run: int) -> np.random.Generator:
    return np.random.default_rng((group, run))


def rows(
    cut: Cut, credit: Credit = "run", drawn: Drawn = Drawn()
) -> tuple[list[Experience], list[dict[Computed, np.ndarray]]]:
    """Every run has the same tokens and numbers, whatever rows they are in."""
    made = []
    computed = []
    for g, runs in enumerate(drawn.lengths):
        for run, length in enumerate(runs):
            draw = _stream(g, run)
            tokens = draw.integers(3, 200, length).astype(np.int32)
            logprobs = (-draw.random(length) - 0.1).astype(np.float32)
            numbers = {
                name: (-draw.random(length) if name in ("old", "ref") else draw.random(length))
                for name in COMPUTED
            }
            at = 0
            for step, size in enumerate(cut.get((g, run), (length,))):
                here = slice(at, at + size)
                at += size
                made.append(
                    _row(
                        ExperienceId(1, 0, 0, g, run, step=step),
                        tokens[here],
                        logprobs[here],
                        drawn.rewards[g][run],
                        credit,
                    )
                )
                computed.append(
                    {name: values[here].astype(np.float32) for name, values in numbers.items()}
                )
            assert at == length
    return made, computed


def _row(
    id: ExperienceId, tokens: np.ndarray, logprobs: np.ndarray, reward: float, credit: Credit
) -> Experience:
    prompt = np.full(PROMPT, 1, np.int32)
    return Experience(
        id=id,
        taskset="t",
        task_index=id.task,
        workflow="w",
        status="complete",
        finish_reason="stop",
        tokens=np.concatenate([prompt, tokens]),
        loss_mask=np.arange(PROMPT + len(tokens)) >= PROMPT,
        logprobs=np.concatenate([np.zeros(PROMPT, np.float32), logprobs]),
        version_spans=(VersionSpan(Version(1, 0), PROMPT, PROMPT + len(tokens)),),
        reward=reward,
        credit=credit,
        reward_parts={"whole": reward, "low": float(reward < 0.5)},
        teacher_logprobs=np.concatenate([np.zeros(PROMPT, np.float32), logprobs * np.float32(0.5)]),
        info={"baseline_reward": 0.5, "env_state_hash": str(id.step), "step_reward": reward},
    )


Outcome = tuple[dict[tuple[int, int], np.ndarray], dict[tuple[int, int], np.ndarray]]


def outcome(
    settings: AlgorithmSettings,
    cut: Cut,
    *,
    budget: Budget = WHOLE,
    world: int = 1,
    order: int | None = None,
    drawn: Drawn = Drawn(),
    rejected: bool = False,
) -> Outcome:
    """Advantages and the gradient of the loss by log-prob, of each token of each run, in the order
    of its tokens.  `rejected`: beside a group that the correction rejects, which is left out.
    """
    num_groups = len(drawn.lengths)
    if rejected:
        drawn = Drawn([*drawn.lengths, [3, 2]], [*drawn.rewards, [9.0, -4.0]])
    made, computed = rows(cut, drawn=drawn)
    for x, numbers in zip(made, computed, strict=True):
        if x.id.task == num_groups:
            numbers["old"] = x.logprobs[x.loss_mask] - np.float32(FAR)
    groups = [GroupId(1, 0, 0, g) for g in range(len(drawn.lengths))]
    stats = tuple(
        group_statistics(str(group), scored_members(x for x in made if x.group == group))
        for group in groups
    )
    if order is not None:
        places = np.random.default_rng(order).permutation(len(made))
        made = [made[i] for i in places]
        computed = [computed[i] for i in places]
    lease = decode_lease(Lease(step=1, frame=encode(made), groups=stats))
    algorithm = replace(build(settings), needs=replace(build(settings).needs, skips_zero=False))
    batch = build_step(lease, algorithm, budget, world_size=world, computed=computed)
    by_place: dict[int, np.ndarray] = {}
    places_of = iter(batch.order)
    for share in batch.shares:
        denominators = Denominators(
            share.tokens, share.rows, 6, num_runs=share.num_runs, num_groups=share.num_groups
        )
        for micro in share.micro_batches:
            places_here = [next(places_of) for _ in micro]
            if micro:
                _, parts = gradients(algorithm, micro, denominators)
                by_place |= zip(places_here, parts, strict=True)
    of_step = [i for i, x in enumerate(made) if x.id.task < num_groups]
    return (
        _by_run(made, {i: batch.advantages[i] for i in of_step}),
        _by_run(made, {i: by_place[i] for i in of_step if i in by_place}),
    )


def _by_run(
    made: Sequence[Experience], values: dict[int, np.ndarray]
) -> dict[tuple[int, int], np.ndarray]:
    found: dict[tuple[int, int], list[tuple[int, np.ndarray]]] = {}
    for i, x in enumerate(made):
        if i in values:
            found.setdefault((x.id.task, x.id.run), []).append((x.id.step, values[i]))
    return {
        key: np.concatenate([v for _, v in sorted(parts, key=lambda p: p[0])])
        for key, parts in found.items()
    }


def same(found: Outcome, expected: Outcome) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.keys() == theirs.keys()
        for key, values in theirs.items():
            np.testing.assert_allclose(mine[key], values, rtol=2e-5, atol=1e-6, err_msg=str(key))


def algorithm(name: str, args: dict[str, Any], mode: str = "token-mean") -> AlgorithmSettings:
    return AlgorithmSettings(
        advantage_fn=name, advantage_fn_args=args, policy_loss_fn="reinforce", loss_agg_mode=mode
    )


CUTS: list[Cut] = [{(0, 1): (3, 2, 2)}, {(0, 0): (1, 4), (1, 2): (5, 1, 2)}]


@pytest.mark.parametrize(("name", "args"), CASES)
@hypothesis.settings(max_examples=4)
@hypothesis.given(data=st.data())
def test_rows_are_no_more_than_a_way_to_store_runs(
    name: str, args: dict[str, Any], data: st.DataObject
) -> None:
    """Cutting runs, permuting rows, other micro-batches and ranks, and a group that is rejected
    change no advantage and no gradient.
    """
    drawn = data.draw(steps())
    cut = data.draw(cuts(drawn))
    mode = data.draw(st.sampled_from(AGG_MODES))
    settings = replace(
        algorithm(name, args, mode), rollout_correction=REJECTS, bypass_old_logprobs=False
    )
    made = outcome(settings, cut, drawn=drawn)
    if not {name, mode} & EXCEPTIONS.keys():
        same(made, outcome(settings, {}, drawn=drawn))
    same(outcome(settings, cut, drawn=drawn, order=data.draw(st.integers(0, 9))), made)
    budget = Budget(data.draw(st.integers(9, 30)), "packed")
    world = data.draw(st.integers(1, 3))
    same(outcome(settings, cut, drawn=drawn, budget=budget, world=world), made)
    same(outcome(settings, cut, drawn=drawn, rejected=True), made)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("mode", AGG_MODES)
def test_cutting_a_run_changes_no_gradient(mode: str, cut: Cut) -> None:
    if mode in EXCEPTIONS:
        pytest.skip(EXCEPTIONS[mode])
    same(outcome(algorithm("grpo", {}, mode), cut), outcome(algorithm("grpo", {}, mode), {}))


@pytest.mark.parametrize("name", REGISTRY.names("policy_loss_fn"))
@hypothesis.settings(max_examples=4)
@hypothesis.given(data=st.data())
def test_a_loss_does_not_see_how_runs_are_cut(name: str, data: st.DataObject) -> None:
    if losses()[name].pairs or losses()[name].labels:
        pytest.skip("its rows are those of a data set, one or two of each")
    if name == "distill_top":
        pytest.skip("rows without logits: tests/unit/trainer/test_distill_top.py cuts real ones")
    drawn = data.draw(steps())
    mode = data.draw(st.sampled_from(sorted(set(AGG_MODES) - EXCEPTIONS.keys())))
    settings = replace(algorithm("grpo", {}, mode), policy_loss_fn=name, bypass_old_logprobs=False)
    whole = outcome(settings, {}, drawn=drawn)
    if name not in SEQUENCES:
        same(outcome(settings, data.draw(cuts(drawn)), drawn=drawn), whole)
    same(outcome(settings, {}, drawn=drawn, order=data.draw(st.integers(0, 9))), whole)


TIED = [
    {"policy_loss_fn": "kl_cov", "policy_loss_fn_args": {"kl_cov_ratio": 0.3}},
    {
        "policy_loss_fn": "clip_cov",
        "policy_loss_fn_args": {"clip_cov_ratio": 0.3, "clip_cov_lb": -1.0},
    },
    {"policy_loss_fn": "m2po"},
    {"policy_loss_fn": "forking_tokens"},
    {"sample_strategy": "reward_variance"},
    {"sample_strategy": "pf_ppo"},
]


@pytest.mark.parametrize("parts", TIED, ids=lambda parts: next(iter(parts.values())))
@pytest.mark.parametrize("order", range(4))
def test_ties_see_neither_order_nor_cuts(parts: dict[str, Any], order: int) -> None:
    """Every token of every run has the same numbers, so each choice is between equals."""
    algorithm = build(AlgorithmSettings(**parts, bypass_old_logprobs=False))

    def chosen(cut: Cut, order: int | None) -> dict[tuple[str, int], list[float]]:
        rows = [
            StepRow(
                group=f"1.0.0.{g}",
                run=run,
                step=step,
                reward=float(run == 1),
                logprobs=np.zeros(size, np.float32),
                old=np.full(size, -0.1, np.float32),
                entropy=np.ones(size, np.float32),
            )
            for g, runs in enumerate(LENGTHS)
            for run, length in enumerate(runs)
            for step, size in enumerate(cut.get((g, run), (length,)))
        ]
        names = dict.fromkeys(row.group for row in rows)
        groups = {
            name: group_statistics(name, [r.scored for r in rows if r.group == name])
            for name in names
        }
        if order is not None:
            rows = [rows[i] for i in np.random.default_rng(order).permutation(len(rows))]
        made = algorithm.prepare(StepInputs(rows=rows, groups=groups, seed=3))
        numbers = range(len(rows)) if made.selected is None else made.selected
        found: dict[tuple[str, int], list[tuple[int, list[float]]]] = {}
        for place, i in enumerate(numbers):
            marks = [array[place].tolist() for array in made.extra.values()] or [[1.0]]
            found.setdefault((rows[i].group, rows[i].run), []).append((rows[i].step, marks[0]))
        return {
            key: [mark for _, marks in sorted(of_run) for mark in marks]
            for key, of_run in found.items()
        }

    assert chosen({}, order) == chosen({}, None)
    if "policy_loss_fn" in parts:
        assert chosen(CUTS[0], order) == chosen({}, None)


@pytest.mark.parametrize("kl", ["k1", "k2"])
@pytest.mark.parametrize("name", ["grpo", "reinforceplusplus", "ppo"])
def test_cutting_a_run_changes_nothing_with_kl_in_rewards(name: str, kl: str) -> None:
    settings = replace(algorithm(name, {}), kl_penalty_fn=kl, kl_penalty_fn_args={"kl_coef": 0.1})
    same(outcome(settings, CUTS[0]), outcome(settings, {}))


@pytest.mark.parametrize("mode", AGG_MODES)
def test_a_masked_row_changes_no_loss(mode: Any) -> None:
    """A row of which no token counts, in a run that has others."""
    from rft.algorithm.aggregate import aggregate

    def of(masked: bool) -> float:
        rows = torch.tensor([0, 0, 1, 1, 1])
        values = torch.tensor([1.0, 2.0, 4.0, 5.0, 6.0])
        mask = torch.tensor([True, True, True, True, True])
        if masked:
            rows = torch.cat([rows, torch.tensor([2, 2])])
            values = torch.cat([values, torch.tensor([9.0, 9.0])])
            mask = torch.cat([mask, torch.tensor([False, False])])
        run_tokens = torch.where(rows == 1, 3.0, 2.0)
        x = LossInputs(
            logprobs=values,
            old_logprobs=values,
            advantages=values,
            mask=mask,
            row=rows,
            num_rows=2 + masked,
            denominators=Denominators(5.0, 2.0, 4, num_runs=2.0, num_groups=1.0),
            loss_agg_mode=mode,
            run_tokens=run_tokens,
            group_tokens=torch.full_like(run_tokens, 5.0),
        )
        return float(aggregate(values, x))

    assert of(True) == of(False)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_a_chain_without_tokens_changes_no_advantage(name: str) -> None:
    """It is scored and stored, and never leased."""
    if name in EXCEPTIONS:
        pytest.skip(EXCEPTIONS[name])
    made, computed = rows({})
    group = GroupId(1, 0, 0, 0)
    members = scored_members(x for x in made if x.group == group)
    empty = members[1]._replace(step=1, length=0)
    others = str(GroupId(1, 0, 0, 1))
    rest = group_statistics(others, scored_members(x for x in made if str(x.group) == others))

    def advantages(of_group: list[Any]) -> list[np.ndarray]:
        lease = Lease(
            step=1, frame=encode(made), groups=(group_statistics(str(group), of_group), rest)
        )
        batch = build_step(
            decode_lease(lease), build(algorithm(name, {})), WHOLE, world_size=1, computed=computed
        )
        return [batch.advantages[i] for i in range(len(made))]

    for found, expected in zip(
        advantages([*members[:2], empty, *members[2:]]), advantages(members), strict=True
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_every_exception_is_one_and_every_shipped_part_is_covered() -> None:
    assert {name for kind, name in shipped() if kind == "advantage_fn"} <= {n for n, _ in CASES}
    assert EXCEPTIONS.keys() <= {*ADVANTAGES, *AGG_MODES}
    for name in EXCEPTIONS.keys() & set(AGG_MODES):
        with pytest.raises(AssertionError):
            same(
                outcome(algorithm("grpo", {}, name), CUTS[0]),
                outcome(algorithm("grpo", {}, name), {}),
            )
    for name in SEQUENCES:
        settings = replace(algorithm("grpo", {}), policy_loss_fn=name, bypass_old_logprobs=False)
        with pytest.raises(AssertionError):
            same(outcome(settings, CUTS[0]), outcome(settings, {}))
    with pytest.raises(AssertionError):
        same(outcome(algorithm("gigpo", {}), CUTS[0]), outcome(algorithm("gigpo", {}), {}))


@pytest.mark.parametrize(("credit", "expected"), [("run", (1.0, 0.0)), ("step", (2.0, 0.0))])
def test_the_reward_of_a_run(credit: Literal["run", "step"], expected: tuple[float, float]) -> None:
    """A shared reward counts once, rewards of steps add up."""
    from rft.types.credit import ScoredRow, compared, run_rewards

    members = [
        ScoredRow(1.0, 0, 0, 4, credit),
        ScoredRow(1.0, 0, 1, 4, credit),
        ScoredRow(0.0, 1, 0, 4, credit),
    ]
    assert tuple(run_rewards(members).values()) == expected
    assert compared(group_statistics("g", members)).rewards == (
        (1.0, 0.0) if credit == "run" else (1.0, 1.0, 0.0)
    )


def test_rows_of_one_run_cannot_be_told_apart_silently(caplog: pytest.LogCaptureFixture) -> None:
    from rft.buffer.trainer_side import _freeze_statistics
    from rft.types.credit import ScoredRow

    stats = _freeze_statistics(
        "g", [ScoredRow(1.0, 0, 0, 1), ScoredRow(0.0, 0, 1, 1), ScoredRow(0.0, 1, 0, 1)]
    )
    assert (
        stats.mean == 0.25
        and "run 0 of group g: its rows were given the rewards 1, 0" in caplog.text
    )


@pytest.mark.parametrize("name", [n for n in ADVANTAGES if _args_of(n).in_groups])
def test_a_run_that_lost_all_others_is_named(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Of whatever advantage that compares runs: it is trained as the formula says of a group of one, and
    counted.
    """
    made, computed = rows({})
    alone = [x for x in made if x.group == GroupId(1, 0, 0, 0)][:1]
    lease = Lease(
        step=1,
        frame=encode(alone),
        groups=(group_statistics(str(alone[0].group), scored_members(alone)),),
    )
    batch = build_step(
        decode_lease(lease),
        build(algorithm(name, {})),
        WHOLE,
        world_size=1,
        computed=computed[:1],
    )
    assert batch.metrics["experience/lone_runs"] == 1.0
    assert f"run 0 of group {alone[0].group} has no other run of its task left" in caplog.text
    assert np.isfinite(batch.advantages[0]).all()


@pytest.mark.parametrize("name", ["grpo", "rloo", "maxrl", "gdpo", "reinforceplusplus", "ppo"])
def test_a_run_whose_chains_are_masked_is_counted(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    settings = replace(
        algorithm(name, {}),
        rollout_correction=CorrectionConfig(rollout_rs="token_k2", rollout_rs_threshold=1e-3),
        bypass_old_logprobs=False,
    )
    made, computed = rows(CUTS[0])
    # the run of several chains has left the sampler far behind
    for x, numbers in zip(made, computed, strict=True):
        far = 3.0 if (x.id.task, x.id.run) == (0, 1) else 0.0
        numbers["old"] = x.logprobs[x.loss_mask] - np.float32(far)
    groups = {x.group: [y for y in made if y.group == x.group] for x in made}
    stats = tuple(
        group_statistics(str(g), scored_members(members)) for g, members in groups.items()
    )
    lease = Lease(step=1, frame=encode(made), groups=stats)
    batch = build_step(decode_lease(lease), build(settings), WHOLE, world_size=1, computed=computed)
    assert (
        batch.metrics["experience/masked_runs"] == 1.0 and batch.metrics["experience/runs"] == 6.0
    )
    assert (
        f"no token of run 1 of group {GroupId(1, 0, 0, 0)} is in the loss (1 such runs)"
        in caplog.text
    )
