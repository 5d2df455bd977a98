"""Every algorithm with a policy loss of its own for one step on the tiny model, from its own
defaults, in several micro-batches.

The loss of the step is that of all its rows at once in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from rft.algorithm.base import Denominators, LossInputs
from rft.algorithm.catalog import algorithm_defaults, algorithms
from rft.algorithm.settings import AlgorithmSettings
from rft.trainer.loop.learner import Learner
from rft.trainer.loop.ranks import Ranks
from rft.trainer.rows import batch_builder
from rft.trainer.rows.pack import TrainRow
from rft.trainer.settings import LearnerSettings
from rft.types.block import encode
from rft.types.completion import VersionSpan
from rft.types.experience import Experience, SamplingRecord
from rft.types.ids import ExperienceId, Version
from rft.types.ports import GroupStats, Lease
from rft.types.task import SamplingArgs

# likely tokens of a teacher: test_every_algorithm.py and test_distill_top.py
LATER = ("ppo", "distill_top")
NAMES = [n for n in algorithms() if algorithm_defaults(n).policy_loss_fn not in LATER]


def experience(
    task: int, run: int, reward: float, logprobs: np.ndarray | None, **changes: Any
) -> Experience:
    """Three prompt tokens and an answer that depend on task and run alone."""
    rng = np.random.default_rng((task, run))
    count = 3 + int(rng.integers(3, 9))
    mask = np.arange(count) >= 3
    tokens = rng.integers(3, 250, count).astype(np.int32)
    tokens[:3] = 5 + task
    given = np.zeros(count, np.float32)
    if logprobs is not None:
        # of a policy a few steps ago
        given[mask] = np.minimum(logprobs + rng.normal(0, 0.3, count - 3), 0)
    fields: dict[str, Any] = {
        "id": ExperienceId(1, 0, 0, task, run),
        "taskset": "t",
        "task_index": task,
        "workflow": "w",
        "status": "complete",
        "tokens": tokens,
        "loss_mask": mask,
        "logprobs": given,
        "version_spans": (VersionSpan(Version(1, 0), 3, count),),
        "sampling": (SamplingRecord(start=3, end=count, sampling=SamplingArgs(temperature=1.0)),),
        "reward": reward,
    }
    return Experience(**{**fields, **changes})


def lease(rows: Sequence[Experience]) -> Lease:
    groups = []
    for name in dict.fromkeys(str(r.group) for r in rows):
        rewards = tuple(float(r.reward or 0) for r in rows if str(r.group) == name)
        mean = float(np.mean(rewards))
        std = float(np.std(rewards, ddof=1)) if len(rewards) > 1 else 0.0
        groups.append(GroupStats(group=name, rewards=rewards, mean=mean, std=std))
    return Lease(step=1, frame=encode(rows), groups=tuple(groups))


@pytest.mark.parametrize("name", NAMES)
async def test_one_step(name: str, settings: Callable[..., LearnerSettings]) -> None:
    d = algorithm_defaults(name)
    parts = (
        "advantage_fn",
        "advantage_fn_args",
        "policy_loss_fn",
        "policy_loss_fn_args",
        "loss_agg_mode",
        "entropy_loss_fn",
    )
    algorithm = AlgorithmSettings(**{part: getattr(d, part) for part in parts})
    learner = Learner(settings(algorithm=algorithm, max_token_len_per_gpu=30))
    ranks = Ranks(learner)
    needs = ranks.algorithm.needs
    if learner.reference is not None:
        with torch.no_grad():
            for p in learner.reference.parameters():
                p.mul_(1.05)
    labels = d.data == "labels"
    rewards = (
        [(1.0, 0.0)] * 4
        if needs.pairs or labels
        else [(1.0, 0.0, 0.5, 0.0), (0.0, 1.0, 1.0, 0.0), (1.0, 1.0, 1.0, 1.0)]
    )
    every = [(task, run, r) for task, of in enumerate(rewards) for run, r in enumerate(of)]
    bare = [experience(*row, None) for row in every]
    now = await ranks.compute(
        batch_builder.decode_lease(lease(bare), samples="none").rows, ("old",)
    )
    of_experts = {0, 5} if needs.samples == "own" else set()
    rows = [
        experience(
            *row,
            None if needs.samples == "none" or i in of_experts else now[i]["old"],
            is_expert=labels or i in of_experts,
            info={"label": i % 4 == 0} if labels and i % 2 == 0 else {},
        )
        for i, row in enumerate(every)
    ]
    given = batch_builder.decode_lease(lease(rows), samples=needs.samples, pairs=needs.pairs)
    computed = await ranks.compute(given.rows, sorted(needs.before)) if needs.before else ()
    made = batch_builder.build_step(
        given, ranks.algorithm, ranks.budget, world_size=1, computed=computed, seed=1
    )
    (share,) = made.shares
    trained = [row for micro in share.micro_batches for row in micro]
    assert len(share.micro_batches) > 1 and len(trained) + made.metrics[
        "experience/skipped_rows"
    ] == len(rows)
    expected = await _at_once(
        ranks, trained, share.tokens, share.rows, share.expert_tokens, share.expert_rows
    )
    before = {n: p.detach().clone() for n, p in learner.policy.names().items()}
    report = await ranks.step(made.shares)
    assert report.finite and report.grad_norm > 0
    assert report.sums["loss"] / share.tokens == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert any(bool((p != before[n]).any()) for n, p in learner.policy.names().items())


async def _at_once(
    ranks: Ranks, rows: list[TrainRow], tokens: float, count: float, theirs: float, experts: float
) -> float:
    """The loss of all rows in float64, from the log-probs of the model as it is."""
    what = ("old", "ref") if ranks.algorithm.needs.reference else ("old",)
    plain = [msgspec.structs.replace(r, old=None, ref=None) for r in rows]
    scored = await ranks.compute(plain, what)

    def tensor(parts: Sequence[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(parts).astype(np.float64))

    lengths = [int(r.loss_mask.sum()) for r in rows]
    x = LossInputs(
        logprobs=tensor([s["old"] for s in scored]).requires_grad_(),
        old_logprobs=tensor([r.logprobs[r.loss_mask] for r in rows]),
        advantages=tensor(
            [
                np.zeros(n) if r.advantages is None else r.advantages
                for r, n in zip(rows, lengths, strict=True)
            ]
        ),
        mask=torch.ones(sum(lengths), dtype=torch.bool),
        row=torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(lengths)),
        num_rows=len(rows),
        denominators=Denominators(tokens, count, 12, expert_tokens=theirs, expert_rows=experts),
        ref_logprobs=tensor([s["ref"] for s in scored]) if "ref" in what else None,
        is_expert=tensor(
            [np.full(n, r.is_expert) for r, n in zip(rows, lengths, strict=True)]
        ).bool(),
        extra={name: tensor([r.extra[name] for r in rows]) for name in rows[0].extra},
        step=1,
    )
    # micro-batches may be in another order than the pairs, but each pair is whole
    if ranks.algorithm.needs.pairs:
        assert all(a.pair == b.pair for a, b in zip(rows[0::2], rows[1::2], strict=True))
    return float(ranks.algorithm.loss(x).loss.item())
