"""Names that the conversion rules share: veRL's groups, our sections, and what each choice is called on the other side.

Knows no rule.  Invariant: a veRL name that is not listed here is not offered.
"""

from __future__ import annotations

from rft.algorithm.catalog import losses
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
ONE_MEGATRON = "belongs to Megatron, which is refused as a whole"
NO_CRITIC = "there is no critic with this advantage estimator"
LORA, LORA_ALPHA = "model.lora_configs[0]", 16  # veRL's default
NO_LORA = "no adapters: lora_rank is 0"
RM_SERVED = "the reward model runs behind a serving engine, which schedules by itself"
RM_OFF = "the reward model is off"
RM_DECIDED = "the engine of the reward model decides that"
ALIASES = {  # other spellings of veRL's own, older and newer ones
    f"{ACTOR}.loss_mode": f"{ACTOR}.policy_loss.loss_mode",
    f"{ACTOR}.kl_cov_ratio": f"{ACTOR}.policy_loss.kl_cov_ratio",
    f"{ACTOR}.ppo_kl_coef": f"{ACTOR}.policy_loss.ppo_kl_coef",
    **{f"{ACTOR}.clip_cov_{n}": f"{ACTOR}.policy_loss.clip_cov_{n}" for n in ("ratio", "lb", "ub")},
    f"{MODEL}.lora.rank": f"{MODEL}.lora_rank",
    f"{MODEL}.lora.alpha": f"{MODEL}.lora_alpha",
    f"{MODEL}.lora.target_modules": f"{MODEL}.target_modules",
    f"{MODEL}.enable_activation_offloading": f"{MODEL}.enable_activation_offload",
    f"{MODEL}.torch_dtype": f"{ACTOR}.fsdp_config.model_dtype",
    f"{ACTOR}.fsdp_config.strategy": f"{ACTOR}.strategy",
    f"{REF}.fsdp_config.strategy": f"{REF}.strategy",
    "reward_manager.name": f"{RM}.reward_manager",
    "reward_manager": f"{RM}.reward_manager",
}
FORMAT = tuple(f"{sets}[i].format" for sets in (TRAIN, EVAL))


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
    return "ppo" if mode == "vanilla" else mode


def loss_reads(d: Draft, argument: str) -> bool:
    """Whether that loss has such an argument; one that is not ours may have any."""
    model = losses().get(policy_loss(d))
    return model is None or argument in model.model_fields


def megatron(d: Draft) -> bool:
    """Whether the launch is for Megatron, which one refusal says for all of its keys."""
    named = [str(a.value) for a in d.launch.options if a.key == "--config-name"]
    return any("megatron" in n for n in named) or d.text(f"{ACTOR}.strategy") == "megatron"


def by_tokens(d: Draft) -> bool:
    """Whether veRL's loss reads loss_agg_mode: those of sequences are always seq-mean-token-mean."""
    return d.text(f"{ACTOR}.policy_loss.loss_mode", "vanilla") not in ("gspo", "sapo", "geo_mean")
