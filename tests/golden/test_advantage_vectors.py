"""Every advantage function against its formula in float64, written here once more over padded [B,
T] arrays with masks.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rft.algorithm.base import Advantages, StepInputs, StepRow
from rft.algorithm.catalog import check_args, shipped
from rft.algorithm.composition import as_advantages, build
from rft.algorithm.pf_ppo import weights
from rft.algorithm.settings import AlgorithmSettings
from rft.plugins import REGISTRY
from rft.types.ports import GroupStats

NAMES = sorted(name for kind, name in shipped() if kind == "advantage_fn")
BY_TOKEN = (
    "ppo",
    "reinforceplusplus",
    "remax",
    "optimal_token_baseline",
    "on_policy_distill",
    "jsd",
    "clipb",
    "clipv",
)
NO_REWARDS = ("none", "on_policy_distill", "jsd", "gdpo")


def row(
    reward: float = 0.0,
    length: int = 1,
    *,
    group: str = "g",
    run: int = 0,
    step: int = 0,
    parts: Mapping[str, float] | None = None,
    **more: Any,
) -> StepRow:
    more.setdefault("logprobs", np.full(length, -1.0, np.float32))
    arrays = {
        k: v if k == "info" or v is None or isinstance(v, bool) else np.asarray(v, np.float32)
        for k, v in more.items()
    }
    parts = {"whole": reward, "low": float(reward < 0.5)} if parts is None else parts
    return StepRow(group=group, run=run, step=step, reward=reward, reward_parts=parts, **arrays)


def stats(members: Iterable[StepRow], name: str = "g") -> GroupStats:
    of = sorted(
        (r for r in members if r.group == name and not r.is_expert), key=lambda r: (r.run, r.step)
    )
    rewards = [r.reward for r in of]
    return GroupStats(
        group=name,
        rewards=tuple(rewards),
        mean=float(np.mean(rewards)),
        std=float(np.std(rewards, ddof=1)) if len(rewards) > 1 else 0.0,
        runs=tuple(r.run for r in of),
        steps=tuple(r.step for r in of),
        lengths=tuple(r.length for r in of),
        parts=tuple(dict(r.reward_parts) for r in of),
    )


def step(rows: Sequence[StepRow], *, beside: Sequence[StepRow] = (), **more: Any) -> StepInputs:
    """`beside`: members of the groups that are not in the step."""
    names = {r.group for r in rows if not r.is_expert}
    return StepInputs(
        rows=list(rows), groups={n: stats([*rows, *beside], n) for n in names}, **more
    )


def group(
    rewards: Sequence[float], lengths: Sequence[int] | None = None, name: str = "g"
) -> list[StepRow]:
    return [
        row(float(r), n, group=name, run=i)
        for i, (r, n) in enumerate(zip(rewards, lengths or [1] * len(rewards), strict=True))
    ]


def advantages(name: str, x: StepInputs, **args: Any) -> Advantages:
    REGISTRY.scan_package("rft.algorithm")
    made = REGISTRY.get("advantage_fn", name).obj(x, check_args("advantage_fn", name, args))
    return as_advantages(made, x.rows)


def per_row(name: str, x: StepInputs, **args: Any) -> list[float]:
    """The one number of every row."""
    values = advantages(name, x, **args).values
    assert all(v.dtype == np.float32 and np.ptp(v) == 0 for v in values)
    return [float(v[0]) for v in values]


# ---------------------------------------------------------------- the reference page's vectors


@pytest.mark.parametrize(
    ("name", "args", "rewards", "expected"),
    [
        ("grpo", {}, (1, 0, 0, 1), (0.866024, -0.866024, -0.866024, 0.866024)),
        ("grpo", {"epsilon": 1e-4}, (1, 0, 0, 1), (0.865875, -0.865875, -0.865875, 0.865875)),
        ("grpo", {"norm_by_std": False}, (1, 0, 0, 1), (0.5, -0.5, -0.5, 0.5)),
        ("grpo", {}, (0, 0, 0, 1), (-0.499999, -0.499999, -0.499999, 1.499997)),
        ("rloo", {}, (0, 0, 0, 1), (-0.333333, -0.333333, -0.333333, 1)),
        ("maxrl", {}, (1, 0, 0, 0), (3, -1, -1, -1)),
        ("maxrl", {}, (0, -0.5, 0, 0.25), (0, 0, 0, 0)),
        ("grpo_passk", {}, (0, 1, 0.5, 0.25), (0, 1.171077, 0, 0)),
        ("grpo_passk", {"norm_by_std": False}, (0, 1, 0.5, 0.25), (0, 0.5, 0, 0)),
        ("rec", {"std_normalize": True}, (0, 0, 0, 1), (-0.577349, -0.577349, -0.577349, 1.732047)),
    ],
)
def test_vectors_of_one_number_per_row(
    name: str, args: dict[str, Any], rewards: Sequence[float], expected: Sequence[float]
) -> None:
    assert per_row(name, step(group(rewards)), **args) == pytest.approx(expected, abs=1.5e-6)


def test_vector_opo() -> None:
    assert per_row("opo", step(group((0, 0, 0, 1), (10, 20, 30, 40)))) == pytest.approx(
        (-0.4, -0.4, -0.4, 0.6), abs=1e-6
    )


def test_vectors_gae() -> None:
    made = advantages("ppo", step([row(1, 4, values=[0.1, 0.2, 0.3, 0.4])]), lam=0.95)
    assert made.returns is not None
    assert made.returns[0].tolist() == pytest.approx([0.899675, 0.9365, 0.97, 1], abs=1e-6)
    assert made.values[0].tolist() == pytest.approx(
        [1.141837, 0.406744, -0.367037, -1.181544], abs=1e-6
    )

    mask = np.array([1, 1, 0, 1, 0], bool)
    rewards = np.array([0, 0, 0, 1, 0.0])
    values = np.array([0.1, 0.2, 0.3, 0.4, 0.5])
    x = row(1, 3, values=values[mask], token_rewards=rewards[mask])
    made = advantages("ppo", step([x]), gamma=0.9, lam=0.8)
    assert made.returns is not None
    raw = made.returns[0] - values[mask]
    assert raw.tolist() == pytest.approx(
        [0.50624, 0.592, 0.6], abs=1e-6
    )  # not those of a form that does not skip: .419, .471, .69


def test_vector_reinforce_plus_plus() -> None:
    x = step([row(1, 3, token_rewards=[0, 0, 1]), row(0.5, 2, run=1, token_rewards=[0, 0.5])])
    made = advantages("reinforceplusplus", x, gamma=0.9)
    assert made.returns is not None
    assert [r.tolist() for r in made.returns] == [
        pytest.approx([0.81, 0.9, 1]),
        pytest.approx([0.45, 0.5]),
    ]
    assert made.values[0].tolist() == pytest.approx([0.318779, 0.686601, 1.095293], abs=1e-6)
    assert made.values[1].tolist() == pytest.approx([-1.152509, -0.948164], abs=1e-6)


def test_vector_pf_ppo() -> None:
    def of(method: str, rewards: Sequence[float]) -> list[float]:
        args: Any = check_args("sample_strategy", "pf_ppo", {"reweight_method": method})
        return weights(np.array(rewards, np.float64), args).tolist()

    assert of("pow", (-1, 0, 0.5, 1)) == pytest.approx(
        [1 + 1e-8, 1e-8, 0.25 + 1e-8, 1 + 1e-8], rel=1e-12
    )
    assert of("max_min", (-1, 0, 1, 1)) == pytest.approx([1, 0, 1, 1], abs=1.1e-8)
    assert of("max_random", (-1, 0, 1, 1)) == pytest.approx([0.1, 0.1, 0.4, 0.4], abs=1.1e-8)


# ---------------------------------------------------------------- formulas over padded arrays


class Padded:
    """B rows of width T with gaps in their masks; what the functions see are the masked tokens
    alone.
    """

    def __init__(self, seed: int, groups: Sequence[int] = (3, 1, 4, 2), width: int = 9) -> None:
        rng = np.random.default_rng(seed)
        self.of = np.repeat(np.arange(len(groups)), groups)
        b = len(self.of)
        self.mask = rng.random((b, width)) < 0.6
        self.mask[:, 0] |= ~self.mask.any(1)
        self.rewards = np.where(
            self.mask & (rng.random((b, width)) < 0.5), rng.normal(size=(b, width)), 0
        ).astype(np.float32)
        self.values = rng.normal(size=(b, width)).astype(np.float32)
        logits = rng.normal(size=(b, width, 7)) * 2
        logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        p = np.exp(logp)
        self.old = logp[..., 0].astype(np.float32)
        self.entropy = -(p * logp).sum(-1).astype(np.float32)
        self.squares = (p**2).sum(-1).astype(np.float32)
        self.mean_score = (
            (p**2 * (logp + -(p * logp).sum(-1, keepdims=True))).sum(-1).astype(np.float32)
        )
        self.sampled = (self.old + rng.normal(size=(b, width)) * 0.1).astype(np.float32)
        self.teacher = -rng.exponential(size=(b, width)).astype(np.float32)
        self.total = self.rewards.astype(np.float64).sum(1)
        self.baseline = rng.normal(size=b)
        number: Counter[int] = Counter()
        rows = []
        for i, g in enumerate(self.of):
            m = self.mask[i]
            rows.append(
                row(
                    float(self.total[i]),
                    group=str(g),
                    run=number[g],
                    logprobs=self.sampled[i][m],
                    token_rewards=self.rewards[i][m],
                    values=self.values[i][m],
                    old=self.old[i][m],
                    entropy=self.entropy[i][m],
                    sum_squares=self.squares[i][m],
                    discriminator_mean=self.mean_score[i][m],
                    teacher=self.teacher[i][m],
                    info={"baseline_reward": float(self.baseline[i]), "env_state_hash": i % 3},
                )
            )
            number[g] += 1
        self.x = step(rows, seed=seed)

    def whitened(self, y: np.ndarray) -> np.ndarray:
        seen = y[self.mask]
        n = len(seen)
        mean = seen.sum() / n
        variance = ((seen - mean) ** 2).sum() / n * n / (n - 1)
        return (y - mean) / math.sqrt(variance + 1e-8)

    def groups(self) -> Iterable[np.ndarray]:
        return (np.flatnonzero(self.of == g) for g in np.unique(self.of))

    def agrees(self, made: Sequence[np.ndarray], expected: np.ndarray) -> None:
        assert np.concatenate(made).dtype == np.float32
        np.testing.assert_allclose(np.concatenate(made), expected[self.mask], rtol=2e-5, atol=2e-5)


SEEDS = (0, 1, 2)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8), (1.0, 0.0), (0.0, 0.5)])
def test_gae(seed: int, gamma: float, lam: float) -> None:
    p = Padded(seed)
    raw = np.zeros(p.mask.shape)
    for i in range(len(p.of)):
        value = advantage = 0.0
        for t in reversed(range(p.mask.shape[1])):
            delta = p.rewards[i, t] + gamma * value - p.values[i, t]
            if p.mask[i, t]:
                value = p.values[i, t]
                advantage = delta + gamma * lam * advantage
            raw[i, t] = advantage
    made = advantages("ppo", p.x, gamma=gamma, lam=lam)
    assert made.returns is not None
    p.agrees(made.values, p.whitened(raw))
    p.agrees(made.returns, raw + p.values)


@pytest.mark.parametrize("seed", SEEDS)
def test_reinforce_plus_plus_carries_returns_over_gaps(seed: int) -> None:
    p = Padded(seed)
    gamma = 0.93
    to_go = np.zeros(p.mask.shape)
    for i in range(len(p.of)):
        ahead = 0.0
        for t in reversed(range(p.mask.shape[1])):
            if p.mask[i, t]:
                ahead = p.rewards[i, t] + gamma * ahead
            to_go[i, t] = ahead
    made = advantages("reinforceplusplus", p.x, gamma=gamma)
    assert made.returns is not None
    p.agrees(made.values, p.whitened(to_go))
    p.agrees(made.returns, to_go)


@pytest.mark.parametrize("seed", SEEDS)
def test_reinforce_plus_plus_baseline_and_remax(seed: int) -> None:
    p = Padded(seed)
    centred = p.total.copy()
    for of in p.groups():
        if len(of) > 1:
            centred[of] -= p.total[of].mean()
    p.agrees(
        advantages("reinforceplusplus_baseline", p.x).values,
        p.whitened(np.repeat(centred[:, None], p.mask.shape[1], 1)),
    )
    to_go = np.cumsum((p.rewards * p.mask).astype(np.float64)[:, ::-1], 1)[:, ::-1]
    p.agrees(advantages("remax", p.x).values, to_go - p.baseline[:, None])


@pytest.mark.parametrize("seed", SEEDS)
def test_optimal_token_baseline(seed: int) -> None:
    p = Padded(seed)
    expected = np.zeros(p.mask.shape)
    tail = np.zeros(p.mask.shape)
    for of in p.groups():
        # number of the token -> row, column, G, W
        found: dict[int, list[tuple[int, int, float, float]]] = defaultdict(list)
        for i in of:
            energy = 0.0
            for number, t in enumerate(np.flatnonzero(p.mask[i])):
                energy += 1 - 2 * math.exp(p.old[i, t]) + p.squares[i, t]
                found[number].append(
                    (i, t, float(p.rewards[i, t:].astype(np.float64).sum()), energy)
                )
        for same in found.values():
            b = (
                sum(g * w for *_, g, w in same) / (sum(w for *_, w in same) + 1e-8)
                if len(of) > 1
                else 0.0
            )
            for i, t, g, _ in same:
                expected[i, t] = g - b
                tail[i, t] = g - (b if len(same) > 1 else 0.0)
    p.agrees(advantages("optimal_token_baseline", p.x, handle_zero_tail=False).values, expected)
    p.agrees(advantages("optimal_token_baseline", p.x).values, tail)


def test_the_tail_of_the_longest_row_learns() -> None:
    old = np.log(np.full(4, 0.5, np.float32))
    squares = np.full(4, 0.5, np.float32)
    rows = [
        row(float(i == 0), n, group="g", run=i, old=old[:n], sum_squares=squares[:n])
        for i, n in enumerate((4, 2))
    ]
    long, short = advantages("optimal_token_baseline", step(rows)).values
    assert long.tolist() == pytest.approx([0.5, 0.5, 1.0, 1.0]) and short.tolist() == pytest.approx(
        [-0.5, -0.5]
    )
    tail = advantages("optimal_token_baseline", step(rows), handle_zero_tail=False).values[0][2:]
    assert tail.tolist() == pytest.approx([0, 0], abs=1e-6)


def test_weights_of_the_correction_scale_the_variance() -> None:
    """W counts with the squared weight: (1 x 1 + 0 x 4) / (1 + 4)."""
    numbers = {
        "old": np.log(np.full(1, 0.5, np.float32)),
        "sum_squares": np.full(1, 0.5, np.float32),
    }
    rows = [
        row(float(i == 0), 1, group="g", run=i, **numbers, weights=np.full(1, w, np.float32))
        for i, w in enumerate((1.0, 2.0))
    ]
    assert per_row("optimal_token_baseline", step(rows)) == pytest.approx([0.8, -0.2])
    assert per_row("optimal_token_baseline", step(rows), rollout_weights=False) == pytest.approx(
        [0.5, -0.5]
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_one_number_per_row(seed: int) -> None:
    p = Padded(seed)
    b = len(p.of)
    lengths = p.mask.sum(1)
    alpha = b / max(int((p.total != 0).sum()), 1)
    batch = math.sqrt(((p.total - p.total.sum() / b) ** 2).sum() / (b - 1))
    want: dict[tuple[str, str], np.ndarray] = defaultdict(lambda: np.zeros(b))
    for of in p.groups():
        r = p.total[of]
        n = len(of)
        mean = r.sum() / n
        if n == 1:  # nothing to compare with
            for name in ("reinforce", "opmd", "opmd logavgexp", "asymre", "opo"):
                want[name, ""][of] = r
            continue
        std = math.sqrt(((r - mean) ** 2).sum() / (n - 1))
        biased = math.sqrt(((r - mean) ** 2).sum() / n)
        want["reinforce", ""][of] = r
        want["grpo", ""][of] = (r - mean) / (std + 1e-6)
        want["grpo batch", ""][of] = (r - mean) / (batch + 1e-6)
        want["rloo", ""][of] = [v - (r.sum() - v) / (n - 1) for v in r]
        want["opmd", ""][of] = r - mean
        want["opmd logavgexp", ""][of] = r - 0.7 * (
            math.log(sum(math.exp(v / 0.7) for v in r)) - math.log(n)
        )
        want["maxrl", ""][of] = (r - mean) / mean if mean > 0 else 0
        want["asymre", ""][of] = r - (mean - 0.1)
        want["rec", ""][of] = r - mean
        want["rec std", ""][of] = (r - mean) / (biased + 1e-6)
        want["opo", ""][of] = r - (lengths[of] * r).sum() / lengths[of].sum()
        want["gpg", ""][of] = alpha * (r - mean)
        best = of[np.argmax(r)]
        want["grpo_passk", ""][best] = (np.sort(r)[-1] - np.sort(r)[-2]) / (std + 1e-6)
    args: dict[str, dict[str, Any]] = {
        "grpo batch": {"std_cal_level": "batch"},
        "opmd logavgexp": {"opmd_baseline": "logavgexp", "tau": 0.7},
        "rec std": {"std_normalize": True},
    }
    for (name, _), expected in want.items():
        found = per_row(name.split()[0], p.x, **args.get(name, {}))
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5, err_msg=name)
    assert per_row("none", p.x) == [0.0] * b
    unsolved = np.concatenate([np.full(len(of), p.total[of].mean() <= 0) for of in p.groups()])
    assert advantages("maxrl", p.x).metrics["maxrl/unsolved"] == unsolved.mean() > 0


@pytest.mark.parametrize(
    "name",
    ["grpo", "grpo_passk", "rloo", "opmd", "asymre", "opo", "rec", "reinforce", "step_wise_grpo"],
)
def test_siblings_elsewhere_count(name: str) -> None:
    rows = group((0.0, 2.0, 1.0, 0.5), (1, 2, 3, 4))
    whole = per_row(name, step(rows))
    assert [
        per_row(name, step([r], beside=[s for s in rows if s is not r]))[0] for r in rows
    ] == pytest.approx(whole, rel=1e-6)


def test_rank_penalty_lowers_what_is_scored_and_the_statistics() -> None:
    rewards = np.array([1, 1, 0, 1.0])
    logprobs = np.array([-0.5, -3.0, -1.0, -2.0])
    rows = [
        row(r, 2, run=i, logprobs=[p, p])
        for i, (r, p) in enumerate(zip(rewards, logprobs, strict=True))
    ]
    lowered = rewards * (1 - 0.5 * np.array([3, 0, 2, 1]) / 4)  # the likeliest loses most
    expected = (lowered - lowered.mean()) / (lowered.std(ddof=1) + 1e-6)
    assert per_row("grpo", step(rows), rank_penalty=0.5) == pytest.approx(expected, rel=1e-5)
    same = [row(1, 1, run=i) for i in range(3)]
    assert per_row("grpo", step(same), rank_penalty=0.5) == [0, 0, 0], (
        "equally likely and equally good"
    )


# ---------------------------------------------------------------- steps of runs


def runs_of(*rewards: Sequence[float], name: str = "g") -> list[StepRow]:
    return [
        row(r, 1 + s, group=name, run=i, step=s)
        for i, run in enumerate(rewards)
        for s, r in enumerate(run)
    ]


def test_step_wise_grpo_compares_last_steps() -> None:
    rows = runs_of((9, 9, 1), (0,), (5, 0))
    other = runs_of((2,), (4, 7), name="h")
    last = (1, 0, 0)
    mean = 1 / 3
    std = math.sqrt(1 / 3)
    expected = [(last[r.run] - mean) / (std + 1e-6) for r in rows] + [
        -s / (25 / 2) ** 0.5 for s in (2.5, -2.5, -2.5)
    ]
    for order in (1, -1):  # last is the highest number, wherever it stands
        x = step([*rows, *other][::order])
        assert per_row("step_wise_grpo", x)[::order] == pytest.approx(expected, rel=1e-5)
    normed = per_row("step_wise_grpo", step([*rows, *other]), enable_step_norm=True)
    counts = [3, 3, 3, 1, 2, 2, 1, 2, 2]
    assert normed == pytest.approx([e / n for e, n in zip(expected, counts, strict=True)], rel=1e-5)
    every = np.std([1, 0, 0, 2, 7], ddof=1)
    batch = per_row("step_wise_grpo", step([*rows, *other]), std_cal_level="batch")
    assert batch[:4] == pytest.approx([(2 / 3) / every] * 3 + [(-1 / 3) / every], rel=1e-5)


def gigpo_rows(rewards: bool) -> tuple[list[StepRow], list[list[float]]]:
    given = [[1.0, 0.0, 2.0], [0.0, 3.0], [1.0]]
    states = [["a", "b", "c"], ["a", "c"], ["b"]]
    rows = []
    for i, (run, names) in enumerate(zip(given, states, strict=True)):
        for s, (r, state) in enumerate(zip(run, names, strict=True)):
            info = {"env_state_hash": state} | ({"step_reward": r} if rewards else {})
            rows.append(row(r, 2, group="gh"[i == 2], run=i, step=s, info=info))
    return rows, given


@pytest.mark.parametrize("rewards", [True, False])
@pytest.mark.parametrize("fnorm", ["none", "std"])
@pytest.mark.parametrize("omega", [1.0, 0.3])
def test_gigpo(rewards: bool, fnorm: str, omega: float) -> None:
    rows, given = gigpo_rows(rewards)
    gamma = 0.9
    if not rewards:
        given = [[0.0] * (len(run) - 1) + [run[-1]] for run in given]

    def normal(values: Sequence[float]) -> list[float]:
        if len(values) == 1 or len(set(values)) == 1:
            return [0.0] * len(values)
        return [
            float(
                (v - np.mean(values)) / ((np.std(values, ddof=1) if fnorm == "std" else 1.0) + 1e-6)
            )
            for v in values
        ]

    episode = [*normal([sum(given[0]), sum(given[1])]), 0.0]
    back = {
        (i, s): sum(gamma ** (k - s) * r for k, r in enumerate(run) if k >= s)
        for i, run in enumerate(given)
        for s in range(len(run))
    }
    apart = [[(0, 0), (1, 0)], [(0, 1)], [(2, 0)], [(0, 2), (1, 1)]]  # a, b of either task, c
    pooled = [apart[0], [(0, 1), (2, 0)], apart[3]]
    for states_of, same in (("task", apart), ("batch", pooled)):
        steps = {
            at: a
            for names in same
            for at, a in zip(names, normal([back[n] for n in names]), strict=True)
        }
        expected = [episode[r.run] + omega * steps[r.run, r.step] for r in rows]
        given_args = {"gamma": gamma, "omega": omega, "fnorm": fnorm, "states_of": states_of}
        assert per_row("gigpo", step(rows), **given_args) == pytest.approx(
            expected, rel=1e-5, abs=1e-6
        )


@pytest.mark.parametrize("gone", range(5))
def test_a_step_that_an_operator_dropped_still_counts_in_its_episode(gone: int) -> None:
    """Where rows have the reward of their own step; its state is not compared, and nobody else's
    return changes.
    """
    rows, _ = gigpo_rows(True)
    kept = [*rows[:gone], *rows[gone + 1 :]]
    whole = per_row("gigpo", step(rows), gamma=0.9, omega=0.0)
    assert per_row("gigpo", step(kept, beside=[rows[gone]]), gamma=0.9, omega=0.0) == [
        *whole[:gone],
        *whole[gone + 1 :],
    ]
    alone = [replace(r, info={**r.info, "env_state_hash": str(i)}) for i, r in enumerate(kept)]
    assert per_row("gigpo", step(alone, beside=[rows[gone]])) == per_row(
        "gigpo", step(kept, beside=[rows[gone]]), omega=0.0
    )


def test_a_dropped_steps_reward_is_not_guessed_from_that_of_its_run() -> None:
    """Rows have the reward of the whole run, which the step that is left earned alone."""
    rows = [
        row(r, 1, run=run, step=s, info={"env_state_hash": "a", "step_reward": r * s})
        for run, r in enumerate((1.0, 0.0))
        for s in (0, 1)
    ]
    last = step([rows[1], rows[3]], beside=[rows[0], rows[2]])
    assert per_row("gigpo", last, omega=0.0) == pytest.approx([0.5, -0.5], rel=1e-5)


def test_how_hard_a_task_is_is_no_advantage_of_its_states() -> None:
    """Two tasks that begin in the same state; all runs of one succeed, none of the other."""
    rows = [
        row(float(g), 1, group="ab"[g], run=i, step=0, info={"env_state_hash": "start"})
        for g in (0, 1)
        for i in (0, 1)
    ]
    assert per_row("gigpo", step(rows)) == [0.0] * 4
    assert per_row("gigpo", step(rows), states_of="batch") == pytest.approx(
        [-0.5, -0.5, 0.5, 0.5], rel=1e-5
    )


def test_gigpo_says_what_is_missing() -> None:
    rows, _ = gigpo_rows(True)
    del rows[3].info["env_state_hash"]  # type: ignore[attr-defined]
    with pytest.raises(
        ValueError, match=r'group g, run 1, step 0: gigpo needs info\["env_state_hash"\]'
    ):
        advantages("gigpo", step(rows))
    assert per_row("gigpo", step(rows), omega=0.0)
    del rows[3].info["step_reward"]  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"there for 4 of 5 rows; run 1, step 0 has none"):
        advantages("gigpo", step(rows), omega=0.0)


# ---------------------------------------------------------------- teachers


@pytest.mark.parametrize("seed", SEEDS)
def test_distillation(seed: int) -> None:
    p = Padded(seed)
    t = p.teacher.astype(np.float64)
    s = p.sampled.astype(np.float64)
    p.agrees(advantages("on_policy_distill", p.x, kl_coef=0.7).values, 0.7 * (t - s))
    p.agrees(advantages("jsd", p.x, lambda_coef=0.0).values, t - s)
    p.agrees(advantages("jsd", p.x, lambda_coef=1.0, kl_coef=2.0).values, 2 * (np.exp(t - s) - 1))
    for b, temperature in ((0.5, 1.0), (0.2, 2.0)):
        ts = t / temperature
        ss = s / temperature
        m = np.log((1 - b) * np.exp(ss) + b * np.exp(ts))
        made = advantages("jsd", p.x, lambda_coef=b, temperature=temperature, kl_coef=3.0)
        p.agrees(made.values, 3 * (1 - b) * (m - ss))
    with pytest.raises(ValueError, match="distillation needs the teacher's log-probs"):
        advantages("jsd", step([row()]))


@pytest.mark.parametrize("b", [None, 0.0, 0.2, 0.5, 0.9, 1.0])
def test_a_students_policy_gradient_is_that_of_the_divergence(b: float | None) -> None:
    """Over a vocabulary of six: sum of s A d(log s) against finite differences of the divergence
    itself.  None: on_policy_distill.
    """
    rng = np.random.default_rng(5)
    logits = rng.normal(size=6) * 1.5
    teacher = rng.normal(size=6) * 1.5
    log_softmax = lambda x: x - np.log(np.exp(x).sum())  # noqa: E731
    t = log_softmax(teacher)

    def divergence(x: np.ndarray) -> float:
        s = log_softmax(x)
        if b in (None, 0.0):
            return float((np.exp(s) * (s - t)).sum())
        if b == 1.0:
            return float((np.exp(t) * (t - s)).sum())
        assert b is not None
        m = np.log((1 - b) * np.exp(s) + b * np.exp(t))
        return float(b * (np.exp(t) * (t - m)).sum() + (1 - b) * (np.exp(s) * (s - m)).sum())

    s = log_softmax(logits)
    x = step([row(0.0, 6, logprobs=s.astype(np.float32), teacher=t.astype(np.float32))])
    made = advantages("on_policy_distill", x) if b is None else advantages("jsd", x, lambda_coef=b)
    a = made.values[0].astype(np.float64)
    # sum over tokens of s A (one-hot - s)
    policy_gradient = np.exp(s) * (a - (np.exp(s) * a).sum())
    slopes = [(divergence(logits + h) - divergence(logits - h)) / 2e-5 for h in np.eye(6) * 1e-5]
    np.testing.assert_allclose(policy_gradient, -np.array(slopes), rtol=1e-4, atol=1e-6)


# ---------------------------------------------------------------- tokens and rows that are left out


@pytest.mark.parametrize("seed", SEEDS)
def test_clips_by_entropy(seed: int) -> None:
    p = Padded(seed, groups=(6, 5, 4), width=30)
    a = np.zeros(p.mask.shape)
    for of in p.groups():
        r = p.total[of]
        a[of] = ((r - r.mean()) / (r.std(ddof=1) + 1e-6))[:, None]
    old = p.old.astype(np.float64)
    h = p.entropy.astype(np.float64)
    s = np.exp(old) * (h + old)
    far = s - s[p.mask].mean() < -1.2 * s[p.mask].std()
    made = advantages("clipb", p.x, mu=1.2)
    assert made.keep is not None and (far & (a < 0))[p.mask].any()
    np.testing.assert_array_equal(np.concatenate(made.keep), ~(far & (a < 0))[p.mask])
    p.agrees(made.values, np.where(far & (a < 0), 0, a))

    # scores far from 0
    raised = [
        replace(r, entropy=r.entropy + np.float32(3)) for r in p.x.rows if r.entropy is not None
    ]
    score = np.exp(old) * (h + 3 + old)
    far = (score - score[p.mask].mean() < -0.3 * score[p.mask].std()) & (a < 0)
    made = advantages("clipb", step(raised), mu=0.3)
    assert made.keep is not None and far[p.mask].any()
    np.testing.assert_array_equal(np.concatenate(made.keep), ~far[p.mask])

    d = p.mean_score.astype(np.float64) - s
    far = (d > 1.1 * d[p.mask].std()) & (a < 0) & p.mask
    made = advantages("clipv", p.x, mu=1.1, max_frac=1.0)
    assert made.keep is not None and far.sum() > 3
    np.testing.assert_array_equal(np.concatenate(made.keep), ~far[p.mask])
    most = 2 / p.mask.sum()
    made = advantages("clipv", p.x, mu=1.1, max_frac=float(most) * 1.01)
    worst = np.argsort(np.where(far, d, -np.inf), axis=None)[-2:]
    assert made.keep is not None
    np.testing.assert_array_equal(
        np.flatnonzero(~np.concatenate(made.keep)), np.sort(np.cumsum(p.mask.ravel())[worst] - 1)
    )


def test_clips_keep_everything_where_nothing_differs() -> None:
    rows = [
        row(r, 3, run=i, old=[-1] * 3, entropy=[1] * 3, discriminator_mean=[0.3] * 3)
        for i, r in enumerate((0, 1))
    ]
    for name in ("clipb", "clipv"):
        made = advantages(name, step(rows))
        assert made.keep is not None and all(k.all() for k in made.keep)


def test_rec_balances() -> None:
    rewards = (0, 0, 0, 0, 1, 1, 0.2)
    rows = group(rewards, (1, 2, 3, 4, 5, 6, 7))
    made = advantages("rec", step(rows, seed=3), drop="balance")
    assert made.keep is not None
    kept = [bool(k.all()) for k in made.keep]
    assert [k.any() for k in made.keep] == kept and kept[4:6] == [True, True] and sum(kept) == 4
    rest = [r for r, k in zip(rewards, kept, strict=True) if k]
    for value, reward, stays in zip(made.values, rewards, kept, strict=True):
        assert value.tolist() == pytest.approx(
            [(reward - np.mean(rest)) if stays else 0.0] * len(value), rel=1e-6
        )
    assert made.metrics == {"rec/dropped_rows_frac": pytest.approx(3 / 7)}
    for i in (0, 4):  # the same choice, whichever rows are at hand
        alone = advantages(
            "rec",
            step([rows[i]], beside=[r for r in rows if r is not rows[i]], seed=3),
            drop="balance",
        )
        assert alone.keep is not None and bool(alone.keep[0].all()) == kept[i]
    choices = {
        tuple(bool(k[0]) for k in advantages("rec", step(rows, seed=s), drop="balance").keep or ())
        for s in range(20)
    }
    assert len(choices) > 1
    balanced = advantages("rec", step(group((0, 1, 1))), drop="balance")
    assert balanced.keep is not None and all(k.all() for k in balanced.keep)


def test_rec_draws_the_same_after_a_restart() -> None:
    def kept(name: str) -> list[bool]:
        return [
            bool(k[0])
            for k in advantages(
                "rec", step(group((0, 0, 0, 0, 0, 1), name=name)), drop="balance"
            ).keep
            or ()
        ]

    assert kept("1.0.2.3") == kept("2.0.2.3"), "the lineage is another one after each start"


def test_an_experts_rows_are_not_compared() -> None:
    own = group((0, 0, 1), (2, 3, 4))
    expert = row(5.0, 2, group="demo", is_expert=True)
    x = step([own[0], expert, *own[1:]], seed=1)
    algorithm = build(
        AlgorithmSettings(
            advantage_fn="rec", advantage_fn_args={"drop": "balance"}, policy_loss_fn="ppo"
        )
    )
    made = algorithm.prepare(x)
    alone = algorithm.prepare(step(own, seed=1))
    assert made.keep is not None and alone.keep is not None
    assert made.advantages[1].tolist() == [0, 0] and made.keep[1].all()
    for a, b in zip([made.advantages[0], *made.advantages[2:]], alone.advantages, strict=True):
        assert a.tolist() == b.tolist()


# ---------------------------------------------------------------- drawn rows


def test_pf_ppo_draws_by_weight() -> None:
    rows = group((0.0, 1.0, 2.0, -1.0) * 25)
    algorithm = build(AlgorithmSettings(sample_strategy="pf_ppo"))
    counts: Counter[float] = Counter()
    for seed in range(40):
        x = step(rows, seed=seed)
        made = algorithm.prepare(x)
        assert made.selected is not None and len(made.selected) == len(rows) == len(made.advantages)
        every = advantages("grpo", x).values
        assert all(
            a is every[i] or a.tolist() == every[i].tolist()
            for a, i in zip(made.advantages, made.selected, strict=True)
        )
        counts.update(rows[i].reward for i in made.selected)
        shuffled = algorithm.prepare(replace(x, rows=rows[::-1])).selected
        assert shuffled is not None and sorted(len(rows) - 1 - i for i in shuffled) == list(
            made.selected
        ), "the order does not matter"
    share = {reward: n / counts.total() for reward, n in counts.items()}
    assert share.get(0.0, 0.0) < 1e-3
    assert [share[r] for r in (1.0, -1.0, 2.0)] == pytest.approx([1 / 6, 1 / 6, 4 / 6], abs=0.02)


# ---------------------------------------------------------------- what holds for all of them


def by_run(x: StepInputs, made: Advantages) -> Mapping[tuple[str, int, int], list[float]]:
    return {(r.group, r.run, r.step): v.tolist() for r, v in zip(x.rows, made.values, strict=True)}


@pytest.mark.parametrize("name", NAMES)
def test_the_order_of_rows_does_not_matter(name: str) -> None:
    x = Padded(5).x
    here = by_run(x, advantages(name, x))
    order = np.random.default_rng(0).permutation(len(x.rows))
    turned = replace(x, rows=[x.rows[i] for i in order])
    there = by_run(turned, advantages(name, turned))
    for at, values in here.items():
        assert there[at] == pytest.approx(values, rel=1e-5, abs=1e-6), at


@pytest.mark.parametrize("name", NAMES)
def test_every_row_has_one_finite_float32_per_token(name: str) -> None:
    for x in (Padded(6).x, Padded(7, groups=(1,)).x, Padded(8, groups=(2,), width=1).x):
        for scale in (1.0, 1e-20, 1e15):
            rows = [
                replace(
                    r,
                    reward=r.reward * scale,
                    token_rewards=(r.rewards * scale).astype(np.float32),
                    values=r.rewards.astype(np.float32),
                )
                for r in x.rows
            ]
            made = advantages(name, step(rows))
            for r, values in zip(rows, made.values, strict=True):
                assert (
                    values.dtype == np.float32
                    and values.shape == (r.length,)
                    and np.isfinite(values).all()
                )


@pytest.mark.parametrize("name", [n for n in NAMES if n not in NO_REWARDS])
def test_a_reward_that_is_not_finite_stops_it(name: str) -> None:
    x = Padded(5).x
    for bad in (math.nan, math.inf):
        rows = [replace(x.rows[0], reward=bad), *x.rows[1:]]
        with pytest.raises(ValueError, match="not finite"):
            advantages(name, replace(x, rows=rows))


ZERO_ALONE = (
    "none",
    "grpo",
    "maxrl",
    "grpo_passk",
    "rloo",
    "rec",
    "gpg",
    "step_wise_grpo",
    "gigpo",
    "clipb",
    "clipv",
)
REWARD_ALONE = ("reinforce", "opmd", "asymre", "opo")


@pytest.mark.parametrize("name", ZERO_ALONE)
def test_a_group_of_one_has_no_advantage(name: str) -> None:
    more = {
        "old": [-1, -2],
        "entropy": [1, 0.5],
        "discriminator_mean": [0.1, 0.2],
        "info": {"env_state_hash": "s"},
    }
    made = advantages(name, step([row(0.7, 2, **more)]))
    assert made.values[0].tolist() == [0, 0]


@pytest.mark.parametrize("name", REWARD_ALONE)
def test_a_group_of_one_without_a_baseline(name: str) -> None:
    assert per_row(name, step([row(0.75, 2)])) == [0.75]


@pytest.mark.parametrize("rewards", [(0.1,) * 7, (1 / 3,) * 3, (0.0, 0.0)])
@pytest.mark.parametrize("name", [*ZERO_ALONE, "opmd", "opo", "reinforceplusplus_baseline"])
def test_equal_rewards_give_exactly_zero(name: str, rewards: Sequence[float]) -> None:
    more: dict[str, Any] = {
        "old": [-1, -2],
        "entropy": [1, 0.5],
        "discriminator_mean": [0.1, 0.2],
        "info": {"env_state_hash": "s"},
    }
    made = advantages(name, step([row(r, 2, run=i, **more) for i, r in enumerate(rewards)]))
    assert not np.concatenate(made.values).any() or (
        name == "reinforceplusplus_baseline" and np.abs(made.values).max() < 1e-9
    )


@settings(max_examples=60)
@given(
    st.lists(
        st.lists(st.floats(-1e6, 1e6, width=32), min_size=2, max_size=6), min_size=1, max_size=4
    )
)
def test_baselines_centre_a_group(groups: list[list[float]]) -> None:
    rows = [r for g, rewards in enumerate(groups) for r in group(rewards, name=str(g))]
    x = step(rows)
    for name in ("grpo", "rloo", "opmd", "rec", "gpg", "step_wise_grpo"):
        values = np.array(per_row(name, x), np.float64)
        for g in range(len(groups)):
            mine = values[[r.group == str(g) for r in rows]]
            assert abs(mine.sum()) <= 1e-5 * max(1.0, np.abs(mine).sum()), name


@pytest.mark.parametrize(
    ("name", "missing", "says"),
    [
        ("ppo", "values", "GAE needs the critic's values"),
        ("optimal_token_baseline", "sum_squares", "sums of squared probabilities"),
        ("clipb", "entropy", "entropies of the row are needed"),
        ("clipv", "discriminator_mean", "mean of the entropy discriminator"),
        ("on_policy_distill", "teacher", "asks an auxiliary model"),
    ],
)
def test_what_is_missing_is_named(name: str, missing: str, says: str) -> None:
    x = Padded(5).x
    rows = [replace(x.rows[0], **{missing: None}), *x.rows[1:]]
    with pytest.raises(ValueError, match=f"group 0, run 0: .*{says}"):
        advantages(name, replace(x, rows=rows))


@pytest.mark.parametrize("found", [None, "0.5", math.nan, True])
def test_remax_says_how_to_get_its_baseline(found: object) -> None:
    info = {} if found is None else {"baseline_reward": found}
    with pytest.raises(
        ValueError, match=r'info\["baseline_reward"\].*The explorer plays it.*or use rloo'
    ):
        advantages("remax", step([row(1.0, 2, info=info)]))


def test_statistics_without_members_are_refused_where_they_are_needed() -> None:
    x = step(group((0, 1)))
    bare = replace(
        x, groups={"g": GroupStats(group="g", rewards=(0.0, 1.0), mean=0.5, std=0.5**0.5)}
    )
    for name in ("opo", "step_wise_grpo"):
        with pytest.raises(ValueError, match="2 rewards, but 0 runs, 0 steps and 0 lengths"):
            advantages(name, bare)
