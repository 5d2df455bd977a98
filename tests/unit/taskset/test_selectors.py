"""Selectors: formulas by hand, draws by their statistics, refusals, and that what was learnt
decides alone.
"""

from __future__ import annotations

import numpy as np
import pytest

from rft.errors import ConfigError
from rft.taskset.base import RowSource, Taskset
from rft.taskset.selectors import DifficultyBased, TaskSelector, View, selector
from rft.taskset.settings import TasksetSettings
from rft.taskset.task_order import TaskOrder, evaluation_order, generator
from rft.types.ports import TaskOutcome

FEATURES = np.array([[0.0, 0.5], [0.2, 0.6], [0.5, 1.0], [0.9, 1.0]])


def taskset(name: str = "a", count: int = 8, **changes):
    rows = [
        {"prompt": f"{name}{i}", "level": i % 3, "weak": i / count / 2, "strong": i / count}
        for i in range(count)
    ]
    settings = TasksetSettings(name=name, path=name, workflow="w", **changes)
    return Taskset(
        settings,
        RowSource(
            rows=rows, where=lambda i: f"row {i}", fingerprint=f"{name}{count}", check_all=False
        ),
    )


def difficulty(seed: int = 0, features=FEATURES, **args) -> DifficultyBased:
    return DifficultyBased(
        View(len(features), features, lambda *what: generator(seed, *what)), **args
    )


def outcome(batch: int, task: int, index: int, rate: float, name: str = "a") -> TaskOutcome:
    return TaskOutcome(batch, task, name, index, rate, 4)


def test_the_first_update_by_hand():
    chooser = difficulty(m=10, lamb=0.2, rho=0.5)
    chooser.learn(np.array([0, 2]), np.array([0.5, 0.75]))
    # weak 0.25, strong 0.75 on average, seen 0.625: the policy stands at 0.75 between them
    assert chooser.capability == pytest.approx(0.75, abs=1e-5)
    expected = [0.5, 0.2 + 0.75 * 0.4, 0.75, 0.9 + 0.75 * 0.1]  # rows 0 and 2 as observed
    passes = [5.0, 0.0, 7.5, 0.0]
    failures = [5.0, 0.0, 2.5, 0.0]
    alpha = [0.8 + 0.2 + 0.5 * s + 0.5 * 10 * p for s, p in zip(passes, expected, strict=True)]
    beta = [
        0.8 + 0.2 + 0.5 * f + 0.5 * 10 * (1 - p) for f, p in zip(failures, expected, strict=True)
    ]
    np.testing.assert_allclose(chooser.alpha, alpha, atol=1e-4)
    np.testing.assert_allclose(chooser.beta, beta, atol=1e-4)
    # at the stronger model: coefficient 1, and 0.9 x 0.75 + 0.1 x 1
    chooser.learn(np.array([1]), np.array([0.6]))
    assert chooser.capability == pytest.approx(0.775, abs=1e-5)
    np.testing.assert_allclose(
        chooser.alpha[3], 0.8 * alpha[3] + 0.2 + 5 * (0.9 + 0.775 * 0.1), atol=1e-4
    )


def test_rho_adapts_when_interpolation_is_far_off():
    chooser = difficulty(adaptive_rho=True)
    steady = difficulty()
    for c in (chooser, steady):
        c.learn(np.array([0, 3]), np.array([1.0, 0.0]))  # the hard one solved, the easy one not
    assert (chooser.rho, steady.rho) == (0.1, 0.2)
    chooser.learn(np.array([1]), np.array([0.4]))
    assert chooser.rho == 0.1


def test_tau_zero_takes_the_nearest_to_the_target():
    chooser = difficulty(tau=0, target_reward=0.5)
    chooser.alpha = np.array([1.0, 5, 9, 3])
    chooser.beta = np.array([9.0, 5, 1, 7])
    assert list(chooser.rows(0, 0, 2)) == [1, 3]
    assert sorted(chooser.rows(0, 0, 6)[:4]) == [0, 1, 2, 3], (
        "more tasks than rows: every row again"
    )


def test_draws_follow_the_softmax():
    chooser = difficulty(tau=0.2)
    chooser.alpha = np.array([2.0, 4, 6, 8])
    chooser.beta = np.array([8.0, 6, 4, 2])
    share = np.exp(np.array([-0.8, -0.6, -0.4, -0.2]) / 0.2)
    share /= share.sum()
    batches = 20_000
    first = np.bincount([chooser.rows(b, 0, 2)[0] for b in range(batches)], minlength=4) / batches
    np.testing.assert_allclose(first, share, atol=4 * np.sqrt(share * (1 - share) / batches).max())
    assert all(len(set(chooser.rows(b, 0, 3))) == 3 for b in range(100)), "without repetition"
    assert list(chooser.rows(7, 0, 3)) == list(difficulty_like(chooser).rows(7, 0, 3))


def difficulty_like(other: DifficultyBased) -> DifficultyBased:
    made = difficulty(**other.args.model_dump())
    made.alpha = other.alpha.copy()
    made.beta = other.beta.copy()
    return made


def test_a_tiny_temperature_still_gives_a_whole_batch():
    chooser = difficulty(tau=1e-9)
    chooser.alpha = np.array([1.0, 2, 3, 4])
    assert list(chooser.rows(0, 0, 4)) == [3, 2, 1, 0]


def test_sampled_posteriors_vary_and_means_do_not():
    mean = difficulty(tau=0)
    drawn = difficulty(tau=0, do_sample=True)
    assert len({tuple(mean.rows(b, 0, 2)) for b in range(30)}) == 1
    assert len({tuple(drawn.rows(b, 0, 2)) for b in range(30)}) > 3


def test_it_finds_the_rows_of_the_wanted_pass_rate():
    """A policy whose pass rates are known: after some batches nearly all that is chosen lies near
    the target.
    """
    n = 400
    rng = np.random.default_rng(3)
    strong = rng.random(n)
    features = np.stack([strong * 0.4, strong], axis=1)
    truth = 0.4 * features[:, 0] + 0.6 * features[:, 1]
    chooser = difficulty(features=features, target_reward=0.5, tau=0.02, m=8)
    errors = []
    for b in range(25):
        rows = np.array(chooser.rows(b, 0, 16))
        errors.append(np.abs(truth[rows] - 0.5).mean())
        chooser.learn(rows, rng.binomial(8, truth[rows]) / 8)
    assert np.mean(errors[:1]) > 0.15 and np.mean(errors[-5:]) < 0.06, errors


def test_easy_to_hard_sorts_once_and_goes_round():
    order = TaskOrder(
        [taskset(count=6, selector="offline_easy2hard", feature_keys=("level", "weak"))], 4, 1
    )
    assert [t.index for b in range(3) for t in order.batch(b)] == [
        5,
        2,
        4,
        1,
        3,
        0,
        5,
        2,
        4,
        1,
        3,
        0,
    ]


# ---------------------------------------------------------------- learning inside an order


def learning(lag: int = 0, **more) -> TaskOrder:
    settings = {
        "selector": "difficulty_based",
        "feature_keys": ("weak", "strong"),
        "selector_args": {"tau": 0.3, **more},
    }
    return TaskOrder(
        [taskset(count=40, **settings), taskset("b", 20, selector="shuffle")], 6, 5, lag=lag
    )


def played(order: TaskOrder, b: int) -> list[TaskOutcome]:
    """What becomes of a batch: a pass rate that depends on the row alone."""
    return [
        outcome(b, i, t.index, (t.index * 7 % 11) / 10, t.taskset)
        for i, t in enumerate(order.batch(b))
    ]


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_a_resumed_order_chooses_what_the_uninterrupted_one_does(lag):
    whole = learning(lag)
    ledger = {}
    chosen = {}
    for b in range(12):
        for n in range(whole.learned, whole.horizon(b)):
            whole.learn(n, ledger[n])
        chosen[b] = [(t.taskset, t.index) for t in whole.batch(b)]
        spares = [whole.spare(b, j).index for j in range(4)]
        ledger[b] = played(whole, b)
        assert spares == [whole.spare(b, j).index for j in range(4)]
    for cursor in (1, 5, 11):
        resumed = learning(lag)
        for b in range(cursor, 12):
            for n in range(resumed.learned, resumed.horizon(b)):
                resumed.learn(n, ledger[n])
            assert [(t.taskset, t.index) for t in resumed.batch(b)] == chosen[b], (cursor, b)
    other = learning(lag)
    for n in range(other.horizon(11)):
        other.learn(n, [outcome(n, o.task, o.index, 1 - o.pass_rate, o.taskset) for o in ledger[n]])
    assert [(t.taskset, t.index) for t in other.batch(11)] != chosen[11], "outcomes matter"


def test_an_order_that_learns_refuses_to_choose_too_early_or_too_late():
    order = learning(lag=1)
    order.batch(0), order.batch(1)
    with pytest.raises(
        ValueError, match="batch 2 is chosen after 1 batches are learnt, not after 0"
    ):
        order.batch(2)
    with pytest.raises(ValueError, match="batch 0 is to be learnt next, not 1"):
        order.learn(1, [])
    order.learn(0, [])
    assert len(order.batch(2)) == 6
    assert TaskOrder([taskset()], 2, 1).horizon(9) == 0, "nothing to learn"


def test_rows_tried_twice_count_with_their_mean_and_rewards_outside_are_clipped():
    one = learning()
    other = learning()
    one.learn(
        0,
        [
            outcome(0, 0, 3, 0.0),
            outcome(0, 1, 3, 1.0),
            outcome(0, 2, 4, 7.0),
            outcome(0, 3, 1, 0.5, "b"),
        ],
    )
    other.learn(0, [outcome(0, 0, 3, 0.5), outcome(0, 1, 4, 1.0)])
    assert [t.index for t in one.batch(1)] == [t.index for t in other.batch(1)]


def test_rows_that_were_left_out_do_not_shift_what_is_learnt():
    settings = TasksetSettings(
        name="a",
        path="a",
        workflow="w",
        skip_bad_rows=True,
        selector="difficulty_based",
        feature_keys=("weak", "strong"),
    )
    rows = [
        {"response": "x", **({"prompt": str(i)} if i % 2 else {}), "weak": i / 20, "strong": i / 10}
        for i in range(10)
    ]
    made = Taskset(settings, RowSource(rows=rows, where=str, fingerprint="f", check_all=False))
    assert [made.place(i) for i in range(10)] == [None, 0, None, 1, None, 2, None, 3, None, 4]
    np.testing.assert_allclose(made.features(("weak",))[:, 0], [0.05, 0.15, 0.25, 0.35, 0.45])
    order = TaskOrder([made], 2, 1)
    order.learn(0, [outcome(0, 0, 7, 1.0), outcome(0, 1, 8, 1.0)])
    (chooser,) = order._selectors
    assert int(np.argmax(chooser.alpha)) == 3


# ---------------------------------------------------------------- evaluation, refusals, one's own


def test_evaluation_takes_every_row_once_in_the_selectors_order():
    assert evaluation_order(taskset(is_eval=True)) == list(range(8))
    shuffled = evaluation_order(taskset(is_eval=True, selector="shuffle", seed=3))
    assert sorted(shuffled) == list(range(8)) and shuffled != list(range(8))
    assert shuffled == evaluation_order(taskset(is_eval=True, selector="shuffle", seed=3))
    assert shuffled != evaluation_order(taskset(is_eval=True, selector="shuffle", seed=4))
    assert sorted(evaluation_order(taskset(is_eval=True, selector="random"))) == list(range(8))
    with pytest.raises(ConfigError, match="uses pass rates of training"):
        evaluation_order(
            taskset(is_eval=True, selector="difficulty_based", feature_keys=("weak", "strong"))
        )


BOTS = {"selector": "difficulty_based", "feature_keys": ("weak", "strong")}


@pytest.mark.parametrize(
    ("changes", "key", "message"),
    [
        ({"selector": "dificulty_based"}, "selector_type", "Did you mean difficulty_based"),
        (
            {"selector_args": {"tau": 1}},
            "kwargs",
            "unknown argument 'tau' for selector 'sequential'",
        ),
        (
            {**BOTS, "selector_args": {"lambda": 1}},
            "kwargs",
            "Known: m, lamb, rho, target_reward, tau, do_sample, adaptive_rho",
        ),
        ({**BOTS, "selector_args": {"rho": 2}}, "kwargs", "rho: .*less than or equal to 1"),
        ({**BOTS, "feature_keys": ("weak",)}, "feature_keys", "takes exactly 2 .*given weak"),
        ({"selector": "offline_easy2hard"}, "feature_keys", "takes at least 1 .*given none"),
        ({"feature_keys": ("weak",)}, "feature_keys", "takes none"),
        (
            {**BOTS, "feature_keys": ("weak", "prompt")},
            "feature_keys",
            "row 0: column 'prompt', .* must be a finite number, but is 'a0'",
        ),
        (
            {**BOTS, "feature_keys": ("weak", "strng")},
            "feature_keys",
            "but is not there; it has prompt, level, weak, strong",
        ),
    ],
)
def test_refused(changes, key, message):
    with pytest.raises(ConfigError, match=message) as caught:
        TaskOrder([taskset(**changes)], 2, 1)
    assert caught.value.key == f"taskset a.data_selector.{key}"


def test_a_selector_of_ones_own(tmp_path):
    @selector("test_backwards")
    class Backwards(TaskSelector):
        def rows(self, batch, first, count):
            return [
                self.view.length - 1 - n % self.view.length for n in range(first, first + count)
            ]

    assert [t.index for t in TaskOrder([taskset(selector="test_backwards")], 3, 1).batch(0)] == [
        7,
        6,
        5,
    ]
    path = tmp_path / "mine.py"
    path.write_text(
        "from rft.taskset.selectors import TaskSelector\n"
        "class Even(TaskSelector):\n"
        "    def __init__(self, view, *, step: int = 2):\n        super().__init__(view)\n        "
        "self.step = step\n"
        "    def rows(self, batch, first, count):\n        return [self.step * n % "
        "self.view.length for n in range(first, first + count)]\n"
    )
    assert [
        t.index
        for t in TaskOrder(
            [taskset(selector=f"{path}:Even", selector_args={"step": 3})], 3, 1
        ).batch(0)
    ] == [0, 3, 6]
    with pytest.raises(ConfigError, match="unknown argument 'stp'"):
        TaskOrder([taskset(selector=f"{path}:Even", selector_args={"stp": 3})], 3, 1)


@pytest.mark.parametrize("answer", [[0], [0, 8], [-1, 0]])
def test_a_selector_of_ones_own_gives_as_many_rows_as_are_asked_for(answer):
    name = "test_gives_" + "_".join(str(row % 100) for row in answer)

    @selector(name)
    class Gives(TaskSelector):
        def rows(self, batch, first, count):
            return answer

    own = taskset(selector=name)
    with pytest.raises(
        ConfigError, match=r"gave \d rows, .*; 2 numbers from 0 to 7 were asked for"
    ) as e:
        TaskOrder([own], 2, 1).batch(0)
    assert e.value.key == "taskset a.data_selector.selector_type"
    with pytest.raises(ConfigError, match="8 numbers from 0 to 7"):
        evaluation_order(own)
