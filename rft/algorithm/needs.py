"""What a configuration of algorithm parts needs computed before and during a step.  Imports no
torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from rft.algorithm.args import Computed, Sampled, declared
from rft.algorithm.catalog import check_args, validate
from rft.algorithm.controller import KlController
from rft.algorithm.correction import CorrectionArgs
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

    @property
    def critic(self) -> bool:
        return "values" in self.before


def needs(settings: AlgorithmSettings) -> Needs:
    """A KL or entropy term with coefficient 0 needs nothing.  Raises ConfigError for wrong
    arguments.
    """
    kl = check_args("kl_loss_fn", settings.kl_loss_fn, settings.kl_loss_fn_args)
    entropy = check_args("entropy_loss_fn", settings.entropy_loss_fn, settings.entropy_loss_fn_args)
    parts = [
        check_args("advantage_fn", settings.advantage_fn, settings.advantage_fn_args),
        check_args("policy_loss_fn", settings.policy_loss_fn, settings.policy_loss_fn_args),
    ]
    before = frozenset[Computed]().union(*(declared(args).before for args in parts))
    kl_loss = settings.kl_loss_fn != "none" and not (isinstance(kl, KlArgs) and kl.kl_coef == 0)
    penalty = check_args("kl_penalty_fn", settings.kl_penalty_fn, settings.kl_penalty_fn_args)
    kl_penalty = settings.kl_penalty_fn != "none" and not (
        isinstance(penalty, KlArgs) and penalty.kl_coef == 0
    )
    if kl_penalty:
        before |= {"ref"}
    if (correction := correction_args(settings)) is not None and correction.measured:
        before |= {"old"}
    bonus = settings.entropy_loss_fn != "none" and not (
        isinstance(entropy, EntropyArgs) and entropy.entropy_coef == 0
    )
    loss = declared(parts[1])
    return Needs(
        reference=kl_loss or "ref" in before or any(declared(args).reference for args in parts),
        kl_loss=kl_loss,
        kl_penalty=kl_penalty,
        entropy=bonus,
        before=before,
        samples=loss.samples,
        pairs=loss.pairs,
        any_sampling=correction is not None and correction.rollout_rs != "none",
        skips_zero=loss.zero_without_advantage
        and not kl_loss
        and not bonus
        and "values" not in before,
    )


def correction_args(settings: AlgorithmSettings) -> CorrectionArgs | None:
    """The checked `algorithm.rollout_correction`; None where there is none.  Raises ConfigErrors
    for wrong arguments.
    """
    if settings.rollout_correction is None:
        return None
    checked = validate(
        CorrectionArgs,
        settings.rollout_correction,
        what="the rollout correction",
        key="algorithm.rollout_correction",
    )
    assert isinstance(checked, CorrectionArgs)
    return checked


def controllers(settings: AlgorithmSettings) -> dict[str, KlController]:
    """What holds the factor of each KL term in use: "kl_penalty" and "kl_loss"."""
    needed = needs(settings)
    found = {}
    for name, used in (("kl_penalty", needed.kl_penalty), ("kl_loss", needed.kl_loss)):
        args = check_args(
            f"{name}_fn", getattr(settings, f"{name}_fn"), getattr(settings, f"{name}_fn_args")
        )
        if used and isinstance(args, KlArgs):
            found[name] = KlController(
                args.kl_coef, args.target_kl if args.adaptive else None, args.horizon
            )
    return found
