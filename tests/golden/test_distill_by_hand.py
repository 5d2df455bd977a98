"""Distillation from likely tokens on a vocabulary of five, computed by hand from the papers' formulas.

Policy s = (0.5, 0.3, 0.1, 0.06, 0.04), teacher t = (0.7, 0.2, 0.04, 0.04, 0.02).  With k = 2 the
classes are (0.5, 0.3, 0.2) and (0.7, 0.2, 0.1).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rft.algorithm.args import AggMode
from rft.algorithm.base import Denominators, LossInputs, LossOutput
from rft.algorithm.catalog import algorithms, losses
from rft.algorithm.distill_top import distill_top
from rft.trainer.model.logprobs import token_logprobs

S = (0.5, 0.3, 0.1, 0.06, 0.04)
T = (0.7, 0.2, 0.04, 0.04, 0.02)

# 0.7 ln 1.4 = 0.235531, 0.2 ln 2/3 = -0.081093, 0.1 ln 0.5 = -0.069315
FORWARD_2 = 0.085123
# 0.5 ln 5/7 = -0.168236, 0.3 ln 1.5 = 0.121640, 0.2 ln 2 = 0.138629
REVERSE_2 = 0.092033
# m = (0.6, 0.25, 0.15): (0.7 ln 7/6 + 0.2 ln 0.8 + 0.1 ln 2/3 + 0.5 ln 5/6 + 0.3 ln 1.2 + 0.2 ln 4/3) / 2
JSD_2 = 0.021901
# the two of k = 2, then 0.04 ln 0.4 = -0.036652, 0.04 ln 2/3 = -0.016219, 0.02 ln 0.5 = -0.013863
FORWARD_5 = 0.087704
# the two of k = 2, then 0.1 ln 2.5 = 0.091629, 0.06 ln 1.5 = 0.024328, 0.04 ln 2 = 0.027726
REVERSE_5 = 0.097087


def logits_and_loss(
    k: int,
    args: dict[str, Any],
    old: float | None = None,
    mode: AggMode = "token-mean",
    is_expert: bool = False,
) -> tuple[torch.Tensor, LossOutput]:
    """The loss of one token, the first of the vocabulary; `old`: its log-prob at the sampler."""
    z = torch.tensor([S], dtype=torch.float64).log().requires_grad_()
    ids = torch.arange(k)[None]
    one = torch.zeros(1, dtype=torch.int64)
    eye = torch.eye(5, dtype=torch.float64)
    logprobs, _, top = token_logprobs(z, eye, one, None, ids=ids, chunk_tokens=2)
    others = max(1 - sum(T[:k]), 1e-300)
    x = LossInputs(
        logprobs=logprobs,
        old_logprobs=logprobs.detach() if old is None else torch.tensor([old]).double(),
        advantages=torch.zeros(1),
        mask=torch.ones(1, dtype=torch.bool),
        row=one,
        num_rows=1,
        denominators=Denominators(1, 1, 1),
        top_logprobs=top,
        teacher_top_logprobs=torch.tensor([[*T[:k], others]], dtype=torch.float64).log(),
        loss_agg_mode=mode,
        is_expert=torch.tensor([is_expert]),
    )
    return z, distill_top(x, losses()["distill_top"].model_validate({"k": k, **args}))


@pytest.mark.parametrize(
    ("k", "divergence", "value"),
    [
        (2, "forward", FORWARD_2),
        (2, "reverse", REVERSE_2),
        (2, "jsd", JSD_2),
        (5, "forward", FORWARD_5),
        (5, "reverse", REVERSE_5),
    ],
)
def test_value_by_hand(k: int, divergence: str, value: float) -> None:
    _, out = logits_and_loss(k, {"divergence": divergence})
    assert out.loss.item() == pytest.approx(value, abs=1e-6)
    assert out.sums["distill_divergence"].item() == pytest.approx(value, abs=1e-6)
    assert out.sums["teacher_top_mass"].item() == pytest.approx(sum(T[:k]))


def test_gradients_by_hand() -> None:
    z, out = logits_and_loss(2, {"divergence": "forward"})
    (found,) = torch.autograd.grad(out.loss, z)
    # s - t of the two; of another token s (1 - 0.1 / 0.2)
    assert found[0].tolist() == pytest.approx([-0.2, 0.1, 0.05, 0.03, 0.02])
    z, out = logits_and_loss(2, {"divergence": "reverse"})
    (found,) = torch.autograd.grad(out.loss, z)
    # s (ln of the class's s / t, less the divergence): 0.5 (-0.336472 - 0.092033), ...
    by_hand = [-0.214253, 0.094030, 0.060111, 0.036067, 0.024045]
    assert found[0].tolist() == pytest.approx(by_hand, abs=1e-6)


def test_clip_and_weight_by_hand() -> None:
    # forward: the first class, 0.235531, is cut to 0.1: 0.1 - 0.081093 - 0.069315
    _, out = logits_and_loss(2, {"divergence": "forward", "clip": 0.1})
    assert out.loss.item() == pytest.approx(-0.050408, abs=1e-6)
    assert out.sums["distill_clipfrac"].item() == 1
    # the sampler gave it 0.4: policy / sampler is 1.25
    _, out = logits_and_loss(2, {"importance_clip": 2.0}, old=-0.9162907)
    assert out.loss.item() == pytest.approx(1.25 * REVERSE_2, abs=1e-6)
    # it gave it 0.1: the ratio 5 is cut to 2
    _, out = logits_and_loss(2, {"importance_clip": 2.0}, old=-2.3025851)
    assert out.loss.item() == pytest.approx(2 * REVERSE_2, abs=1e-6)


def test_gkd_is_a_mean_over_answers_of_both_by_hand() -> None:
    """beta = 0.25 over the whole vocabulary, arXiv:2306.13649: D = beta KL(t || m) + (1 - beta)
    KL(s || m), m = beta t + (1 - beta) s = (0.55, 0.275, 0.085, 0.055, 0.035).

    KL(t || m): 0.7 ln 0.7/0.55 = 0.168814, then -0.063691, -0.030151, -0.012738, -0.011192; KL(s ||
    m): 0.5 ln 0.5/0.55 = -0.047655, then 0.026103, 0.016252, 0.005221, 0.005341.
    """
    args = {"divergence": "jsd", "beta": 0.25}
    value = 0.25 * 0.051042 + 0.75 * 0.005262
    _, out = logits_and_loss(5, args)
    assert out.loss.item() == pytest.approx(value, abs=2e-6)
    # a token of the teacher's answer has no sampler: its weight is 1 whatever stands for it
    weighed = {**args, "importance_clip": 2.0}
    _, own = logits_and_loss(5, weighed, old=-0.9162907)
    _, expert = logits_and_loss(5, weighed, old=-0.9162907, is_expert=True)
    assert own.loss.item() == pytest.approx(1.25 * value, abs=2e-6)
    assert expert.loss.item() == pytest.approx(value, abs=2e-6)
    assert expert.sums["ppo_kl"].item() == 0
    defaults = algorithms()["gkd"]
    assert defaults.policy_loss_fn == "distill_top"
    assert defaults.policy_loss_fn_args == {"divergence": "jsd"}
