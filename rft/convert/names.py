"""Names that the conversion rules share: veRL's groups, our sections, and what each choice is called on the other side.

Knows no rule.  Invariant: a veRL name that is not listed here is not offered.
"""

from __future__ import annotations

from rft.convert.draft import EVAL, TRAIN, Draft

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
CRITIC_ESTIMATORS = ("gae",)
MODEL, REF, RM = "actor_rollout_ref.model", "actor_rollout_ref.ref", "reward_model"
OPTIM, ENGINE, CRITIC = "algorithm.optimizer", "explorer.rollout_model", "trainer.critic"
PASSED = "trainer.trainer_config"
ESTIMATORS = {  # veRL's name -> (algorithm_type, advantage_fn)
    "gae": ("ppo", "ppo"),
    "grpo": ("grpo", "grpo"),
    "grpo_vectorized": ("grpo", "grpo"),
    "grpo_passk": ("grpo", "grpo_passk"),
    "rloo": ("rloo", "rloo"),
    "rloo_vectorized": ("rloo", "rloo"),
    "reinforce_plus_plus": ("reinforceplusplus", "reinforceplusplus"),
    "reinforce_plus_plus_baseline": ("reinforceplusplus", "reinforceplusplus_baseline"),
    "remax": ("remax", "remax"),
    "opo": ("opo", "opo"),
    "gpg": ("gpg", "gpg"),
    "optimal_token_baseline": ("grpo", "optimal_token_baseline"),
}
KL = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "low_var_kl", "k3": "low_var_kl"}
TRACKERS = ("tensorboard", "wandb", "mlflow", "swanlab")
DTYPES = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp32": "float32", "float32": "float32", "float": "float32"}
FULL_KL = "needs both models' probabilities over the whole vocabulary (veRL does not implement it either); use low_var_kl"
ONLY_MEGATRON = "belongs to Megatron, which is not offered; FSDP2 has no counterpart"
NO_CRITIC = "there is no critic with this advantage estimator"
LORA, LORA_ALPHA = "model.lora_configs[0]", 16  # veRL's default
NO_LORA = "no adapters: lora_rank is 0"
RM_SERVED = "the reward model runs behind a serving engine, which schedules by itself"
RM_OFF = "the reward model is off"
FORMAT = tuple(f"{sets}[i].format" for sets in (TRAIN, EVAL))


def estimator(d: Draft) -> tuple[str, str]:
    """(algorithm_type, advantage_fn) of the launch."""
    return ESTIMATORS[estimator_name(d)]


def estimator_name(d: Draft) -> str:
    """veRL's name; its default where the launch names one that is refused."""
    name = d.text("algorithm.adv_estimator")
    return name if name in ESTIMATORS else "gae"


def by_tokens(d: Draft) -> bool:
    """Whether veRL's loss reads loss_agg_mode: those of sequences are always seq-mean-token-mean."""
    return d.text(f"{ACTOR}.policy_loss.loss_mode", "vanilla") not in ("gspo", "sapo", "geo_mean")
