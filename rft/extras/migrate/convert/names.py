"""Names that the conversion rules share: veRL's groups, our sections, and what each choice is
called on the other side.

Depends on no rule.  Invariant: a veRL name that is not listed here is not offered.
"""

from __future__ import annotations

import re

from rft.algorithm.catalog import losses
from rft.extras.migrate.convert.draft import Draft

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
CRITIC_ESTIMATORS = ("gae",)
CLIPPED = ("vanilla", "bypass_mode")  # names of the clipped PPO loss
MODEL = "actor_rollout_ref.model"
REF = "actor_rollout_ref.ref"
RM = "reward_model"
OPTIM = "algorithm.optimizer"
ENGINE = "explorer.rollout_model"
CRITIC = "trainer.critic"
ESTIMATORS = {  # veRL's name -> (algorithm_type, advantage_fn)
    "gae": ("ppo", "ppo"),
    "grpo": ("grpo", "grpo"),
    "grpo_vectorized": ("grpo", "grpo"),
    "grpo_passk": ("grpo", "grpo_passk"),
    "gdpo": ("gdpo", "gdpo"),
    "rloo": ("rloo", "rloo"),
    "rloo_vectorized": ("rloo", "rloo"),
    "reinforce_plus_plus": ("reinforceplusplus", "reinforceplusplus"),
    "reinforce_plus_plus_baseline": ("reinforceplusplus", "reinforceplusplus_baseline"),
    "remax": ("remax", "remax"),
    "opo": ("opo", "opo"),
    "gpg": ("gpg", "gpg"),
    "optimal_token_baseline": ("grpo", "optimal_token_baseline"),
    "tir_optimal_token_baseline": ("grpo", "optimal_token_baseline"),
}
KL = {
    "kl": "k1",
    "k1": "k1",
    "abs": "abs",
    "mse": "k2",
    "k2": "k2",
    "low_var_kl": "low_var_kl",
    "k3": "low_var_kl",
}
TRACKERS = ("tensorboard", "wandb", "mlflow", "swanlab")
DTYPES = {
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp32": "float32",
    "float32": "float32",
    "float": "float32",
}
ONLY_MEGATRON = "belongs to Megatron, which is not offered; FSDP2 has no counterpart"
ONE_MEGATRON = "belongs to Megatron, which is refused as a whole"
LORA = "model.lora_configs[0]"  # veRL's default
LORA_ALPHA = 16
NO_LORA = "no adapters: lora_rank is 0"


def estimator(d: Draft) -> tuple[str, str]:
    """(algorithm_type, advantage_fn) of the launch."""
    return ESTIMATORS[estimator_name(d)]


def estimator_name(d: Draft) -> str:
    """veRL's name; its default where the launch names one that is refused."""
    name = d.text("algorithm.adv_estimator")
    return name if name in ESTIMATORS else "gae"


def policy_loss(d: Draft) -> str:
    """Our name of the launch's policy loss."""
    correction = "algorithm.rollout_correction"
    if d.flag(f"{correction}.bypass_mode") and d.text(f"{correction}.loss_type") == "reinforce":
        return "reinforce"
    mode = d.text(f"{ACTOR}.policy_loss.loss_mode", "vanilla")
    return "ppo" if mode in CLIPPED else mode


def loss_reads(d: Draft, argument: str) -> bool:
    """Whether that loss has such an argument; one that is not ours may have any."""
    model = losses().get(policy_loss(d))
    return model is None or argument in model.model_fields


def eval_samples(d: Draft) -> bool:
    """Whether evaluation draws its answers: asynchronous generation asks val_kwargs.temperature
    alone.
    """
    numbers_alone = (
        d.text(f"{ROLLOUT}.mode", "async") != "sync" and d.text(f"{ROLLOUT}.name") != "hf"
    )
    return d.flag(f"{ROLLOUT}.val_kwargs.do_sample") or (
        numbers_alone and d.number(f"{ROLLOUT}.val_kwargs.temperature") > 0
    )


def shows_images(d: Draft) -> bool:
    """Whether rows hold images: their column is written, or the model is called one that reads them
    (veRL looks for the column `images` in any case).
    """
    named = re.search(r"(?<![a-z])vl(?![a-z])", d.text(f"{MODEL}.path").lower()) is not None
    return named or (d.stated("data.image_key") and not d.terse)


def trains_vision(d: Draft) -> bool:
    """Whether veRL trains the vision tower unless it is told to freeze it."""
    return shows_images(d) and d.whole(f"{MODEL}.lora_rank") <= 0


def megatron(d: Draft) -> bool:
    """Whether the launch is for Megatron, which one refusal says for all of its keys."""
    named = [str(a.value) for a in d.launch.options if a.key == "--config-name"]
    return any("megatron" in n for n in named) or d.text(f"{ACTOR}.strategy") == "megatron"


def aggregates(d: Draft) -> bool:
    """Whether anything reads loss_agg_mode: losses of sequences are always seq-mean-token-mean, KL
    and entropy beside them are not.
    """
    of_sequences = d.text(f"{ACTOR}.policy_loss.loss_mode", "vanilla") in (
        "gspo",
        "sapo",
        "geo_mean",
    )
    return (
        not of_sequences
        or d.flag(f"{ACTOR}.use_kl_loss")
        or d.number(f"{ACTOR}.entropy_coeff") != 0
    )
