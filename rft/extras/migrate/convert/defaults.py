"""veRL's defaults that the exact profile writes where no argument states them.

Invariant: a value is written only where nothing else has written it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rft.extras.migrate.convert.actions import lora
from rft.extras.migrate.convert.draft import EVAL, TRAIN, Draft
from rft.extras.migrate.convert.names import (
    ACTOR,
    CRITIC_ESTIMATORS,
    ENGINE,
    LORA,
    LORA_ALPHA,
    OPTIM,
    ROLLOUT,
    aggregates,
    estimator_name,
    loss_reads,
    policy_loss,
    shows_images,
    trains_vision,
)
from rft.extras.migrate.convert.sizes import has_critic, is_async, micro_batch

Condition = Callable[[Draft], bool]
# target, veRL's key (its default is written) or (value,), condition
Default = tuple[str, Any, Condition]


def any_run(d: Draft) -> bool:
    return True


def _vanilla(d: Draft) -> bool:
    return policy_loss(d) == "ppo"


def _of(*estimators: str) -> Condition:
    return lambda d: estimator_name(d) in estimators


def _dynamic(d: Draft) -> bool:
    return d.flag(f"{ACTOR}.use_dynamic_bsz")


def warms_up(section: str) -> Condition:
    return lambda d: (
        bool(d.read(f"{section}.lr_warmup_steps_ratio"))
        or (d.read(f"{section}.lr_warmup_steps") or 0) > 0
    )


DEFAULTS: tuple[Default, ...] = (
    (
        "algorithm.advantage_fn_args.gamma",
        "algorithm.gamma",
        _of(*CRITIC_ESTIMATORS, "reinforce_plus_plus"),
    ),
    ("algorithm.advantage_fn_args.lam", "algorithm.lam", _of(*CRITIC_ESTIMATORS)),
    (
        "algorithm.advantage_fn_args.norm_by_std",
        "algorithm.norm_adv_by_std_in_grpo",
        lambda d: estimator_name(d).startswith("grpo"),
    ),
    ("algorithm.policy_loss_fn", ("ppo",), _vanilla),
    (
        "algorithm.policy_loss_fn_args.clip_ratio_c",
        f"{ACTOR}.clip_ratio_c",
        lambda d: loss_reads(d, "clip_ratio_c"),
    ),
    ("algorithm.policy_loss_fn_args.ppo_kl_coef", (0.1,), lambda d: policy_loss(d) == "kl_cov"),
    ("algorithm.entropy_loss_fn", ("default",), any_run),
    ("algorithm.entropy_loss_fn_args.entropy_coef", f"{ACTOR}.entropy_coeff", any_run),
    ("algorithm.loss_agg_mode", f"{ACTOR}.loss_agg_mode", aggregates),
    *(
        (f"{OPTIM}.{n}", f"{ACTOR}.optim.{n}", any_run)
        for n in ("lr", "min_lr_ratio", "weight_decay")
    ),
    (
        f"{OPTIM}.lr_warmup_steps_ratio",
        f"{ACTOR}.optim.lr_warmup_steps_ratio",
        lambda d: not d.has(f"{OPTIM}.lr_warmup_steps"),
    ),
    (f"{OPTIM}.lr_warmup_from_zero", (True,), warms_up(OPTIM)),
    (f"{OPTIM}.lr_scheduler_type", f"{ACTOR}.optim.warmup_style", any_run),
    (f"{OPTIM}.betas", ([0.9, 0.999],), any_run),
    ("model.model_path", "actor_rollout_ref.model.path", any_run),
    (f"{LORA}.lora_alpha", (LORA_ALPHA,), lora),
    ("model.max_prompt_tokens", "data.max_prompt_length", any_run),
    ("model.max_response_tokens", "data.max_response_length", any_run),
    ("model.temperature", f"{ROLLOUT}.temperature", any_run),
    ("model.enable_prompt_truncation", (False,), any_run),
    (
        "buffer.total_epochs",
        "trainer.total_epochs",
        lambda d: not d.has("buffer.total_steps") and not is_async(d),
    ),
    *(
        (f"{sets}[i].filter_overlong_prompts", "data.filter_overlong_prompts", any_run)
        for sets in (TRAIN, EVAL)
    ),
    *((f"{sets}[i].format.image_key", "data.image_key", shows_images) for sets in (TRAIN, EVAL)),
    ("trainer.train_vision", (True,), trains_vision),
    (
        "buffer.total_tasks",
        "rollout.total_rollout_steps",
        lambda d: is_async(d) and not d.has("buffer.total_steps"),
    ),
    ("synchronizer.staleness_threshold", "async_training.staleness_threshold", is_async),
    ("explorer.eval_interval", (0,), lambda d: not is_async(d)),
    (f"{ENGINE}.engine_type", f"{ROLLOUT}.name", any_run),
    (f"{ENGINE}.tensor_parallel_size", f"{ROLLOUT}.tensor_model_parallel_size", any_run),
    *(
        (f"{ENGINE}.{n}", f"{ROLLOUT}.{n}", any_run)
        for n in ("gpu_memory_utilization", "max_num_batched_tokens")
    ),
    ("trainer.max_checkpoints_to_keep", (0,), any_run),
    ("trainer.grad_clip", f"{ACTOR}.grad_clip", any_run),
    ("trainer.use_dynamic_bsz", f"{ACTOR}.use_dynamic_bsz", any_run),
    ("trainer.max_token_len_per_gpu", f"{ACTOR}.ppo_max_token_len_per_gpu", _dynamic),
    (
        "trainer.enable_gradient_checkpointing",
        "actor_rollout_ref.model.enable_gradient_checkpointing",
        any_run,
    ),
    ("model.critic_model_path", "critic.model.path", has_critic),
    *(
        (f"trainer.critic.optimizer.{n}", f"critic.optim.{n}", has_critic)
        for n in ("lr", "lr_warmup_steps_ratio", "weight_decay")
    ),
    *((f"trainer.critic.{n}", f"critic.{n}", has_critic) for n in ("grad_clip", "cliprange_value")),
    ("trainer.critic.optimizer.lr_warmup_from_zero", (True,), warms_up("trainer.critic.optimizer")),
    ("trainer.critic.optimizer.min_lr_ratio", (0.0,), has_critic),
    (
        "trainer.critic.enable_gradient_checkpointing",
        "critic.model.enable_gradient_checkpointing",
        has_critic,
    ),
)
NEEDED = (
    "model.model_path",
    "model.max_prompt_tokens",
    "model.max_response_tokens",
    f"{ENGINE}.tensor_parallel_size",
)
"""Without these a configuration does not say enough; the guide's profile writes them too."""


def fill(d: Draft, rows: Sequence[Default]) -> None:
    """Writes what nothing has written yet; in the guide's profile only what is needed, the rest is
    left to our defaults.
    """
    for target, source, condition in rows:
        if condition(d) and (d.exact or target in NEEDED):
            value = source[0] if isinstance(source, tuple) else d.default(source)
            d.fill(
                target,
                value,
                "veRL's default" + ("" if isinstance(source, tuple) else f" of {source}"),
            )


def write(d: Draft) -> None:
    """The defaults of the trainers."""
    fill(d, DEFAULTS)
    if not d.exact:
        return
    d.fill(
        "explorer.eval_interval",
        d.interval * d.whole("rollout.test_freq", 1),
        "veRL's default of rollout.test_freq",
    )
    if d.read("explorer.eval_interval") == 0 and d.evals:
        d.fill(
            "explorer.eval_at_end", False, "trainer.test_freq is off: veRL evaluates no last step"
        )
    _micro_batch(d)


def _micro_batch(d: Draft) -> None:
    """Fixed micro-batches need a size; veRL's own file has none and refuses to start without."""
    for key, role in (
        ("trainer.micro_batch_size_per_gpu", ACTOR),
        ("trainer.critic.micro_batch_size_per_gpu", "critic"),
    ):
        if (
            _dynamic(d)
            or d.has(key)
            or micro_batch(d, role)
            or (role == "critic" and not has_critic(d))
        ):
            continue
        d.put(
            key,
            1,
            f"neither {role}.ppo_micro_batch_size_per_gpu nor use_dynamic_bsz is given; 1 fits "
            f"always",
        )
        d.warn(
            f"{role}.ppo_micro_batch_size_per_gpu is not given (veRL would not start); {key} 1 is "
            f"slow but fits, raise it"
        )
