"""What clients send beside OpenAI's requests, checked by pydantic; errors name the field, in
OpenAI's form.

Depends on no sessions.  Invariant: a body is understood wholly or refused.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from rft.reward.base import checked
from rft.types.completion import Score
from rft.types.ids import MAX_REWARD

MAX_METADATA = 16 << 10  # bytes of its JSON
Value = Annotated[float, Field(ge=-MAX_REWARD, le=MAX_REWARD, allow_inf_nan=False, strict=True)]
Text = Annotated[str, Field(max_length=200, pattern=r"^[^\x00-\x1f\x7f]*$")]


class ServeBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class OpenSession(ServeBody):
    """POST /v1/sessions."""

    task_id: Text = ""
    metadata: dict[str, Any] = {}
    ttl: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None

    @field_validator("metadata")
    @classmethod
    def _small(cls, value: dict[str, Any]) -> dict[str, Any]:
        if (size := len(json.dumps(value))) > MAX_METADATA:
            raise ValueError(f"has {size} bytes; at most {MAX_METADATA} are kept")
        return value


class RewardBody(ServeBody):
    """POST /v1/sessions/{id}/reward.  `message`: the id of one answer; `final`: no reward of the
    whole session follows.
    """

    reward: Value | Annotated[dict[Text, Value], Field(min_length=1)]
    message: Text | None = None
    final: bool = False

    @field_validator("reward")
    @classmethod
    def _storable(cls, value: float | dict[str, float]) -> float | dict[str, float]:
        checked(value)  # parts can add up to more than each may be
        return value

    @property
    def score(self) -> Score:
        return checked(self.reward)


class Feedback(ServeBody):
    """POST /feedback, as Trinity-RFT's client sends it: these answers are one run of a task."""

    reward: Value
    msg_ids: Annotated[list[Text], Field(min_length=1, max_length=1000)]
    task_id: Text | None = None  # without one: that of the answers' session
    run_id: Text | int | None = None  # a label of the client's


def call_of(message: str) -> str:
    """The id of a call in that of its answer: "chatcmpl-s12-0" is of call "s12-0"."""
    return re.sub("^(chatcmpl-|cmpl-|resp_|msg_)|_i$", "", message)
