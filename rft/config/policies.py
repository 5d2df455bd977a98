"""Which policies a loss compares: the one trained, the old one of the ratio, the one that sampled, and the reference model.

Part of `resolve`; the same rules hold here.
"""

from __future__ import annotations

from dataclasses import replace

from rft.algorithm.args import ARGS
from rft.algorithm.catalog import correction_args
from rft.algorithm.loss_args import LOSSES
from rft.config.plan import Facts
from rft.config.problems import Problems
from rft.config.schema.root import RunConfig
from rft.config.schema.trainer import CriticConfig
from rft.errors import ConfigError
from rft.plugins import REGISTRY
from rft.trainer.settings import AlgorithmSettings

REINFORCE = "reinforce"


def policies(config: RunConfig, settings: AlgorithmSettings, p: Problems) -> AlgorithmSettings:
    """`settings` with the old policy and the off-policy correction."""
    a, correction = config.algorithm, config.algorithm.rollout_correction
    written = "bypass_old_logprobs" in a.model_fields_set
    settings = replace(settings, bypass_old_logprobs=a.bypass_old_logprobs)
    three = a.compute_prox_logprobs or (correction is not None and not correction.bypass_mode)
    two = correction is not None and correction.bypass_mode
    why = "algorithm.compute_prox_logprobs" if a.compute_prox_logprobs else "algorithm.rollout_correction"
    if a.compute_prox_logprobs and two:
        p.error(
            "algorithm.compute_prox_logprobs",
            "takes old log-probs from the trainer, and rollout_correction.bypass_mode: true from the engines; write one of them",
            given=True,
        )
    elif written and ((three and a.bypass_old_logprobs) or (two and not a.bypass_old_logprobs)):
        p.error(
            "algorithm.bypass_old_logprobs",
            f"is {str(a.bypass_old_logprobs).lower()}, but {why}{' with bypass_mode: true' if two else ''} means "
            f"{str(two).lower()}; leave it out",
            given=a.bypass_old_logprobs,
        )
    elif (three or two) and a.bypass_old_logprobs != two:
        settings = replace(settings, bypass_old_logprobs=two)
        p.derive("algorithm.bypass_old_logprobs", two, why)
    s = config.synchronizer
    if three and (s.sync_interval > 1 or s.sync_style == "explorer_driven"):  # whose windows are as long as they come
        settings = replace(settings, proximal_window=True)
    settings = settings if correction is None else _corrected(config, settings, p)
    _of_the_loss(settings, p)
    return settings


def _of_the_loss(settings: AlgorithmSettings, p: Problems) -> None:
    """What the policy loss can do with these policies."""
    if (model := LOSSES.get(name := settings.policy_loss_fn)) is None:
        return
    if "old" in model.before and settings.proximal_window:
        p.error(
            "algorithm.policy_loss_fn",
            f"{name} chooses tokens under the weights before the step, but here old log-probs are those of a window's first weights; "
            "write synchronizer.sync_interval: 1 with a sync_style other than explorer_driven, or another loss",
            given=name,
        )
    elif name == "m2po" and not settings.bypass_old_logprobs:
        p.warn(
            "algorithm.policy_loss_fn: m2po leaves no token out with old log-probs of the trainer: the ratio before the step is 1"
        )
    if model.samples == "none" and settings.rollout_correction is not None:
        p.error("algorithm.rollout_correction", f"corrects for the policy that sampled, which {name} does not read; leave it out")


def _corrected(config: RunConfig, settings: AlgorithmSettings, p: Problems) -> AlgorithmSettings:
    given = config.algorithm.rollout_correction
    assert given is not None
    settings = replace(settings, rollout_correction={k: v for k, v in given.model_dump().items() if v is not None})
    try:
        args = correction_args(settings)
    except ConfigError as e:
        p.take(e)
        return replace(settings, rollout_correction=None)
    assert args is not None
    key = "algorithm.rollout_correction"
    if args.rollout_is != "none" and not args.weighted:
        p.warn(
            f"{key}.rollout_is has no effect with bypass_mode: true and loss_type ppo_clip: the clipped ratio holds the weight"
        )
    if args.rollout_rs == "none" and args.rollout_rs_threshold is not None:
        p.warn(f"{key}.rollout_rs_threshold has no effect without rollout_rs")
    if args.loss_type != REINFORCE:
        return settings
    if config.trainer.ppo_epochs > 1:
        p.error(
            f"{key}.loss_type",
            f"reinforce weighs rows by the policy before the step, which holds for one update; trainer.ppo_epochs is "
            f"{config.trainer.ppo_epochs}: write 1, or ppo_clip",
            given=REINFORCE,
        )
    if (loss := config.algorithm.policy_loss_fn) not in (None, REINFORCE):
        p.error("algorithm.policy_loss_fn", f"is {loss}, but {key}.loss_type means reinforce; leave one of them out", given=loss)
    if settings.policy_loss_fn != REINFORCE:
        p.derive("algorithm.policy_loss_fn", REINFORCE, f"{key}.loss_type")
    return replace(settings, policy_loss_fn=REINFORCE, policy_loss_fn_args={})


def whole_groups(settings: AlgorithmSettings, compares: bool, rows: int | None, p: Problems) -> None:
    """A KL in the reward changes the rewards of all members of a group, so these have to be in one step where they are compared."""
    if settings.kl_penalty_fn != "none" and compares and rows is not None:
        p.error(
            "buffer.train_batch_size",
            f"counts rows, which may split a group, but with kl_penalty_fn {settings.kl_penalty_fn} advantages need the KL of all rows "
            "of a group; leave it out, or write batch_size x repeat_times",
            given=rows,
        )


def has_critic(settings: AlgorithmSettings, facts: Facts) -> bool | None:
    """None: of a plugin; it is judged where these are loaded."""
    model = ARGS.get(("advantage_fn", settings.advantage_fn))
    if model is None and facts.plugins_loaded:
        model = REGISTRY.get("advantage_fn", settings.advantage_fn).args
    elif model is None:
        return None
    return "values" in getattr(model, "before", ())


def critic(config: RunConfig, settings: AlgorithmSettings, facts: Facts, p: Problems) -> None:
    """Keys of the critic, where there is none."""
    if has_critic(settings, facts) is not False:
        return
    t = config.trainer
    if t.critic_warmup:
        p.error(
            "trainer.critic_warmup",
            f"is {t.critic_warmup}, but advantage {settings.advantage_fn} has no critic; write 0",
            given=t.critic_warmup,
        )
    if t.critic != CriticConfig() or config.model.critic_model_path is not None:
        p.note(f"trainer.critic and model.critic_model_path have no effect: advantage {settings.advantage_fn} has no critic")
