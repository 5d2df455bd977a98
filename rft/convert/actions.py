"""What single veRL keys do to the result, where that is more than passing a value on.

Each function is the `act` of a rule, or makes a rule.  Invariant: it writes at most the keys that its outcome names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rft.convert.draft import EVAL, TRAIN, Draft, Outcome
from rft.convert.names import (
    ACTOR,
    CRITIC,
    DTYPES,
    ENGINE,
    ESTIMATORS,
    FORMAT,
    FULL_KL,
    KL,
    LORA,
    MODEL,
    NO_CRITIC,
    NO_LORA,
    OPTIM,
    PASSED,
    RM_OFF,
    ROLLOUT,
    TRACKERS,
    estimator_name,
)
from rft.convert.rule import Rule, expand, only_if, scaled, to, via, write
from rft.convert.sizes import has_critic, micro_batch, verl_ranks

if TYPE_CHECKING:
    from rft.convert.launch import Argument


def columns(name: str) -> Rule:
    return to(*(f"{f}.{name}" for f in FORMAT))


def estimator(d: Draft, a: Argument) -> Outcome:
    if str(a.value) not in ESTIMATORS:
        return Outcome("refused", f"unknown estimator; known: {', '.join(ESTIMATORS)}")
    return Outcome("mapped", "", ("algorithm.algorithm_type", "algorithm.advantage_fn"))


def advantage_arg(name: str, *estimators: str) -> Rule:
    target = f"algorithm.advantage_fn_args.{name}"

    def act(d: Draft, a: Argument) -> Outcome:
        name = estimator_name(d)
        if name not in estimators:
            return Outcome("ignored", f"{name} advantages do not use it")
        return write(d, a, (target,), a.value)

    return Rule(act, (target,), native=True)


def kl_name(fn: str, switch: str) -> Rule:
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


def kl_arg(target: str, switch: str, adaptive: bool = False) -> Rule:
    def act(d: Draft, a: Argument) -> Outcome:
        if not d.flag(switch):
            return Outcome("ignored", f"{switch} is off")
        if adaptive and d.text("algorithm.kl_ctrl.type") != "adaptive":
            return Outcome("ignored", "the coefficient is fixed")
        return Outcome("mapped", "", (target,))

    return Rule(act, (target,), native=True)


def strategy(d: Draft, a: Argument) -> Outcome:
    if a.value in ("fsdp", "fsdp2"):
        if a.value == "fsdp":
            d.warn(f"{a.key}: fsdp becomes fsdp2, which shards per parameter; the same sums in another order")
        d.put("trainer.trainer_strategy", "fsdp2", a.key)
        return Outcome("mapped", "FSDP2 in place of FSDP" if a.value == "fsdp" else "", ("trainer.trainer_strategy",))
    return Outcome("refused", f"{a.value} is not offered: use fsdp2")


def same_strategy(d: Draft, a: Argument) -> Outcome:
    if a.value in ("fsdp", "fsdp2"):
        return Outcome("derived", "all models are trained with trainer.trainer_strategy", ("trainer.trainer_strategy",))
    return Outcome("refused", f"{a.value} is not offered: use fsdp2")


def micro(role: str, key: str, target: str) -> Rule:
    """The deprecated global micro batch."""

    def act(d: Draft, a: Argument) -> Outcome:
        if d.stated(key):
            return Outcome("ignored", f"{key} is given and wins")
        size = micro_batch(d, role) if key.endswith("ppo_micro_batch_size_per_gpu") else max(1, d.whole(a.key) // verl_ranks(d))
        d.warn(f"{a.key} is deprecated in veRL; {a.value} over {verl_ranks(d)} GPUs became {size} per GPU")
        return write(d, a, (target,), size, f"{a.value} / {verl_ranks(d)} GPUs; deprecated in veRL")

    return Rule(act, (target,), native=True)


def engine(d: Draft, a: Argument) -> Outcome:
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


def do_sample(d: Draft, a: Argument) -> Outcome:
    if d.flag(a.key):
        return Outcome("equal", "training always samples")
    d.warn(f"{a.key} is false: greedy runs of a task are all alike; `rft check` refuses temperature 0 in training")
    d.put("model.temperature", 0, a.key)
    return Outcome("derived", "greedy", ("model.temperature",))


def temperature(d: Draft, a: Argument) -> Outcome:
    if not d.flag(f"{ROLLOUT}.do_sample", True):
        return Outcome("ignored", f"{ROLLOUT}.do_sample is off, which is temperature 0")
    return write(d, a, ("model.temperature",), a.value)


def length(limit: str, target: str) -> Rule:
    def act(d: Draft, a: Argument) -> Outcome:
        if (isinstance(a.value, str) and "${" in a.value) or d.whole(a.key) == d.whole(limit):
            return Outcome("derived", f"is {limit}", (target,))
        return Outcome("refused", f"differs from {limit} {d.get(limit)}; there is one limit here, set that one")

    return Rule(act, (target,))


def truncation(d: Draft, a: Argument) -> Outcome:
    if a.value == "error":
        return Outcome("ignored", "a prompt over the limit is an error here too")
    if not d.exact:
        return Outcome("ignored", "the guide has no key for it")
    if a.value in ("left", "right", "middle"):
        return write(d, a, ("model.prompt_truncation_side",), a.value)
    return Outcome("refused", "prompts are cut on the left, on the right or in the middle")


def filter_prompts(d: Draft, a: Argument) -> Outcome:
    if not d.exact:
        d.note(
            "model.enable_prompt_truncation is the guide's spelling of filter_overlong_prompts; it keeps the task and masks the run"
        )
        return write(d, a, ("model.enable_prompt_truncation",), d.flag(a.key))
    targets = tuple(f"{sets}[i].filter_overlong_prompts" for sets in (TRAIN, EVAL))
    return write(d, a, targets, d.flag(a.key), "long prompts are taken out before training, as in veRL")


def trust(d: Draft, a: Argument) -> Outcome:
    wanted = any(d.flag(k) for k in ("data.trust_remote_code", f"{MODEL}.trust_remote_code"))
    return write(d, a, ("model.trust_remote_code",), wanted, "for model and tokenizer alike" if wanted else "")


def path(*targets: str) -> Rule:
    def act(d: Draft, a: Argument) -> Outcome:
        if str(a.value).startswith("hdfs:"):
            return Outcome("refused", "HDFS is not offered; copy or mount it and name the local folder")
        return write(d, a, targets, a.value)

    return Rule(act, targets, native=True)


def hybrid(d: Draft, a: Argument) -> Outcome:
    if d.flag(a.key):
        return Outcome("derived", "engines and trainer have GPUs of their own here; see the GPU split", ("mode",))
    return Outcome("equal", "engines and trainer have GPUs of their own", ("mode",))


def multi_turn(d: Draft, a: Argument) -> Outcome:
    if not d.flag(a.key):
        return Outcome("equal", "the workflow decides; a simple one asks once")
    key = "buffer.explorer_input.default_workflow_type"
    if key in d.overridden:
        return Outcome("derived", "played by the workflow that --set names", (key,))
    return write(d, a, (key,), "tool_workflow", "tools are run by tool_workflow; --set another one where yours plays the turns")


def multi(d: Draft) -> bool:
    return d.flag(f"{ROLLOUT}.multi_turn.enable")


def sanity(d: Draft, a: Argument) -> Outcome:
    names = {"disable": "off", "strict": "strict", "ignore_strippable": "warn", "true": "strict", "false": "off"}
    if (name := names.get(str(a.value).lower())) is None:
        return Outcome("refused", f"unknown mode; known: {', '.join(names)}")
    return write(d, a, (f"{ENGINE}.tokenization_check",), name)


def clip(d: Draft, a: Argument) -> Outcome:
    there = expand(d, tuple(f"algorithm.policy_loss_fn_args.clip_range_{side}" for side in ("low", "high")))
    if all(d.stated(f"{a.key}_{side}") for side in ("low", "high")):
        return Outcome("ignored", "clip_ratio_low and clip_ratio_high are given and win, as in veRL")
    used = tuple(t for t in there if not d.stated(f"{a.key}_{t.rsplit('_', 1)[1]}"))
    return Outcome("mapped", "applied to the sides that are not given themselves", used)


def loss_mode(d: Draft, a: Argument) -> Outcome:
    name = "ppo" if a.value == "vanilla" else a.value
    if name == "ppo" and not d.exact:
        return Outcome("equal", "the clipped PPO loss")
    return write(d, a, ("algorithm.policy_loss_fn",), name)


def loss_arg(*modes: str) -> Rule:
    def act(d: Draft, a: Argument) -> Outcome:
        if d.text(f"{ACTOR}.policy_loss.loss_mode", "vanilla") not in modes:
            return Outcome("ignored", f"belongs to the loss {' or '.join(modes)}")
        return write(d, a, (f"algorithm.policy_loss_fn_args.{a.key.rsplit('.', 1)[-1]}",), a.value)

    return Rule(act, ("algorithm.policy_loss_fn_args",), native=True)


def lora(d: Draft) -> bool:
    return d.whole(f"{MODEL}.lora_rank", 0) > 0 or d.whole("model.lora_rank", 0) > 0


def lora_key(name: str) -> Rule:
    return only_if(lora, NO_LORA, to(f"{LORA}.{name}"))


def lora_rank(d: Draft, a: Argument) -> Outcome:
    """Written where it equals our default too: without it there would be no adapter."""
    if not lora(d):
        return Outcome("ignored", NO_LORA)
    d.put(f"{LORA}.lora_rank", d.whole(a.key), a.key)
    return Outcome("mapped", "", (f"{LORA}.lora_rank",))


def model_dtype(d: Draft, a: Argument) -> Outcome:
    name = DTYPES.get(str(a.value).lower())
    if name == "float32":
        return Outcome("equal", "master weights are float32; the type of forward and backward is trainer.param_dtype")
    if name is None:
        return Outcome("refused", f"known types: {', '.join(DTYPES)}")
    d.note(f"{a.key} {a.value}: forward and backward are {name} as in veRL, but the master weights stay float32")
    return write(d, a, ("trainer.param_dtype",), name)


def compute_dtype(d: Draft, a: Argument) -> Outcome:
    name = DTYPES.get(str(a.value).lower())
    return (
        write(d, a, ("trainer.param_dtype",), name)
        if name
        else Outcome("refused", "use bfloat16, or float32 on machines without it")
    )


def reduce_dtype(d: Draft, a: Argument) -> Outcome:
    name = DTYPES.get(str(a.value).lower())
    if name not in ("float32", "bfloat16"):
        return Outcome("refused", "gradients are summed in float32 or bfloat16")
    return write(d, a, ("trainer.reduce_dtype",), name)


def scheduler(d: Draft, a: Argument) -> Outcome:
    if a.key.endswith("warmup_style"):
        d.warn(f"{a.key} is the old name of lr_scheduler_type")
    if a.value not in ("constant", "cosine"):
        return Outcome("refused", "schedules: constant, cosine")
    into = CRITIC + ".optimizer" if a.key.startswith("critic.") else OPTIM
    return write(d, a, (f"{into}.lr_scheduler_type",), a.value)


def min_lr(d: Draft, a: Argument) -> Outcome:
    lr = d.number(f"{ACTOR}.optim.lr")
    if lr <= 0:
        raise d.wrong(f"{ACTOR}.optim.lr", lr, "above 0")
    ratio = d.number(a.key) / lr
    return write(d, a, (f"{OPTIM}.min_lr_ratio",), ratio, f"{a.value} / lr {lr:g}")


def optimizer(d: Draft, a: Argument) -> Outcome:
    if str(a.value).lower() in ("adam", "adamw"):
        return write(d, a, (f"{OPTIM}.optimizer_type",), "adamw")
    return Outcome("refused", "of veRL's optimizers AdamW is known; algorithm.optimizer.optimizer_type lists others")


def logger(d: Draft, a: Argument) -> Outcome:
    named = a.value if isinstance(a.value, list) else [a.value]
    others = [n for n in named if n not in ("console", *TRACKERS)]
    if others:
        d.warn(
            f"{a.key}: {', '.join(map(str, others))} not offered (known: {', '.join(TRACKERS)}); metrics.jsonl is always written"
        )
    return Outcome("mapped", "console is always on" if "console" in named else "", ("monitor.monitor_type",))


def val_only(d: Draft, a: Argument) -> Outcome:
    if not d.flag(a.key):
        return Outcome("ignored", "it trains")
    d.put("mode", "bench", a.key)
    return Outcome("derived", "evaluate and stop", ("mode",))


def resume(d: Draft, a: Argument) -> Outcome:
    if a.value in ("auto", "disable"):
        return write(d, a, ("continue_from_checkpoint",), a.value == "auto")
    if a.value != "resume_path":
        return Outcome("refused", "known: auto, disable, resume_path")
    return Outcome("derived", "trainer.resume_from_path says which", ("resume_from_path",))


def resume_path(d: Draft, a: Argument) -> Outcome:
    if d.text("trainer.resume_mode") != "resume_path" or a.value is False:
        return Outcome("ignored", "resume_mode is not resume_path")
    return write(d, a, ("resume_from_path",), a.value)


def keep(d: Draft, a: Argument) -> Outcome:
    if a.key.endswith("_in_save"):
        if not d.flag(a.key):
            return Outcome("ignored", "all checkpoints are kept")
        d.fill("trainer.max_checkpoints_to_keep", 1, a.key)
        return Outcome("derived", "deprecated in veRL", ("trainer.max_checkpoints_to_keep",))
    return write(d, a, ("trainer.max_checkpoints_to_keep",), d.whole(a.key))


def critic_keep(d: Draft, a: Argument) -> Outcome:
    actor = d.get("trainer.max_actor_ckpt_to_keep")
    if a.value == actor:
        return Outcome("derived", "actor and critic are one checkpoint", ("trainer.max_checkpoints_to_keep",))
    return Outcome("ignored", "actor and critic are one checkpoint; the actor's number holds")


def rollout_dir(d: Draft, a: Argument) -> Outcome:
    pipeline = "data_processor.experience_pipeline"
    d.put(f"{pipeline}.save_input", True, a.key)
    d.put(f"{pipeline}.input_save_path", a.value, a.key)
    return Outcome("mapped", "", (f"{pipeline}.save_input", f"{pipeline}.input_save_path"))


def profile(d: Draft, a: Argument) -> Outcome:
    named = a.value if isinstance(a.value, list) else [a.value]
    if not all(isinstance(i, int) and i > 0 for i in named):
        raise d.wrong(a.key, a.value, "a list of iterations, from 1")
    k = d.interval if d.exact else 1
    return write(d, a, ("trainer.profiler.steps",), [(int(i) - 1) * k + j for i in named for j in range(1, k + 1)])


def reward_model(d: Draft) -> bool:
    return d.flag("reward_model.enable")


def rm(rule: Rule) -> Rule:
    return only_if(reward_model, RM_OFF, rule)


def rm_enable(d: Draft, a: Argument) -> Outcome:
    if not d.flag(a.key):
        return Outcome("ignored", "rewards come from functions")
    return Outcome("derived", "one more engine, which scores", ("explorer.auxiliary_models",))


MANAGER_TARGETS = tuple(f"{sets}[i].reward_fn_args.reward_manager" for sets in (TRAIN, EVAL))


def manager(d: Draft, a: Argument) -> Outcome:
    if a.value == "naive":
        return Outcome("equal", "one call for each answer")
    if a.value in ("batch", "prime", "dapo"):
        return write(d, a, MANAGER_TARGETS, a.value)
    return Outcome("refused", "known reward managers: naive, batch, prime, dapo")


def reward_arg(name: str) -> Rule:
    return to(*(f"{sets}[i].reward_fn_args.{name}" for sets in (TRAIN, EVAL)))


def max_resp(d: Draft, a: Argument) -> Outcome:
    if isinstance(a.value, str) or d.whole(a.key) == d.whole("data.max_response_length"):
        return Outcome("derived", "is data.max_response_length", ("model.max_response_tokens",))
    return Outcome("refused", "differs from data.max_response_length; the penalty is measured from that")


def clipped(side: str) -> Rule:
    return via("", f"algorithm.policy_loss_fn_args.clip_range_{side}")


def evaluated(name: str) -> Rule:
    target = f"{EVAL}[i].{'repeat_times' if name == 'n' else f'rollout_args.{name}'}"

    def act(d: Draft, a: Argument) -> Outcome:
        there = tuple(t for t in expand(d, (target,)) if d.has(t))
        return Outcome("mapped", "", there) if there else Outcome("ignored", "do_sample is off: evaluation is greedy")

    return Rule(act, (target,), native=True)


def critic(target: str, *, guide: bool = False, by: Any = None) -> Rule:
    def act(d: Draft, a: Argument) -> Outcome:
        into = f"{PASSED}.{a.key}" if guide and not d.exact else target
        return write(d, a, (into,), by(a.value) if by else a.value)

    return only_if(has_critic, NO_CRITIC, Rule(act, (target,), native=True))


def critic_warmup(d: Draft, a: Argument) -> Outcome:
    if not d.exact:
        return write(d, a, (f"{PASSED}.{a.key}",), d.whole(a.key))
    return only_if(has_critic, NO_CRITIC, scaled("trainer.critic_warmup")).act(d, a)


def config_name(d: Draft, a: Argument) -> Outcome:
    if "megatron" in str(a.value):
        return Outcome("refused", "Megatron is not offered: use the FSDP configuration with actor.strategy fsdp2")
    return Outcome("ignored", "the defaults of veRL's own configuration are assumed")


def positive_k(value: Any) -> Any:
    return -1 if value in (0, None) else value


def max_samples(sets: str) -> Rule:
    """-1 means all rows."""
    target = f"{sets}[i].max_samples"

    def act(d: Draft, a: Argument) -> Outcome:
        count = d.whole(a.key)
        return write(d, a, (target,), count) if count > 0 else Outcome("equal", "all rows")

    return Rule(act, (target,), native=True)


def async_test(d: Draft, a: Argument) -> Outcome:
    count = d.whole(a.key)
    return write(d, a, ("explorer.eval_interval",), max(0, count) * d.interval, f"{count} synchronisations x {d.interval} steps")


_OPERATORS = "data_processor.experience_pipeline.operators[i]"
_REWARDS = ("score", "seq_reward", "seq_final_reward")  # metrics of veRL that are the reward itself
FILTER_TARGETS = (f"{_OPERATORS}.name", f"{_OPERATORS}.args", "buffer.max_refill")


def filter_groups(d: Draft, a: Argument) -> Outcome:
    """Groups whose runs all have the same metric are dropped and replaced."""
    group, _, name = a.key.rpartition(".")
    if not d.flag(f"{group}.enable"):
        return Outcome("ignored", "dynamic sampling is off")
    metric = d.text(f"{group}.metric")
    if name == "metric":
        return Outcome("derived", f"{group}.enable chooses the operator by it")
    if name == "enable":
        if not metric:
            return Outcome("refused", f"{group}.metric must say which number is compared: acc, score, seq_reward ...")
        if metric in _REWARDS:
            d.put(f"{_OPERATORS}.name", "reward_std_filter", a.key)
            return Outcome("mapped", "groups of equal reward are dropped and replaced", FILTER_TARGETS[:1])
        d.put(f"{_OPERATORS}.name", "dapo_dynamic_sampling", a.key)
        d.put(f"{_OPERATORS}.args.metric_key", metric, f"{group}.metric")
        return Outcome(
            "mapped", f"groups in which {metric} is above 0 in all or in none are dropped and replaced", FILTER_TARGETS[:2]
        )
    if name != "max_num_gen_batches":
        return Outcome("refused", "dynamic sampling has no such argument; known: enable, metric, max_num_gen_batches")
    most, size = d.whole(a.key), d.whole("data.train_batch_size")
    if most <= 0:
        return Outcome("ignored", "no limit there; here buffer.max_refill, 3 x batch_size where it is not written")
    spare = max(0, most * d.whole("data.gen_batch_size", size) - size) // d.interval
    return write(d, a, FILTER_TARGETS[2:], spare, f"{most} batches to draw from, less the {size} prompts that are trained")
