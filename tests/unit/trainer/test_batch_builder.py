"""From a lease to shares."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from rft.algorithm.composition import build
from rft.algorithm.settings import AlgorithmSettings, CorrectionConfig
from rft.errors import RunFailed
from rft.trainer.rows import batch_builder
from rft.trainer.rows.pack import Budget
from rft.types.block import encode
from rft.types.completion import VersionSpan
from rft.types.experience import Experience, SamplingRecord
from rft.types.ids import GroupId, Version
from rft.types.ports import GroupStats, Lease
from rft.types.task import SamplingArgs


def experience(
    task: int, run: int, reward: float | None, *, written_by: int = 0, **changes: Any
) -> Experience:
    tokens = np.array([1, 5, 6, 7 + run, 2], np.int32)
    fields: dict[str, Any] = {
        "id": GroupId(1, 0, 0, task).run(run),
        "taskset": "sums",
        "task_index": task,
        "workflow": "math_workflow",
        "status": "complete",
        "tokens": tokens,
        "loss_mask": np.array([0, 0, 0, 1, 1], np.bool_),
        "logprobs": np.array([0, 0, 0, -1, -2], np.float32),
        "version_spans": (VersionSpan(Version(1, written_by), 3, 5),),
        "sampling": (SamplingRecord(start=3, end=5, sampling=SamplingArgs(temperature=0.5)),),
        "reward": reward,
    }
    return Experience(**{**fields, **changes})


def lease(rows: list[Experience], *, step: int = 1) -> Lease:
    stats = []
    for group in dict.fromkeys(r.group for r in rows):
        rewards = tuple(float(r.reward or 0) for r in rows if r.group == group)
        std = float(np.std(rewards, ddof=1)) if len(rewards) > 1 else 0.0
        stats.append(
            GroupStats(group=str(group), rewards=rewards, mean=float(np.mean(rewards)), std=std)
        )
    return Lease(step=step, frame=encode(rows), groups=tuple(stats))


def make(
    rows: list[Experience], *, step: int = 1, world_size: int = 1, **algorithm: Any
) -> batch_builder.StepBatch:
    given = batch_builder.decode_lease(lease(rows, step=step))
    return batch_builder.build_step(
        given, build(AlgorithmSettings(**algorithm)), Budget(100), world_size=world_size
    )


def test_rows_of_equal_rewards_are_left_out_but_counted() -> None:
    made = make(
        [experience(0, 0, 1.0), experience(0, 1, 0.0), experience(1, 0, 1.0), experience(1, 1, 1.0)]
    )
    (share,) = made.shares
    ((first, second),) = share.micro_batches
    assert (share.tokens, share.rows, made.metrics["experience/skipped_rows"]) == (8.0, 4.0, 2)
    assert first.advantages is not None and second.advantages is not None
    assert [*first.advantages, *second.advantages] == pytest.approx(
        [0.7071058] * 2 + [-0.7071058] * 2
    )
    assert first.temperatures == 0.5
    assert made.metrics["frac_reward_zero_std"] == 0.5


def test_a_kl_loss_needs_every_row() -> None:
    made = make([experience(1, 0, 1.0), experience(1, 1, 1.0)], kl_loss_fn="k2")
    assert (
        made.metrics["experience/skipped_rows"] == 0 and len(made.shares[0].micro_batches[0]) == 2
    )


def test_drawn_rows_stand_as_often_as_they_were_drawn() -> None:
    rows = [experience(0, run, reward) for run, reward in enumerate((0.0, 0.1, 1.0, -1.0))]
    made = make(rows, sample_strategy="pf_ppo", kl_loss_fn="k2")
    ((*micro,),) = made.shares[0].micro_batches
    assert (len(micro), made.shares[0].rows, made.shares[0].tokens) == (4, 4.0, 8.0)
    assert len({id(r.tokens) for r in micro}) < 4, "a row that was drawn again is not copied"
    mean = 0.025
    std = float(np.std([0, 0.1, 1, -1], ddof=1))
    every = {round((r - mean) / std, 4) for r in (0, 0.1, 1, -1)}
    assert all(
        r.advantages is not None and round(float(r.advantages[0]), 4) in every for r in micro
    )


def test_rewards_on_other_peoples_tokens_reach_the_token_before() -> None:
    rewards = np.array([0.5, 1, 2, 4, 8, 16, 32], np.float32)
    mask = np.array([0, 0, 1, 1, 0, 0, 1], np.bool_)
    assert batch_builder._shift_to_trained_tokens(rewards, mask).tolist() == [
        0.5 + 1 + 2,
        4 + 8 + 16,
        32,
    ]
    assert batch_builder._shift_to_trained_tokens(rewards, ~mask).tolist() == [
        0.5,
        1 + 2 + 4,
        8,
        16 + 32,
    ]


def test_all_rewards_equal_leaves_no_micro_batch() -> None:
    made = make([experience(1, 0, 1.0), experience(1, 1, 1.0)], world_size=2)
    assert [s.micro_batches for s in made.shares] == [(), ()]


def test_every_rank_knows_that_the_reference_model_ran_before() -> None:
    """Also one without rows, which would otherwise compute it alone and wait for the others."""
    given = batch_builder.decode_lease(lease([experience(1, 0, 1.0), experience(1, 1, 0.0)]))
    algorithm = build(AlgorithmSettings(kl_loss_fn="k2"))
    for computed, told in ([{"ref": np.zeros(2, np.float32)}] * 2, True), ((), False):
        made = batch_builder.build_step(
            given, algorithm, Budget(100), world_size=3, computed=computed
        )
        assert [s.ref_given for s in made.shares] == [told] * 3 and made.shares[
            2
        ].micro_batches == ((),)


def test_staleness_counts_finished_steps_since_the_oldest_token() -> None:
    made = make([experience(0, 0, 1.0, written_by=4), experience(0, 1, 0.0, written_by=2)], step=5)
    assert made.staleness == [0, 2]
    assert (
        made.metrics["experience/staleness/max"] == 2.0
        and made.metrics["experience/staleness/mean"] == 1.0
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"sampling": (SamplingRecord(start=3, end=5, sampling=SamplingArgs(temperature=0.0)),)},
            "sampled with temperature 0.0",
        ),
        (
            {"sampling": (SamplingRecord(start=3, end=5, sampling=SamplingArgs(top_p=0.9)),)},
            "top_p 0.9.*change the taskset's rollout_args",
        ),
        (
            {
                "sampling": (
                    SamplingRecord(start=3, end=5, sampling=SamplingArgs(), logprob_mode="raw"),
                )
            },
            "has raw log-probs",
        ),
        ({"has_logprobs": False}, "has no log-probs of a sampling policy"),
        ({"reward": None}, "only scored rows"),
    ],
)
def test_rows_that_cannot_be_trained_on_are_refused_by_name(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(
        RunFailed,
        match=rf"experience 0001.00.00000000.000000.0001.00.0000 of taskset 'sums'.*{message}",
    ):
        make([experience(0, 0, 1.0), experience(0, 1, **{"reward": 0.0, **changes})])


def test_a_correction_that_rejects_takes_tokens_of_a_part_of_the_distribution() -> None:
    """As `rft check` says of `top_p` and the like; at temperature 0 nothing can be computed."""
    rejects = CorrectionConfig(rollout_rs="seq_mean_k1", rollout_rs_threshold=2.0)
    for correction, takes in (
        (rejects, True),
        (CorrectionConfig(rollout_is="token"), False),
        (None, False),
    ):
        needs = build(
            AlgorithmSettings(bypass_old_logprobs=False, rollout_correction=correction)
        ).needs
        assert needs.any_sampling == takes
    bent, greedy = (
        SamplingRecord(start=3, end=5, sampling=SamplingArgs(**x))
        for x in ({"top_p": 0.9}, {"temperature": 0.0})
    )
    rows = lease([experience(0, 0, 1.0, sampling=(bent,)), experience(0, 1, 0.0)])
    assert len(batch_builder.decode_lease(rows, any_sampling=True).rows) == 2
    with pytest.raises(RunFailed, match=r"top_p 0\.9"):
        batch_builder.decode_lease(rows)
    with pytest.raises(RunFailed, match=r"temperature 0\.0"):
        batch_builder.decode_lease(
            lease([experience(0, 0, 1.0, sampling=(greedy,))]), any_sampling=True
        )


def test_fixed_micro_batches_take_any_number_of_rows() -> None:
    """The best of each group, rows whose advantage is 0, and one that a failed run left missing."""
    rows = [
        experience(task, run, float(run == task), written_by=0)
        for task in range(3)
        for run in range(3)
    ][:8]
    lengths = {}
    for name, parts in {
        "raft": {"policy_loss_fn": "sft", "advantage_fn": "none", "sample_strategy": "group_best"},
        "grpo": {},
    }.items():
        given = batch_builder.decode_lease(whole(lease(rows)), samples="none")
        made = batch_builder.build_step(
            given, build(AlgorithmSettings(**parts)), Budget(1, rows=2), world_size=1
        )
        lengths[name] = [len(micro) for micro in made.shares[0].micro_batches]
    assert lengths == {"raft": [2, 1], "grpo": [2, 2, 2]}, "the third group has no spread"


def whole(given: Lease) -> Lease:
    """With the names of the groups' members."""
    groups = [
        msgspec.structs.replace(
            g, runs=tuple(range(n := len(g.rewards))), steps=(0,) * n, lengths=(2,) * n
        )
        for g in given.groups
    ]
    return msgspec.structs.replace(given, groups=tuple(groups))


def test_rows_without_group_statistics_are_refused() -> None:
    given = lease([experience(0, 0, 1.0)])
    with pytest.raises(RunFailed, match="no statistics of its group"):
        batch_builder.decode_lease(msgspec.structs.replace(given, groups=()))


# ---------------------------------------------------------------- what a policy loss needs of its
# rows


def test_rows_without_advantage_are_computed_where_their_loss_is_not_zero() -> None:
    rows = [experience(1, 0, 1.0), experience(1, 1, 1.0)]
    assert make(rows, policy_loss_fn="gspo").metrics["experience/skipped_rows"] == 2
    k2 = {"regularizer": "k2", "regularizer_coef": 0.1}
    assert (
        make(rows, policy_loss_fn="rec", advantage_fn="rec").metrics["experience/skipped_rows"] == 2
    )
    assert (
        make(rows, policy_loss_fn="rec", advantage_fn="rec", policy_loss_fn_args=k2).metrics[
            "experience/skipped_rows"
        ]
        == 0
    )
    assert (
        make(rows, entropy_loss_fn="default", entropy_loss_fn_args={"entropy_coef": 0.1}).metrics[
            "experience/skipped_rows"
        ]
        == 0
    )


def test_imitation_takes_rows_without_a_sampling_policy() -> None:
    bare = experience(0, 0, 1.0, has_logprobs=False, sampling=())
    given = batch_builder.decode_lease(lease([bare]), samples="none")
    made = batch_builder.build_step(
        given,
        build(AlgorithmSettings(policy_loss_fn="sft", advantage_fn="none")),
        Budget(100),
        world_size=1,
    )
    assert made.metrics["experience/skipped_rows"] == 0 and made.tokens == 2


def test_an_experts_rows_are_counted_apart() -> None:
    rows = [
        experience(0, 0, 1.0),
        experience(0, 1, 0.0),
        experience(1, 0, 1.0, is_expert=True, has_logprobs=False),
    ]
    with pytest.raises(RunFailed, match="no log-probs"):
        batch_builder.decode_lease(lease(rows))
    made = batch_builder.build_step(
        batch_builder.decode_lease(lease(rows), samples="own"),
        build(AlgorithmSettings(policy_loss_fn="mix")),
        Budget(100),
        world_size=1,
    )
    (share,) = made.shares
    assert (share.tokens, share.rows, share.expert_tokens, share.expert_rows) == (
        6.0,
        3.0,
        2.0,
        1.0,
    )
    assert [r.is_expert for m in share.micro_batches for r in m] == [False, False, True]


def test_pairs_are_marked_and_checked() -> None:
    good = [
        experience(0, 0, 1.0),
        experience(0, 1, 0.0),
        experience(1, 0, 1.0),
        experience(1, 1, 0.0),
    ]
    rows = batch_builder.decode_lease(lease(good), samples="none", pairs=True).rows
    assert [r.pair for r in rows] == [rows[0].group] * 2 + [rows[2].group] * 2
    assert not batch_builder.decode_lease(lease(good)).rows[0].pair
    for bad, says in (
        (good[:3], "is alone; a preference loss needs pairs"),
        ([good[0], good[2]], "is not followed by the other one of its pair"),
        ([good[0], good[0]], "is not followed by the other one of its pair"),
        (
            [good[1], good[0]],
            "comes first in its pair, as the chosen one, but has the lower reward",
        ),
    ):
        with pytest.raises(RunFailed, match=says):
            batch_builder.decode_lease(lease(bad), samples="none", pairs=True)


def test_log_probs_that_are_all_zero_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """One certain answer may be; a step of nothing else has none."""
    certain = np.zeros(5, np.float32)
    make([experience(0, 0, 1.0), experience(0, 1, 0.0, logprobs=certain)])
    assert not caplog.records
    make([experience(0, 0, 1.0, logprobs=certain), experience(0, 1, 0.0, logprobs=certain)], step=4)
    assert "step 4: every log-prob of the policy that sampled its 2 rows is 0" in caplog.text
