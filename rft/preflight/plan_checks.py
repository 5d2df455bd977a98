"""Check that a plan fits its models and its storage, and warn of settings that are allowed but
probably unintended.

Depends on plans and the content of model folders.  Invariant: the trainer proves a row layout
accepted here again when it loads the model.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rft.algorithm.needs import needs
from rft.config.context import Problems
from rft.config.plan import Plan
from rft.config.plan_engines import distinct
from rft.config.schema.root import RunConfig
from rft.engine.settings import AuxiliarySettings
from rft.errors import ConfigError, SetupError
from rft.images.processor import FAMILIES
from rft.plugins import extra_entry
from rft.preflight import lora_checks, model_folder, sync_checks
from rft.preflight.model_folder import ModelFiles
from rft.types import rotary
from rft.types.row_layout import AskedLayout, Choice, changing_rope, choose, text_config

_EACH = (
    "is for this explorer alone: divide it by their number; on one machine they share one if "
    "all name one file as cost_ledger"
)

_LOCAL = re.compile(r"https?://(localhost|127\.|\[::1\])")


def storage(plan: Plan, problems: Problems) -> None:
    dumps = plan.monitor.eval_dump_dir
    for key, folder in (
        ("checkpoint_root_dir", plan.run_dir),
        ("monitor.eval_dump_dir", None if dumps is None else Path(dumps)),
    ):
        tree = () if folder is None else (folder, *folder.parents)
        if (
            obstacle := next(filter(os.path.lexists, tree), None)
        ) is not None and not obstacle.is_dir():
            problems.error(key, f"{obstacle} is no folder, so {folder} cannot be one; name another")
    from rft.buffer.location import ledger_location  # SQLAlchemy takes a quarter of a second
    from rft.buffer.storage_choice import STORAGE_KEY, make_storage

    with problems.collect_errors(f"{STORAGE_KEY}.storage_type"):
        make_storage(plan.buffer)  # touches no file yet
    with problems.collect_errors(f"{STORAGE_KEY}.path"):
        if (
            ledger_location(plan.buffer).url is not None
            and importlib.util.find_spec("psycopg") is None
        ):
            problems.error(
                f"{STORAGE_KEY}.path",
                'needs the package psycopg: pip install "rft-platform[postgres]"',
            )


def models(config: RunConfig, plan: Plan, policy: ModelFiles, problems: Problems) -> Choice | None:
    """Check the requirements of each model; return the layout of the policy's rows.

    None if nothing is trained or the layout is refused.
    """
    _policy_fits(policy, plan, problems)
    _critic_fits(policy, plan, problems)
    _top_fits(policy, plan, problems)
    sync_checks.served(policy.config, plan, problems)
    if plan.trains:
        sync_checks.model(policy.config, plan, problems)
    choice = _rows(policy.config, plan, problems)
    lora_checks.check_adapter(plan.learner, policy.tensors, problems)
    lora_checks.warn_of_rounding(plan, problems)
    for i, m in zip(distinct(config), plan.auxiliary, strict=True):
        if m.engines[0].external is None and m.engines[0].engine_type != "scripted":
            _auxiliary_fits(f"explorer.auxiliary_models[{i}]", m, problems)
    return choice


def _policy_fits(model: ModelFiles, plan: Plan, problems: Problems) -> None:
    problems.warnings.extend(model.warnings)
    if model_folder.gives_scores(model.config):
        problems.error(
            "model.model_path",
            "is a reward model, which gives scores and writes no texts; name a language model",
        )
    sets = (*plan.explorer.tasksets, *plan.explorer.eval_tasksets)
    sees = plan.engines[0].engine_type == "vllm" and any(t.format.image_key for t in sets)
    family = FAMILIES.get(model.config.get("model_type", ""))  # none: each row is refused
    if sees and family is not None and not family.on_vllm:
        problems.error(
            "explorer.rollout_model.engine_type",
            "vllm is proven with images of Qwen2-VL, Qwen2.5-VL and Qwen3-VL alone; write transformers",
        )
    elif sees and importlib.util.find_spec("torchvision") is None:
        problems.error(
            "explorer.rollout_model.engine_type",
            "vllm needs the package torchvision for images: pip install torchvision, or write "
            "transformers",
        )
    max_model_len = plan.engines[0].max_model_len
    longest = None
    with problems.collect_errors():
        longest = rotary.positions(model.config, plan.learner.override_config)
    if longest is not None and max_model_len > longest:
        problems.error(
            "model.max_model_len",
            f"is {max_model_len} tokens, but the model knows {longest} positions; lower it, or "
            f"max_prompt_tokens or max_response_tokens, or see "
            "model.rope_scaling",
            given=max_model_len,
        )
    sizes = text_config(model.config)
    heads = sizes.get("num_attention_heads") or sizes.get("num_key_value_heads")
    tp = plan.engines[0].tensor_parallel_size
    if isinstance(heads, int) and heads % tp:
        problems.error(
            "explorer.rollout_model.tensor_parallel_size",
            f"is {tp}, which does not divide the attention heads",
            given=tp,
        )
    texts = plan.trainer.offline_data is not None and plan.trainer.offline_data.kind == "texts"
    if model.chat_template is None and plan.engines[0].chat_template is None and not texts:
        problems.error(
            "model.custom_chat_template", f"{model.folder} has no chat template; write one here"
        )


def _top_fits(policy: ModelFiles, plan: Plan, problems: Problems) -> None:
    """Check how many of the teacher's most likely tokens the loss reads."""
    known = text_config(policy.config).get("vocab_size")
    top = needs(plan.learner.algorithm).teacher_top
    if isinstance(known, int) and top > known:
        problems.error(
            "algorithm.policy_loss_fn_args.k",
            f"is {top}, and the model's vocabulary has {known} tokens; write at most that",
            given=top,
        )


def _critic_fits(policy: ModelFiles, plan: Plan, problems: Problems) -> None:
    """Check the critic, which reads the policy's tokens with its own weights."""
    path = plan.learner.critic.model_path
    key = "model.critic_model_path"
    if path in ("", plan.learner.model_path) or not needs(plan.learner.algorithm).critic:
        return
    try:
        files = model_folder.look(path)
    except ConfigError as e:
        for error in e.errors:
            problems.error(key, error.message, given=path)
        return
    ours, theirs = (text_config(m.config).get("vocab_size") for m in (policy, files))
    if None not in (ours, theirs) and ours != theirs:
        problems.error(
            key,
            f"has a vocabulary of {theirs}, the policy one of {ours}; both read the same tokens",
            given=path,
        )


def _auxiliary_fits(key: str, model: AuxiliarySettings, problems: Problems) -> None:
    e = model.engines[0]
    name = f"auxiliary model {model.name}"
    try:
        files = model_folder.look(e.model_path, e.tokenizer_path)
    except ConfigError as error:
        for one in error.errors:
            problems.error(f"{key}.model_path", f"{name}: {one.message}", given=e.model_path)
        return
    kinds = files.config.get("architectures") or []
    if kinds and model_folder.gives_scores(files.config) != (e.task == "score"):
        other = "generate" if e.task == "score" else "score"
        text = (
            f"{name}: is {e.task}, but the model is a {', '.join(kinds)}; use task: {other} or "
            f"another model"
        )
        problems.error(f"{key}.task", text, given=e.task)
    longest = rotary.positions(files.config, {})
    if longest is not None and e.max_model_len > longest:
        text = f"{name}: is {e.max_model_len} tokens, but the model knows {longest} positions"
        problems.error(f"{key}.max_model_len", text, given=e.max_model_len)
    if files.chat_template is None and e.chat_template is None:
        problems.warn(
            f"{name} has no chat template; it can be asked with token ids only.  Write "
            f"chat_template there"
        )


def _rows(config: Mapping[str, Any], plan: Plan, problems: Problems) -> Choice | None:
    """Return the row layout for the policy, whose config.json is `config`."""
    if not plan.trains:
        return None
    try:
        replaced = rotary.replaced(config, plan.learner.override_config)
    except ConfigError:
        return None  # reported by the check of the model's files
    _rope(replaced, plan, problems)
    critic = plan.learner.critic
    if needs(plan.learner.algorithm).critic and critic.model_path not in (
        "",
        plan.learner.model_path,
    ):
        other = model_folder.sizes(critic.model_path)
        if other is not None:
            _chosen(other[0], critic.row_layout, plan, "the critic", problems)
    return _chosen(replaced, plan.learner.row_layout, plan, "the model", problems)


def _chosen(
    config: Mapping[str, Any], layout: AskedLayout, plan: Plan, whose: str, problems: Problems
) -> Choice | None:
    try:
        choice = choose(config, layout)
    except ConfigError as e:
        problems.add_errors(e)
        return None
    if layout == "auto" and choice.layout != "shared":
        problems.note(
            f"rows of {whose} are {choice.layout} (trainer.row_layout: auto): {choice.reason}"
        )
    return choice


def _rope(config: Mapping[str, Any], plan: Plan, problems: Problems) -> None:
    changing = changing_rope(config)
    longest = plan.engines[0].max_model_len
    if changing is not None and longest > changing[1]:
        kind, max_length = changing
        problems.error(
            "model.max_model_len",
            f"is {longest} tokens, and the model's {kind} rotary embeddings change for every row "
            f"of a micro-batch in which one is longer "
            f"than {max_length}, so its gradient would depend on the cut.  Write at most {max_length}, or "
            f"model.rope_scaling of type yarn or linear",
            given=longest,
        )


def settled(plan: Plan, choice: Choice | None) -> Plan:
    """Return `plan` with padded rows if "auto" means padded; else the trainer chooses, and may
    still fall back.
    """
    if choice is None or choice.layout != "padded":
        return plan
    critic = plan.learner.critic
    if critic.row_layout == "auto" and critic.model_path in ("", plan.learner.model_path):
        critic = replace(critic, row_layout="padded")
    return replace(plan, learner=replace(plan.learner, row_layout="padded", critic=critic))


def advise(plan: Plan, p: Problems) -> None:
    _gpus(plan, p)
    _environment(plan, p)
    _schedule(plan, p)
    _evaluation(plan, p)
    for t in (*plan.explorer.tasksets, *plan.explorer.eval_tasksets) if plan.joins else ():
        for args in _mappings(t.reward_args):  # including the parts of a weighted_reward
            per_run = args.get("cost_ledger") is None and args.get("cache", "run") in ("run", "off")
            if "max_cost_usd" in args and per_run:
                p.warn(f"{t.key}: the judge's max_cost_usd {args['max_cost_usd']} {_EACH}")


def _mappings(value: Any) -> Iterator[Mapping[str, Any]]:
    """Yield every mapping inside a value."""
    if isinstance(value, Mapping):
        yield value
        value = list(value.values())
    if isinstance(value, list | tuple):
        for child in value:
            yield from _mappings(child)


def _environment(plan: Plan, p: Problems) -> None:
    """Warn of addresses and keys that the run needs and this environment, perhaps another, lacks."""
    for e in (*plan.engines, *(e for m in plan.auxiliary for e in m.engines)):
        if (s := e.external) is None:
            continue
        url = s.base_url or os.environ.get(s.base_url_env)
        if not url:
            p.warn(
                f"{e.name} has no base_url, and the environment variable {s.base_url_env} is not "
                f"set here: the run cannot start"
            )
        elif not (
            os.environ.get(s.api_key_env) or s.headers or s.header_envs or _LOCAL.match(url)
        ):  # the server may need no key
            p.warn(
                f"{e.name}: {url} is asked without a key: the environment variable {s.api_key_env} "
                f"is not set here"
            )
    if plan.serve is not None:
        try:
            extra_entry("service", "clients", key="mode")(plan.serve)
        except SetupError as e:
            p.warn(str(e))


def _gpus(plan: Plan, p: Problems) -> None:
    c = plan.cluster
    if idle := c.gpus - c.used(len(plan.engines)):
        p.warn(
            f"{idle} of {c.gpus} GPUs are used by no role (engines {len(plan.engines)} x "
            f"{c.gpus_per_engine}"
            f"{f', auxiliary models {c.auxiliary_gpus}' if c.auxiliary_gpus else ''}, trainer "
            f"{c.trainer_gpus}): raise "
            "trainer.world_size or explorer.rollout_model.engine_num, or lower cluster.gpu_per_node"
        )


def _schedule(plan: Plan, p: Problems) -> None:
    o = plan.learner.optim
    warmup = o.lr_warmup_steps < 0 and o.lr_warmup_steps_ratio > 0
    if plan.total_steps is None and (warmup or o.lr_scheduler_type != "constant"):
        what = " and ".join(
            [f"lr_warmup_steps_ratio {o.lr_warmup_steps_ratio:g}"] * warmup
            + [f"lr_scheduler_type {o.lr_scheduler_type}"] * (o.lr_scheduler_type != "constant")
        )
        p.warn(
            f"algorithm.optimizer: the number of train steps decides {what}, and it is known only "
            f"once the tasksets are opened; write "
            "trainer.total_steps (or lr_warmup_steps) to fix the schedule"
        )


def _evaluation(plan: Plan, p: Problems) -> None:
    x = plan.trainer
    metric = plan.trainer.best_metric or ""
    names = [t.name for t in plan.explorer.eval_tasksets] + [
        d.rows.name for d in (x.held_out,) if d is not None
    ]
    known_elsewhere = not names and plan.mode == "train" and not x.alone
    if (
        plan.trains
        and metric.startswith("eval/")
        and metric.split("/")[1] not in names
        and not known_elsewhere
    ):
        reader = (
            f"so no checkpoint will be the best; there are: "
            f"{', '.join(f'eval/{name}/...' for name in names) or 'none'}"
        )
        p.warn(
            f"trainer.checkpoint.best_metric: {metric} is of no evaluation of this run, {reader}"
        )
    training = {t.sampling.temperature for t in plan.explorer.tasksets}
    for t in plan.explorer.eval_tasksets:
        key = t.key
        temperature = t.sampling.temperature
        if t.num_runs > 1 and (temperature == 0 or t.sampling.seed is not None):
            reason, use = (
                ("temperature 0", "a temperature above 0")
                if temperature == 0
                else ("rollout_args.seed", "none")
            )
            p.warn(
                f"{key}: {reason} gives the same answer {t.num_runs} times; use {use}, or one run"
            )
        elif temperature > 0 and t.num_runs == 1:
            p.note(
                f"{key}: one answer per task at temperature {temperature:g} is a noisy measure; "
                f"use temperature 0, or repeat_times of 4 "
                "or more for a mean"
            )
        if training and temperature > 0 and temperature not in training:
            trained = ", ".join(f"{x:g}" for x in sorted(training))
            p.note(
                f"{key}: evaluated at temperature {temperature:g}, trained at {trained}: the two "
                f"rewards are not comparable"
            )
