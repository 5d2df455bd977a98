"""veRL's supervised fine-tuning (fsdp_sft_trainer, and sft_trainer on chats) → algorithm_type sft,
mode train.

Keys of sft_trainer are read as those of the older program, or of the ordinary trainer, that mean
the same.  The demonstrations are what the trainer reads, so they stand in the experience buffer.
Invariant: every argument has one outcome.
"""

from __future__ import annotations

import posixpath
import re
from functools import partial
from typing import TYPE_CHECKING, Any

from rft.extras.migrate.compat.keys import verl_keys as table
from rft.extras.migrate.convert import actions as do
from rft.extras.migrate.convert import key_groups
from rft.extras.migrate.convert.defaults import Default, any_run, fill, warms_up
from rft.extras.migrate.convert.draft import ArgumentOutcome, Draft
from rft.extras.migrate.convert.names import ACTOR, LORA, LORA_ALPHA, MODEL, OPTIM
from rft.extras.migrate.convert.rule import (
    Rule,
    account,
    always,
    among,
    below,
    choice,
    derived,
    only_if,
    rule,
    scaled,
    to,
    via,
    write,
)
from rft.extras.migrate.convert.rules import of_row, rule_of
from rft.extras.migrate.convert.sizes import positive

if TYPE_CHECKING:
    from rft.extras.migrate.convert.launch import Argument

SECTION = frozenset({18, 23})
BUFFER = "buffer.trainer_input.experience_buffer"
OWN: dict[str, Any] = {key: table.default(key, SECTION) for key in table.by_name(SECTION)} | {
    "trainer.project_name": "gsm8k-sft",
    "trainer.experiment_name": "test",
    "trainer.total_epochs": 4,
}
"""Defaults of veRL's sft_trainer.yaml: those of the table of keys, and others."""
DYNAMIC = f"{ACTOR}.use_dynamic_bsz"
MOST = f"{ACTOR}.ppo_max_token_len_per_gpu"
NEWER: dict[str, Any] = OWN | {
    "data.multiturn.enable": True,
    DYNAMIC: True,
    MOST: 8192,
    "data.micro_batch_size_per_gpu": 4,
    "trainer.n_gpus_per_node": 1,
    "model.partial_pretrain": "~/models/deepseek-llm-7b-chat",
    "optim.lr": 1e-3,
    "optim.warmup_steps_ratio": 0.0,
    "optim.lr_scheduler": "constant",
    "optim.betas": [0.9, 0.999],
}
"""Those of sft_trainer_engine.yaml."""
DEFAULTS: tuple[Default, ...] = (
    (f"{OPTIM}.lr", "optim.lr", any_run),
    (f"{OPTIM}.weight_decay", "optim.weight_decay", any_run),
    (f"{OPTIM}.lr_warmup_steps_ratio", "optim.warmup_steps_ratio", any_run),
    (f"{OPTIM}.lr_scheduler_type", "optim.lr_scheduler", any_run),
    (f"{OPTIM}.lr_warmup_from_zero", (True,), warms_up(OPTIM)),
    (f"{OPTIM}.min_lr_ratio", (0.0,), any_run),
    (f"{OPTIM}.betas", "optim.betas", any_run),
    ("trainer.grad_clip", "optim.clip_grad", any_run),
    ("model.model_path", "model.partial_pretrain", any_run),
    ("trainer.enable_gradient_checkpointing", "model.enable_gradient_checkpointing", any_run),
    (f"{LORA}.lora_alpha", (LORA_ALPHA,), do.lora),
    (f"{BUFFER}.data_selector.selector_type", ("shuffle",), any_run),
    (
        "trainer.micro_batch_size_per_gpu",
        "data.micro_batch_size_per_gpu",
        lambda d: d.default(DYNAMIC) and not d.flag(DYNAMIC),
    ),
    (
        "trainer.use_dynamic_bsz",
        DYNAMIC,
        lambda d: d.default(DYNAMIC) or d.has("trainer.micro_batch_size_per_gpu"),
    ),
    ("trainer.max_token_len_per_gpu", MOST, lambda d: d.flag(DYNAMIC)),
    ("trainer.max_checkpoints_to_keep", (0,), any_run),
    ("buffer.total_epochs", "trainer.total_epochs", lambda d: not d.has("buffer.total_steps")),
)
_NODES = ("--nnodes", "--num_nodes", "--num_machines")
GROUPS = ("engine", "optim", "model")  # of sft_trainer: the word alone chooses which keys it has
TEMPLATE = "data.apply_chat_template_kwargs"
_PER_NODE = ("--nproc_per_node", "--num_gpus")


def prepare(d: Draft) -> None:
    """What is written whatever the arguments are."""
    d.put("mode", "train", "supervised fine-tuning explores nothing")
    d.put("algorithm.algorithm_type", "sft", "fsdp_sft_trainer")
    files = d.get("data.train_files")
    files = [str(f) for f in files] if isinstance(files, list) else [str(files)]
    folder = posixpath.dirname(files[0]) or "."
    split = posixpath.splitext(posixpath.basename(files[0]))[0]
    for name, value in (("storage_type", "file"), ("path", folder), ("split", split)):
        d.put(f"{BUFFER}.{name}", value, "data.train_files")
    if (held_out := _held_out(d, files[0])) is not None:
        d.put(f"{BUFFER}.eval_split", held_out, "data.val_files")
    if d.flag("data.multiturn.enable"):
        d.put(f"{BUFFER}.format.prompt_type", "messages", "data.multiturn.enable")
        d.put(
            f"{BUFFER}.format.messages_key",
            d.text("data.multiturn.messages_key"),
            "data.multiturn.messages_key",
        )
        d.put(
            f"{BUFFER}.format.enable_concatenated_multi_turn",
            True,
            "veRL trains every answer of a chat",
        )
    else:
        d.put(f"{BUFFER}.format.prompt_type", "plaintext", "a question and an answer")
        d.put(f"{BUFFER}.format.prompt_key", _column(d, "prompt"), "data.prompt_key")
        d.put(f"{BUFFER}.format.response_key", _column(d, "response"), "data.response_key")
    if re.search(r"[-_]vl([-_]|$)", d.text("model.partial_pretrain").lower()):
        d.put(f"{BUFFER}.format.image_key", "images", "veRL reads this column where it is")
        if not d.whole("model.lora_rank"):
            d.put("trainer.train_vision", True, "veRL trains the vision tower")
        d.questions.append(
            "Do the rows hold images?  Their column `images` is read.  Else write --set "
            f"{BUFFER}.format.image_key="
        )
    size = positive(d, "data.train_batch_size")
    d.put("buffer.batch_size", size, "data.train_batch_size")
    d.put("buffer.train_batch_size", size, "data.train_batch_size, demonstrations of a step")
    d.put("model.max_model_len", positive(d, "data.max_length"), "data.max_length")
    _cluster(d)
    key_groups.names(d)


def _held_out(d: Draft, trained: str) -> str | None:
    """The split that validation reads, where its file stands beside the training file."""
    val_files = d.given["data.val_files"].value if d.stated("data.val_files") else None
    file = str(val_files[0]) if isinstance(val_files, list) and val_files else str(val_files or "")
    same_kind = posixpath.splitext(file)[1] == posixpath.splitext(trained)[1]
    if (
        not file
        or file == trained
        or posixpath.dirname(file) != posixpath.dirname(trained)
        or not same_kind
    ):
        return None
    return posixpath.splitext(posixpath.basename(file))[0]


def _cluster(d: Draft) -> None:
    """Nodes and GPUs as the launcher (torchrun, accelerate, deepspeed) starts them: veRL's own keys
    do not decide that.
    """
    nodes = _put_started(d, "trainer.nnodes", "cluster.node_num", _launched(d, _NODES))
    each = _launched(d, _PER_NODE)
    every = _launched(d, ("--num_processes",))  # accelerate counts the processes of all nodes
    if each is None and every is not None:
        each = (
            (every[0], str(int(every[1]) // nodes))
            if every[1].isdecimal() and int(every[1]) % nodes == 0
            else every
        )
    _put_started(d, "trainer.n_gpus_per_node", "cluster.gpu_per_node", each)


def _put_started(d: Draft, key: str, target: str, launched: tuple[str, str] | None) -> int:
    count = positive(d, key)
    reason = key_groups.said_by(d, key)
    if launched is not None:
        option, value = launched
        if value.isdecimal() and int(value) > 0:
            if d.stated(key) and int(value) != count:
                d.warn(f"{key} {count} is not what {option} {value} starts; {target} is {value}")
            count = int(value)
            reason = option
        elif target not in d.overridden:
            d.warn(
                f"{option} {value} is no number that the script tells; {target} {count} is {reason}: "
                f"--set {target}=N"
            )
    d.put(target, count, reason)
    return count


def _launched(d: Draft, names: tuple[str, ...]) -> tuple[str, str] | None:
    """(option, value) of the launcher, written --name=value or --name value, with - or _."""
    words = d.launch.launcher
    for i, word in enumerate(words):
        option, equals, value = word.partition("=")
        if option.replace("-", "_").replace("__", "--", 1) in names:
            return option, value if equals else words[i + 1] if i + 1 < len(words) else ""
    return None


finish = partial(fill, rows=DEFAULTS)


def _column(d: Draft, which: str) -> str:
    """`prompt_key: extra_info` with `prompt_dict_keys: [question]` is the column
    extra_info.question.
    """
    column = d.text(f"data.{which}_key")
    inside = d.get(f"data.{which}_dict_keys")
    inner = inside if isinstance(inside, list) else [inside] if inside else []
    if len(inner) > 1:
        d.warn(f"data.{which}_dict_keys has {len(inner)} names; the first is taken")
    return f"{column}.{inner[0]}" if inner else column


@rule("trainer.offload_policy")
def _offload(d: Draft, a: Argument) -> ArgumentOutcome:
    if not d.flag(a.key):
        return ArgumentOutcome("ignored", "everything stays on the GPUs")
    if a.key.endswith("offload_params") and not d.flag("model.fsdp_config.cpu_offload", False):
        return ArgumentOutcome("ignored", "cpu_offload is off")
    return write(d, a, ("trainer.offload_policy",), True)


def _one_file(rule: Rule) -> Rule:
    def act(d: Draft, a: Argument) -> ArgumentOutcome:
        if isinstance(a.value, list) and len(a.value) > 1:
            return ArgumentOutcome(
                "refused",
                f"{len(a.value)} files; one is read here, the first: put the others into it",
            )
        return rule.act(d, a)

    return Rule(act, rule.targets)


RULES: dict[str, Rule] = {
    "data.train_files": _one_file(
        derived("the demonstrations", f"{BUFFER}.path", f"{BUFFER}.split")
    ),
    "data.val_files": _one_file(
        via(
            "its loss is computed",
            f"{BUFFER}.eval_split",
            otherwise="only rows of a file beside that of data.train_files can be held out",
        )
    ),
    "data.train_batch_size": via("demonstrations of a step", "buffer.train_batch_size"),
    "data.micro_batch_size_per_gpu": only_if(
        lambda d: not d.flag(DYNAMIC),
        "micro-batches are cut by tokens: use_dynamic_bsz",
        to("trainer.micro_batch_size_per_gpu"),
    ),
    **{f"data.{w}_key": via("", f"{BUFFER}.format.{w}_key") for w in ("prompt", "response")},
    "data.multiturn.messages_key": via("", f"{BUFFER}.format.messages_key"),
    "data.max_length": via("", "model.max_model_len"),
    TEMPLATE: to(f"{BUFFER}.format.chat_template_args"),
    "data.enable_thinking_default": only_if(
        lambda d: d.text("data.enable_thinking_default") != "none",
        "the chat template decides",
        to("model.enable_thinking"),
    ),
    "use_remove_padding": to("trainer.row_layout", by=table.LAYOUT.get),
    "data.balance_dp_token": always("rows are always dealt by tokens"),
    "model.partial_pretrain": do.path("model.model_path"),
    "model.fsdp_config.model_dtype": do.model_dtype,
    **dict.fromkeys(
        ("model.fsdp_config.cpu_offload", "model.fsdp_config.offload_params"), _offload
    ),
    **{
        f"{g}_group": among(("fsdp", "hf_model"), always("FSDP2"), "{} is not offered; use fsdp")
        for g in GROUPS
    },
    "model.strategy": among(("fsdp", "fsdp2"), always("FSDP2"), "use fsdp2"),
    "model.lora_rank": do.lora_rank,
    "model.lora_alpha": do.lora_key("lora_alpha"),
    "model.target_modules": do.lora_key("target_modules"),
    "optim.lr_scheduler": choice(
        f"{OPTIM}.lr_scheduler_type",
        {n: n for n in ("constant", "cosine", "wsd")},
        "schedules: constant, cosine, wsd",
    ),
    "trainer.test_freq": only_if(
        lambda d: d.has(f"{BUFFER}.eval_split"),
        "no rows are held out",
        scaled("trainer.eval_interval", never=0),
    ),
}
RULES |= {key: of_row(row) for key, row in table.by_name(SECTION).items() if key not in RULES}
SECTIONS = {
    "engine": f"{ACTOR}.fsdp_config",
    "optim": f"{ACTOR}.optim",
    "profiler": f"{ACTOR}.profiler",
    "model": MODEL,
    "checkpoint": "trainer.checkpoint",
}
RENAMED = (
    {key: key for key in RULES}
    | {group: f"{group}_group" for group in GROUPS}
    | {
        "data.messages_key": "data.multiturn.messages_key",
        "data.tools_key": "data.multiturn.tools_key",
        "data.use_dynamic_bsz": DYNAMIC,
        "data.max_token_len_per_gpu": MOST,
        "model.path": "model.partial_pretrain",
        "engine.model_dtype": "model.fsdp_config.model_dtype",
        "engine.strategy": "model.strategy",
        "engine.ulysses_sequence_parallel_size": "ulysses_sequence_parallel_size",
        "model.use_remove_padding": "use_remove_padding",
        "optim.lr_warmup_steps_ratio": "optim.warmup_steps_ratio",
        "optim.lr_scheduler_type": "optim.lr_scheduler",
    }
)
"""Keys of sft_trainer whose rules have another name than their section says."""


def outcome(d: Draft, a: Argument) -> ArgumentOutcome:
    of_the_run = (
        rule_of(a.key) if a.key.startswith(("trainer.", "--", "actor_rollout_ref.")) else None
    )
    if a.key.startswith(f"{TEMPLATE}."):
        of_the_run = below(f"{BUFFER}.format.chat_template_args", after=TEMPLATE)
    return account(d, a, RULES.get(a.key, of_the_run), RULES)
