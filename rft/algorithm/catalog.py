"""Algorithms by name: which parts each one is made of, and what a configuration of parts needs computed.  Torch-free.

A configuration names an algorithm and may replace any part of it.  Invariant: every entry's parts and arguments pass
`check_args`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from rft.algorithm.args import AggMode, EntropyArgs, KlArgs, check_args
from rft.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class AlgorithmDefaults:
    """The parts of one algorithm.  Arguments left out have the defaults of the part's own `Args`."""

    name: str
    doc: str
    advantage_fn: str
    policy_loss_fn: str
    kl_loss_fn: str = "none"
    entropy_loss_fn: str = "default"
    loss_agg_mode: AggMode = "token-mean"
    repeat_times: int = 8  # runs of each task where the configuration names none; a group of one has no advantage
    advantage_fn_args: Mapping[str, Any] = field(default_factory=dict)
    policy_loss_fn_args: Mapping[str, Any] = field(default_factory=dict)
    kl_loss_fn_args: Mapping[str, Any] = field(default_factory=dict)
    entropy_loss_fn_args: Mapping[str, Any] = field(default_factory=dict)


ALGORITHMS: dict[str, AlgorithmDefaults] = {
    d.name: d
    for d in (
        AlgorithmDefaults(
            name="grpo",
            doc="Group-relative advantages with the clipped PPO loss (arXiv:2402.03300).  No KL loss unless kl_loss_fn is set: "
            "Trinity-RFT's preset adds k2 with kl_coef 0.001, which costs a reference model; write kl_loss_fn: k2 for the same.",
            advantage_fn="grpo",
            policy_loss_fn="ppo",
        ),
        AlgorithmDefaults(
            name="dr_grpo",
            doc="GRPO without its two biases (arXiv:2503.20783): advantages are not divided by the group's standard deviation, "
            "and a sequence's loss is divided by max_response_tokens instead of its own length.",
            advantage_fn="grpo",
            advantage_fn_args={"norm_by_std": False},
            policy_loss_fn="ppo",
            loss_agg_mode="seq-mean-token-sum-norm",
        ),
    )
}

_LATER = """ppo reinforceplusplus rloo remax opmd asymre topr cispo gspo sapo rec sppo mix mix_chord multi_step_grpo gigpo
on_policy_distill jsd raft sft cpt dpo m2po opo gpg"""
LATER: dict[str, str] = {  # name -> what to do until then
    **dict.fromkeys(_LATER.split(), ""),
    "dapo": "use grpo with policy_loss_fn_args.clip_range_high: 0.28 for its asymmetric clipping",
    "grpo_verl": "write grpo, which computes the same",
}


def algorithm_defaults(name: str, *, key: str = "algorithm.algorithm_type") -> AlgorithmDefaults:
    """The parts of algorithm `name`; raises ConfigError that lists what there is."""
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    known = ", ".join(ALGORITHMS)
    if name in LATER:
        hint = f"  For now: {LATER[name]}." if LATER[name] else ""
        raise ConfigError(f"{name!r} comes later.  Available: {known}.{hint}", key=key, given=name)
    near = difflib.get_close_matches(name, [*ALGORITHMS, *LATER], n=1)
    tail = f"  Did you mean {near[0]}?" if near else ""
    raise ConfigError(f"unknown algorithm {name!r}.  Available: {known}.{tail}", key=key, given=name)


class PartSettings(Protocol):
    """What this room reads of the trainer's algorithm settings."""

    @property
    def advantage_fn(self) -> str: ...
    @property
    def advantage_fn_args(self) -> Mapping[str, Any]: ...
    @property
    def policy_loss_fn(self) -> str: ...
    @property
    def policy_loss_fn_args(self) -> Mapping[str, Any]: ...
    @property
    def kl_loss_fn(self) -> str: ...
    @property
    def kl_loss_fn_args(self) -> Mapping[str, Any]: ...
    @property
    def entropy_loss_fn(self) -> str: ...
    @property
    def entropy_loss_fn_args(self) -> Mapping[str, Any]: ...
    @property
    def loss_agg_mode(self) -> str: ...


@dataclass(frozen=True)
class Needs:
    """What the losses read beyond log-probs; the trainer computes nothing else."""

    reference: bool  # log-probs of the reference model
    entropy: bool  # entropy of every response token, with gradient


def needs(settings: PartSettings) -> Needs:
    """A KL or entropy loss with coefficient 0 needs nothing.  Raises ConfigError for wrong arguments."""
    kl = check_args("kl_loss_fn", settings.kl_loss_fn, settings.kl_loss_fn_args)
    entropy = check_args("entropy_loss_fn", settings.entropy_loss_fn, settings.entropy_loss_fn_args)
    return Needs(
        reference=settings.kl_loss_fn != "none" and not (isinstance(kl, KlArgs) and kl.kl_coef == 0),
        entropy=settings.entropy_loss_fn != "none" and not (isinstance(entropy, EntropyArgs) and entropy.entropy_coef == 0),
    )
