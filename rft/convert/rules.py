"""One rule per veRL key of the ordinary and the asynchronous trainer: what becomes of it here, and why.

Keys that are not named here follow their row of the table: a native key goes to its target as it is, one that is not taken over is
ignored with the row's remark.  Knows no shell.  Invariant: a key is looked up in one order (exact name, pattern, row), so it has one rule.
"""

from __future__ import annotations

import fnmatch
from typing import TYPE_CHECKING, Any

from rft.convert import table
from rft.convert.draft import EVAL, TRAIN, Draft, Outcome
from rft.convert.rule import Rule, always, derived, expand, ignored, only_if, refused, scaled, to, via, write
from rft.convert.sizes import ACTOR, CRITIC_ESTIMATORS, ROLLOUT, has_critic, micro_batch, verl_ranks

if TYPE_CHECKING:
    from rft.convert.launch import Argument

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
}
KL = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "low_var_kl", "k3": "low_var_kl"}
TRACKERS = ("tensorboard", "wandb", "mlflow", "swanlab")
DTYPES = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp32": "float32", "float32": "float32", "float": "float32"}
FULL_KL = "needs both models' probabilities over the whole vocabulary (veRL does not implement it either); use low_var_kl"
ONLY_MEGATRON = "belongs to Megatron, which is not offered; FSDP2 has no counterpart"
NO_CRITIC = "there is no critic with this advantage estimator"
NO_LORA = "no adapters: lora_rank is 0"
RM_SERVED = "the reward model runs behind a serving engine, which schedules by itself"
RM_OFF = "the reward model is off"
FORMAT = tuple(f"{sets}[i].format" for sets in (TRAIN, EVAL))


def _columns(name: str) -> Rule:
    return to(*(f"{f}.{name}" for f in FORMAT))


def _estimator(d: Draft, a: Argument) -> Outcome:
    if a.value not in ESTIMATORS:
        return Outcome("refused", f"unknown estimator; known: {', '.join(ESTIMATORS)}")
    return Outcome("mapped", "", ("algorithm.algorithm_type", "algorithm.advantage_fn"))


def _advantage_arg(name: str, *estimators: str) -> Rule:
    target = f"algorithm.advantage_fn_args.{name}"

    def act(d: Draft, a: Argument) -> Outcome:
        estimator = d.text("algorithm.adv_estimator")
        if estimator not in estimators:
            return Outcome("ignored", f"{estimator} advantages do not use it")
        return write(d, a, (target,), a.value)

    return Rule(act, (target,), native=True)


def _kl_name(fn: str, switch: str) -> Rule:
    target = f"algorithm.{fn}"

    def act(d: Draft, a: Argument) -> Outcome:
        name = str(a.value).removesuffix("+")
        if not d.flag(switch):
            return Outcome("ignored", f"{switch} is off")
        if name not in KL:
            reason = FULL_KL if name == "full" else f"unknown estimator; known: {', '.join(KL)}"
            return Outcome("refused", reason)
        reason = "veRL clamps k3 and low_var_kl alike" if name == "k3" else ""
        return Outcome("mapped", reason, (target,))

    return Rule(act, (target,), native=True)


def _kl_arg(target: str, switch: str, adaptive: bool = False) -> Rule:
    def act(d: Draft, a: Argument) -> Outcome:
        if not d.flag(switch):
            return Outcome("ignored", f"{switch} is off")
        if adaptive and d.text("algorithm.kl_ctrl.type") != "adaptive":
            return Outcome("ignored", "the coefficient is fixed")
        return Outcome("mapped", "", (target,))

    return Rule(act, (target,), native=True)


def _strategy(d: Draft, a: Argument) -> Outcome:
    if a.value in ("fsdp", "fsdp2"):
        if a.value == "fsdp":
            d.warn(f"{a.key}: fsdp becomes fsdp2, which shards per parameter; the same sums in another order")
        d.put("trainer.trainer_strategy", "fsdp2", a.key)
        return Outcome("mapped", "FSDP2 in place of FSDP" if a.value == "fsdp" else "", ("trainer.trainer_strategy",))
    return Outcome("refused", f"{a.value} is not offered: use fsdp2")


def _same_strategy(d: Draft, a: Argument) -> Outcome:
    if a.value in ("fsdp", "fsdp2"):
        return Outcome("derived", "all models are trained with trainer.trainer_strategy", ("trainer.trainer_strategy",))
    return Outcome("refused", f"{a.value} is not offered: use fsdp2")


def _micro(role: str, key: str, target: str, guide: str = "") -> Rule:
    """The deprecated global micro batch."""

    def act(d: Draft, a: Argument) -> Outcome:
        if d.stated(key):
            return Outcome("ignored", f"{key} is given and wins")
        size = micro_batch(d, role) if key.endswith("ppo_micro_batch_size_per_gpu") else max(1, d.whole(a.key) // verl_ranks(d))
        d.warn(f"{a.key} is deprecated in veRL; {a.value} over {verl_ranks(d)} GPUs became {size} per GPU")
        return write(d, a, (target,), size, f"{a.value} / {verl_ranks(d)} GPUs; deprecated in veRL")

    return Rule(act, (target,), native=True)


def _engine(d: Draft, a: Argument) -> Outcome:
    target = f"{ENGINE}.engine_type"
    if a.value == "vllm":
        if not d.exact:
            return Outcome("ignored", "always vLLM")
        d.put(target, "vllm", a.key)
        return Outcome("mapped", "", (target,))
    if a.value == "hf":
        d.put(target, "transformers", a.key)
        return Outcome("mapped", "the transformers engine", (target,))
    return Outcome("refused", f"the {a.value} engine is not offered; use vllm")


def _do_sample(d: Draft, a: Argument) -> Outcome:
    if d.flag(a.key):
        return Outcome("equal", "training always samples")
    d.warn(f"{a.key} is false: greedy runs of a task are all alike; `rft check` refuses temperature 0 in training")
    d.put("model.temperature", 0, a.key)
    return Outcome("derived", "greedy", ("model.temperature",))


def _temperature(d: Draft, a: Argument) -> Outcome:
    if not d.flag(f"{ROLLOUT}.do_sample", True):
        return Outcome("ignored", f"{ROLLOUT}.do_sample is off, which is temperature 0")
    return write(d, a, ("model.temperature",), a.value)


def _length(limit: str, target: str) -> Rule:
    def act(d: Draft, a: Argument) -> Outcome:
        if isinstance(a.value, str) and "${" in a.value or d.whole(a.key) == d.whole(limit):
            return Outcome("derived", f"is {limit}", (target,))
        return Outcome("refused", f"differs from {limit} {d.get(limit)}; there is one limit here, set that one")

    return Rule(act, (target,))


def _truncation(d: Draft, a: Argument) -> Outcome:
    if a.value == "error":
        return Outcome("ignored", "a prompt over the limit is an error here too")
    if not d.exact:
        return Outcome("ignored", "the guide has no key for it")
    if a.value in ("left", "right"):
        return write(d, a, ("model.prompt_truncation_side",), a.value)
    return Outcome("refused", "prompts are cut on the left or on the right")


def _filter(d: Draft, a: Argument) -> Outcome:
    if not d.exact:
        d.note("model.enable_prompt_truncation is the guide's spelling of filter_overlong_prompts; it keeps the task and masks the run")
        return write(d, a, ("model.enable_prompt_truncation",), d.flag(a.key))
    targets = tuple(f"{sets}[i].filter_overlong_prompts" for sets in (TRAIN, EVAL))
    return write(d, a, targets, d.flag(a.key), "long prompts are taken out before training, as in veRL")


def _trust(d: Draft, a: Argument) -> Outcome:
    wanted = any(d.flag(k) for k in ("data.trust_remote_code", f"{MODEL}.trust_remote_code"))
    return write(d, a, ("model.trust_remote_code",), wanted, "for model and tokenizer alike" if wanted else "")


def _path(*targets: str) -> Rule:
    def act(d: Draft, a: Argument) -> Outcome:
        if str(a.value).startswith("hdfs:"):
            return Outcome("refused", "HDFS is not offered; copy or mount it and name the local folder")
        return write(d, a, targets, a.value)

    return Rule(act, targets, native=True)


def _hybrid(d: Draft, a: Argument) -> Outcome:
    if d.flag(a.key):
        return Outcome("derived", "engines and trainer have GPUs of their own here; see the GPU split", ("mode",))
    return Outcome("equal", "engines and trainer have GPUs of their own", ("mode",))


def _multi_turn(d: Draft, a: Argument) -> Outcome:
    if not d.flag(a.key):
        return Outcome("equal", "the workflow decides; a simple one asks once")
    key = "buffer.explorer_input.default_workflow_type"
    if key in d.overridden:
        return Outcome("derived", "played by the workflow that --set names", (key,))
    return Outcome("refused", f"which workflow plays the turns?  Name it with --set {key}=NAME (`rft plugins workflow` lists them)")


def _multi(d: Draft) -> bool:
    return d.flag(f"{ROLLOUT}.multi_turn.enable")


def _sanity(d: Draft, a: Argument) -> Outcome:
    names = {"disable": "off", "strict": "strict", "ignore_strippable": "warn", "true": "strict", "false": "off"}
    if (name := names.get(str(a.value).lower())) is None:
        return Outcome("refused", f"unknown mode; known: {', '.join(names)}")
    return write(d, a, (f"{ENGINE}.tokenization_check",), name)


def _clip(d: Draft, a: Argument) -> Outcome:
    there = expand(d, tuple(f"algorithm.policy_loss_fn_args.clip_range_{side}" for side in ("low", "high")))
    if all(d.stated(f"{a.key}_{side}") for side in ("low", "high")):
        return Outcome("ignored", "clip_ratio_low and clip_ratio_high are given and win, as in veRL")
    used = tuple(t for t in there if not d.stated(f"{a.key}_{t.rsplit('_', 1)[1]}"))
    return Outcome("mapped", "applied to the sides that are not given themselves", used)


def _loss_mode(d: Draft, a: Argument) -> Outcome:
    name = "ppo" if a.value == "vanilla" else a.value
    if name == "ppo" and not d.exact:
        return Outcome("equal", "the clipped PPO loss")
    return write(d, a, ("algorithm.policy_loss_fn",), name)


def _loss_arg(*modes: str) -> Rule:
    def act(d: Draft, a: Argument) -> Outcome:
        if d.text(f"{ACTOR}.policy_loss.loss_mode", "vanilla") not in modes:
            return Outcome("ignored", f"belongs to the loss {' or '.join(modes)}")
        return write(d, a, (f"algorithm.policy_loss_fn_args.{a.key.rsplit('.', 1)[-1]}",), a.value)

    return Rule(act, ("algorithm.policy_loss_fn_args",), native=True)


def _lora(d: Draft) -> bool:
    return d.whole(f"{MODEL}.lora_rank", 0) > 0 or d.whole("model.lora_rank", 0) > 0


def _lora_key(name: str) -> Rule:
    return only_if(_lora, NO_LORA, to(f"model.lora_configs[0].{name}"))


def _model_dtype(d: Draft, a: Argument) -> Outcome:
    name = DTYPES.get(str(a.value).lower())
    if name == "float32":
        return Outcome("equal", "master weights are float32; the type of forward and backward is trainer.param_dtype")
    if name is None:
        return Outcome("refused", f"known types: {', '.join(DTYPES)}")
    d.note(f"{a.key} {a.value}: forward and backward are {name} as in veRL, but the master weights stay float32")
    return write(d, a, ("trainer.param_dtype",), name)


def _compute_dtype(d: Draft, a: Argument) -> Outcome:
    name = DTYPES.get(str(a.value).lower())
    return (
        write(d, a, ("trainer.param_dtype",), name) if name else Outcome("refused", "use bfloat16, or float32 on machines without it")
    )


def _scheduler(d: Draft, a: Argument) -> Outcome:
    if a.key.endswith("warmup_style"):
        d.warn(f"{a.key} is the old name of lr_scheduler_type")
    if a.value not in ("constant", "cosine"):
        return Outcome("refused", "schedules: constant, cosine")
    into = CRITIC + ".optimizer" if a.key.startswith("critic.") else OPTIM
    return write(d, a, (f"{into}.lr_scheduler_type",), a.value)


def _min_lr(d: Draft, a: Argument) -> Outcome:
    lr = d.number(f"{ACTOR}.optim.lr")
    ratio = d.number(a.key) / lr
    return write(d, a, (f"{OPTIM}.min_lr_ratio",), ratio, f"{a.value} / lr {lr:g}")


def _optimizer(d: Draft, a: Argument) -> Outcome:
    if str(a.value).lower() in ("adam", "adamw"):
        return write(d, a, (f"{OPTIM}.optimizer_type",), "adamw")
    return Outcome("refused", "the optimizer is AdamW")


def _logger(d: Draft, a: Argument) -> Outcome:
    named = a.value if isinstance(a.value, list) else [a.value]
    others = [n for n in named if n not in ("console", *TRACKERS)]
    if others:
        d.warn(f"{a.key}: {', '.join(map(str, others))} not offered (known: {', '.join(TRACKERS)}); metrics.jsonl is always written")
    return Outcome("mapped", "console is always on" if "console" in named else "", ("monitor.monitor_type",))


def _val_only(d: Draft, a: Argument) -> Outcome:
    if not d.flag(a.key):
        return Outcome("ignored", "it trains")
    d.put("mode", "bench", a.key)
    return Outcome("derived", "evaluate and stop", ("mode",))


def _resume(d: Draft, a: Argument) -> Outcome:
    if a.value in ("auto", "disable"):
        return write(d, a, ("continue_from_checkpoint",), a.value == "auto")
    if a.value != "resume_path":
        return Outcome("refused", "known: auto, disable, resume_path")
    return Outcome("derived", "trainer.resume_from_path says which", ("resume_from_path",))


def _resume_path(d: Draft, a: Argument) -> Outcome:
    if d.text("trainer.resume_mode") != "resume_path" or a.value is False:
        return Outcome("ignored", "resume_mode is not resume_path")
    return write(d, a, ("resume_from_path",), a.value)


def _keep(d: Draft, a: Argument) -> Outcome:
    if a.key.endswith("_in_save"):
        if not d.flag(a.key):
            return Outcome("ignored", "all checkpoints are kept")
        d.fill("trainer.max_checkpoints_to_keep", 1, a.key)
        return Outcome("derived", "deprecated in veRL", ("trainer.max_checkpoints_to_keep",))
    return write(d, a, ("trainer.max_checkpoints_to_keep",), d.whole(a.key))


def _critic_keep(d: Draft, a: Argument) -> Outcome:
    actor = d.get("trainer.max_actor_ckpt_to_keep")
    if a.value == actor:
        return Outcome("derived", "actor and critic are one checkpoint", ("trainer.max_checkpoints_to_keep",))
    return Outcome("ignored", "actor and critic are one checkpoint; the actor's number holds")


def _rollout_dir(d: Draft, a: Argument) -> Outcome:
    pipeline = "data_processor.experience_pipeline"
    d.put(f"{pipeline}.save_input", True, a.key)
    d.put(f"{pipeline}.input_save_path", a.value, a.key)
    return Outcome("mapped", "", (f"{pipeline}.save_input", f"{pipeline}.input_save_path"))


def _profile(d: Draft, a: Argument) -> Outcome:
    named = a.value if isinstance(a.value, list) else [a.value]
    k = d.interval if d.exact else 1
    return write(d, a, ("trainer.profiler.steps",), [(int(i) - 1) * k + j for i in named for j in range(1, k + 1)])


def _reward_model(d: Draft) -> bool:
    return d.flag("reward_model.enable")


def _rm(rule: Rule) -> Rule:
    return only_if(_reward_model, RM_OFF, rule)


def _rm_enable(d: Draft, a: Argument) -> Outcome:
    if not d.flag(a.key):
        return Outcome("ignored", "rewards come from functions")
    return Outcome("derived", "one more engine, which scores", ("explorer.auxiliary_models",))


def _manager(d: Draft, a: Argument) -> Outcome:
    if a.value in ("naive", "batch", "prime"):
        return Outcome("equal", "every run is scored as soon as it ends, rewards in parallel")
    if a.value == "dapo":
        return Outcome("derived", "the penalty for long answers is an argument of the reward: overlong_buffer", ())
    return Outcome("refused", "known reward managers: naive, batch, prime, dapo")


def _reward_arg(name: str) -> Rule:
    return to(*(f"{sets}[i].reward_fn_args.{name}" for sets in (TRAIN, EVAL)))


def _max_resp(d: Draft, a: Argument) -> Outcome:
    if isinstance(a.value, str) or d.whole(a.key) == d.whole("data.max_response_length"):
        return Outcome("derived", "is data.max_response_length", ("model.max_response_tokens",))
    return Outcome("refused", "differs from data.max_response_length; the penalty is measured from that")


def _clipped(side: str) -> Rule:
    return via("", f"algorithm.policy_loss_fn_args.clip_range_{side}")


def _eval(name: str) -> Rule:
    target = f"{EVAL}[i].{'repeat_times' if name == 'n' else f'rollout_args.{name}'}"

    def act(d: Draft, a: Argument) -> Outcome:
        there = tuple(t for t in expand(d, (target,)) if d.has(t))
        return Outcome("mapped", "", there) if there else Outcome("ignored", "do_sample is off: evaluation is greedy")

    return Rule(act, (target,), native=True)


def _critic(target: str, *, guide: bool = False, by: Any = None) -> Rule:
    def act(d: Draft, a: Argument) -> Outcome:
        into = f"{PASSED}.{a.key}" if guide and not d.exact else target
        return write(d, a, (into,), by(a.value) if by else a.value)

    return only_if(has_critic, NO_CRITIC, Rule(act, (target,), native=True))


def _critic_warmup(d: Draft, a: Argument) -> Outcome:
    if not d.exact:
        return write(d, a, (f"{PASSED}.{a.key}",), d.whole(a.key))
    return only_if(has_critic, NO_CRITIC, scaled("trainer.critic_warmup")).act(d, a)


def _config_name(d: Draft, a: Argument) -> Outcome:
    if "megatron" in str(a.value):
        return Outcome("refused", "Megatron is not offered: use the FSDP configuration with actor.strategy fsdp2")
    return Outcome("ignored", "the defaults of veRL's own configuration are assumed")


def _positive_k(value: Any) -> Any:
    return -1 if value in (0, None) else value


def _max_samples(sets: str) -> Rule:
    """-1 means all rows."""
    target = f"{sets}[i].max_samples"

    def act(d: Draft, a: Argument) -> Outcome:
        count = d.whole(a.key)
        return write(d, a, (target,), count) if count > 0 else Outcome("equal", "all rows")

    return Rule(act, (target,), native=True)


def _async_test(d: Draft, a: Argument) -> Outcome:
    count = d.whole(a.key)
    return write(d, a, ("explorer.eval_interval",), max(0, count) * d.interval, f"{count} synchronisations x {d.interval} steps")


def _filter_groups(d: Draft, a: Argument) -> Outcome:
    if not d.flag("algorithm.filter_groups.enable"):
        return Outcome("ignored", "dynamic sampling is off")
    return Outcome("refused", "dynamic sampling (groups of equal reward are dropped and replaced) comes later; leave it out or --allow")


_TRACE = "profiling and tracing change no result; trainer.profiler is the native one"
_INTERNAL = "veRL-internal"
_NSIGHT = "Nsight Systems through Ray; trainer.profiler is the native one"
_SCHEDULED = "the program sets it from the length of the run, here too"

RULES: dict[str, Rule] = {
    # ------------------------------------------------------------------ data
    "data.train_files": derived("one taskset per file", *(f"{TRAIN}[i].{k}" for k in ("name", "path", "split", "storage_type"))),
    "data.val_files": derived("one taskset per file", *(f"{EVAL}[i].{k}" for k in ("name", "path", "split", "storage_type"))),
    "data.prompt_key": _columns("prompt_key"),
    "data.response_key": _columns("response_key"),
    "data.reward_fn_key": _columns("reward_fn_key"),
    "data.apply_chat_template_kwargs": _columns("chat_template_args"),
    "data.train_batch_size": derived("B / m steps between two synchronisations", "synchronizer.sync_interval"),
    "data.val_batch_size": ignored("deprecated; the engine schedules evaluation by itself"),
    "data.return_raw_chat": ignored("always so: workflows receive messages"),
    "data.return_full_prompt": ignored("always so: the prompt is kept as text"),
    "data.shuffle": via("", f"{TRAIN}[i].data_selector.selector_type"),
    "data.validation_shuffle": to(f"{EVAL}[i].data_selector.selector_type", by=lambda v: "shuffle" if v is True else "sequential"),
    "data.seed": to(f"{TRAIN}[i].data_selector.seed"),
    "data.filter_overlong_prompts": Rule(_filter, (*(f"{s}[i].filter_overlong_prompts" for s in (TRAIN, EVAL)),), native=True),
    "data.truncation": Rule(_truncation, ("model.prompt_truncation_side",), native=True),
    "data.trust_remote_code": Rule(_trust, ("model.trust_remote_code",), native=True),
    "data.train_max_samples": _max_samples(TRAIN),
    "data.val_max_samples": _max_samples(EVAL),
    "data.dataloader_num_workers": ignored("the reader is our own"),
    "data.image_key": ignored("texts only; a taskset with images is refused when it is read"),
    "data.gen_batch_size": derived("single tasks are streamed; a step closes when its groups are there"),
    # ------------------------------------------------------------------ model
    "actor_rollout_ref.hybrid_engine": Rule(_hybrid),
    "actor_rollout_ref.nccl_timeout": ignored("synchronizer.sync_timeout is the time that is waited for weights"),
    f"{MODEL}.path": _path("model.model_path"),
    f"{MODEL}.trust_remote_code": Rule(_trust, ("model.trust_remote_code",), native=True),
    f"{MODEL}.external_libs": to("model.external_lib"),
    f"{MODEL}.override_config.model_config": refused(ONLY_MEGATRON),
    f"{MODEL}.override_config.moe_config": refused(ONLY_MEGATRON),
    f"{MODEL}.override_config.moe_config.freeze_moe_router": refused(ONLY_MEGATRON),
    f"{MODEL}.custom_chat_template": to("model.custom_chat_template"),
    f"{MODEL}.lora_rank": only_if(_lora, NO_LORA, to("model.lora_configs[0].lora_rank")),
    f"{MODEL}.lora_alpha": _lora_key("lora_alpha"),
    f"{MODEL}.target_modules": _lora_key("target_modules"),
    f"{MODEL}.exclude_modules": _lora_key("exclude_modules"),
    f"{MODEL}.tokenizer_path": to("model.tokenizer_path"),
    # ------------------------------------------------------------------ actor
    f"{ACTOR}.strategy": Rule(_strategy, ("trainer.trainer_strategy",), native=True),
    f"{ACTOR}.ppo_mini_batch_size": via("prompts of an optimizer step", "buffer.batch_size"),
    f"{ACTOR}.ppo_micro_batch_size": _micro(ACTOR, f"{ACTOR}.ppo_micro_batch_size_per_gpu", "trainer.micro_batch_size_per_gpu"),
    f"{ACTOR}.clip_ratio": Rule(_clip, ("algorithm.policy_loss_fn_args.clip_range_low",), native=True),
    f"{ACTOR}.clip_ratio_low": _clipped("low"),
    f"{ACTOR}.clip_ratio_high": _clipped("high"),
    f"{ACTOR}.use_kl_loss": derived("none when off, else kl_loss_type", "algorithm.kl_loss_fn"),
    f"{ACTOR}.kl_loss_type": _kl_name("kl_loss_fn", f"{ACTOR}.use_kl_loss"),
    f"{ACTOR}.kl_loss_coef": _kl_arg("algorithm.kl_loss_fn_args.kl_coef", f"{ACTOR}.use_kl_loss"),
    f"{ACTOR}.policy_loss.loss_mode": Rule(_loss_mode, ("algorithm.policy_loss_fn",), native=True),
    f"{ACTOR}.policy_loss.kl_cov_ratio": _loss_arg("kl_cov"),
    f"{ACTOR}.policy_loss.ppo_kl_coef": _loss_arg("kl_cov"),
    f"{ACTOR}.tau_pos": _loss_arg("sapo"),
    f"{ACTOR}.tau_neg": _loss_arg("sapo"),
    f"{ACTOR}.loss_scale_factor": to("algorithm.loss_scale_factor"),
    f"{ACTOR}.calculate_entropy": ignored("a metric only"),
    f"{ACTOR}.use_rollout_log_probs": to("algorithm.bypass_old_logprobs"),
    f"{ACTOR}.freeze_vision_tower": ignored("texts only"),
    f"{ACTOR}.rollout_n": derived("is rollout.n", "algorithm.repeat_times"),
    # ------------------------------------------------------------------ optimizer
    f"{ACTOR}.optim.lr_warmup_steps": scaled(f"{OPTIM}.lr_warmup_steps"),
    f"{ACTOR}.optim.warmup_style": Rule(_scheduler, (f"{OPTIM}.lr_scheduler_type",), native=True),
    f"{ACTOR}.optim.lr_scheduler_type": Rule(_scheduler, (f"{OPTIM}.lr_scheduler_type",), native=True),
    f"{ACTOR}.optim.lr_decay_style": Rule(_scheduler, (f"{OPTIM}.lr_scheduler_type",)),
    f"{ACTOR}.optim.total_training_steps": derived(_SCHEDULED, "buffer.total_steps"),
    f"{ACTOR}.optim.betas": to(f"{OPTIM}.betas"),
    f"{ACTOR}.optim.optimizer": Rule(_optimizer, (f"{OPTIM}.optimizer_type",), native=True),
    f"{ACTOR}.optim.optimizer_impl": refused("the optimizer is torch's AdamW", "torch.optim"),
    f"{ACTOR}.optim.override_optimizer_config": refused("the optimizer has no further arguments"),
    f"{ACTOR}.optim.clip_grad": to("trainer.grad_clip"),
    f"{ACTOR}.optim.min_lr": Rule(_min_lr, (f"{OPTIM}.min_lr_ratio",)),
    f"{ACTOR}.optim.lr_warmup_init": refused(ONLY_MEGATRON, 0, 0.0),
    f"{ACTOR}.optim.lr_decay_steps": refused(ONLY_MEGATRON),
    f"{ACTOR}.optim.weight_decay_incr_style": refused(ONLY_MEGATRON, "constant"),
    f"{ACTOR}.optim.lr_wsd_decay_style": ignored("shape of a schedule that is not used"),
    f"{ACTOR}.optim.lr_wsd_decay_steps": refused(ONLY_MEGATRON),
    f"{ACTOR}.optim.use_checkpoint_opt_param_scheduler": ignored("the scheduler is always stored with the checkpoint"),
    f"{ACTOR}.optim.zero_indexed_step": ignored("the warm-up's form is written explicitly"),
    # ------------------------------------------------------------------ sharding
    f"{ACTOR}.fsdp_config.wrap_policy": derived("FSDP2 shards each decoder layer"),
    f"{ACTOR}.fsdp_config.wrap_policy.transformer_layer_cls_to_wrap": derived("FSDP2 shards each decoder layer"),
    f"{ACTOR}.fsdp_config.model_dtype": Rule(_model_dtype, ("trainer.param_dtype",), native=True),
    f"{ACTOR}.fsdp_config.dtype": Rule(_compute_dtype, ("trainer.param_dtype",), native=True),
    f"{ACTOR}.fsdp_config.mixed_precision.param_dtype": Rule(_compute_dtype, ("trainer.param_dtype",), native=True),
    f"{ACTOR}.fsdp_config.mixed_precision.reduce_dtype": always(
        "gradients are summed in float32", "fp32", "float32", otherwise="gradients are summed in float32"
    ),
    f"{ACTOR}.checkpoint.contents": to("trainer.checkpoint.save_contents"),
    # ------------------------------------------------------------------ reference model
    f"{REF}.strategy": Rule(_same_strategy, ("trainer.trainer_strategy",)),
    f"{REF}.log_prob_micro_batch_size": _micro(
        REF, f"{REF}.log_prob_micro_batch_size_per_gpu", "trainer.ref.log_prob_micro_batch_size_per_gpu"
    ),
    f"{REF}.ulysses_sequence_parallel_size": derived("is the actor's", "trainer.ulysses_sequence_parallel_size"),
    **{
        f"{REF}.{name}": ignored("follows the actor")
        for name in ("use_torch_compile", "entropy_from_logits_with_chunking", "entropy_checkpointing", "rollout_n", "model.path")
    },
    f"{REF}.fsdp_config.wrap_policy.transformer_layer_cls_to_wrap": derived("FSDP2 shards each decoder layer"),
    # ------------------------------------------------------------------ rollout
    f"{ROLLOUT}.name": Rule(_engine, (f"{ENGINE}.engine_type",)),
    f"{ROLLOUT}.n": via("", "algorithm.repeat_times"),
    f"{ROLLOUT}.temperature": Rule(_temperature, ("model.temperature",), native=True),
    f"{ROLLOUT}.top_k": to("model.top_k", by=_positive_k),
    f"{ROLLOUT}.do_sample": Rule(_do_sample, ("model.temperature",)),
    f"{ROLLOUT}.use_fire_sampling": refused("FIRE sampling is not offered by the engine"),
    f"{ROLLOUT}.prompt_length": _length("data.max_prompt_length", "model.max_prompt_tokens"),
    f"{ROLLOUT}.response_length": _length("data.max_response_length", "model.max_response_tokens"),
    f"{ROLLOUT}.free_cache_engine": ignored("only for GPUs shared with the trainer; here the engine keeps its own"),
    f"{ROLLOUT}.load_format": ignored("the engine starts from model.model_path and takes over the trainer's weights"),
    f"{ROLLOUT}.log_prob_micro_batch_size": _micro(
        ROLLOUT, f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu", "trainer.log_prob_micro_batch_size_per_gpu"
    ),
    f"{ROLLOUT}.log_prob_use_dynamic_bsz": derived("is the actor's; cutting log-probs differently changes nothing"),
    f"{ROLLOUT}.mode": always(
        "generation is always asynchronous", "async", "sync", otherwise="generation is asynchronous; write async or sync"
    ),
    f"{ROLLOUT}.calculate_log_probs": always("the engine's log-probs are always returned"),
    f"{ROLLOUT}.data_parallel_size": to(f"{ENGINE}.data_parallel_size"),
    f"{ROLLOUT}.enable_prefix_caching": to(f"{ENGINE}.enable_prefix_caching"),
    f"{ROLLOUT}.repetition_penalty": to("model.repetition_penalty"),
    f"{ROLLOUT}.max_num_batched_tokens": to(f"{ENGINE}.max_num_batched_tokens"),
    f"{ROLLOUT}.layered_summon": ignored("weights are sent layer by layer anyway"),
    f"{ROLLOUT}.multi_stage_wake_up": ignored("only for GPUs shared with the trainer"),
    f"{ROLLOUT}.pipeline_model_parallel_size": refused("use tensor_model_parallel_size", 1),
    f"{ROLLOUT}.expert_parallel_size": refused("expert parallel is not offered: use tensor_model_parallel_size", 1),
    f"{ROLLOUT}.enable_rollout_routing_replay": refused("MoE router replay is not offered"),
    f"{ROLLOUT}.over_sample_rate": refused("over-sampling is not part of a conversion; see explorer.over_rollout", 0, 0.0),
    f"{ROLLOUT}.engine_kwargs.vllm.disable_mm_preprocessor_cache": ignored("texts only"),
    f"{ROLLOUT}.multi_turn.enable": Rule(_multi_turn, ("buffer.explorer_input.default_workflow_type",)),
    f"{ROLLOUT}.multi_turn.completion_callback": refused("write a workflow instead"),
    f"{ROLLOUT}.multi_turn.use_inference_chat_template": ignored("training uses the tokens that the engine returned"),
    f"{ROLLOUT}.multi_turn.enable_tokenization_sanity_check": Rule(_sanity, (f"{ENGINE}.tokenization_check",), native=True),
    f"{ROLLOUT}.multi_turn.tokenization_sanity_check_mode": Rule(_sanity, (f"{ENGINE}.tokenization_check",), native=True),
    f"{ROLLOUT}.val_kwargs.do_sample": derived(
        "off: evaluation is greedy", f"{EVAL}[i].rollout_args.temperature", f"{EVAL}[i].repeat_times"
    ),
    **{f"{ROLLOUT}.val_kwargs.{n}": _eval(n) for n in ("temperature", "top_p", "top_k", "n")},
    f"{ROLLOUT}.agent.custom_async_server.path": refused("veRL's extension point; ours is the workflow"),
    f"{ROLLOUT}.agent.custom_async_server.name": refused("veRL's extension point; ours is the workflow"),
    f"{ROLLOUT}.agent.num_workers": ignored("runs are coroutines of one process: explorer.max_concurrent_runs"),
    f"{ROLLOUT}.agent.default_agent_loop": always(
        "asks once", "single_turn_agent", otherwise="name a workflow with --set buffer.explorer_input.default_workflow_type=NAME"
    ),
    # ------------------------------------------------------------------ critic
    "critic.enable": derived("from the advantage estimator", "algorithm.advantage_fn"),
    "critic.strategy": Rule(_same_strategy, ("trainer.trainer_strategy",)),
    "critic.ppo_mini_batch_size": derived("is the actor's", "buffer.batch_size"),
    "critic.ppo_micro_batch_size": only_if(
        has_critic, NO_CRITIC, _micro("critic", "critic.ppo_micro_batch_size_per_gpu", f"{CRITIC}.micro_batch_size_per_gpu")
    ),
    "critic.ppo_micro_batch_size_per_gpu": _critic(f"{CRITIC}.micro_batch_size_per_gpu", guide=True),
    "critic.model.path": only_if(has_critic, NO_CRITIC, _path("model.critic_model_path")),
    "critic.model.use_remove_padding": _critic(f"{CRITIC}.use_remove_padding", guide=True),
    "critic.model.enable_gradient_checkpointing": _critic(f"{CRITIC}.enable_gradient_checkpointing", guide=True),
    "critic.model.fsdp_config.param_offload": _critic(f"{CRITIC}.param_offload", guide=True),
    "critic.model.fsdp_config.optimizer_offload": _critic(f"{CRITIC}.optimizer_offload", guide=True),
    "critic.model.tokenizer_path": ignored("actor and critic read the same tokens"),
    "critic.optim.lr": _critic(f"{CRITIC}.optimizer.lr", guide=True),
    "critic.optim.lr_warmup_steps_ratio": _critic(f"{CRITIC}.optimizer.lr_warmup_steps_ratio", guide=True),
    "critic.optim.lr_warmup_steps": only_if(has_critic, NO_CRITIC, scaled(f"{CRITIC}.optimizer.lr_warmup_steps")),
    "critic.optim.min_lr_ratio": _critic(f"{CRITIC}.optimizer.min_lr_ratio"),
    "critic.optim.betas": _critic(f"{CRITIC}.optimizer.betas"),
    "critic.optim.warmup_style": only_if(
        has_critic, NO_CRITIC, Rule(_scheduler, (f"{CRITIC}.optimizer.lr_scheduler_type",), native=True)
    ),
    "critic.optim.lr_scheduler_type": only_if(
        has_critic, NO_CRITIC, Rule(_scheduler, (f"{CRITIC}.optimizer.lr_scheduler_type",), native=True)
    ),
    "critic.optim.total_training_steps": derived(_SCHEDULED, "buffer.total_steps"),
    "critic.shuffle": derived("is the actor's", "trainer.shuffle_minibatches"),
    "critic.loss_agg_mode": derived("is the actor's", "algorithm.loss_agg_mode"),
    "critic.ulysses_sequence_parallel_size": derived("is the actor's", "trainer.ulysses_sequence_parallel_size"),
    "critic.checkpoint.save_contents": derived("actor and critic are one checkpoint", "trainer.checkpoint.save_contents"),
    "critic.rollout_n": derived("is rollout.n", "algorithm.repeat_times"),
    # ------------------------------------------------------------------ rewards
    f"{RM}.enable": Rule(_rm_enable, ("explorer.auxiliary_models",)),
    f"{RM}.model.path": _rm(_path("explorer.auxiliary_models[i].model_path")),
    f"{RM}.model.input_tokenizer": ignored("messages are rendered with the reward model's own template"),
    f"{RM}.model.trust_remote_code": _rm(to("explorer.auxiliary_models[i].trust_remote_code")),
    f"{RM}.max_length": _rm(to("explorer.auxiliary_models[i].max_model_len")),
    **{
        f"{RM}.{name}": ignored(RM_SERVED)
        for name in ("micro_batch_size", "ulysses_sequence_parallel_size", "num_workers", "enable_resource_pool",
                     "n_gpus_per_node", "nnodes", "model.tokenizer_path")
    },
    f"{RM}.reward_manager": Rule(_manager),
    f"{RM}.launch_reward_fn_async": always("rewards are always computed beside generation"),
    f"{RM}.sandbox_fusion.url": _reward_arg("sandbox_url"),
    f"{RM}.sandbox_fusion.max_concurrent": _reward_arg("sandbox_max_concurrent"),
    f"{RM}.sandbox_fusion.memory_limit_mb": _reward_arg("sandbox_memory_mb"),
    **{
        f"{RM}.{group}.{name}": _reward_arg(target)
        for group in ("overlong_buffer", "reward_kwargs.overlong_buffer_cfg")
        for name, target in (
            ("enable", "enable_overlong_penalty"), ("len", "cache_length"), ("penalty_factor", "penalty_factor")
        )
    },
    f"{RM}.overlong_buffer.log": ignored("the parts of a reward are always logged"),
    f"{RM}.reward_kwargs.overlong_buffer_cfg.log": ignored("the parts of a reward are always logged"),
    f"{RM}.reward_kwargs.max_resp_len": Rule(_max_resp, ("model.max_response_tokens",)),
    "custom_reward_function.path": via("", "buffer.explorer_input.default_reward_fn_type"),
    "custom_reward_function.name": derived("second half of file.py:function", "buffer.explorer_input.default_reward_fn_type"),
    # ------------------------------------------------------------------ algorithm
    "algorithm.adv_estimator": Rule(_estimator, ("algorithm.algorithm_type", "algorithm.advantage_fn"), native=True),
    "algorithm.gamma": _advantage_arg("gamma", "gae", "reinforce_plus_plus"),
    "algorithm.lam": _advantage_arg("lam", "gae"),
    "algorithm.norm_adv_by_std_in_grpo": _advantage_arg("norm_by_std", "grpo", "grpo_vectorized", "grpo_passk"),
    "algorithm.use_kl_in_reward": derived("none when off, else kl_penalty", "algorithm.kl_penalty_fn"),
    "algorithm.kl_penalty": _kl_name("kl_penalty_fn", "algorithm.use_kl_in_reward"),
    "algorithm.kl_ctrl.type": _kl_arg("algorithm.kl_penalty_fn_args.adaptive", "algorithm.use_kl_in_reward"),
    "algorithm.kl_ctrl.kl_coef": _kl_arg("algorithm.kl_penalty_fn_args.kl_coef", "algorithm.use_kl_in_reward"),
    "algorithm.kl_ctrl.horizon": _kl_arg("algorithm.kl_penalty_fn_args.horizon", "algorithm.use_kl_in_reward", adaptive=True),
    "algorithm.kl_ctrl.target_kl": _kl_arg("algorithm.kl_penalty_fn_args.target_kl", "algorithm.use_kl_in_reward", adaptive=True),
    "algorithm.use_pf_ppo": Rule(
        lambda d, a: write(d, a, ("algorithm.sample_strategy",), "pf_ppo") if d.flag(a.key) else Outcome("ignored", "switched off"),
        ("algorithm.sample_strategy",), native=True,
    ),
    **{
        f"algorithm.pf_ppo.{name}": only_if(
            lambda d: d.flag("algorithm.use_pf_ppo"), "use_pf_ppo is off", to(f"algorithm.sample_strategy_args.{name}")
        )
        for name in ("reweight_method", "weight_pow")
    },
    # ------------------------------------------------------------------ trainer
    "trainer.total_epochs": Rule(
        lambda d, a: (
            Outcome("ignored", "total_training_steps is given and wins")
            if d.stated("trainer.total_training_steps") or d.stated("rollout.total_rollout_steps")
            else write(d, a, ("buffer.total_epochs",), d.whole(a.key))
        ),
        ("buffer.total_epochs",), native=True,
    ),
    "trainer.total_training_steps": scaled("buffer.total_steps"),
    "trainer.profile_steps": Rule(_profile, ("trainer.profiler.steps",), native=True),
    "trainer.project_name": via("", "project"),
    "trainer.experiment_name": via("", "name"),
    "trainer.logger": Rule(_logger, ("monitor.monitor_type",), native=True),
    "trainer.rollout_data_dir": Rule(
        _rollout_dir,
        tuple(f"data_processor.experience_pipeline.{n}" for n in ("save_input", "input_save_path")), native=True,
    ),
    "trainer.nnodes": via("all nodes", "cluster.node_num"),
    "trainer.n_gpus_per_node": via("", "cluster.gpu_per_node"),
    "trainer.save_freq": scaled("trainer.save_interval", never=0),
    "trainer.test_freq": scaled("explorer.eval_interval", never=0),
    "trainer.val_only": Rule(_val_only, ("mode",)),
    "trainer.critic_warmup": Rule(_critic_warmup, ("trainer.critic_warmup",), native=True),
    "trainer.default_hdfs_dir": ignored("no HDFS: mount it and name it in checkpoint_root_dir"),
    "trainer.default_local_dir": via("without a trailing /project/name", "checkpoint_root_dir"),
    "trainer.resume_mode": Rule(_resume, ("continue_from_checkpoint", "resume_from_path")),
    "trainer.resume_from_path": Rule(_resume_path, ("resume_from_path",), native=True),
    "trainer.remove_previous_ckpt_in_save": Rule(_keep, ("trainer.max_checkpoints_to_keep",)),
    "trainer.max_actor_ckpt_to_keep": Rule(_keep, ("trainer.max_checkpoints_to_keep",), native=True),
    "trainer.max_critic_ckpt_to_keep": Rule(_critic_keep, ("trainer.max_checkpoints_to_keep",)),
    "trainer.device": Rule(
        lambda d, a: (
            write(d, a, ("trainer.device",), a.value) if a.value in ("cuda", "cpu")
            else Outcome("refused", f"{a.value} devices are not offered; use cuda or cpu")
        ),
        ("trainer.device",), native=True,
    ),
    "trainer.esi_redundant_time": ignored("cloud-specific"),
    "trainer.use_legacy_worker_impl": ignored(_INTERNAL),
    "ray_init.timeline_json_file": to("monitor.enable_ray_timeline", by=bool),
    "ray_kwargs.ray_init.num_cpus": to("cluster.ray_init.num_cpus"),
    "ray_kwargs.timeline_json_file": to("monitor.enable_ray_timeline", by=bool),
    # ------------------------------------------------------------------ the asynchronous recipe
    "rollout.nnodes": derived("engines x tensor_parallel_size", f"{ENGINE}.engine_num", "cluster.node_num"),
    "rollout.n_gpus_per_node": derived("engines x tensor_parallel_size", f"{ENGINE}.engine_num", "cluster.gpu_per_node"),
    "rollout.n": via("", "algorithm.repeat_times"),
    "rollout.total_epochs": ignored("the number of samples ends the run"),
    "rollout.total_rollout_steps": to("buffer.total_tasks"),
    "rollout.test_freq": Rule(_async_test, ("explorer.eval_interval",), native=True),
    "async_training.trigger_parameter_sync_step": via("local updates x require_batches", "synchronizer.sync_interval"),
    "async_training.use_trainer_do_validate": ignored("evaluation runs in the explorer"),
    "async_training.parallel_validate_and_rollout": to("explorer.eval_in_background"),
    # ------------------------------------------------------------------ options
    "--config-name": Rule(_config_name),
    "--config-path": ignored("where veRL's own configuration lies"),
    "--config-dir": ignored("where veRL's own configuration lies"),
}  # fmt: skip

_GUIDE = (  # written below trainer.trainer_config in the guide's examples
    f"{MODEL}.use_remove_padding",
    f"{MODEL}.enable_gradient_checkpointing",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu",
    f"{ACTOR}.fsdp_config.param_offload",
    f"{ACTOR}.fsdp_config.optimizer_offload",
    f"{REF}.fsdp_config.param_offload",
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu",
)
RULES |= {key: to(*table.by_name()[key].targets, guide=f"{PASSED}.{key}") for key in _GUIDE}
RULES |= {
    key: only_if(_multi, "one turn: multi_turn.enable is off", to(*(f"{sets}[i].workflow_args.{last}" for sets in (TRAIN, EVAL))))
    for last in (
        "max_turns", "tool_config_path", "max_assistant_turns", "max_user_turns", "max_parallel_calls", "max_tool_response_length",
        "format",
    )
    for key in (f"{ROLLOUT}.multi_turn.{last}",)
}  # fmt: skip
RULES |= {
    e.name: _critic(e.targets[0])
    for e in table.by_name().values()
    if e.name.startswith("critic.") and e.kind == "native" and e.name not in RULES
}

PATTERNS: tuple[tuple[str, Rule], ...] = (
    (f"{MODEL}.override_config.*", Rule(lambda d, a: write(d, a, (f"model.override_config.{a.key[42:]}",), a.value), native=True)),
    (f"{ROLLOUT}.engine_kwargs.vllm.*", Rule(
        lambda d, a: write(d, a, (f"{ENGINE}.extra_engine_args.{a.key.rsplit('.', 1)[-1]}",), a.value), native=True)),
    (f"{ROLLOUT}.engine_kwargs.sglang*", ignored("SGLang is not the engine")),
    (f"{ROLLOUT}.engine_kwargs.trtllm*", ignored("TensorRT-LLM is not the engine")),
    (f"{ACTOR}.policy_loss.clip_cov_*", _loss_arg("clip_cov")),
    (f"{ACTOR}.megatron.param_offload", to("trainer.param_offload")),
    (f"{ACTOR}.megatron.optimizer_offload", to("trainer.optimizer_offload")),
    ("*.megatron.override_transformer_config*", refused(ONLY_MEGATRON)),
    ("*.megatron.*", ignored("how Megatron lays out and offloads its work; FSDP2 shards instead")),
    ("*.optim.override_optimizer_config*", refused("the optimizer has no further arguments")),
    ("algorithm.rollout_correction.*", Rule(
        lambda d, a: write(d, a, (a.key,), a.value), ("algorithm.rollout_correction",), native=True)),
    ("algorithm.filter_groups.*", Rule(_filter_groups)),
    ("custom_reward_function.reward_kwargs.*", Rule(
        lambda d, a: write(d, a, tuple(f"{s}[i].reward_fn_args.{a.key.rsplit('.', 1)[-1]}" for s in (TRAIN, EVAL)), a.value),
        native=True)),
    ("trainer.*nsight_options.*", ignored(_NSIGHT)),
    ("*.profiler.*", ignored(_TRACE)), ("global_profiler.*", ignored(_TRACE)), ("*.trace.*", ignored(_TRACE)),
    ("*._target_", ignored(_INTERNAL)), ("*_target_", ignored(_INTERNAL)), ("hydra.*", ignored("where Hydra puts its own files")),
    ("transfer_queue.*", ignored(_INTERNAL)), ("prometheus.*", ignored(_TRACE)), ("*.prometheus.*", ignored(_TRACE)),
    ("evaluation.*", ignored("not a veRL key")),
    (f"{RM}.model.fsdp_config.*", ignored(RM_SERVED)),
    ("ray_kwargs.ray_init.*", ignored("Ray is started by the program")),
    (f"{REF}.fsdp_config.*", ignored("follows the actor")),
)  # fmt: skip

ASYNC = frozenset({*table.MAIN, 19})
KNOWN = sorted({*RULES, *(n for n in table.by_name(ASYNC) if "*" not in n)})


def rule_of(key: str) -> Rule | None:
    """The rule of a veRL key; None if nobody knows it."""
    if key in RULES:
        return RULES[key]
    entry = table.by_name(ASYNC).get(key)
    for pattern, rule in PATTERNS:
        if fnmatch.fnmatchcase(key, pattern) and not (entry is not None and pattern.startswith(("*", f"{REF}.", f"{RM}."))):
            return rule
    if entry is None:
        return None
    if entry.kind == "native":
        return to(*entry.targets)
    return (derived if entry.kind == "derived" else ignored)(entry.note or "not taken over")


def megatron(key: str) -> bool:
    """Keys that only say how Megatron would do it."""
    return ".megatron." in key


def estimator(d: Draft) -> tuple[str, str]:
    name = d.text("algorithm.adv_estimator")
    return ESTIMATORS.get(name, ("grpo" if name not in CRITIC_ESTIMATORS else "ppo", name))
