"""Section `data_processor`: what is done to tasks before a run and to experiences before they are trained."""

from __future__ import annotations

from rft.config.schema.base import Args, Later, Section, key, section
from rft.config.schema.buffer import TasksetConfig

_TASKS = "prepare the rows beforehand and name the file in a taskset's path"
_EXPERIENCES = "change rewards in a reward function, the order of the rows with data_selector"


class OperatorConfig(Section):
    """One operator and its arguments."""

    name: str = key(..., "Name of the operator.", min_length=1)
    args: Args = key({}, "Its arguments.")


class ExperiencePipelineConfig(Section):
    """Operators on the experiences of every explore step, in this order, before their advantages."""

    operators: tuple[OperatorConfig, ...] = key((), "The operators.", later=Later(_EXPERIENCES))
    save_input: bool = key(
        False, "Keep a copy of the experiences as the explorer made them.", on_resume="safe",
        later=Later("the experience buffer keeps them until they are trained", True),
    )  # fmt: skip
    input_save_path: str | None = key(
        None, "A jsonl file or database URL for that copy.  Null: in the run folder.", on_resume="safe",
        later=Later("the experience buffer keeps them until they are trained", True),
    )  # fmt: skip
    inputs: dict[str, str] = key({}, "Further experiences that join the stream: name and path.", later=Later(_EXPERIENCES))
    output: str | None = key(
        None, "Where the results go.  Null: the experience buffer.", later=Later("they go to the experience buffer")
    )


class PriorityWeightsConfig(Section):
    """What makes a row come early: weighted sum of its scores."""

    difficulty: float = key(-0.7, "Weight of how hard it is.")
    diversity: float = key(0.8, "Weight of how unlike the others it is.")
    usage_frequency: float = key(-0.5, "Weight of how often it was used.")
    quality: float = key(1.0, "Weight of its quality.")


class TaskPipelineConfig(Section):
    """Operators on the rows of a taskset, once before the run."""

    operators: tuple[OperatorConfig, ...] = key((), "The operators.", later=Later(_TASKS))
    num_process: int = key(
        4, "Processes that work on the rows.", unit="processes", on_resume="safe", ge=1,
        later=Later("rows are read and filtered by one process", True),
    )  # fmt: skip
    config_path: str | None = key(None, "File with the operators.", later=Later(_TASKS))
    inputs: tuple[str, ...] = key((), "Files with the rows.", later=Later(_TASKS))
    output: TasksetConfig | None = key(
        None, "Taskset that takes the result; its path must not exist.  Null: the first training taskset.", later=Later(_TASKS)
    )
    target_fields: tuple[str, ...] = key((), "Columns that the operators see.  Empty: all.", later=Later(_TASKS))
    priority_weights: PriorityWeightsConfig = section(PriorityWeightsConfig, "What makes a row come early.", later=Later(_TASKS))
    top_k: int = key(-1, "Keep the first rows of that order; -1 = all.", unit="rows", ge=-1, later=Later(_TASKS))


class DataProcessorConfig(Section):
    """What is done to tasks and experiences on their way."""

    experience_pipeline: ExperiencePipelineConfig = section(ExperiencePipelineConfig, "Operators on experiences.")
    task_pipeline: TaskPipelineConfig | None = key(None, "Operators on the rows of a taskset, once before the run.")
