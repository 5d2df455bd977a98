"""Numbers that count something: type, bounds and unit in one place."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field


def _of(unit: str, **bounds: Any) -> Any:
    return Field(json_schema_extra={"unit": unit}, **bounds)


Seconds = Annotated[float, _of("s", gt=0)]
Pause = Annotated[float, _of("s", ge=0)]
Patience = Annotated[float, _of("s", ge=1)]
Bytes = Annotated[int, _of("bytes", ge=1 << 20)]
Dollars = Annotated[float, _of("USD", ge=0)]
GradientNorm = Annotated[float, _of("gradient norm", gt=0)]
Tokens = Annotated[int, _of("tokens", ge=1)]
TokensOr0 = Annotated[int, _of("tokens", ge=0)]
TrainSteps = Annotated[int, _of("train steps", ge=1)]
TrainStepsOr0 = Annotated[int, _of("train steps", ge=0)]
ExploreSteps = Annotated[int, _of("explore steps", ge=1)]
ExploreStepsOr0 = Annotated[int, _of("explore steps", ge=0)]
Tasks = Annotated[int, _of("tasks", ge=1)]
Groups = Annotated[int, _of("groups", ge=1)]
Runs = Annotated[int, _of("runs", ge=1)]
Rows = Annotated[int, _of("experiences", ge=1)]
RunsOr0 = Annotated[int, _of("runs", ge=0)]
DataRows = Annotated[int, _of("rows", ge=1)]
Batches = Annotated[int, _of("batches", ge=1)]
Epochs = Annotated[int, _of("epochs", ge=1)]
Periods = Annotated[float, _of("periods", gt=0)]
Passes = Annotated[int, _of("passes", ge=1)]
Ranks = Annotated[int, _of("ranks", ge=1)]
Cpus = Annotated[int, _of("CPUs", ge=1)]
Gpus = Annotated[int, _of("GPUs", ge=1)]
Stages = Annotated[int, _of("stages", ge=1)]
Copies = Annotated[int, _of("copies", ge=1)]
EnginesOr0 = Annotated[int, _of("engines", ge=0)]
Adapters = Annotated[int, _of("adapters", ge=1)]
Threads = Annotated[int, _of("threads", ge=1)]
Requests = Annotated[int, _of("requests", ge=1)]
Retries = Annotated[int, _of("retries", ge=0)]
Tries = Annotated[int, _of("tries", ge=0)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
"""What generators of Python, numpy and torch all take."""
