"""Trinity-RFT's Experience and its id: what its workflows get from a model and give back."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rft.types.completion import Turn


@dataclass
class EID:
    """batch/task/run/step/suffix.  A workflow sets `run` (where it plays several) and `step`; the
    rest is set for it.
    """

    batch: int | str = ""
    task: int | str = ""
    run: int = 0
    step: int = 0
    suffix: str = field(default_factory=lambda: uuid.uuid4().hex[:6])

    @property
    def uid(self) -> str:
        return f"{self.batch}/{self.task}/{self.run}/{self.step}/{self.suffix}"

    @property
    def sid(self) -> str:
        return f"{self.batch}/{self.task}/{self.step}"

    @property
    def rid(self) -> str:
        return f"{self.batch}/{self.task}/{self.run}"

    @property
    def tid(self) -> str:
        return f"{self.batch}/{self.task}"

    def __str__(self) -> str:
        return self.uid

    def to_dict(self) -> dict[str, Any]:
        return {
            "batch": self.batch,
            "task": self.task,
            "run": self.run,
            "step": self.step,
            "suffix": self.suffix,
        }


class CustomField:
    """Not kept."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise ValueError(
            "custom_fields are not kept: put JSON values into `info`; advantages and operators "
            "read them there"
        )


_NOT_KEPT = {
    "token_level_reward": "give one `reward`; tokens are rewarded by an advantage of your own "
    "(docs/howto/algorithm.md)",
    **dict.fromkeys(
        ("advantages", "returns"),
        "they are computed in the trainer, from the rewards (docs/howto/algorithm.md)",
    ),
    **dict.fromkeys(
        ("chosen", "rejected", "chosen_messages", "rejected_messages"),
        "preferences are a data set of mode: train, algorithm_type: dpo (docs/howto/given-data.md)",
    ),
    "multi_modal_inputs": "images and video are not trained",
    "routed_experts": "the engine reports them itself: explorer.rollout_model.router_replay: on",
    "custom_fields": "put JSON values into `info`",
}


class TrinityExperience:
    """One sequence.  `tokens` int32 [T]; the others are of the T - prompt_length tokens after the
    prompt.
    """

    def __init__(
        self,
        *,
        tokens: Any,
        eid: EID | dict[str, Any] | None = None,
        prompt_length: int = 1,
        logprobs: Any = None,
        reward: float | None = None,
        action_mask: Any = None,
        truncate_status: str | None = None,
        info: dict[str, Any] | None = None,
        metrics: dict[str, float] | None = None,
        response_text: str | None = None,
        prompt_text: str | None = None,
        messages: list[dict[str, Any]] | None = None,
        tools: list[dict[str, Any]] | None = None,
        teacher_logprobs: Any = None,
        **not_kept: Any,
    ) -> None:
        for name, value in not_kept.items():
            if name not in _NOT_KEPT:
                raise TypeError(f"Experience has no field {name!r}")
            if value is not None:
                raise ValueError(f"{name} of an Experience is not kept: {_NOT_KEPT[name]}")
        self.eid = EID(**eid) if isinstance(eid, dict) else eid or EID()
        self.tokens = _tensor(tokens, torch.int32)
        self.prompt_length = prompt_length
        # Trinity-RFT's sign of a run without a usable answer
        untrained = action_mask is not None and not any(action_mask)
        if not untrained and not 0 < prompt_length < len(self.tokens):
            raise ValueError(
                f"prompt_length {prompt_length} of {len(self.tokens)} tokens: both prompt and "
                f"answer need a token"
            )
        self.logprobs = None if logprobs is None else _tensor(logprobs, torch.float32)
        self.experience_type = "single_turn" if action_mask is None else "multi_turn"
        n = len(self.tokens) - prompt_length
        self.action_mask = (
            torch.ones(n, dtype=torch.bool)
            if action_mask is None
            else _tensor(action_mask, torch.bool)
        )
        self.reward = reward
        self.truncate_status = truncate_status
        self.info = info or {}
        self.metrics = metrics or {}
        self.response_text = response_text
        self.prompt_text = prompt_text
        self.messages = messages
        self.tools = tools
        self.teacher_logprobs = (
            None if teacher_logprobs is None else _tensor(teacher_logprobs, torch.float32)
        )

    def __repr__(self) -> str:
        return f"Experience({self.eid}, {len(self.tokens)} tokens, reward={self.reward})"


def of(turns: list[Turn]) -> TrinityExperience:
    """The sequence of one call, or of several that go on from each other."""
    first = turns[0].completion
    last = turns[-1].completion
    tokens_ = np.concatenate([last.prompt_tokens, last.tokens])
    start = len(first.prompt_tokens)
    mask = np.zeros(len(tokens_), np.bool_)
    logprobs = np.zeros(len(tokens_), np.float32)
    for turn in turns:
        c = turn.completion
        at = slice(len(c.prompt_tokens), len(c.prompt_tokens) + len(c.tokens))
        mask[at], logprobs[at] = True, c.logprobs
    return TrinityExperience(
        tokens=torch.from_numpy(tokens_.astype(np.int32)),
        prompt_length=start,
        logprobs=torch.from_numpy(logprobs[start:]),
        action_mask=torch.from_numpy(mask[start:]) if len(turns) > 1 else None,
        truncate_status="response_truncated" if last.finish_reason == "length" else None,
        info={"model_version": last.version.step},
        prompt_text="\n".join(str(m.get("content", "")) for m in turns[0].messages),
        response_text=last.text,
        messages=[*turns[-1].messages, last.message],
    )


def group_by(
    experiences: Iterable[TrinityExperience], id_type: str
) -> dict[str, list[TrinityExperience]]:
    """By task, run or step, in order of appearance."""
    keys = {"task": "tid", "run": "rid", "step": "sid"}
    if id_type not in keys:
        raise ValueError(f"id_type {id_type!r}: use {', '.join(keys)}")
    groups: dict[str, list[TrinityExperience]] = {}
    for x in experiences:
        groups.setdefault(getattr(x.eid, keys[id_type]), []).append(x)
    return groups


def plain(info: dict[str, Any]) -> dict[str, Any]:
    """With lists and numbers in place of arrays and tensors."""
    return {str(k): v.tolist() if hasattr(v, "tolist") else v for k, v in info.items()}


def _tensor(value: Any, dtype: torch.dtype) -> Tensor:
    return value.to(dtype) if isinstance(value, Tensor) else torch.tensor(value, dtype=dtype)
