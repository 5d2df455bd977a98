"""What a configuration of algorithm parts needs computed before and during a step.  Imports no
torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from rft.algorithm.args import Computed, Sampled, declared
from rft.algorithm.catalog import part_args
from rft.algorithm.controller import Controller, EntropyController, KlController
from rft.algorithm.entropy import EntropyArgs
from rft.algorithm.kl import KlArgs
from rft.algorithm.settings import AlgorithmSettings


@dataclass(frozen=True)
class Needs:
    """What is read beyond the log-probs of the samplers and of the policy; the trainer computes
    nothing else.
    """

    reference: bool  # the reference model
    kl_loss: bool  # log-probs of the reference model, in the KL loss
    kl_penalty: bool  # the same, in the reward
    entropy: bool  # entropy of every response token, with gradient
    before: frozenset[Computed]  # what is computed for all rows before the step
    samples: Sampled = "all"  # which rows need log-probs of their sampler
    pairs: bool = False  # rows come in pairs, chosen and rejected
    skips_zero: bool = False  # rows whose advantages are all 0 have no loss and no gradient
    # tokens that were drawn from a part of the distribution may be among them: a correction rejects
    any_sampling: bool = False
    reward_parts: tuple[str, ...] | None = None  # see `Args.reward_parts`
    teacher_top: int = 0  # see `Args.teacher_top`

    @property
    def critic(self) -> bool:
        return "values" in self.before


def needs(settings: AlgorithmSettings) -> Needs:
    """A KL with coefficient 0 needs nothing, nor does an entropy term whose coefficient stays 0.
    Raises ConfigError for wrong arguments.
    """
    kl_loss, kl_penalty, bonus = (
        getattr(settings, kind) != "none"
        and (args.get(coefficient) != 0 or bool(args.get(steered)))
        for kind, coefficient, steered in (
            ("kl_loss_fn", "kl_coef", ""),
            ("kl_penalty_fn", "kl_coef", ""),
            ("entropy_loss_fn", "entropy_coef", "adaptive"),
        )
        for args in (part_args(settings, kind).model_dump(),)
    )
    parts = [declared(part_args(settings, kind)) for kind in ("advantage_fn", "policy_loss_fn")]
    advantage, loss = parts
    before = advantage.before | loss.before
    if kl_penalty:
        before |= {"ref"}
    if (correction := settings.rollout_correction) is not None and correction.measured:
        before |= {"old"}
    return Needs(
        reference=kl_loss or "ref" in before or any(args.reference for args in parts),
        kl_loss=kl_loss,
        kl_penalty=kl_penalty,
        entropy=bonus,
        before=before,
        samples=loss.samples,
        pairs=loss.pairs,
        reward_parts=advantage.reward_parts,
        teacher_top=loss.teacher_top,
        any_sampling=correction is not None and bool(correction.rollout_rs),
        skips_zero=loss.zero_without_advantage
        and not kl_loss
        and not bonus
        and "values" not in before,
    )


def controllers(settings: AlgorithmSettings) -> dict[str, Controller]:
    """What holds the factor of each term in use: "kl_penalty", "kl_loss" and "entropy_loss"."""
    needed = needs(settings)
    used = {
        "kl_penalty": needed.kl_penalty,
        "kl_loss": needed.kl_loss,
        "entropy_loss": needed.entropy,
    }
    by_name: dict[str, Controller] = {}
    for name in (name for name, is_used in used.items() if is_used):
        args = part_args(settings, f"{name}_fn")
        if isinstance(args, KlArgs):
            target = args.target_kl if args.adaptive else None
            by_name[name] = KlController(coef=args.kl_coef, target=target, horizon=args.horizon)
        elif isinstance(args, EntropyArgs):
            by_name[name] = EntropyController(
                coef=args.entropy_coef,
                target=args.target_entropy if args.adaptive else None,
                delta=args.delta,
                low=args.min_coef,
                high=args.max_coef,
            )
    return by_name
