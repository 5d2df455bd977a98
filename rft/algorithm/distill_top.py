"""Divergence of policy and teacher over the teacher's most likely tokens, as a loss.

A token's distribution is k + 1 numbers: the k tokens that the teacher finds most likely, and all
others together.  Depends on no rewards and no advantages.  Invariant: with k the size of the
vocabulary each divergence is that of the whole distributions; it is 0, with gradient 0, where both
agree.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from rft.algorithm import ratio as ratios
from rft.algorithm.aggregate import valid
from rft.algorithm.args import Args, Sampled
from rft.algorithm.base import LossInputs, LossOutput, define_algorithm, policy_loss

if TYPE_CHECKING:
    import torch

Divergence = Literal["forward", "reverse", "jsd", "skew_forward", "skew_reverse"]


class DistillTopArgs(Args):
    """Divergence over the teacher's most likely tokens."""

    samples: ClassVar[Sampled] = "own"
    reads: ClassVar[str] = "the teacher's most likely tokens at every token (teacher_top_ids)"

    k: int = Field(20, ge=1, description="most likely tokens of the teacher at each position")
    divergence: Divergence = Field(
        "reverse", description="forward: KL(teacher || policy); reverse: KL(policy || teacher)"
    )
    beta: float = Field(
        0.5,
        gt=0,
        lt=1,
        description="jsd: weight of the teacher in the mixture; skew_*: of the other",
    )
    clip: float | None = Field(
        None, gt=0, description="largest part of one class in a token's divergence; null: no limit"
    )
    importance_clip: float | None = Field(
        None,
        gt=0,
        description="weigh tokens by the ratio policy / sampler, at most this; null: all alike",
    )

    @property
    def wants(self) -> tuple[str, ...]:
        return ("teacher_logprobs",)

    @property
    def teacher_top(self) -> int:
        return self.k


@policy_loss("distill_top", args=DistillTopArgs)
def distill_top(x: LossInputs, args: DistillTopArgs) -> LossOutput:
    """With t and s the probabilities of teacher and policy of the k + 1 classes, b = beta, per token
    the sum over the classes of

        forward:        t log(t / s)
        reverse:        s log(s / t)
        jsd:            b t log(t / m) + (1 - b) s log(s / m),   m = b t + (1 - b) s
        skew_forward:   t log(t / (b t + (1 - b) s))
        skew_reverse:   s log(s / (b s + (1 - b) t))

    each at most `clip`, beyond which it has no gradient; times sg(min(ratio, importance_clip)),
    ratio = exp(clip(logprob - old, -20, 20)), 1 in an expert's rows.  The teacher's float16 values are normalised.  jsd:
    arXiv:2306.13649; skew: arXiv:2402.03898 with alpha = beta.  Metrics, as means over valid
    tokens: distill_divergence (before clipping and weights), teacher_top_mass (of the k tokens),
    distill_clipfrac (tokens with a class that is clipped), those of `ratio_metrics`.

    Example: t = (0.7, 0.2, 0.1), s = (0.5, 0.3, 0.2): forward 0.0851, reverse 0.0920 nats.
    """
    if x.is_expert is not None:  # which no policy sampled
        old = x.old_logprobs.where(~x.is_expert, x.logprobs.detach())
        x = replace(x, old_logprobs=old)
    if x.top_logprobs is None or x.teacher_top_logprobs is None:
        raise ValueError(
            "distill_top reads the teacher's most likely tokens; use a workflow that calls "
            "ctx.teach (Experience.teacher_top_ids)"
        )
    mask = x.mask[:, None]
    s = x.top_logprobs.masked_fill(~mask, 0)
    t = x.teacher_top_logprobs.to(s.dtype).masked_fill(~mask, 0).log_softmax(-1)
    parts = _parts(t, s, args.divergence, args.beta)
    clipped = parts if args.clip is None else parts.clamp(max=args.clip)
    values = valid(clipped.sum(-1), x.mask)
    if args.importance_clip is not None:
        values = values * ratios.log_ratio(x).detach().exp().clamp(max=args.importance_clip)
    return ratios.output(
        values,
        x,
        distill_divergence=parts.sum(-1),
        teacher_top_mass=1 - t[:, -1].exp(),
        distill_clipfrac=(clipped < parts).any(-1),
    )


def _parts(t: torch.Tensor, s: torch.Tensor, divergence: Divergence, b: float) -> torch.Tensor:
    """Return the classes' parts of the divergence, [N, k + 1], from log-probs t and s."""
    match divergence:
        case "forward":
            return t.exp() * (t - s)
        case "reverse":
            return s.exp() * (s - t)
        case "jsd":
            m = _mixture(t, s, b)
            return b * t.exp() * (t - m) + (1 - b) * s.exp() * (s - m)
        case "skew_forward":
            return t.exp() * (t - _mixture(t, s, b))
        case "skew_reverse":
            return s.exp() * (s - _mixture(s, t, b))


def _mixture(p: torch.Tensor, q: torch.Tensor, weight: float) -> torch.Tensor:
    """Return log(weight e^p + (1 - weight) e^q)."""
    import torch

    return torch.logaddexp(p + math.log(weight), q + math.log1p(-weight))


for _name, _doc, _divergence, _runs in (
    ("opd_topk", "A teacher's most likely tokens as the target.", "reverse", 8),
    ("gkd", "The same on answers of the policy and of the teacher (arXiv:2306.13649).", "jsd", 1),
    ("opsd", "The policy, told the gold answer, teaches itself (arXiv:2601.18734).", "forward", 1),
    ("sdft", "The policy, told a worked example, teaches itself (arXiv:2601.19897).", "reverse", 1),
    ("sdpo", "The policy, told what was wrong, teaches itself (arXiv:2601.20802).", "jsd", 8),
):
    define_algorithm(
        _name,
        _doc,
        advantage_fn="none",
        policy_loss_fn="distill_top",
        policy_loss_fn_args={"divergence": _divergence}
        | ({"importance_clip": 2.0} if _name == "sdpo" else {}),
        entropy_loss_fn="none",
        repeat_times=_runs,
    )
