"""Same data, other cut, same gradient: for every policy loss there is, in every aggregation mode.

A loss that is added is tested here without a change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rft.algorithm.args import AGG_MODES
from rft.algorithm.base import Denominators, LossInputs, LossOutput, StepInputs, StepRow
from rft.algorithm.catalog import losses, shipped
from rft.algorithm.composition import Algorithm, build
from rft.algorithm.kl import ESTIMATORS
from rft.algorithm.settings import AlgorithmSettings
from rft.plugins import REGISTRY
from rft.types.ports import GroupStats

ARGUMENTS: dict[str, dict[str, Any]] = {  # such that every term of the loss is there
    "distill_top": {"divergence": "jsd", "clip": 0.5, "importance_clip": 1.2},
    "ppo": {"enable_sequence_masking": True, "delta_sequence_masking": 0.05},
    "gspo": {"clip_range": 0.1},
    "cispo": {"enable_mask_clip": True, "mask_clip_range_low": 0.2},
    "rec": {
        "clip_mode": "gspo-one-side",
        "weight": "gspo_importance_sampling",
        "regularizer": "k2",
        "regularizer_coef": 0.2,
    },
    "dpo": {"label_smoothing": 0.1},
    "mix": {"mu": 0.4},
    "mix_chord": {"mu_peak": 0.4, "mu_decay_steps": 9},
    "m2po": {"m2_threshold": 0.01},
    "clip_cov": {"clip_cov_ratio": 0.3, "clip_cov_lb": 0.0},
    "kl_cov": {"kl_cov_ratio": 0.3},
}


@dataclass(frozen=True)
class Whole:
    """All tokens of a step."""

    theta: torch.Tensor
    tensors: dict[str, torch.Tensor]
    extra: dict[str, torch.Tensor]
    denominators: Denominators

    def cut(self, rows: list[int]) -> LossInputs:
        """The micro-batch of these rows; none is an empty one."""
        row = self.tensors["row"]
        where = torch.isin(row, torch.tensor(rows, dtype=torch.int64))
        return LossInputs(
            **{name: t[where] for name, t in self.tensors.items() if name != "row"},
            row=torch.searchsorted(torch.tensor(rows, dtype=torch.int64), row[where]),
            num_rows=len(rows),
            denominators=self.denominators,
            extra={name: t[where] for name, t in self.extra.items()},
            step=3,
        )


def whole(algorithm: Algorithm, name: str, seed: int, lengths: list[int], weighted: bool) -> Whole:
    rng = torch.Generator().manual_seed(seed)
    n = sum(lengths)
    row = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    mask = torch.rand(n, generator=rng) < 0.7
    mask[0] = True
    if algorithm.needs.pairs:
        # every row of a pair has a valid token
        mask |= torch.cat([torch.ones(1, dtype=torch.int64), row.diff()]).bool()
    expert = torch.isin(row, torch.arange(1, len(lengths), 3)) & (algorithm.needs.samples == "own")
    theta = torch.randn(n, generator=rng, dtype=torch.float64).mul(0.5).sub(1).requires_grad_()
    old, a, ref = (torch.randn(n, generator=rng, dtype=torch.float64) * 0.5 for _ in range(3))
    old = theta.detach() + old
    ref = theta.detach() + ref
    run = 2 * (row // 2) + expert.long()  # two rows each, but where one is an expert's
    counts = torch.bincount(run, weights=mask.double())
    group = 2 * (row // 4) + expert.long()  # two runs each
    sizes = torch.bincount(group, weights=mask.double())
    # three tokens and all others
    top, teacher_top = (
        torch.randn(n, 4, generator=rng, dtype=torch.float64).log_softmax(-1) for _ in range(2)
    )
    tensors = {
        "logprobs": theta * 1.0,
        "top_logprobs": (top + theta[:, None] * torch.arange(4)).log_softmax(-1),
        "teacher_top_logprobs": teacher_top,
        "entropy": theta.exp(),
        "old_logprobs": old,
        "advantages": a,
        "ref_logprobs": ref,
        "mask": mask,
        "is_expert": expert,
        "row": row,
        "run_tokens": counts[run],
        "group_tokens": sizes[group],
    }
    if weighted:
        tensors["weights"] = torch.rand(n, generator=rng, dtype=torch.float64) + 0.5
    return Whole(
        theta,
        tensors,
        _extra(name, [t.detach().numpy() for t in (theta, old, a, mask, ref, row)]),
        Denominators(
            float(mask.sum()),
            float(len(row[mask].unique())),
            6,
            expert_tokens=float((mask & expert).sum()),
            expert_rows=float(len(row[mask & expert].unique())),
            num_runs=float(len(run[mask].unique())),
            expert_runs=float(len(run[mask & expert].unique())),
            num_groups=float(len(group[mask].unique())),
            expert_groups=float(len(group[mask & expert].unique())),
        ),
    )


def _extra(name: str, arrays: list[np.ndarray]) -> dict[str, torch.Tensor]:
    """What the loss reads of the step, prepared before it is cut, as in a run."""
    if name not in REGISTRY.names("policy_extra"):
        return {}
    *columns, row = arrays
    rows = [[column[row == i] for column in columns] for i in range(row.max() + 1)]
    x = StepInputs(
        rows=[
            StepRow(
                group="g",
                run=i,
                step=0,
                reward=0.0,
                logprobs=old.astype(np.float32),
                old=now.astype(np.float32),
                ref=ref.astype(np.float32),
                entropy=-now.astype(np.float32),
                info={"label": (None, True, False)[i % 3]},
            )
            for i, (now, old, _, _, ref) in enumerate(rows)
        ],
        groups={"g": GroupStats(group="g", rewards=(0.0,), mean=0.0, std=0.0)},
        keep=[mask for *_, mask, _ in rows],
    )
    part = REGISTRY.get("policy_extra", name).obj
    made = part(
        x, [a for _, _, a, _, _ in rows], losses()[name].model_validate(ARGUMENTS.get(name, {}))
    )
    return {key: torch.from_numpy(np.concatenate(values)).double() for key, values in made.items()}


ALL = [n for k, n in shipped() if k == "policy_loss_fn"]


@pytest.mark.parametrize("mode", AGG_MODES)
@pytest.mark.parametrize("name", ALL)
@settings(max_examples=4)
@given(data=st.data())
def test_same_data_other_cut_same_gradient(name: str, mode: str, data: st.DataObject) -> None:
    _other_cut(name, mode, data)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
@settings(max_examples=200)
@given(data=st.data())
def test_same_data_many_other_cuts_same_gradient(name: str, data: st.DataObject) -> None:
    _other_cut(name, data.draw(st.sampled_from(AGG_MODES)), data)


def _other_cut(name: str, mode: str, data: st.DataObject) -> None:
    kl = data.draw(
        st.sampled_from(
            ["none", *(n + plus for n in (*ESTIMATORS, "corrected_k3") for plus in ("", "+"))]
        )
    )
    algorithm = build(
        AlgorithmSettings(
            policy_loss_fn=name,
            policy_loss_fn_args=ARGUMENTS.get(name, {}),
            kl_loss_fn=kl,
            kl_loss_fn_args={} if kl == "none" else {"kl_coef": 0.3},
            entropy_loss_fn=data.draw(st.sampled_from(["default", "mix"])),
            entropy_loss_fn_args={"entropy_coef": 0.1},
            loss_agg_mode=mode,
        )
    )
    pairs = algorithm.needs.pairs
    lengths = data.draw(
        st.lists(st.integers(1, 6), min_size=1, max_size=7).map(lambda v: v * 2 if pairs else v)
    )
    full = whole(
        algorithm, name, data.draw(st.integers(0, 10**6)), lengths, data.draw(st.booleans())
    )
    at_once = algorithm.loss(full.cut(list(range(len(lengths)))))
    (expected,) = torch.autograd.grad(at_once.loss, full.theta, retain_graph=True)
    units = len(lengths) // 2 if pairs else len(lengths)
    # of micro-batches or ranks
    places = data.draw(st.lists(st.integers(0, 3), min_size=units, max_size=units))
    places = [p for p in places for _ in range(2)] if pairs else places
    # empty ones too
    outs = [
        algorithm.loss(full.cut([r for r, p in enumerate(places) if p == part]))
        for part in range(4)
    ]
    (grad,) = torch.autograd.grad(sum(o.loss for o in outs), full.theta)  # type: ignore[arg-type]
    torch.testing.assert_close(grad, expected, rtol=1e-10, atol=1e-13)
    _same_numbers(at_once, outs)


def _same_numbers(at_once: LossOutput, outs: list[LossOutput]) -> None:
    assert all(
        o.sums.keys() == at_once.sums.keys() and o.maxima.keys() == at_once.maxima.keys()
        for o in outs
    )
    for name, value in at_once.sums.items():
        torch.testing.assert_close(
            sum(o.sums[name] for o in outs), value, rtol=1e-9, atol=1e-9, msg=name
        )
    for name, value in at_once.maxima.items():
        assert max(o.maxima[name] for o in outs) == value


@pytest.mark.parametrize("entropy", [n for k, n in shipped() if k == "entropy_loss_fn"])
def test_entropy_of_own_rows(entropy: str) -> None:
    """`mix` is a mean over the rows that are not an expert's, `default` over all."""
    algorithm = build(
        AlgorithmSettings(
            policy_loss_fn="mix",
            entropy_loss_fn=entropy,
            entropy_loss_fn_args={} if entropy == "none" else {"entropy_coef": 0.5},
        )
    )
    full = whole(algorithm, "mix", 3, [3, 4, 2, 5], False)
    out, plain = (
        a.loss(full.cut([0, 1, 2, 3]))
        for a in (algorithm, build(AlgorithmSettings(policy_loss_fn="mix")))
    )
    t = full.tensors
    own = t["mask"] if entropy == "default" else t["mask"] & ~t["is_expert"]
    expected = 0.0 if entropy == "none" else t["entropy"][own].mean().item()
    assert plain.loss.item() - out.loss.item() == pytest.approx(0.5 * expected)
    if entropy != "none":
        assert out.sums["entropy"].item() / full.denominators.tokens == pytest.approx(expected)
