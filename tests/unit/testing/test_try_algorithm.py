"""An algorithm part over rows written by hand: `rft.testing.try_algorithm`."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rft import Args, StepInputs, register
from rft.errors import ConfigError
from rft.testing import AlgorithmRow, try_algorithm


def test_a_clipped_token_has_no_gradient() -> None:
    rows = [
        AlgorithmRow(reward=0.0, logprobs=[-1.0]),
        AlgorithmRow(reward=1.0, logprobs=[-1.0, -1.0], new=[-0.5, -1.2]),
    ]
    bad, good = try_algorithm(rows, advantage_fn_args={"norm_by_std": False}).rows
    assert bad.advantages.tolist() == [-0.5] and good.advantages.tolist() == [0.5, 0.5]
    assert bad.gradients == pytest.approx([0.5 / 3])
    # exp(0.5) is above 1.2: no gradient
    assert good.gradients == pytest.approx([0.0, -0.5 * math.exp(-0.2) / 3])


def test_chains_of_a_run_are_one_run() -> None:
    solved = AlgorithmRow(reward=1.0, run=0)
    chains = [AlgorithmRow(reward=0.0, run=1)] * 3
    tried = try_algorithm([solved, *chains], advantage_fn_args={"norm_by_std": False})
    assert [row.advantages[0] for row in tried.rows] == [0.5, -0.5, -0.5, -0.5]


def test_a_registered_function_and_what_it_computes() -> None:
    class HalfArgs(Args):
        share: float = 0.5

    @register.advantage("half_of_reward_test", args=HalfArgs)
    def half(x: StepInputs, args: HalfArgs) -> np.ndarray:
        """A = share R."""
        return np.float32([args.share * row.reward for row in x.rows])

    tried = try_algorithm([AlgorithmRow(reward=2.0)], advantage_fn=half, policy_loss_fn="reinforce")
    assert tried.loss == pytest.approx(1.0) and "likelier" in repr(tried)
    weighted = try_algorithm(
        [AlgorithmRow(reward=2.0)], advantage_fn=half, advantage_fn_args={"share": 0.25}
    )
    assert weighted.rows[0].advantages.tolist() == [0.5, 0.5]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # numpy's, outside of tests no error
def test_an_array_of_one_token() -> None:
    tried = try_algorithm([AlgorithmRow(reward=1.0, logprobs=[-1.0], new=np.array([-1.5]))], "sft")
    assert tried.rows[0].gradients.tolist() == [-1.0]


def test_the_ratio_is_against_the_sampler_where_a_part_reads_old_logprobs() -> None:
    rows = [
        AlgorithmRow(reward=r, logprobs=[-1.0], new=[-1.1], computed={"old": [-1.1]})
        for r in (0.0, 1.0)
    ]
    _, sampler = try_algorithm(rows, "m2po", advantage_fn_args={"norm_by_std": False}).rows
    assert sampler.gradients == pytest.approx([-0.25 * math.exp(-0.1)])
    trainer = try_algorithm(
        rows, "m2po", advantage_fn_args={"norm_by_std": False}, bypass_old_logprobs=False
    )
    assert trainer.rows[1].gradients == pytest.approx([-0.25])


def test_unknown_parts_are_named() -> None:
    with pytest.raises(ConfigError, match="advantage_fn"):
        try_algorithm([AlgorithmRow(reward=1.0)], advantage_fn="grop")
