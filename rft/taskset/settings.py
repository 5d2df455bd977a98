"""What the taskset room needs to know.  Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from rft.types.task import SamplingArgs


@dataclass(frozen=True, kw_only=True)
class FormatSettings:
    """Which columns of a row mean what."""

    prompt_key: str = "prompt"
    response_key: str = "response"
    messages_key: str = "message"
    system_prompt_key: str | None = None
    system_prompt: str | None = None
    tools_key: str = "tools"
    workflow_key: str = ""
    reward_fn_key: str = ""
    prompt_type: str = "plaintext"  # "plaintext" reads prompt_key, "messages" reads messages_key
    preset: str | None = None  # "verl": rows also keep their data source under the name `data_source`
    data_source_key: str = "data_source"  # preset verl: column of the data source
    chat_template: str | None = None  # None = the engine's
    chat_template_args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PromptLimit:
    """Rows whose chat has more than `max_tokens` tokens under this tokenizer and template are left out."""

    model_path: str  # folder with tokenizer.json
    max_tokens: int
    chat_template: str | None = None  # None = the tokenizer's own
    chat_template_args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TasksetSettings:
    """One taskset: where its rows come from and what is done with each."""

    name: str
    path: str  # local file or folder, HF dataset id, or reasoning_gym://<name>
    storage_type: str = "file"
    subset_name: str | None = None
    split: str = "train"
    format: FormatSettings = field(default_factory=FormatSettings)
    workflow: str
    workflow_args: dict[str, Any] = field(default_factory=dict)
    reward: str | None = None
    reward_args: dict[str, Any] = field(default_factory=dict)
    sampling: SamplingArgs = field(default_factory=SamplingArgs)
    num_runs: int = 1
    selector: str = "sequential"  # sequential | shuffle | random
    seed: int = 42
    weight: float | None = None  # share in the mixture; None = proportional to length
    is_eval: bool = False
    args: dict[str, Any] = field(default_factory=dict)  # arguments of a generator such as reasoning_gym
    max_rows: int | None = None
    prompt_limit: PromptLimit | None = None  # None = no row is left out


@dataclass(frozen=True, kw_only=True)
class GivenSettings:
    """A data set that is trained on as it is: which rows, what each is, and how it becomes tokens."""

    rows: TasksetSettings  # where they come from, the columns of a chat, and their order
    kind: Literal["chats", "texts", "pairs"]
    model_path: str  # folder with tokenizer.json
    max_tokens: int  # of one row; of a pair's longer side
    chat_template: str | None = None  # None = the tokenizer's own
    chat_template_args: dict[str, Any] = field(default_factory=dict)
    every_turn: bool = False  # of a chat: train all answers, not only the last
    chosen_key: str = "chosen"
    rejected_key: str = "rejected"
    filter_overlong: bool = False  # leave out rows that are too long, instead of refusing the data set
