"""Sample strategies that the buffer carries out; each is a name with its arguments."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import BeforeValidator, Field

from rft.algorithm.args import Args, NoArgs
from rft.algorithm.base import BufferStrategy, sample_strategy


@sample_strategy("default", args=NoArgs)
class AllRows(BufferStrategy):
    """All rows of the step."""


class StalenessControlArgs(Args):
    """Rows whose weights are too old are left out; the bound is synchronizer.max_staleness."""

    max_staleness: Annotated[
        int | None, BeforeValidator(lambda x: None if x == math.inf else x)
    ] = Field(
        None,
        ge=0,
        description="train steps by which a row may be behind; null or infinity: no bound",
    )


@sample_strategy("staleness_control", args=StalenessControlArgs)
class FreshRows(BufferStrategy):
    """Rows that are young enough."""
