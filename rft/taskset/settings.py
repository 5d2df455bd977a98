"""Settings of tasksets, task pipeline and offline data.  Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from rft.types.ids import SEED
from rft.types.task import SamplingArgs

FILES = (".jsonl", ".ndjson", ".json", ".csv", ".parquet")


@dataclass(frozen=True, kw_only=True)
class FormatSettings:
    """The meaning of a row's columns."""

    prompt_key: str = "prompt"
    response_key: str = "response"
    messages_key: str = "message"
    system_prompt_key: str | None = None
    system_prompt: str | None = None
    tools_key: str = "tools"
    image_key: str = ""  # column of images; "" = none
    workflow_key: str = ""
    reward_fn_key: str = ""
    prompt_type: str = "plaintext"  # "plaintext" reads prompt_key, "messages" reads messages_key
    # "verl": rows also get their data source under the name `data_source`
    preset: str | None = None
    data_source_key: str = "data_source"  # preset verl: column of the data source
    chat_template: str | None = None  # None = the engine's
    chat_template_args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PromptLimit:
    """Leaves out (or refuses) rows whose chat has more than `max_tokens` tokens under this
    tokenizer and template.
    """

    model_path: str  # folder with tokenizer.json
    max_tokens: int
    refuse: bool = False  # the first such row is an error; rows without a chat are skipped
    chat_template: str | None = None  # None = the tokenizer's own
    chat_template_args: dict[str, Any] = field(default_factory=dict)
    weights_path: str | None = None  # folder with the image processor; None = model_path
    image_processor_args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TaskOperatorSettings:
    """One operator of the task pipeline."""

    name: str  # a plugin of kind "task_operator"
    args: dict[str, Any] = field(default_factory=dict)
    key: str = ""  # configuration key of the operator


@dataclass(frozen=True, kw_only=True)
class TaskPipelineSettings:
    """Processing of rows once before the run, and the output file."""

    inputs: tuple[str, ...]
    output: str  # jsonl file
    operators: tuple[TaskOperatorSettings, ...] = ()
    target_fields: tuple[str, ...] = ()  # columns that operators see; empty = all
    order: str = "keep"  # keep | shuffle | sort
    priority_weights: dict[str, float] = field(default_factory=dict)  # of score columns, for sort
    top_k: int = -1  # keep the first rows of that order; -1 = all
    seed: int = SEED
    num_process: int = 1
    plugin_dirs: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TasksetSettings:
    """One taskset: the source of its rows, and how each is played."""

    name: str
    path: str  # local file or folder, HF dataset id, reasoning_gym://<name>, database URL
    storage_type: str = "file"  # file | sql | reasoning_gym | python
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
    feature_keys: tuple[str, ...] = ()  # numeric columns used by the selector
    seed: int = SEED
    weight: float | None = None  # share in the mixture; None = proportional to length
    is_eval: bool = False
    # arguments of a generator such as reasoning_gym or of a reader, or {table, query} of sql
    args: dict[str, Any] = field(default_factory=dict)
    max_rows: int | None = None
    # skip and count unreadable rows instead of refusing the taskset
    skip_bad_rows: bool = False
    prompt_limit: PromptLimit | None = None  # None = no limit; prompts are not counted
    key: str = field(default="", compare=False)  # configuration key of the taskset
    # left | right | middle: where the engine cuts an overlong first prompt
    prompt_truncation: str = "error"
    num_process: int = 1  # processes that count prompt tokens


@dataclass(frozen=True, kw_only=True)
class OfflineDataSettings:
    """A data set for offline training: its rows, their kind, and their conversion to tokens."""

    rows: TasksetSettings  # source, columns and order of the rows
    kind: Literal["chats", "texts", "pairs", "labels"]
    model_path: str  # folder with tokenizer.json
    max_tokens: int  # of one row; for a pair, of its longer side
    # the model's folder, with end tokens and image processor; None = model_path
    weights_path: str | None = None
    image_processor_args: dict[str, Any] = field(default_factory=dict)
    chat_template: str | None = None  # None = the tokenizer's own
    chat_template_args: dict[str, Any] = field(default_factory=dict)
    every_turn: bool = False  # chats: train all answers, not only the last
    chosen_key: str = "chosen"
    rejected_key: str = "rejected"
    label_key: str = "label"
    # leave out overlong rows instead of refusing the data set
    filter_overlong: bool = False
