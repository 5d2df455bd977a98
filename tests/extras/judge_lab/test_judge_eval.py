"""The numbers of a judge's report, against values worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from rft.errors import ConfigError
from rft.extras.judge_lab.judge_eval import Labelled, auc, drift, number, ranks, report


def rows(*given: tuple[float | None, float | None, int]) -> list[Labelled]:
    return [Labelled(length, (value,), label) for value, label, length in given]


def test_agreement() -> None:
    told = report(
        rows((0.9, 1, 10), (0.8, 1, 20), (0.2, 1, 30), (0.1, 0, 10), (0.7, 0, 40), (None, 1, 5))
    )
    assert told["answers"] == 6 and told["unscored"] == 1 and told["labelled"] == 6
    assert told["accuracy"] == pytest.approx(3 / 5)
    chance = 3 / 5 * 3 / 5 + 2 / 5 * 2 / 5
    assert told["kappa"] == pytest.approx((3 / 5 - chance) / (1 - chance))
    assert told["auc"] == pytest.approx(5 / 6), "0.9 and 0.8 beat both, 0.2 beats 0.1 alone"
    assert told["bias"] == pytest.approx(np.mean([-0.1, -0.2, -0.8, 0.1, 0.7]))
    assert told["length_bias"] == pytest.approx(
        np.corrcoef([-0.1, -0.2, -0.8, 0.1, 0.7], [10, 20, 30, 10, 40])[0, 1]
    )


def test_what_is_not_defined_is_none() -> None:
    told = report(rows((0.5, None, 3), (0.5, None, 3)))
    assert (
        told["accuracy"] is None
        and told["kappa"] is None
        and told["auc"] is None
        and told["pearson"] is None
    )
    one_sided = report(rows((0.9, 1, 3), (0.9, 1, 4)))
    assert one_sided["accuracy"] == 1.0 and one_sided["kappa"] is None and one_sided["auc"] is None


def test_labels_on_another_scale_have_their_middle() -> None:
    told = report(rows((0.9, 5, 1), (0.2, 1, 2), (0.8, 4, 3)))
    assert told["label_threshold"] == 3 and told["accuracy"] == 1.0
    assert report(rows((0.9, 5, 1), (0.2, 1, 2)), label_threshold=6)["accuracy"] == 0.5


def test_consistency() -> None:
    told = report([Labelled(1, (0.9, 0.8)), Labelled(1, (0.9, 0.1)), Labelled(1, (0.2, None))])
    assert told["self_consistency"] == 0.5 and told["repeat_std"] == pytest.approx((0.05 + 0.4) / 2)


def test_drift_by_weights() -> None:
    told = drift(
        [
            Labelled(5, (0.3,), 0, 1),
            Labelled(7, (0.5,), 1, 1),
            Labelled(20, (0.9,), 0, 4),
            Labelled(20, (None,), 0, 4),
        ],
        0.5,
        0.5,
    )
    first, last = told
    assert (first["step"], first["mean_score"], first["mean_label"], first["accuracy"]) == (
        1,
        pytest.approx(0.4),
        0.5,
        1.0,
    )
    assert (last["step"], last["unscored"], last["bias"], last["mean_length"]) == (
        4,
        1,
        pytest.approx(0.9),
        20,
    )


def test_ranks_and_auc_share_ties() -> None:
    assert ranks(np.array([3.0, 1.0, 3.0, 2.0])).tolist() == [3.5, 1.0, 3.5, 2.0]
    assert auc(np.array([1.0, 1.0]), np.array([True, False])) == 0.5
    assert auc(np.array([1.0, 2.0]), np.array([True, True])) is None


def test_labels_are_numbers_or_words() -> None:
    assert [number(x) for x in (True, 0, 2.5, "Yes", " incorrect ", "0.25")] == [
        1.0,
        0.0,
        2.5,
        1.0,
        0.0,
        0.25,
    ]
    for wrong in ("perhaps", None, float("nan"), "inf", [1]):
        with pytest.raises(ConfigError, match="is no label"):
            number(wrong)
