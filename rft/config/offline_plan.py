"""Mode train: a data set instead of an explorer.  Which algorithms read one, what the experience
buffer's keys say of it, how many steps.

Part of `resolve`; the same rules hold here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from rft.algorithm.base import Data
from rft.algorithm.catalog import algorithm_defaults, check_args, losses
from rft.algorithm.expert_mix import MixSampleArgs
from rft.algorithm.settings import AlgorithmSettings
from rft.buffer.settings import MixSettings
from rft.config import cross_rules
from rft.config.context import Context, Problems
from rft.config.plan_schedule import NumBatches
from rft.config.plan_serve import PLAYING
from rft.config.schema.buffer_section import ExperienceBufferConfig
from rft.config.schema.root import RunConfig
from rft.config.tasksets import columns
from rft.engine.settings import EngineSettings
from rft.errors import ConfigError
from rft.taskset.settings import FILES, OfflineDataSettings, TasksetSettings

KEY = "buffer.trainer_input.experience_buffer"
BUFFERS = "buffer.trainer_input.auxiliary_buffers"
_ONLY_HERE = ("split", "subset_name", "format", "data_selector", "eval_split", "filter_overlong")
_OF_A_STORAGE = (
    *(
        "storage_args",
        "capacity",
        "capacity_bytes",
        "max_read_timeout",
        "durability",
        "on_damaged_payload",
    ),
    *("replay_buffer", "max_retry_times", "max_retry_interval"),
)
_OTHER_COLUMNS: dict[Data, tuple[str, ...]] = {
    "chats": ("chosen_key", "rejected_key", "label_key"),
    "pairs": ("response_key", "enable_concatenated_multi_turn", "label_key"),
    "labels": ("chosen_key", "rejected_key", "enable_concatenated_multi_turn"),
    "texts": (
        *(
            "response_key",
            "chosen_key",
            "rejected_key",
            "label_key",
            "enable_concatenated_multi_turn",
            "tools_key",
            "system_prompt",
        ),
        *("system_prompt_key", "chat_template", "chat_template_args", "enable_thinking"),
    ),
}


@dataclass(frozen=True)
class DataSets:
    """What is trained on, and the rows whose loss is computed beside."""

    trained: OfflineDataSettings
    held_out: OfflineDataSettings | None


def kind(config: RunConfig) -> Data | None:
    """The rows that this run reads from a data set; None: it trains on what it samples, or does not
    train.
    """
    try:
        return (
            algorithm_defaults(config.algorithm.algorithm_type).data
            if config.mode == "train"
            else None
        )
    except ConfigError:
        return None  # told by `resolve`


def data_sets(
    ctx: Context, algorithm: AlgorithmSettings, name: str, engine: EngineSettings
) -> DataSets | None:
    """The data sets of the run; None where it reads none.  `engine` says how chats become tokens."""
    data = kind(ctx.config)
    if data is None:
        _elsewhere(ctx, algorithm)
        return None
    _parts(algorithm, data, ctx)
    b = ctx.config.buffer.trainer_input.experience_buffer
    _check_rows_to_train_on(ctx, b)
    _warn_unused(ctx, b, data)
    source = _source(ctx, b, b.split or "train", name, data, engine)
    if b.eval_split is None:
        if ctx.config.trainer.eval_interval:
            ctx.error(
                "trainer.eval_interval", f"needs {KEY}.eval_split: the rows that are held out"
            )
        ctx.note("no eval_split: the loss on rows that are not trained is not computed")
        return DataSets(source, None)
    if b.eval_split == (b.split or "train"):
        ctx.error(f"{KEY}.eval_split", "is the split that is trained on; name another one")
    elif (b.path or "").lower().endswith(FILES):
        text = (
            f"needs a data set with splits, and {b.path} is one file; name a folder with a file "
            f"for each split"
        )
        ctx.error(f"{KEY}.eval_split", text)
    return DataSets(source, _source(ctx, b, b.eval_split, f"{name}_{b.eval_split}", data, engine))


def _check_rows_to_train_on(ctx: Context, b: ExperienceBufferConfig) -> None:
    if b.path is None:
        ctx.error(
            f"{KEY}.path",
            f"is required: algorithm {ctx.config.algorithm.algorithm_type} trains on the rows of a "
            f"file, folder or hub data set",
        )
    if "storage_type" not in b.model_fields_set:
        ctx.derive(f"{KEY}.storage_type", "file", "mode train reads a data set")
    if b.data_selector.selector_type not in ("sequential", "shuffle", "random") or (
        b.data_selector.feature_keys or b.data_selector.kwargs
    ):
        ctx.error(
            f"{KEY}.data_selector",
            "rows to train on come in the order sequential, shuffle or random, which take no "
            "arguments",
        )
    if ctx.config.monitor.keep_trainer_logprobs:
        ctx.error(
            "monitor.keep_trainer_logprobs",
            "is kept in the ledger of what was sampled; rows of a data set are in none.  Write "
            "false",
        )


def _warn_unused(ctx: Context, b: ExperienceBufferConfig, data: Data) -> None:
    _idle(ctx, b, KEY, data)
    ctx.config.buffer.warn_unused(
        "buffer",
        ("on_short_batch", "max_refill", "resume_rows"),
        "a data set is read as it is",
        ctx,
    )
    if ctx.config.buffer.train_batch_size not in (None, 0, ctx.config.buffer.batch_size):
        ctx.config.buffer.warn_unused("buffer", ("batch_size",), "train_batch_size is written", ctx)
    if (ctx.config.algorithm.repeat_times or 1) > 1:
        ctx.config.algorithm.warn_unused(
            "algorithm", ("repeat_times",), f"{data} that are given are trained once each", ctx
        )
    if data == "pairs" and ctx.config.resume_from_path:
        ctx.warn(
            "resume_from_path gives the weights to begin with; the reference model is still "
            "model.model_path.  To compare with those "
            "weights, name there what rft export gives of them"
        )
    written = ctx.config.buffer.explorer_input
    if written.taskset is not None or written.tasksets or written.eval_tasksets:
        ctx.warn(
            "buffer.explorer_input has no effect: mode train explores nothing; see eval_split for "
            "rows that are held out"
        )
    reason = "given rows are not played; those that are held out have trainer.eval_interval"
    ctx.config.explorer.warn_unused("explorer", ("max_timeout", *PLAYING), reason, ctx)


def expert(
    ctx: Context, algorithm: AlgorithmSettings, own_rows: int, engine: EngineSettings
) -> tuple[MixSettings, OfflineDataSettings] | None:
    """The expert's rows that sample_strategy mix puts beside `own_rows` of each train batch; None
    where none are mixed in.
    """
    if algorithm.sample_strategy != "mix":
        return None
    try:
        args = check_args("sample_strategy", "mix", algorithm.sample_strategy_args)
    except ConfigError:
        return None  # told by `resolve`
    assert isinstance(args, MixSampleArgs)
    share = Fraction(str(args.expert_data_ratio))
    count = math.ceil(own_rows * share / (1 - share))
    name = args.sft_dataset_name
    key = f"{BUFFERS}.{name}"
    if (b := ctx.config.buffer.trainer_input.auxiliary_buffers.get(name)) is None:
        ctx.error(
            key,
            "is required: sample_strategy mix takes the expert's rows from it; write {path: "
            "answers.jsonl}",
        )
        return None
    if b.data_selector.selector_type not in ("sequential", "shuffle"):
        ctx.error(
            f"{key}.data_selector.selector_type", "an expert's rows come sequential or shuffle"
        )
    _idle(ctx, b, key, "chats")
    b.warn_unused(key, ("eval_split",), "no loss of the expert's rows is computed beside", ctx)
    ctx.note(f"each train batch has {own_rows} rows of the policy and {count} of {name}")
    if step_rows := ctx.config.buffer.train_batch_size:
        sampled_rows = step_rows - math.ceil(step_rows * share)
        ctx.warn(
            f"buffer.train_batch_size {step_rows} counts the policy's rows alone; to count the "
            f"expert's as well, write {sampled_rows}"
        )
    source = _source(ctx, b, b.split or "train", name, "chats", engine, key)
    return MixSettings(
        name=name, rows=count, shuffle=source.rows.selector == "shuffle", seed=source.rows.seed
    ), source


def _idle(ctx: Context, b: ExperienceBufferConfig, key: str, data: Data) -> None:
    """Keys of a storage, and of other kinds of rows, where a data set is read."""
    if "://" in (b.path or "") and not (b.path or "").startswith("reasoning_gym://"):
        ctx.error(
            f"{key}.path",
            "is a database; rows to train on are read from a file, a folder or a hub data set",
        )
    if "storage_type" in b.model_fields_set and b.storage_type != "file":
        ctx.error(f"{key}.storage_type", f"is {b.storage_type}; a data set is read with file")
    b.warn_unused(key, _OF_A_STORAGE, "a data set is read as it is", ctx)
    b.format.warn_unused(f"{key}.format", _OTHER_COLUMNS[data], f"{data} are read", ctx)


def _parts(a: AlgorithmSettings, data: Data, p: Problems) -> None:
    """Given rows have no reward, no group and no log-probs of a sampler: parts that read them are
    refused.
    """
    # a plugin says nothing; a row that it cannot use is told at the first step
    fit = [
        name
        for name, model in losses().items()
        if model.samples == "none"
        and (model.pairs, model.labels) == (data == "pairs", data == "labels")
    ]
    if a.policy_loss_fn in losses() and a.policy_loss_fn not in fit:
        text = (
            f"{a.policy_loss_fn} does not read {data} as algorithm {a.algorithm_type} gives "
            f"them; use {', '.join(fit)}"
        )
        p.error("algorithm.policy_loss_fn", text)
    for key, fine in (
        ("advantage_fn", "none"),
        ("sample_strategy", "default"),
        ("kl_penalty_fn", "none"),
    ):
        if (value := getattr(a, key)) != fine:
            text = f"{value} reads rewards or groups, which given {data} do not have; write {fine}"
            p.error(f"algorithm.{key}", text)


def _elsewhere(ctx: Context, algorithm: AlgorithmSettings) -> None:
    """Keys of a data set where none is read."""
    a = ctx.config.algorithm.algorithm_type
    b = ctx.config.buffer.trainer_input.experience_buffer
    default = ExperienceBufferConfig()
    try:
        data = algorithm_defaults(a).data
    except ConfigError:
        return  # told by `resolve`
    if data is not None:
        text = (
            f"is {ctx.config.mode}, but algorithm {a} trains on given {data} and samples "
            f"nothing; write mode: train"
        )
        ctx.error("mode", text)
        return
    loss = losses().get(algorithm.policy_loss_fn)
    if loss is not None and (loss.pairs or loss.labels):
        name = algorithm.policy_loss_fn
        text = (
            f"{name} compares {'pairs' if loss.pairs else 'labels'}, which are not sampled; write "
            f"mode: train and algorithm_type: {name}"
        )
        ctx.error("algorithm.policy_loss_fn", text)
    for key in _ONLY_HERE:
        if getattr(b, key) != getattr(default, key):
            text = (
                "says how a data set is read, and only mode: train with sft, cpt or dpo reads one"
            )
            ctx.error(f"{KEY}.{key}", text)
    if ctx.config.trainer.eval_interval:
        text = "is for mode: train with sft, cpt or dpo; write explorer.eval_interval"
        ctx.error("trainer.eval_interval", text)


def _source(
    ctx: Context,
    b: ExperienceBufferConfig,
    split: str,
    name: str,
    data: Data,
    engine: EngineSettings,
    key: str = KEY,
) -> OfflineDataSettings:
    if data == "texts" and b.format.image_key:
        ctx.error(f"{key}.format.image_key", "cpt continues texts alone; leave it out, or use sft")
    rows = TasksetSettings(
        name=name,
        key=key,
        path=ctx.find(b.path or ""),
        subset_name=b.subset_name,
        split=split,
        format=columns(b.format, key, ctx),
        workflow="",
        selector=b.data_selector.selector_type,
        seed=b.data_selector.seed,
    )
    cross_rules.images_need_a_rank_each(ctx, rows)
    return OfflineDataSettings(
        rows=rows,
        kind=data,
        model_path=engine.tokenizer_path or engine.model_path,
        weights_path=engine.model_path,
        image_processor_args=engine.image_processor_args,
        max_tokens=engine.max_model_len,
        chat_template=engine.chat_template,
        chat_template_args=dict(engine.chat_template_kwargs),
        every_turn=b.format.enable_concatenated_multi_turn,
        chosen_key=b.format.chosen_key,
        rejected_key=b.format.rejected_key,
        label_key=b.format.label_key,
        filter_overlong=b.filter_overlong,
    )


def steps(ctx: Context, data: DataSets, num_batches: NumBatches | None) -> tuple[int, int | None]:
    """(rows of a train step, train steps); None where the data set would have to be opened."""
    b = ctx.config.buffer
    t = ctx.config.trainer
    size = b.train_batch_size or b.batch_size
    if not b.train_batch_size:
        ctx.derive("buffer.train_batch_size", size, "buffer.batch_size")
    if data.trained.kind == "labels" and size < 2:
        ctx.error(
            "buffer.train_batch_size",
            "must be at least 2: the reference point comes from prompts with the answers of others",
            given=size,
        )
    limits = [
        n
        for n in (b.total_steps, -(-b.total_tasks // size) if b.total_tasks else None)
        if n is not None
    ]
    by_epochs = b.total_epochs and not limits
    limits += [] if t.total_steps is None else [t.total_steps]
    if (by_epochs or not limits) and num_batches is not None and not ctx.errors:
        epochs = b.total_epochs or 1
        with ctx.collect_errors():
            limits.append(epoch_steps := num_batches((data.trained.rows,), size, epochs))
            ctx.derive(
                "buffer.total_steps",
                epoch_steps,
                f"{epochs} epoch(s) of the data set in batches of {size}",
            )
    elif not limits:
        return size, None
    total = min(limits, default=1)
    if t.total_steps != total:
        ctx.derive("trainer.total_steps", total, "buffer.total_steps")
    return size, total
