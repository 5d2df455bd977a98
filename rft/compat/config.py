"""The two parts of Trinity-RFT's configuration that workflows read from their task."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class FormatConfig:
    """How a row becomes a task.  `prompt_key` and `response_key` name columns of `task.raw_task`."""

    prompt_key: str = "prompt"
    response_key: str = "response"
    messages_key: str = "message"
    tools_key: str = "tools"
    system_prompt: str | None = None
    reply_prefix: str | None = None
    chat_template: str | None = None
    enable_thinking: bool | None = None


@dataclass
class GenerationConfig:
    """Sampling; the taskset's `rollout_args`."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int = -1
    logprobs: int | None = None
    max_tokens: int | None = None
    n: int = 1
