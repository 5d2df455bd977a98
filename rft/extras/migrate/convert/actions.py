"""What single veRL keys do to the result, where that is more than passing a value on.

Each function is the `act` of a rule, or makes a rule.  Invariant: it writes at most the keys that
its outcome names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rft.extras.migrate.convert.draft import EVAL, TRAIN, ArgumentOutcome, Draft
from rft.extras.migrate.convert.names import (
    ACTOR,
    CLIPPED,
    DTYPES,
    ENGINE,
    ESTIMATORS,
    KL,
    LORA,
    MODEL,
    NO_LORA,
    OPTIM,
    ROLLOUT,
    TRACKERS,
    estimator_name,
)
from rft.extras.migrate.convert.rule import (
    Rule,
    always,
    among,
    below,
    choice,
    derived,
    expand,
    only_if,
    rule,
    switch,
    to,
    via,
    write,
)
from rft.extras.migrate.convert.sizes import has_critic, micro_batch, verl_ranks

if TYPE_CHECKING:
    from rft.extras.migrate.convert.launch import Argument


estimator = among(
    ESTIMATORS,
    via("", "algorithm.algorithm_type", "algorithm.advantage_fn"),
    f"unknown estimator; known: {', '.join(ESTIMATORS)}",
)


def advantage_arg(name: str, *estimators: str) -> Rule:
    return only_if(
        lambda d: estimator_name(d) in estimators,
        lambda d: f"{estimator_name(d)} advantages do not use it",
        to(f"algorithm.advantage_fn_args.{name}"),
    )


def kl_name(fn: str, on: str) -> Rule:
    @rule(f"algorithm.{fn}")
    def act(d: Draft, a: Argument) -> ArgumentOutcome:
        name = str(a.value).removesuffix("+")
        if name == "full":
            return ArgumentOutcome(
                "refused", "needs both models' probabilities of all tokens; use low_var_kl"
            )
        if name not in KL:
            return ArgumentOutcome("refused", f"unknown estimator; known: {', '.join(KL)}")
        return ArgumentOutcome(
            "mapped", "veRL clamps k3 and low_var_kl alike" if name == "k3" else "", act.targets
        )

    return switch(on, f"{on} is off", act)


def kl_arg(target: str, on: str, adaptive: bool = False) -> Rule:
    written = via("", target)
    if adaptive:
        written = only_if(
            lambda d: d.text("algorithm.kl_ctrl.type") == "adaptive",
            "the coefficient is fixed",
            written,
        )
    return switch(on, f"{on} is off", written)


strategy = among(
    ("fsdp", "fsdp2"), always("the one trainer is FSDP2"), "{} is not offered: use fsdp2"
)


def micro(role: str, key: str, target: str) -> Rule:
    """The deprecated global micro batch."""

    def act(d: Draft, a: Argument) -> ArgumentOutcome:
        if d.stated(key):
            return ArgumentOutcome("ignored", f"{key} is given and wins")
        size = (
            micro_batch(d, role)
            if key.endswith("ppo_micro_batch_size_per_gpu")
            else max(1, d.whole(a.key) // verl_ranks(d))
        )
        return write(d, a, (target,), size, f"{a.value} / {verl_ranks(d)} GPUs; deprecated in veRL")

    return Rule(act, (target,))


@rule(f"{ENGINE}.engine_type")
def engine(d: Draft, a: Argument) -> ArgumentOutcome:
    target = f"{ENGINE}.engine_type"
    if a.value == "vllm":
        if not d.exact:
            return ArgumentOutcome("ignored", "always vLLM")
        d.put(target, "vllm", a.key)
        return ArgumentOutcome("mapped", "", (target,))
    if a.value == "hf":
        d.put(target, "transformers", a.key)
        return ArgumentOutcome("mapped", "the transformers engine", (target,))
    if target in d.overridden:
        return ArgumentOutcome("derived", "the engine that --set names", (target,))
    return ArgumentOutcome(
        "refused", f"the {a.value} engine is not offered; --set {target}=vllm takes vllm instead"
    )


@rule("model.temperature")
def do_sample(d: Draft, a: Argument) -> ArgumentOutcome:
    if d.flag(a.key):
        return ArgumentOutcome("equal", "training always samples")
    d.warn(
        f"{a.key} is false: greedy runs of a task are all alike; `rft check` refuses temperature 0 "
        f"in training"
    )
    d.put("model.temperature", 0, a.key)
    return ArgumentOutcome("derived", "greedy", ("model.temperature",))


temperature = only_if(
    lambda d: d.flag(f"{ROLLOUT}.do_sample", True),
    f"{ROLLOUT}.do_sample is off, which is temperature 0",
    to("model.temperature"),
)


def alike(
    limit: str, target: str, otherwise: str = "there is one limit here, set that one"
) -> Rule:
    """One key here for two of veRL's, which must say the same."""

    def act(d: Draft, a: Argument) -> ArgumentOutcome:
        written = d.given[limit].text if limit in d.given else ""
        if str(a.value).lower() == d.text(limit).lower() or a.text == written:
            return ArgumentOutcome("derived", f"is {limit}", (target,))
        return ArgumentOutcome("refused", f"differs from {limit} {d.get(limit)}; {otherwise}")

    return Rule(act, (target,))


@rule(*(f"{sets}[i].storage_type" for sets in (TRAIN, EVAL)))
def reader(d: Draft, a: Argument) -> ArgumentOutcome:
    """One name of a class that reads rows."""
    targets = tuple(f"{sets}[i].storage_type" for sets in (TRAIN, EVAL))
    return write(d, a, targets, ":".join(d.text(f"data.custom_cls.{n}") for n in ("path", "name")))


@rule("model.prompt_truncation_side")
def truncation(d: Draft, a: Argument) -> ArgumentOutcome:
    if a.value == "error":
        return ArgumentOutcome("ignored", "a prompt over the limit is an error here too")
    if not d.exact:
        return ArgumentOutcome("ignored", "the guide has no key for it")
    if a.value in ("left", "right", "middle"):
        return write(d, a, ("model.prompt_truncation_side",), a.value)
    return ArgumentOutcome("refused", "prompts are cut on the left, on the right or in the middle")


@rule(*(f"{sets}[i].filter_overlong_prompts" for sets in (TRAIN, EVAL)))
def filter_prompts(d: Draft, a: Argument) -> ArgumentOutcome:
    if not d.exact:
        d.note(
            "model.enable_prompt_truncation is the guide's name of filter_overlong_prompts; it "
            "keeps the task, masks the run"
        )
        return write(d, a, ("model.enable_prompt_truncation",), d.flag(a.key))
    targets = tuple(f"{sets}[i].filter_overlong_prompts" for sets in (TRAIN, EVAL))
    return write(
        d, a, targets, d.flag(a.key), "long prompts are taken out before training, as in veRL"
    )


@rule("model.trust_remote_code")
def trust(d: Draft, a: Argument) -> ArgumentOutcome:
    trusted = any(d.flag(k) for k in ("data.trust_remote_code", f"{MODEL}.trust_remote_code"))
    return write(
        d,
        a,
        ("model.trust_remote_code",),
        trusted,
        "for model and tokenizer alike" if trusted else "",
    )


def path(*targets: str) -> Rule:
    def act(d: Draft, a: Argument) -> ArgumentOutcome:
        if str(a.value).startswith("hdfs:"):
            return ArgumentOutcome(
                "refused", "HDFS is not offered; copy or mount it and name the local folder"
            )
        return write(d, a, targets, a.value)

    return Rule(act, targets)


hybrid = derived("mode: colocate shares the GPUs of engines and trainer, in turns", "mode")


@rule("trainer.fsdp_size")
def fsdp_size(d: Draft, a: Argument) -> ArgumentOutcome:
    size = d.whole(a.key)
    ranks = d.trainer_ranks
    if size > 0 and ranks % size:
        return write(
            d,
            a,
            ("trainer.fsdp_size",),
            -1,
            f"{size} does not divide the {ranks} training ranks that are left here: all of them",
        )
    return write(d, a, ("trainer.fsdp_size",), size)


@rule("trainer.profiler.ranks")
def profiled_ranks(d: Draft, a: Argument) -> ArgumentOutcome:
    named = a.value if isinstance(a.value, list) else [a.value]
    ranks = [r for r in named if isinstance(r, int) and r < d.trainer_ranks]
    ignored_ranks = (
        f"of {len(named)}, those of the {d.trainer_ranks} training ranks here"
        if len(ranks) < len(named)
        else ""
    )
    return write(d, a, ("trainer.profiler.ranks",), ranks, ignored_ranks)


@rule("algorithm.policy_loss_fn_args.clip_range_low")
def clip(d: Draft, a: Argument) -> ArgumentOutcome:
    targets = expand(
        d, tuple(f"algorithm.policy_loss_fn_args.clip_range_{side}" for side in ("low", "high"))
    )
    if all(d.stated(f"{a.key}_{side}") for side in ("low", "high")):
        return ArgumentOutcome(
            "ignored", "clip_ratio_low and clip_ratio_high are given and win, as in veRL"
        )
    used = tuple(t for t in targets if not d.stated(f"{a.key}_{t.rsplit('_', 1)[1]}"))
    return ArgumentOutcome("mapped", "applied to the sides that are not given themselves", used)


@rule("algorithm.policy_loss_fn")
def loss_mode(d: Draft, a: Argument) -> ArgumentOutcome:
    name = "ppo" if a.value in CLIPPED else a.value
    if name == "ppo" and not d.exact:
        return ArgumentOutcome("equal", "the clipped PPO loss")
    return write(d, a, ("algorithm.policy_loss_fn",), name)


def loss_arg(*modes: str) -> Rule:
    return only_if(
        lambda d: d.text(f"{ACTOR}.policy_loss.loss_mode", "vanilla") in modes,
        f"belongs to the loss {' or '.join(modes)}",
        below("algorithm.policy_loss_fn_args"),
    )


def lora(d: Draft) -> bool:
    return d.whole(f"{MODEL}.lora_rank", 0) > 0 or d.whole("model.lora_rank", 0) > 0


def lora_key(name: str) -> Rule:
    return only_if(lora, NO_LORA, to(f"{LORA}.{name}"))


compute_dtype = choice(
    "trainer.param_dtype", DTYPES, "use bfloat16, or float32 on machines without it"
)
reduce_dtype = choice("trainer.reduce_dtype", DTYPES, "gradients are summed in float32 or bfloat16")
sanity = choice(
    f"{ENGINE}.tokenization_check",
    {
        "disable": "off",
        "strict": "strict",
        "ignore_strippable": "warn",
        "true": "strict",
        "false": "off",
    },
    "unknown mode; known: disable, strict, ignore_strippable, true, false",
)


@rule(f"{LORA}.lora_rank")
def lora_rank(d: Draft, a: Argument) -> ArgumentOutcome:
    """Written where it equals our default too: without it there would be no adapter."""
    if not lora(d):
        return ArgumentOutcome("ignored", NO_LORA)
    d.put(f"{LORA}.lora_rank", d.whole(a.key), a.key)
    return ArgumentOutcome("mapped", "", (f"{LORA}.lora_rank",))


@rule("trainer.param_dtype")
def model_dtype(d: Draft, a: Argument) -> ArgumentOutcome:
    name = DTYPES.get(str(a.value).lower())
    if name == "float32":
        return ArgumentOutcome(
            "equal",
            "master weights are float32; the type of forward and backward is trainer.param_dtype",
        )
    if name is None:
        return ArgumentOutcome("refused", f"known types: {', '.join(DTYPES)}")
    d.note(
        f"{a.key} {a.value}: forward and backward are {name} as in veRL, but the master weights "
        f"stay float32"
    )
    return write(d, a, ("trainer.param_dtype",), name)


def scheduler(section: str) -> Rule:
    return choice(
        f"{section}.lr_scheduler_type",
        {"constant": "constant", "cosine": "cosine"},
        "schedules: constant, cosine",
    )


@rule(f"{OPTIM}.min_lr_ratio")
def min_lr(d: Draft, a: Argument) -> ArgumentOutcome:
    lr = d.number(f"{ACTOR}.optim.lr")
    if lr <= 0:
        raise d.wrong(f"{ACTOR}.optim.lr", lr, "above 0")
    ratio = d.number(a.key) / lr
    return write(d, a, (f"{OPTIM}.min_lr_ratio",), ratio, f"{a.value} / lr {lr:g}")


@rule("monitor.monitor_type")
def logger(d: Draft, a: Argument) -> ArgumentOutcome:
    named = a.value if isinstance(a.value, list) else [a.value]
    unknown = [n for n in named if n not in ("console", *TRACKERS)]
    if unknown:
        d.warn(
            f"{a.key}: {', '.join(map(str, unknown))} not offered (known: {', '.join(TRACKERS)}); "
            f"metrics.jsonl is always written"
        )
    return ArgumentOutcome(
        "mapped", "console is always on" if "console" in named else "", ("monitor.monitor_type",)
    )


val_only = switch(
    "trainer.val_only", "it trains", to("mode", by=lambda v: "bench", reason="evaluate and stop")
)


@rule("continue_from_checkpoint", "resume_from_path")
def resume(d: Draft, a: Argument) -> ArgumentOutcome:
    if a.value in ("auto", "disable"):
        return write(d, a, ("continue_from_checkpoint",), a.value == "auto")
    if a.value != "resume_path":
        return ArgumentOutcome("refused", "known: auto, disable, resume_path")
    return ArgumentOutcome("derived", "trainer.resume_from_path says which", ("resume_from_path",))


resume_path = only_if(
    lambda d: (
        d.text("trainer.resume_mode") == "resume_path"
        and d.get("trainer.resume_from_path") is not False
    ),
    "resume_mode is not resume_path",
    to("resume_from_path"),
)
keep_last = switch(
    "trainer.remove_previous_ckpt_in_save",
    "all checkpoints are kept",
    only_if(
        lambda d: not d.stated("trainer.max_actor_ckpt_to_keep"),
        "max_actor_ckpt_to_keep is given and wins",
        to("trainer.max_checkpoints_to_keep", by=lambda v: 1, reason="deprecated in veRL"),
    ),
)


@rule(*(f"data_processor.experience_pipeline.{name}" for name in ("save_input", "input_save_path")))
def rollout_dir(d: Draft, a: Argument) -> ArgumentOutcome:
    pipeline = "data_processor.experience_pipeline"
    d.put(f"{pipeline}.save_input", True, a.key)
    d.put(f"{pipeline}.input_save_path", a.value, a.key)
    return ArgumentOutcome("mapped", "", (f"{pipeline}.save_input", f"{pipeline}.input_save_path"))


@rule("trainer.profiler.steps")
def profile(d: Draft, a: Argument) -> ArgumentOutcome:
    named = a.value if isinstance(a.value, list) else [a.value]
    if not all(isinstance(i, int) and i > 0 for i in named):
        raise d.wrong(a.key, a.value, "a list of iterations, from 1")
    k = d.interval if d.exact else 1
    return write(
        d,
        a,
        ("trainer.profiler.steps",),
        [(int(i) - 1) * k + j for i in named for j in range(1, k + 1)],
    )


def critic(rule: Rule) -> Rule:
    return only_if(has_critic, "there is no critic with this advantage estimator", rule)


@rule("trainer.critic_warmup")
def critic_warmup(d: Draft, a: Argument) -> ArgumentOutcome:
    if not d.exact:
        return write(d, a, (a.key,), d.whole(a.key))
    before = max(0, d.whole(a.key) - 1)
    reason = (
        f"{before} iterations x {d.update} steps: the policy is trained from iteration {a.value} on"
    )
    return critic(to("trainer.critic_warmup", by=lambda _: before * d.update, reason=reason)).act(
        d, a
    )


# how veRL's own configurations are called
VERLS_OWN = ("_trainer", "_trainer_engine", "generation", "evaluation")


@rule()
def config_name(d: Draft, a: Argument) -> ArgumentOutcome:
    if "megatron" in str(a.value):
        return ArgumentOutcome(
            "refused",
            "Megatron is not offered: use the FSDP configuration with actor.strategy fsdp2",
        )
    if not str(a.value).removesuffix(".yaml").endswith(VERLS_OWN):
        d.questions.append(
            f"line {a.line}: --config-name {a.value} is a file that is not read here.  Does it set "
            f"more than veRL's own?  Then write that "
            "into the script, or convert the resolved YAML file"
        )
    return ArgumentOutcome("ignored", "the defaults of veRL's own configuration are assumed")


def max_samples(sets: str) -> Rule:
    """-1 means all rows.  veRL counts the rows of all files together."""
    target = f"{sets}[i].max_rows"

    def act(d: Draft, a: Argument) -> ArgumentOutcome:
        count = d.whole(a.key)
        files = len(d.expand(target))
        if count <= 0:
            return ArgumentOutcome("equal", "all rows")
        if files > 1:
            return ArgumentOutcome(
                "refused",
                f"counts rows of {files} files together; here each has max_rows of its own, by "
                f"--set",
            )
        return write(
            d,
            a,
            (target,),
            count,
            "the first rows; veRL draws them at random where data.shuffle is on",
        )

    return Rule(act, (target,))


@rule("explorer.eval_interval")
def async_test(d: Draft, a: Argument) -> ArgumentOutcome:
    count = d.whole(a.key)
    return write(
        d,
        a,
        ("explorer.eval_interval",),
        max(0, count) * d.interval,
        f"{count} synchronisations x {d.interval} steps",
    )
