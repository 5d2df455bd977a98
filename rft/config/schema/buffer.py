"""Section `buffer`: where tasks come from, where experiences are kept, how many make a step."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AliasChoices

from rft.config.schema.base import Args, IgnoreCase, Name, Section, key, section

OnShortBatch = Annotated[Literal["stop", "train", "carry"], IgnoreCase]


class FormatConfig(Section):
    """Which columns of a row mean what."""

    prompt_type: Annotated[Literal["plaintext", "messages"], IgnoreCase] = key(
        "plaintext", "plaintext: prompt_key holds the question; messages: messages_key holds a chat."
    )
    prompt_key: str = key("prompt", "Column of the question.")
    response_key: str = key("response", "Column of the gold answer.")
    messages_key: str = key("message", "Column of the chat, a list of {role, content}.")
    tools_key: str = key("tools", "Column of the tools, a list or JSON text.")
    system_prompt_key: str | None = key(None, "Column of the system prompt.")
    system_prompt: str | None = key(None, "System prompt of all rows.")
    workflow_key: str = key("", "Column that names the row's workflow; empty: none.")
    reward_fn_key: str = key("", "Column that names the row's reward; empty: none.")


class RolloutArgs(Section):
    """Sampling of one taskset; a key that is not written is taken from `model`."""

    temperature: float | None = key(None, "Sampling temperature; 0 = greedy (evaluation only).", ge=0, le=10)
    top_p: float | None = key(None, "Nucleus sampling; 1 = off.", gt=0, le=1)
    top_k: int | None = key(None, "Sample from the k likeliest tokens; -1 = off.", ge=-1)
    min_p: float | None = key(None, "Drop tokens below this share of the likeliest one's probability; 0 = off.", ge=0, le=1)
    presence_penalty: float | None = key(None, "OpenAI's presence penalty; 0 = off.", ge=-2, le=2)
    frequency_penalty: float | None = key(None, "OpenAI's frequency penalty; 0 = off.", ge=-2, le=2)
    repetition_penalty: float | None = key(None, "Penalty on tokens already seen; 1 = off.", gt=0)
    max_tokens: int | None = key(None, "Longest response.", unit="tokens", ge=1)
    min_tokens: int | None = key(None, "No end before this many tokens.", unit="tokens", ge=0)
    stop: tuple[str, ...] = key((), "Texts that end a response.")
    seed: int | None = key(None, "Seed of every request.  Null: derived from the run's place.")
    n: int | None = key(None, "Runs of each task; same as the taskset's repeat_times.", unit="runs", ge=1)
    logprobs: int | None = key(None, "Accepted for compatibility; the log-prob of every generated token is always kept.", ge=0)


class DataSelectorConfig(Section):
    """In which order the rows are attempted."""

    selector_type: Annotated[Literal["sequential", "shuffle", "random"], IgnoreCase] = key("sequential", "Order of the rows.")
    seed: int = key(42, "Seed of that order.", ge=0)


class TasksetConfig(Section):
    """One source of tasks."""

    name: Name | None = key(None, "Unique name, used in metrics.  Null: the last part of `path`.")
    path: str = key(
        ..., "Local file or folder (jsonl, json, parquet, csv), a hub dataset in the local cache, or reasoning_gym://NAME."
    )
    storage_type: Annotated[Literal["file", "reasoning_gym", "python"], IgnoreCase] = key(
        "file",
        "file: what `path` names; reasoning_gym: the generator of that name; python: a function pkg.module:func or file.py:func.",
    )
    subset_name: str | None = key(None, "Subset (configuration) of a hub dataset.")
    split: str = key("train", "Split of the dataset.")
    max_rows: int | None = key(None, "Use only the first rows; needed for generators.", unit="rows", ge=1)
    args: Args = key({}, "Arguments of a generator, e.g. of reasoning_gym://chain_sum.")
    format: FormatConfig = section(FormatConfig, "Meaning of the columns.")
    default_workflow_type: str | None = key(None, "Workflow of the rows.  Null: explorer_input.default_workflow_type.")
    workflow_args: Args = key({}, "Arguments of the workflow.")
    default_reward_fn_type: str | None = key(None, "Reward of the rows.  Null: explorer_input.default_reward_fn_type.")
    reward_fn_args: Args = key({}, "Arguments of the reward.")
    rollout_args: RolloutArgs = section(RolloutArgs, "Sampling of this taskset; wins over `model`.")
    repeat_times: int | None = key(
        None, "Runs of each task.  Null: algorithm.repeat_times for training, 1 for evaluation.", unit="runs", ge=1
    )
    data_selector: DataSelectorConfig = section(
        DataSelectorConfig,
        "Order of the rows (task_selector is another name).",
        validation_alias=AliasChoices("data_selector", "task_selector"),
    )
    weight: float | None = key(None, "Share of this taskset in the mixture.  Null: proportional to its length.", gt=0)


class ExplorerInputConfig(Section):
    """Tasks to train on and tasks to evaluate on."""

    taskset: TasksetConfig | None = key(None, "The one taskset to train on; or use tasksets.")
    tasksets: tuple[TasksetConfig, ...] = key((), "Several tasksets to train on, mixed by weight.")
    eval_tasksets: tuple[TasksetConfig, ...] = key((), "Held-out tasksets.", on_resume="safe")
    default_workflow_type: str | None = key(None, "Workflow of tasksets that name none.")
    default_eval_workflow_type: str | None = key(
        None, "Workflow of evaluation tasksets that name none.  Null: default_workflow_type."
    )
    default_reward_fn_type: str | None = key(None, "Reward of tasksets that name none.")


class ExperienceBufferConfig(Section):
    """The store between explorer and trainer."""

    name: Name = key("experience_buffer", "Name of the buffer.")
    storage_type: Annotated[Literal["sql", "queue", "file"], IgnoreCase] = key(
        "sql", "sql: in the database; queue: memory with write-ahead segments; file: one segment per group."
    )
    path: str | None = key(
        None,
        "sql: database URL (null: SQLite in the run folder).  queue, file: folder (null: in the run folder; none: queue in memory only).",
    )
    capacity: int = key(10000, "Groups that may wait before the explorer is held back.", unit="groups", on_resume="safe", ge=1)
    max_read_timeout: float = key(1800.0, "How long the trainer waits for a batch.", unit="s", on_resume="safe", gt=0)
    durability: Annotated[Literal["process", "power"], IgnoreCase] = key(
        "process",
        "What an acknowledged experience survives: the death of every process, or also of the machine.",
        on_resume="safe",
    )


class TrainerInputConfig(Section):
    """What the trainer reads."""

    experience_buffer: ExperienceBufferConfig = section(ExperienceBufferConfig, "The main channel from explorer to trainer.")


class BufferConfig(Section):
    """Tasks, experiences and the size of a step."""

    batch_size: int = key(1, "Tasks per explore step; each becomes a group of repeat_times runs.", unit="tasks", ge=1)
    train_batch_size: int | None = key(
        None, "Experiences per train step.  Null or 0: all of batch_size accepted groups.", unit="experiences", ge=0
    )
    total_epochs: int | None = key(
        None,
        "Passes over the training tasksets.  Null: as many as total_steps or trainer.total_steps need, else 1.",
        unit="epochs",
        on_resume="safe",
        ge=1,
    )
    total_steps: int | None = key(None, "Explore steps; wins over total_epochs.", unit="explore steps", on_resume="safe", ge=1)
    explorer_input: ExplorerInputConfig = section(ExplorerInputConfig, "Tasksets.")
    trainer_input: TrainerInputConfig = section(TrainerInputConfig, "The experience buffer.")
    on_short_batch: OnShortBatch = key(
        "stop", "When a batch cannot be filled: stop the run, train on what is there, or carry it over to the next step."
    )
    max_refill: int | None = key(
        None, "Groups replaced per explore step when runs fail or are filtered.  Null: 3 x batch_size.", unit="groups", ge=0
    )
    resume_rows: Annotated[Literal["orphan", "keep"], IgnoreCase] = key(
        "orphan", "Rows beyond the checkpoint that a run resumes from: set aside, or keep as off-policy data."
    )
