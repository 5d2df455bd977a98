"""Section `data_processor`: what is done to tasks before a run and to experiences before they are trained."""

from __future__ import annotations

from typing import Annotated, Literal

from rft.config.schema.base import Args, IgnoreCase, Moot, Section, key, section
from rft.config.schema.buffer import TasksetConfig

_STREAMS = (
    "experiences come from the explorer and go to the experience buffer; use buffer.trainer_input.auxiliary_buffers for others"
)


class OperatorConfig(Section):
    """One operator and its arguments."""

    name: str = key(..., "Name of the operator.", min_length=1)
    args: Args = key({}, "Its arguments.")


class ExperiencePipelineConfig(Section):
    """What happens to the experiences of every group between explorer and buffer."""

    operators: tuple[OperatorConfig, ...] = key(
        (),
        "The operators, in this order: those that change rewards, then those that look at them, then those that drop rows or groups.",
    )
    save_input: bool = key(False, "Keep a copy of the experiences as the explorer made them.", on_resume="safe")
    input_save_path: str | None = key(
        None, "File (.jsonl) or folder for that copy.  Null: buffer/explorer_output.jsonl in the run folder.", on_resume="safe"
    )
    inputs: dict[str, str] = key({}, "Further experiences that join the stream: name and path.", later=Moot(_STREAMS))
    output: str | None = key(None, "Where the results go.  Null: the experience buffer.", later=Moot(_STREAMS))


class PriorityWeightsConfig(Section):
    """What makes a row come early: weighted sum of its scores."""

    difficulty: float = key(-0.7, "Weight of how hard it is.")
    diversity: float = key(0.8, "Weight of how unlike the others it is.")
    usage_frequency: float = key(-0.5, "Weight of how often it was used.")
    quality: float = key(1.0, "Weight of its quality.")


class TaskPipelineConfig(Section):
    """Operators on rows, once before the run; the result is a file, which a taskset of the run reads."""

    operators: tuple[OperatorConfig, ...] = key((), "The operators, in this order.")
    num_process: int = key(
        4, "Processes that work on the rows, and that count tokens for filter_overlong_prompts.", unit="processes",
        on_resume="safe", ge=1,
    )  # fmt: skip
    config_path: str | None = key(None, "YAML file with the key `operators`; these come before the ones written here.")
    inputs: tuple[str, ...] = key((), "Files with the rows (jsonl, json, csv, parquet), one after the other.")
    output: TasksetConfig | None = key(
        None,
        "Taskset whose path (jsonl) takes the result; it must not exist.  Null: the first training taskset.  Only path has an effect here.",
    )
    target_fields: tuple[str, ...] = key((), "Columns that the operators see.  Empty: all.")
    order: Annotated[Literal["keep", "shuffle", "sort"], IgnoreCase] | None = key(
        None,
        "Order of the result: as it came, shuffled by `seed`, or by priority.  Null: sort with priority_weights or top_k, else keep.",
    )
    priority_weights: PriorityWeightsConfig = section(
        PriorityWeightsConfig, "What makes a row come early: weights of the columns of these names, each scaled to 0 to 1."
    )
    top_k: int = key(-1, "Keep the first rows of that order; -1 = all.", unit="rows", ge=-1)


class DataProcessorConfig(Section):
    """What is done to tasks and experiences on their way."""

    experience_pipeline: ExperiencePipelineConfig = section(ExperiencePipelineConfig, "Operators on experiences.")
    task_pipeline: TaskPipelineConfig | None = key(None, "Operators on the rows of a taskset, once before the run.")
