"""veRL's supervised fine-tuning (fsdp_sft_trainer) → algorithm_type sft, mode train.

The demonstrations are what the trainer reads, so they stand in the experience buffer.  Invariant: every argument has one outcome.
"""

from __future__ import annotations

import posixpath
from typing import TYPE_CHECKING, Any

from rft.compat.keys import verl_keys as table
from rft.convert import actions as do
from rft.convert import key_groups
from rft.convert.draft import ArgumentOutcome, Draft
from rft.convert.names import LORA, LORA_ALPHA, OPTIM
from rft.convert.rule import Rule, account, always, choice, derived, ignored, only_if, refused, rule, to, via, write

if TYPE_CHECKING:
    from rft.convert.launch import Argument

SECTION = frozenset({18})
BUFFER = "buffer.trainer_input.experience_buffer"
OWN: dict[str, Any] = {
    "data.train_batch_size": 256,
    "data.max_length": 1024,
    "data.prompt_key": "question",
    "data.response_key": "answer",
    "data.multiturn.messages_key": "messages",
    "trainer.project_name": "gsm8k-sft",
    "trainer.experiment_name": "test",
    "trainer.total_epochs": 4,
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
}
"""Defaults of veRL's sft_trainer.yaml that its table of keys does not hold."""
_NODES = ("--nnodes", "--num_nodes", "--num_machines")
_PER_NODE = ("--nproc_per_node", "--num_gpus")


def prepare(d: Draft) -> None:
    """What is written whatever the arguments are."""
    d.put("mode", "train", "supervised fine-tuning explores nothing")
    d.put("algorithm.algorithm_type", "sft", "fsdp_sft_trainer")
    files = d.get("data.train_files")
    files = [str(f) for f in files] if isinstance(files, list) else [str(files)]
    if len(files) > 1:
        d.warn(f"data.train_files names {len(files)} files; one data set is read here, the first: put the others into it")
    folder, split = posixpath.dirname(files[0]) or ".", posixpath.splitext(posixpath.basename(files[0]))[0]
    for name, value in (("storage_type", "file"), ("path", folder), ("split", split)):
        d.put(f"{BUFFER}.{name}", value, "data.train_files")
    if (held_out := _held_out(d, files[0])) is not None:
        d.put(f"{BUFFER}.eval_split", held_out, "data.val_files")
    if d.flag("data.multiturn.enable"):
        d.put(f"{BUFFER}.format.prompt_type", "messages", "data.multiturn.enable")
        d.put(f"{BUFFER}.format.messages_key", _own(d, "data.multiturn.messages_key"), "data.multiturn.messages_key")
    else:
        d.put(f"{BUFFER}.format.prompt_type", "plaintext", "a question and an answer")
        d.put(f"{BUFFER}.format.prompt_key", _column(d, "prompt"), "data.prompt_key")
        d.put(f"{BUFFER}.format.response_key", _column(d, "response"), "data.response_key")
    size = _count(d, "data.train_batch_size")
    d.put("buffer.batch_size", size, "data.train_batch_size")
    d.put("buffer.train_batch_size", size, "data.train_batch_size, demonstrations of a step")
    d.put("model.max_model_len", _count(d, "data.max_length"), "data.max_length")
    _cluster(d)
    key_groups.names(d, project=str(_own(d, "trainer.project_name")), name=str(_own(d, "trainer.experiment_name")))


def _held_out(d: Draft, trained: str) -> str | None:
    """The split that validation reads, where its file stands beside the training file."""
    given = d.given["data.val_files"].value if d.stated("data.val_files") else None
    file = str(given[0]) if isinstance(given, list) and given else str(given or "")
    same_kind = posixpath.splitext(file)[1] == posixpath.splitext(trained)[1]
    if not file or file == trained or posixpath.dirname(file) != posixpath.dirname(trained) or not same_kind:
        return None
    return posixpath.splitext(posixpath.basename(file))[0]


def _cluster(d: Draft) -> None:
    """Nodes and GPUs as the launcher (torchrun, accelerate, deepspeed) starts them: veRL's own keys do not decide that."""
    nodes = _put_started(d, "trainer.nnodes", "cluster.node_num", _launched(d, _NODES))
    each = _launched(d, _PER_NODE)
    every = _launched(d, ("--num_processes",))  # accelerate counts the processes of all nodes
    if each is None and every is not None:
        each = (every[0], str(int(every[1]) // nodes)) if every[1].isdecimal() and int(every[1]) % nodes == 0 else every
    _put_started(d, "trainer.n_gpus_per_node", "cluster.gpu_per_node", each)


def _put_started(d: Draft, key: str, target: str, launched: tuple[str, str] | None) -> int:
    count, why = _count(d, key), key_groups.said_by(d, key)
    if launched is not None:
        option, value = launched
        if value.isdecimal() and int(value) > 0:
            if d.stated(key) and int(value) != count:
                d.warn(f"{key} {count} is not what {option} {value} starts; {target} is {value}")
            count, why = int(value), option
        elif target not in d.overridden:
            d.warn(f"{option} {value} is no number that the script tells; {target} {count} is {why}: --set {target}=N")
    d.put(target, count, why)
    return count


def _launched(d: Draft, names: tuple[str, ...]) -> tuple[str, str] | None:
    """(option, value) of the launcher, written --name=value or --name value, with - or _."""
    words = d.launch.launcher
    for i, word in enumerate(words):
        option, equals, value = word.partition("=")
        if option.replace("-", "_").replace("__", "--", 1) in names:
            return option, value if equals else words[i + 1] if i + 1 < len(words) else ""
    return None


def finish(d: Draft) -> None:
    """veRL's defaults that differ from ours."""
    if not d.exact:
        return
    for target, key in (
        (f"{OPTIM}.lr", "optim.lr"),
        (f"{OPTIM}.weight_decay", "optim.weight_decay"),
        (f"{OPTIM}.lr_warmup_steps_ratio", "optim.warmup_steps_ratio"),
        (f"{OPTIM}.lr_scheduler_type", "optim.lr_scheduler"),
        ("trainer.grad_clip", "optim.clip_grad"),
        ("model.model_path", "model.partial_pretrain"),
        ("trainer.enable_gradient_checkpointing", "model.enable_gradient_checkpointing"),
    ):
        d.fill(target, table.default(key, SECTION), f"veRL's default of {key}")
    if do.lora(d):
        d.fill(f"{LORA}.lora_alpha", LORA_ALPHA, "veRL's default of model.lora_alpha")
    d.fill(f"{BUFFER}.data_selector.selector_type", "shuffle", "veRL's sampler shuffles each epoch")
    if d.has("trainer.micro_batch_size_per_gpu"):
        d.fill("trainer.use_dynamic_bsz", False, "data.micro_batch_size_per_gpu: a fixed number of rows")
    if d.read(f"{OPTIM}.lr_warmup_steps_ratio"):
        d.fill(f"{OPTIM}.lr_warmup_from_zero", True, "veRL's warm-up begins at 0")
    d.fill(f"{OPTIM}.min_lr_ratio", 0.0, "veRL's cosine ends at 0")
    d.fill(f"{OPTIM}.betas", [0.9, 0.95], "veRL's default of optim.betas")
    d.fill("trainer.max_checkpoints_to_keep", 0, "veRL's default of trainer.max_ckpt_to_keep: all")
    if not d.has("buffer.total_steps"):
        d.fill("buffer.total_epochs", OWN["trainer.total_epochs"], "veRL's default of trainer.total_epochs")


def _own(d: Draft, key: str) -> Any:
    return d.given[key].value if d.stated(key) else OWN[key]


def _count(d: Draft, key: str) -> int:
    value = d.whole(key) if d.stated(key) else OWN[key]
    if value < 1:
        raise d.wrong(key, value, "at least 1")
    return int(value)


def _column(d: Draft, which: str) -> str:
    """`prompt_key: extra_info` with `prompt_dict_keys: [question]` is the column extra_info.question."""
    column, inside = str(_own(d, f"data.{which}_key")), d.get(f"data.{which}_dict_keys")
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


def _every(target: str) -> Rule:
    """Counts of steps; the two programs count the same steps here."""
    return Rule(lambda d, a: write(d, a, (target,), max(0, d.whole(a.key))), (target,))


RULES: dict[str, Rule] = {
    "data.train_files": derived("the demonstrations", f"{BUFFER}.path", f"{BUFFER}.split"),
    "data.val_files": only_if(
        lambda d: d.has(f"{BUFFER}.eval_split"),
        "only rows of a file beside that of data.train_files can be held out",
        via("its loss is computed", f"{BUFFER}.eval_split"),
    ),
    "data.train_batch_size": via("demonstrations of a step", "buffer.train_batch_size"),
    "data.micro_batch_size_per_gpu": to("trainer.micro_batch_size_per_gpu"),
    "data.micro_batch_size": ignored("deprecated in veRL; micro-batches are cut by tokens"),
    **{f"data.{w}_key": via("", f"{BUFFER}.format.{w}_key") for w in ("prompt", "response")},
    **{f"data.{w}_dict_keys": derived("part of the column's name", f"{BUFFER}.format.{w}_key") for w in ("prompt", "response")},
    "data.multiturn.enable": derived("chats instead of question and answer", f"{BUFFER}.format.prompt_type"),
    "data.multiturn.messages_key": via("", f"{BUFFER}.format.messages_key"),
    "data.multiturn.tools_key": to(f"{BUFFER}.format.tools_key"),
    "data.max_length": via("", "model.max_model_len"),
    "data.truncation": refused("demonstrations are not cut: raise data.max_length or take the long ones out, and write error", "error"),
    "data.balance_dp_token": always("rows are always dealt by tokens"),
    "data.chat_template": to("model.custom_chat_template"),
    "data.use_shm": ignored("Parquet memory mapping does the same job"),
    "data.custom_cls.path": refused("write a function that returns the rows"),
    "data.custom_cls.name": refused("write a function that returns the rows"),
    "model.partial_pretrain": do.path("model.model_path"),
    "model.fsdp_config.model_dtype": do.model_dtype,
    "model.fsdp_config.wrap_policy.min_num_params": ignored("FSDP2 shards each decoder layer"),
    "model.fsdp_config.cpu_offload": _offload,
    "model.fsdp_config.offload_params": _offload,
    "model.strategy": always("FSDP2", "fsdp", "fsdp2", otherwise="use fsdp2"),
    "model.use_shm": ignored("safetensors memory mapping suffices"),
    "model.external_lib": to("model.external_lib"),
    "model.enable_gradient_checkpointing": to("trainer.enable_gradient_checkpointing"),
    "model.trust_remote_code": to("model.trust_remote_code"),
    "model.use_liger": to("trainer.use_liger"),
    "model.lora_rank": do.lora_rank,
    "model.lora_alpha": do.lora_key("lora_alpha"),
    "model.target_modules": do.lora_key("target_modules"),
    "optim.lr": to(f"{OPTIM}.lr"),
    "optim.betas": to(f"{OPTIM}.betas"),
    "optim.weight_decay": to(f"{OPTIM}.weight_decay"),
    "optim.warmup_steps_ratio": to(f"{OPTIM}.lr_warmup_steps_ratio"),
    "optim.lr_warmup_steps_ratio": to(f"{OPTIM}.lr_warmup_steps_ratio"),
    "optim.clip_grad": to("trainer.grad_clip"),
    "optim.lr_scheduler": choice(
        f"{OPTIM}.lr_scheduler_type", {n: n for n in ("constant", "cosine", "wsd")}, "schedules: constant, cosine, wsd"
    ),
    "ulysses_sequence_parallel_size": to("trainer.ulysses_sequence_parallel_size"),
    "use_remove_padding": to("trainer.use_remove_padding"),
    "trainer.default_local_dir": via("without a trailing /project/name", "checkpoint_root_dir"),
    "trainer.default_hdfs_dir": ignored("no HDFS: mount it and name it in checkpoint_root_dir"),
    "trainer.project_name": via("", "project"),
    "trainer.experiment_name": via("", "name"),
    "trainer.logger": do.logger,
    "trainer.total_epochs": to("buffer.total_epochs"),
    "trainer.total_training_steps": to("buffer.total_steps"),
    "trainer.save_freq": _every("trainer.save_interval"),
    "trainer.test_freq": only_if(
        lambda d: d.has(f"{BUFFER}.eval_split"), "no rows are held out", _every("trainer.eval_interval")
    ),
    "trainer.seed": to("seed"),
    "trainer.nnodes": via("", "cluster.node_num"),
    "trainer.n_gpus_per_node": via("", "cluster.gpu_per_node"),
    "trainer.max_ckpt_to_keep": to("trainer.max_checkpoints_to_keep"),
    "trainer.device": to("trainer.device"),
    "trainer.resume_mode": do.resume,
    "trainer.resume_from_path": to("resume_from_path"),
    "trainer.checkpoint.save_contents": to("trainer.checkpoint.save_contents"),
    "trainer.checkpoint.load_contents": to("trainer.checkpoint.load_contents"),
    "--config-name": ignored("the defaults of veRL's own configuration are assumed"),
    "--config-path": ignored("where veRL's own configuration lies"),
}  # fmt: skip


def outcome(d: Draft, a: Argument) -> ArgumentOutcome:
    return account(d, a, RULES.get(a.key), RULES)
