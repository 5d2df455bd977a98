"""Every policy loss on a model in float64: the gradient of the weights is the same however the step
is cut.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest
import torch

from rft.algorithm.catalog import losses
from rft.algorithm.composition import build
from rft.algorithm.settings import AlgorithmSettings
from rft.trainer.loop.learner import Learner
from rft.trainer.rows.pack import Budget, RankBatch, TrainRow, plan
from rft.trainer.settings import LearnerSettings

ARGUMENTS = {
    "gspo": {"clip_range": 0.3},
    "mix": {"mu": 0.5},
    "mix_chord": {"mu_peak": 0.5, "mu_valley": 0.5},
}


@pytest.fixture
def learner(settings: Callable[..., LearnerSettings]) -> Learner:
    """With a reference model that differs from the policy."""
    made = Learner(settings(algorithm=AlgorithmSettings(kl_loss_fn="k2")))
    made.policy.double()
    assert made.reference is not None
    with torch.no_grad():
        for p in made.reference.parameters():
            p.mul_(1.02)
    return made


def step_of(rows: list[TrainRow], budget: Budget) -> RankBatch:
    (cut,) = plan(rows, 1, budget)
    expert = [r for r in rows if r.is_expert]
    return RankBatch(
        step=1,
        micro_batches=tuple(tuple(rows[i] for i in m) for m in cut),
        tokens=float(sum(r.loss_mask.sum() for r in rows)),
        rows=float(len(rows)),
        expert_tokens=float(sum(r.loss_mask.sum() for r in expert)),
        expert_rows=float(len(expert)),
    )


@pytest.mark.parametrize("name", losses())
def test_any_cut_gives_the_same_gradient(name: str, learner: Learner, rows: list[TrainRow]) -> None:
    rng, likely = np.random.default_rng(3), np.random.default_rng(4)
    model = losses()[name]
    made = []
    for i, row in enumerate(rows):
        extra = {
            key: (rng.random(int(row.loss_mask.sum())) < 0.5).astype(np.float32)
            for key in (
                *("m2po_kept", "cov_chosen", "fork"),
                *("kto_point", "kto_desirable", "kto_undesirable"),
            )
        }
        logprobs = np.where(
            row.loss_mask, row.logprobs + rng.normal(0, 0.3, len(row.tokens)), 0
        ).astype(np.float32)
        pair = str(i // 2) if model.pairs else ""
        is_expert = model.samples == "own" and i % 3 == 0
        count = int(row.loss_mask.sum())
        top = [likely.choice(250, 4, replace=False) for _ in range(count)]
        teacher = np.log(likely.dirichlet(np.ones(5), count))
        row = msgspec.structs.replace(
            row, top_ids=np.array(top, np.int32), top_logprobs=teacher.astype(np.float16)
        )
        made.append(
            msgspec.structs.replace(
                row, extra=extra, logprobs=logprobs, pair=pair, is_expert=is_expert
            )
        )
    learner.algorithm = build(
        AlgorithmSettings(policy_loss_fn=name, policy_loss_fn_args=ARGUMENTS.get(name, {}))
    )
    found = []
    for tokens in (4000, 40):
        batch = step_of(made, Budget(tokens))
        assert (len(batch.micro_batches) > 2) == (tokens == 40)
        found.append(_gradient(learner, batch))
    (loss, whole), (other, cut) = found
    assert loss == pytest.approx(other, rel=1e-6, abs=1e-7)
    scale = max(float(g.abs().max()) for g in whole.values())
    assert scale > 0
    assert max(float((whole[n] - cut[n]).abs().max()) for n in whole) <= 1e-6 * scale


def _gradient(learner: Learner, batch: RankBatch) -> tuple[float, dict[str, torch.Tensor]]:
    found: dict[str, torch.Tensor] = {}

    def keep(lr: float) -> float:
        found.update(
            {n: p.grad.clone() for n, p in learner.policy.names().items() if p.grad is not None}
        )
        learner.optimizer.zero_grad()
        return 1.0

    learner._update = keep  # type: ignore[method-assign]
    return learner.step(batch).sums["loss"] / batch.tokens, found
