"""Sections `buffer` and `data_processor`: tasks, experiences, the size of a step, and what is done
to rows on their way.
"""

from __future__ import annotations

from typing import Annotated, Literal

from rft.buffer.settings import STORAGES, BufferSettings, ReplaySettings
from rft.schema import units
from rft.schema.base import (
    Args,
    Diagnostics,
    IgnoreCase,
    Name,
    Section,
    key,
    safe_key,
    section,
    shipped,
)
from rft.taskset.settings import (
    FILES,
    FormatSettings,
    OfflineDataSettings,
    TaskPipelineSettings,
    TasksetSettings,
)

OnShortBatch = Annotated[Literal["stop", "train", "carry"], IgnoreCase]


class FormatConfig(Section):
    """What the columns of a row mean.  A key with dots goes into a column of mappings:
    reward_model.ground_truth.
    """

    prompt_type: Annotated[Literal["plaintext", "messages"], IgnoreCase] = key(
        FormatSettings.prompt_type,
        "plaintext: prompt_key holds the question; messages: messages_key holds a chat.",
    )
    prompt_key: str = key(
        FormatSettings.prompt_key, "Column of the question; with preset verl of the chat."
    )
    response_key: str = key(FormatSettings.response_key, "Column of the gold answer.")
    messages_key: str = key(
        FormatSettings.messages_key, "Column of the chat, a list of {role, content}."
    )
    tools_key: str = key(FormatSettings.tools_key, "Column of the tools, a list or JSON text.")
    image_key: str = key(
        FormatSettings.image_key,
        "Column of the images: files, paths, data URLs, or a list of them, for models that read images "
        "(tasks: on engine_type vllm or transformers); empty: none.",
    )
    system_prompt_key: str | None = key(None, "Column of the system prompt.")
    system_prompt: str | None = key(None, "System prompt of all rows.")
    chat_template: str | None = key(
        None, "Chat template (Jinja text) of this taskset.  Null: the model's."
    )
    chat_template_args: Args = key(
        {},
        "Values for the chat template, e.g. {enable_thinking: false}; they win over those of "
        "`model`.",
    )
    enable_thinking: bool | None = key(
        None,
        "Value of `enable_thinking` for chat templates that know it.  Null: model.enable_thinking.",
    )


class TaskFormatConfig(FormatConfig):
    """What the columns of a task mean."""

    preset: Annotated[Literal["verl"], IgnoreCase] | None = key(
        None,
        "verl: the other keys take the values of veRL's data where they are not written: the chat "
        "in `prompt`, the gold answer in "
        "`reward_model.ground_truth`, the reward chosen by `data_source` unless one is named.",
    )
    workflow_key: str = key("", "Column that names the row's workflow; empty: none.")
    reward_fn_key: str = key(
        "",
        "Column that names the row's reward, or veRL's data source, which has a shipped reward; "
        "empty: none.",
    )

    def rules(self, at: str, diagnostics: Diagnostics) -> None:
        if self.preset is None:
            _refuse_other_column(self, at, diagnostics)


def _refuse_other_column(section: FormatConfig, at: str, diagnostics: Diagnostics) -> None:
    """Refuse the column that the other prompt_type reads."""
    unread, other = (
        ("messages_key", "messages")
        if section.prompt_type == "plaintext"
        else ("prompt_key", "plaintext")
    )
    section.refuse_options(at, (unread,), f"prompt_type {other}", "prompt_type", diagnostics)


class DataFormatConfig(FormatConfig):
    """What the columns of a row to train on mean: chats (sft), texts (cpt), pairs of answers (dpo),
    answers with labels (kto).
    """

    prompt_type: Annotated[Literal["plaintext", "messages"], IgnoreCase] = key(
        FormatSettings.prompt_type,
        "plaintext: prompt_key holds a question and response_key its answer; cpt: prompt_key holds "
        "the text.  messages: messages_key "
        "holds a chat that ends with the answer; dpo: the chat before the two answers.",
    )
    chosen_key: str = key(
        OfflineDataSettings.chosen_key,
        "dpo: column of the better answer, a text or a chat that ends with it.",
    )
    label_key: str = key(
        OfflineDataSettings.label_key,
        "kto: column that says whether the answer is good, true or false.",
    )
    rejected_key: str = key(
        OfflineDataSettings.rejected_key,
        "dpo: column of the worse answer, a text or a chat that ends with it.",
    )
    enable_concatenated_multi_turn: bool = key(
        False,
        "sft: train every answer of a chat.  False: only the last one; the earlier ones are "
        "context.",
    )

    def rules(self, at: str, diagnostics: Diagnostics) -> None:
        _refuse_other_column(self, at, diagnostics)


class RolloutArgs(Section):
    """Sampling of one taskset; a key that is not written is taken from `model`."""

    temperature: float | None = key(
        None, "Sampling temperature; 0 = greedy (evaluation only).", ge=0, le=10
    )
    top_p: float | None = key(None, "Nucleus sampling; 1 = off.", gt=0, le=1)
    top_k: int | None = key(None, "Sample from the k likeliest tokens; -1 = off.", ge=-1)
    min_p: float | None = key(
        None,
        "Drop tokens below this fraction of the likeliest token's probability; 0 = off.",
        ge=0,
        le=1,
    )
    presence_penalty: float | None = key(None, "OpenAI's presence penalty; 0 = off.", ge=-2, le=2)
    frequency_penalty: float | None = key(None, "OpenAI's frequency penalty; 0 = off.", ge=-2, le=2)
    repetition_penalty: float | None = key(None, "Penalty on tokens already seen; 1 = off.", gt=0)
    max_tokens: units.Tokens | None = key(None, "Longest response.")
    min_tokens: units.TokensOr0 | None = key(None, "No end before this many tokens.")
    stop: tuple[str, ...] = key((), "Texts that end a response.")
    seed: int | None = key(None, "Seed of every request.  Null: derived from the run's place.")


class DataSelectorConfig(Section):
    """The order in which rows are attempted."""

    selector_type: str = key(
        TasksetSettings.selector,
        "Order of the rows: sequential (file order), shuffle (another permutation in each pass), "
        "random (drawn for each batch), "
        "offline_easy2hard (sorted by feature_keys, the largest first), difficulty_based (chosen "
        "by the pass rates seen so far; "
        "training only), or your own selector.",
    )
    seed: int = key(TasksetSettings.seed, "Seed of that order.", ge=0)
    feature_keys: tuple[str, ...] = key(
        (),
        "Numeric columns by which a selector orders the rows; difficulty_based: pass rates of a "
        "weaker and of a stronger model.",
    )
    kwargs: Args = key(
        {},
        "Arguments of the selector; difficulty_based: m, lamb, rho, target_reward, tau, do_sample, "
        "adaptive_rho.",
    )


class TasksetConfig(Section):
    """One source of tasks."""

    name: Name | None = key(None, "Unique name, used in metrics.  Null: the last part of `path`.")
    path: str = key(
        ...,
        "Local file or folder (jsonl, json, parquet, csv), a hub dataset in the local cache, "
        "reasoning_gym://NAME, "
        "or with storage_type sql a SQLite file or database URL.",
    )
    storage_type: str = key(
        TasksetSettings.storage_type,
        "file: what `path` names; reasoning_gym: the generator of that name; python: a function "
        "pkg.module:func or file.py:func; "
        "sql: a table or query, see args; or your own task source: its name, pkg.module:Name or "
        "path/file.py:Name, a class with __len__ and __getitem__(i), which gives row i as a "
        "mapping.",
    )
    subset_name: str | None = key(None, "Subset (configuration) of a hub dataset.")
    split: str = key(TasksetSettings.split, "Split of the dataset.")
    max_rows: units.DataRows | None = key(
        None,
        "Use only the first rows; needed for generators.",
    )
    filter_overlong_prompts: bool = key(
        False,
        "Leave out rows whose chat, rendered and tokenized, has more than model.max_prompt_tokens "
        "tokens; of the first max_rows.",
    )
    skip_bad_rows: bool = key(
        TasksetSettings.skip_bad_rows,
        "Leave out rows that cannot be read or lack a column and report how many, instead of "
        "refusing the taskset.",
    )
    args: Args = key(
        {},
        "Arguments of a generator, e.g. of reasoning_gym://chain_sum, or of a reader; of "
        "storage_type sql: table (else the taskset's "
        "name) or query, and order_by.",
    )
    format: TaskFormatConfig = section(TaskFormatConfig, "Meaning of the columns.")
    default_workflow_type: str | None = key(
        None, "Workflow of the rows.  Null: explorer_input.default_workflow_type."
    )
    workflow_args: Args = key({}, "Arguments of the workflow.")
    default_reward_fn_type: str | None = key(
        None, "Reward of the rows.  Null: explorer_input.default_reward_fn_type."
    )
    reward_fn_args: Args = key({}, "Arguments of the reward.")
    rollout_args: RolloutArgs = section(RolloutArgs, "Sampling of this taskset; wins over `model`.")
    repeat_times: units.Runs | None = key(
        None, "Runs of each task.  Null: algorithm.repeat_times for training, 1 for evaluation."
    )
    data_selector: DataSelectorConfig = section(
        DataSelectorConfig,
        "Order of the rows.",
    )

    def rules(self, at: str, diagnostics: Diagnostics) -> None:
        if self.storage_type.lower() == "file" and self.path.lower().endswith(FILES):
            self.warn_unused(
                at,
                ("split", "subset_name", "args"),
                f"{self.path} is one file, whose rows are taken as they are",
                diagnostics,
            )


class TrainTasksetConfig(TasksetConfig):
    """One source of tasks to train on."""

    weight: float | None = key(
        None, "Share of this taskset in the mixture.  Null: proportional to its length.", gt=0
    )


class ExplorerInputConfig(Section):
    """Tasks to train on and tasks to evaluate on."""

    taskset: TrainTasksetConfig | None = key(None, "The one taskset to train on; or use tasksets.")
    tasksets: tuple[TrainTasksetConfig, ...] = key(
        (), "Several tasksets to train on, mixed by weight."
    )
    eval_tasksets: tuple[TasksetConfig, ...] = safe_key((), "Held-out tasksets.")
    default_workflow_type: str | None = key(None, "Workflow of tasksets that name none.")
    default_eval_workflow_type: str | None = key(
        None, "Workflow of evaluation tasksets that name none.  Null: default_workflow_type."
    )
    default_reward_fn_type: str | None = key(None, "Reward of tasksets that name none.")


class ReplayBufferConfig(Section):
    """Reading by priority, and training on experiences more than once."""

    implied = ("priority_fn_args",)

    enable: bool = key(
        False, "Read the groups of highest priority first.  False: the oldest first, each once."
    )
    priority_fn: str = key(
        ReplaySettings.priority_fn,
        "Priority of a group: linear_decay, decay_limit_randomization, or your own function.  It "
        "sees all rows of the group; their "
        "version is that of the oldest weights.",
    )
    priority_fn_args: Args = key(
        {"decay": 2.0}, "Single arguments of priority_fn that differ from its defaults."
    )
    reuse_cooldown_time: units.Seconds | None = key(
        None,
        "How long an experience must wait before it may be used again.  Null: it is used once.",
    )
    max_uses: units.TrainSteps | None = key(
        None,
        "Train steps that may use an experience.  Null: use_count_limit of priority_fn, else no "
        "limit; without reuse_cooldown_time 1.",
    )

    def rules(self, at: str, diagnostics: Diagnostics) -> None:
        if not self.enable:
            self.warn_unused(
                at,
                type(self).model_fields,
                "enable is false: each experience is trained once, oldest first",
                diagnostics,
            )


class ExperienceBufferConfig(Section):
    """The store between explorer and trainer."""

    implied = ("storage_type",)

    name: Name = key(BufferSettings.name, "Name of the buffer.")
    storage_type: Annotated[Literal["sql", "queue", "file"] | str, shipped(*STORAGES)] = key(
        BufferSettings.storage_type,
        "sql: in the database; queue: memory with write-ahead segments; file: one segment per "
        "group; or your own storage: "
        "pkg.module:Name, path/file.py:Name.",
    )
    storage_args: Args = key({}, "Arguments of your own storage.")
    path: str | None = key(
        None,
        "Database URL: postgresql://USER:PASSWORD@HOST:PORT/DATABASE or sqlite:///FILE, with any "
        "storage_type; the run has a schema of its "
        "own in PostgreSQL.  Else sql: an SQLite file; queue, file: folder (none: queue in memory "
        "only).  Null: all in the run folder.  "
        "Mode train: the data set, a file (jsonl, json, csv, parquet), a folder with one for each "
        "split, or a hub id.",
    )
    capacity: units.Groups = safe_key(
        BufferSettings.capacity, "Groups that may wait in the buffer before the explorer is paused."
    )
    capacity_bytes: units.Bytes = safe_key(
        BufferSettings.capacity_bytes,
        "Payload that may wait in the buffer before the explorer is paused.",
    )
    max_read_timeout: units.Seconds = safe_key(1800.0, "How long the trainer waits for a batch.")
    durability: Annotated[Literal["process", "power"], IgnoreCase] = safe_key(
        BufferSettings.durability,
        "What an acknowledged experience survives: a crash of every process, or of the machine "
        "too.",
    )
    on_damaged_payload: Annotated[Literal["stop", "explain"], IgnoreCase] = safe_key(
        BufferSettings.on_damaged_payload,
        "When acknowledged payload is missing or damaged: stop the run, or continue without these "
        "groups, which are counted as "
        "payload_damaged.  At startup their tasks are explored again; later on, the train batch is "
        "smaller by that much.",
    )
    replay_buffer: ReplayBufferConfig = section(
        ReplayBufferConfig, "Training on experiences more than once."
    )
    max_retry_times: units.Tries = safe_key(
        BufferSettings.max_retry_times,
        "How often a locked database is retried, after one immediate retry.  A PostgreSQL server "
        "that goes away during a run is waited for, ten minutes at most.  0: never.",
    )
    max_retry_interval: units.Pause = safe_key(
        BufferSettings.max_retry_interval_s,
        "Pause before the first of these retries; it doubles each time, up to 10 s.",
    )
    split: str | None = key(
        None, "Mode train: split of the data set that is trained on.  Null: train."
    )
    eval_split: str | None = safe_key(
        None,
        "Mode train: split whose loss is computed but never trained on (trainer.eval_interval).  "
        "Null: none.",
    )
    subset_name: str | None = key(None, "Mode train: subset of a hub data set.")
    format: DataFormatConfig = section(DataFormatConfig, "Mode train: meaning of the columns.")
    data_selector: DataSelectorConfig = section(
        DataSelectorConfig, "Mode train: order of the rows."
    )
    filter_overlong: bool = key(
        False,
        "Mode train: leave out rows of more than model.max_model_len tokens and report how many.  "
        "False: they are an error.",
    )

    def rules(self, at: str, diagnostics: Diagnostics) -> None:
        if (self.path or "").lower().endswith(FILES):
            self.warn_unused(
                at,
                ("split", "subset_name"),
                f"{self.path} is one file, whose rows are taken as they are",
                diagnostics,
            )


class AuxiliaryBufferConfig(ExperienceBufferConfig):
    """Further data for the trainer, e.g. expert answers that are mixed in."""

    path: str = key(..., "Local file or folder, or a hub data set in the local cache.")


class TrainerInputConfig(Section):
    """What the trainer reads."""

    experience_buffer: ExperienceBufferConfig = section(
        ExperienceBufferConfig, "The main channel from explorer to trainer."
    )
    auxiliary_buffers: dict[Name, AuxiliaryBufferConfig] = key(
        {}, "Further data for the trainer, by name, e.g. sft_dataset."
    )
    replay_run: str | None = key(
        None,
        "Folder of another run.  mode: train then trains on the rows of its steps, each step on "
        "the rows that its step of the same number "
        "used, without engines.  With the configuration of that run and its seed the weights "
        "become the same.",
    )


class BufferConfig(Section):
    """Tasks, experiences and the size of a step."""

    batch_size: units.Tasks = key(
        1, "Tasks per explore step; each becomes a group of repeat_times runs."
    )
    train_batch_size: int | None = key(
        None,
        "Experiences per train step.  Null or 0: every row of batch_size groups.",
        unit="experiences",
        ge=0,
    )
    total_epochs: units.Epochs | None = safe_key(
        None,
        "Passes over the training tasksets.  Null: as many as total_steps or trainer.total_steps "
        "need, else 1.",
    )
    total_steps: units.ExploreSteps | None = safe_key(
        None, "Explore steps; wins over total_epochs."
    )
    total_tasks: units.Tasks | None = safe_key(
        None, "Tasks in all: total_steps is this divided by batch_size, rounded up."
    )
    explorer_input: ExplorerInputConfig = section(ExplorerInputConfig, "Tasksets.")
    trainer_input: TrainerInputConfig = section(TrainerInputConfig, "The experience buffer.")
    on_short_batch: OnShortBatch = safe_key(
        BufferSettings.on_short_batch,
        "When a batch cannot be filled: stop the run, train on what has arrived, or carry it over "
        "to the next step.",
    )
    max_refill: int | None = safe_key(
        None,
        "Groups replaced per explore step when runs fail or are filtered.  Null: 3 x batch_size.",
        unit="groups",
        ge=0,
    )
    resume_rows: Annotated[Literal["orphan", "keep"], IgnoreCase] | None = key(
        None,
        "Rows beyond the checkpoint that a run resumes from: set aside and explore again, or keep "
        "as off-policy data.  Null: keep where a "
        "service samples, which keeps them always, else orphan.",
    )


class OperatorConfig(Section):
    """One operator and its arguments."""

    name: str = key(..., "Name of the operator.", min_length=1)
    args: Args = key({}, "Its arguments.")


class ExperiencePipelineConfig(Section):
    """What happens to the experiences of every group between explorer and buffer."""

    operators: tuple[OperatorConfig, ...] = key(
        (),
        "The operators, in this order: those that change rewards, then those that look at them, "
        "then those that drop rows or groups.",
    )
    save_input: bool = safe_key(False, "Keep a copy of the experiences as the explorer made them.")
    input_save_path: str | None = safe_key(
        None,
        "File (.jsonl) or folder for that copy.  Null: buffer/explorer_output.jsonl in the run "
        "folder.",
    )


class PriorityWeightsConfig(Section):
    """What makes a row come early: weighted sum of its scores."""

    difficulty: float = key(-0.7, "Weight of how hard it is.")
    diversity: float = key(0.8, "Weight of how much it differs from the others.")
    usage_frequency: float = key(-0.5, "Weight of how often it was used.")
    quality: float = key(1.0, "Weight of its quality.")


class PipelineOutputConfig(Section):
    """The file that takes the result of the task pipeline."""

    path: str = key(..., "File (.jsonl), which must not exist.")


class TaskPipelineConfig(Section):
    """Operators on rows, once before the run; the result is a file, which a taskset of the run
    reads.
    """

    operators: tuple[OperatorConfig, ...] = key((), "The operators, in this order.")
    num_process: int = safe_key(
        4,
        "Processes that work on the rows, and that count tokens for filter_overlong_prompts.",
        unit="processes",
        ge=1,
    )
    config_path: str | None = key(
        None, "YAML file with the key `operators`; these come before the ones written here."
    )
    inputs: tuple[str, ...] = key(
        (), "Files with the rows (jsonl, json, csv, parquet), one after the other."
    )
    output: PipelineOutputConfig | None = key(
        None, "File that takes the result.  Null: that of the first training taskset."
    )
    target_fields: tuple[str, ...] = key((), "Columns that the operators see.  Empty: all.")
    order: Annotated[Literal["keep", "shuffle", "sort"], IgnoreCase] | None = key(
        None,
        "Order of the result: as it came, shuffled by `seed`, or by priority.  Null: sort with "
        "priority_weights or top_k, else keep.",
    )
    priority_weights: PriorityWeightsConfig = section(
        PriorityWeightsConfig,
        "What makes a row come early: weights of the columns of these names, each scaled to 0 to "
        "1.",
    )
    top_k: int = key(
        TaskPipelineSettings.top_k,
        "Keep the first rows of that order; -1 = all.",
        unit="rows",
        ge=-1,
    )


class DataProcessorConfig(Section):
    """What is done to tasks and experiences on their way."""

    experience_pipeline: ExperiencePipelineConfig = section(
        ExperiencePipelineConfig, "Operators on experiences."
    )
    task_pipeline: TaskPipelineConfig | None = key(
        None, "Operators on the rows of a taskset, once before the run."
    )
