"""Arguments of algorithm parts that a configuration may name before they exist.  Torch-free.

`COMING` has the form of `args.ARGS`; a part that is built moves its model there.  Formulas stand with the part when it comes.
Invariant: no name is in both.
"""

from __future__ import annotations

from pydantic import BaseModel, Field

from rft.algorithm.argbase import Args

# ---------------------------------------------------------------- KL, entropy, choice of the rows


class MixSampleArgs(Args):
    """Rows of an expert's data set beside the policy's own."""

    expert_data_ratio: float = Field(0.5, ge=0, le=1, description="share of the expert's rows in a batch")
    sft_dataset_name: str = Field("sft_dataset", description="which of buffer.trainer_input.auxiliary_buffers holds them")


COMING: dict[tuple[str, str], type[BaseModel]] = {
    ("sample_strategy", "mix"): MixSampleArgs,
}


def coming(kind: str) -> tuple[str, ...]:
    """The names of `kind` that are accepted and not there yet."""
    return tuple(n for k, n in COMING if k == kind)
