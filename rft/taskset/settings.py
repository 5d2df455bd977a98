"""What the taskset room needs to know.  Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from rft.types.ids import SEED
from rft.types.task import SamplingArgs

FILES = (".jsonl", ".ndjson", ".json", ".csv", ".parquet")


@dataclass(frozen=True, kw_only=True)
class FormatSettings:
    """What the columns of a row mean."""

    prompt_key: str = "prompt"
    response_key: str = "response"
    messages_key: str = "message"
    system_prompt_key: str | None = None
    system_prompt: str | None = None
    tools_key: str = "tools"
    workflow_key: str = ""
    reward_fn_key: str = ""
    prompt_type: str = "plaintext"  # "plaintext" reads prompt_key, "messages" reads messages_key
    # "verl": rows also keep their data source under the name `data_source`
    preset: str | None = None
    data_source_key: str = "data_source"  # preset verl: column of the data source
    chat_template: str | None = None  # None = the engine's
    chat_template_args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PromptLimit:
    """Rows whose chat has more than `max_tokens` tokens under this tokenizer and template are left
    out, or refused.
    """

    model_path: str  # folder with tokenizer.json
    max_tokens: int
    refuse: bool = False  # the first such row is an error; rows without a chat are not counted
    chat_template: str | None = None  # None = the tokenizer's own
    chat_template_args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TaskOperatorSettings:
    """One operator of the task pipeline."""

    name: str  # a plugin of kind "task_operator"
    args: dict[str, Any] = field(default_factory=dict)
    key: str = ""  # where the configuration names it


@dataclass(frozen=True, kw_only=True)
class TaskPipelineSettings:
    """What is done to rows once before the run, and where the result goes."""

    inputs: tuple[str, ...]
    output: str  # jsonl file
    operators: tuple[TaskOperatorSettings, ...] = ()
    target_fields: tuple[str, ...] = ()  # columns that operators see; empty = all
    order: str = "keep"  # keep | shuffle | sort
    priority_weights: dict[str, float] = field(default_factory=dict)  # of score columns, for sort
    top_k: int = -1  # first rows of that order; -1 = all
    seed: int = SEED
    num_process: int = 1
    plugin_dirs: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TasksetSettings:
    """One taskset: where its rows come from and what is done with each."""

    name: str
    path: str  # local file or folder, HF dataset id, reasoning_gym://<name>, database URL
    storage_type: str = "file"  # file | sql | reasoning_gym | python
    reader_path: str | None = None  # file or module with a class of rows; wins over storage_type
    reader_name: str | None = None
    subset_name: str | None = None
    split: str = "train"
    format: FormatSettings = field(default_factory=FormatSettings)
    workflow: str
    workflow_args: dict[str, Any] = field(default_factory=dict)
    reward: str | None = None
    reward_args: dict[str, Any] = field(default_factory=dict)
    sampling: SamplingArgs = field(default_factory=SamplingArgs)
    num_runs: int = 1
    selector: str = "sequential"  # a plugin of kind "selector"
    selector_args: dict[str, Any] = field(default_factory=dict)
    feature_keys: tuple[str, ...] = ()  # columns of numbers that the selector goes by
    seed: int = SEED
    weight: float | None = None  # share in the mixture; None = proportional to length
    is_eval: bool = False
    # of a generator such as reasoning_gym, a reader, or {table, query} of sql
    args: dict[str, Any] = field(default_factory=dict)
    max_rows: int | None = None
    # leave out and count rows that cannot be read, instead of refusing the taskset
    skip_bad_rows: bool = False
    prompt_limit: PromptLimit | None = None  # None = no prompt is counted
    key: str = field(default="", compare=False)  # where the configuration names it
    # left | right | middle: where the engine cuts an opening prompt that is too long
    prompt_truncation: str = "error"
    num_process: int = 1  # processes that count prompt tokens


@dataclass(frozen=True, kw_only=True)
class OfflineDataSettings:
    """A data set that is trained on directly: which rows, what each is, and how it becomes tokens."""

    rows: TasksetSettings  # where they come from, the columns of a chat, and their order
    kind: Literal["chats", "texts", "pairs"]
    model_path: str  # folder with tokenizer.json
    max_tokens: int  # of one row; of a pair's longer side
    # the model's folder, whose end tokens count; None = that of the tokenizer
    weights_path: str | None = None
    chat_template: str | None = None  # None = the tokenizer's own
    chat_template_args: dict[str, Any] = field(default_factory=dict)
    every_turn: bool = False  # of a chat: train all answers, not only the last
    chosen_key: str = "chosen"
    rejected_key: str = "rejected"
    # leave out rows that are too long, instead of refusing the data set
    filter_overlong: bool = False
