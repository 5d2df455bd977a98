"""Cutting a run into more rows changes nothing: every registered advantage and aggregation, through
the trainer's own path from a lease to the gradient of each token's loss.  A part that is registered
later is covered without a change here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch

from rft.algorithm.args import AGG_MODES, Computed
from rft.algorithm.base import Denominators, LossInputs
from rft.algorithm.catalog import shipped
from rft.algorithm.composition import build
from rft.algorithm.settings import AlgorithmSettings
from rft.plugins import REGISTRY
from rft.trainer.batch_builder import make, read
from rft.trainer.pack import Budget, TrainRow
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
CASES = [(name, args) for name in ADVANTAGES for args in ({}, *VARIANTS.get(name, ()))]
EXCEPTIONS = {
    "gigpo": "its rows are steps with states of their own, so a cut makes other steps: "
    "docs/algorithms/gigpo.md",
    "seq-mean-token-mean": "a mean over rows, as veRL has it; run-mean is the mean over runs: "
    "docs/algorithms/aggregation.md",
}
WHOLE = Budget(10_000)  # one micro-batch
# (group, run) -> trained tokens of each of its rows; else it is one row
Cut = dict[tuple[int, int], Sequence[int]]


def _stream(group: int, run: int) -> np.random.Generator:
    return np.random.default_rng((group, run))


def rows(
    cut: Cut, credit: Credit = "run"
) -> tuple[list[Experience], list[dict[Computed, np.ndarray]]]:
    """Every run has the same tokens and numbers, whatever rows they are in."""
    made = []
    computed = []
    for g, runs in enumerate(LENGTHS):
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
                        REWARDS[g][run],
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
) -> Outcome:
    """Advantages and the gradient of the loss by log-prob, of each token of each run, in the order
    of its tokens.
    """
    made, computed = rows(cut)
    groups = [GroupId(1, 0, 0, g) for g in range(len(LENGTHS))]
    stats = tuple(
        group_statistics(str(group), scored_members(x for x in made if x.group == group))
        for group in groups
    )
    if order is not None:
        places = np.random.default_rng(order).permutation(len(made))
        made = [made[i] for i in places]
        computed = [computed[i] for i in places]
    lease = read(Lease(step=1, frame=encode(made), groups=stats))
    algorithm = replace(build(settings), needs=replace(build(settings).needs, skips_zero=False))
    batch = make(lease, algorithm, budget, world_size=world, computed=computed)
    gradients: dict[int, np.ndarray] = {}
    places_of = iter(batch.order)
    for share in batch.shares:
        denominators = Denominators(share.tokens, share.rows, 6, num_runs=share.num_runs)
        for micro in share.micro_batches:
            places_here = [next(places_of) for _ in micro]
            gradients |= zip(places_here, _gradients(algorithm, micro, denominators), strict=True)
    return _by_run(made, batch.advantages), _by_run(made, gradients)


def _gradients(
    algorithm: Any, micro: Sequence[TrainRow], denominators: Denominators
) -> list[np.ndarray]:
    if not micro:
        return []
    lengths = [int(row.loss_mask.sum()) for row in micro]

    def packed(values: list[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(values).astype(np.float64))

    theta = packed([row.logprobs[row.loss_mask] for row in micro]).requires_grad_()
    keep = [
        np.ones(n, np.bool_) if row.keep is None else row.keep
        for row, n in zip(micro, lengths, strict=True)
    ]
    x = LossInputs(
        logprobs=theta,
        old_logprobs=theta.detach(),
        advantages=packed(
            [np.zeros(0) if row.advantages is None else row.advantages for row in micro]
        ),
        mask=torch.from_numpy(np.concatenate(keep)),
        row=torch.repeat_interleave(torch.arange(len(micro)), torch.tensor(lengths)),
        num_rows=len(micro),
        denominators=denominators,
        run_tokens=packed(
            [np.full(n, row.run_tokens) for row, n in zip(micro, lengths, strict=True)]
        ),
        rollout_logprobs=theta.detach(),
    )
    algorithm.loss(x).loss.backward()
    assert theta.grad is not None
    return [part.numpy() for part in theta.grad.split(lengths)]


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


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(("name", "args"), CASES)
def test_cutting_a_run_changes_no_advantage(name: str, args: dict[str, Any], cut: Cut) -> None:
    if name in EXCEPTIONS:
        pytest.skip(EXCEPTIONS[name])
    same(outcome(algorithm(name, args), cut), outcome(algorithm(name, args), {}))


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("mode", AGG_MODES)
def test_cutting_a_run_changes_no_gradient(mode: str, cut: Cut) -> None:
    if mode in EXCEPTIONS:
        pytest.skip(EXCEPTIONS[mode])
    same(outcome(algorithm("grpo", {}, mode), cut), outcome(algorithm("grpo", {}, mode), {}))


@pytest.mark.parametrize("kl", ["k1", "k2"])
@pytest.mark.parametrize("name", ["grpo", "reinforceplusplus", "ppo"])
def test_cutting_a_run_changes_nothing_with_kl_in_rewards(name: str, kl: str) -> None:
    settings = replace(algorithm(name, {}), kl_penalty_fn=kl, kl_penalty_fn_args={"kl_coef": 0.1})
    same(outcome(settings, CUTS[0]), outcome(settings, {}))


@pytest.mark.parametrize("mode", AGG_MODES)
@pytest.mark.parametrize("name", ADVANTAGES)
def test_order_micro_batches_and_ranks_change_nothing(name: str, mode: str) -> None:
    settings = algorithm(name, {}, mode)
    cut = CUTS[1]
    whole = outcome(settings, cut)
    same(outcome(settings, cut, order=3), whole)
    same(outcome(settings, cut, budget=Budget(12, "packed"), world=2), whole)


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
            denominators=Denominators(5.0, 2.0, 4, num_runs=2.0),
            loss_agg_mode=mode,
            run_tokens=run_tokens,
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
        batch = make(
            read(lease), build(algorithm(name, {})), WHOLE, world_size=1, computed=computed
        )
        return [batch.advantages[i] for i in range(len(made))]

    for found, expected in zip(
        advantages([*members[:2], empty, *members[2:]]), advantages(members), strict=True
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_every_exception_is_one_and_every_shipped_part_is_covered() -> None:
    assert {name for kind, name in shipped() if kind == "advantage_fn"} <= set(ADVANTAGES)
    assert EXCEPTIONS.keys() <= {*ADVANTAGES, *AGG_MODES}
    for name in EXCEPTIONS.keys() & set(AGG_MODES):
        with pytest.raises(AssertionError):
            same(
                outcome(algorithm("grpo", {}, name), CUTS[0]),
                outcome(algorithm("grpo", {}, name), {}),
            )
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
    from rft.buffer.trainer_side import _frozen
    from rft.types.credit import ScoredRow

    stats = _frozen(
        "g", [ScoredRow(1.0, 0, 0, 1), ScoredRow(0.0, 0, 1, 1), ScoredRow(0.0, 1, 0, 1)]
    )
    assert (
        stats.mean == 0.25
        and "run 0 of group g: its rows were given the rewards 1, 0" in caplog.text
    )


def test_a_run_that_lost_all_others_is_named(caplog: pytest.LogCaptureFixture) -> None:
    made, computed = rows({})
    alone = [x for x in made if x.group == GroupId(1, 0, 0, 0)][:1]
    lease = Lease(
        step=1,
        frame=encode(alone),
        groups=(group_statistics(str(alone[0].group), scored_members(alone)),),
    )
    batch = make(
        read(lease), build(algorithm("opmd", {})), WHOLE, world_size=1, computed=computed[:1]
    )
    assert batch.metrics["experience/lone_runs"] == 1.0
    assert f"run 0 of group {alone[0].group} has no other run of its task left" in caplog.text


def test_a_run_whose_chains_are_masked_is_counted() -> None:
    settings = replace(
        algorithm("grpo", {}),
        rollout_correction={"rollout_rs": "token_k2", "rollout_rs_threshold": 1e-3},
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
    batch = make(read(lease), build(settings), WHOLE, world_size=1, computed=computed)
    assert (
        batch.metrics["experience/masked_runs"] == 1.0 and batch.metrics["experience/runs"] == 6.0
    )
