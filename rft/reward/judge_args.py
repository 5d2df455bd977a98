"""Arguments of every judge in `reward_fn_args`: model, sampling, limits and costs."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class ModelLimits(BaseModel):
    """Limits shared by all judges that use the same model in this process; their values must be
    equal.

    `cache`: a file, `run` (judge_cache.db in the run's folder) or `off`.  `cost_ledger`: the file
    in which `max_cost_usd` is counted for all its users; null: the cache's file, else that of the
    run.
    """

    cache: str = "run"
    cost_ledger: str | None = None
    max_concurrent: int = Field(32, ge=1)
    requests_per_minute: float | None = Field(None, gt=0)
    tokens_per_minute: float | None = Field(None, gt=0)
    price_per_1k_prompt_tokens: float = Field(0.0, ge=0)  # US dollars
    price_per_1k_completion_tokens: float = Field(0.0, ge=0)
    max_cost_usd: float | None = Field(None, gt=0)

    @property
    def limits(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in ModelLimits.model_fields}


class JudgeArgs(ModelLimits):
    """`judge`: name of the auxiliary model; null: the only one."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    judge: str | None = None
    name: str | None = Field(None, pattern=r"^[\w.-]+$")  # in metrics; null: the reward's name
    temperature: float = Field(0.0, ge=0)
    max_tokens: int = Field(512, ge=1)  # of a reply
    max_retries: int = Field(2, ge=0, le=10)  # after a reply that is unreadable or late
    timeout_s: float = Field(120.0, gt=0)  # of one call
    # longer answers are not shown to the judge and stay unscored
    max_chars: int = Field(32_000, ge=1)
    show_images: bool = True  # the model sees the images of the question
    over_budget: Literal["stop", "unscored"] = "stop"

    @model_validator(mode="after")
    def _priced(self) -> Self:
        if self.max_cost_usd is not None and not (
            self.price_per_1k_prompt_tokens or self.price_per_1k_completion_tokens
        ):
            raise ValueError(
                "max_cost_usd needs price_per_1k_prompt_tokens or price_per_1k_completion_tokens"
            )
        return self
