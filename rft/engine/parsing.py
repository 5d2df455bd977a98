"""Takes reasoning and tool calls out of an answer's text, with vLLM's parsers.  For any engine, where vLLM is installed.

Knows no engine.  Invariant: only what is read changes (`text`, `reasoning`, `tool_calls`); tokens and log-probs stay as they were written.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import msgspec
import xxhash

from rft.engine.settings import EngineSettings
from rft.errors import ConfigError, SetupError
from rft.types.completion import Completion

log = logging.getLogger(__name__)


class Parsers:
    """The parsers that the settings name; none where they name none.  Raises SetupError without vLLM, ConfigError for unknown names."""

    def __init__(self, settings: EngineSettings, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._kwargs = settings.chat_template_kwargs
        self._tools = self._reasoning = None
        if settings.tool_call_parser is None and settings.reasoning_parser is None:
            return
        try:
            from vllm.reasoning import ReasoningParserManager
            from vllm.tool_parsers import ToolParserManager
        except ImportError as e:
            raise SetupError(
                f"{settings.name}: tool_call_parser and reasoning_parser are vLLM's, and it cannot be imported ({e}); install it, or leave "
                "them out and read the answer's text in the workflow"
            ) from e
        if settings.tool_call_parser is not None:
            self._tools = _named(ToolParserManager.get_tool_parser, "tool_call_parser", settings.tool_call_parser)
        if settings.reasoning_parser is not None:
            self._reasoning = _named(ReasoningParserManager.get_reasoning_parser, "reasoning_parser", settings.reasoning_parser)

    def __call__(self, c: Completion, tools: Sequence[dict[str, Any]]) -> Completion:
        """`c` with reasoning and, where the request had tools, tool calls taken out of its text."""
        if self._reasoning is None and (self._tools is None or not tools):
            return c
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        asked = ChatCompletionRequest(messages=[], model="policy", tools=[dict(t) for t in tools] or None)
        text, reasoning, calls = self._whole(c), "", []
        if self._reasoning is not None:
            parser = self._reasoning(self._tokenizer, chat_template_kwargs=self._kwargs)
            parser.adjust_initial_state_from_prompt(c.prompt_tokens.tolist())
            found, rest = parser.extract_reasoning(text, asked)
            text, reasoning = rest or "", found or ""
        if self._tools is not None and tools:
            seen = self._tools(self._tokenizer, asked.tools).extract_tool_calls(text, asked)
            if seen.tools_called:
                text, calls = seen.content or "", [call.model_dump(include={"type", "function"}) for call in seen.tool_calls]
        name = xxhash.xxh3_64_hexdigest(c.prompt_tokens.tobytes() + c.tokens.tobytes())  # equal runs give equal ids
        return msgspec.structs.replace(
            c,
            text=text,
            reasoning=reasoning,
            tool_calls=tuple({"id": f"call_{name}_{i}", **call} for i, call in enumerate(calls)),
        )

    def _whole(self, c: Completion) -> str:
        """The answer with its special tokens, which some models write around calls, but for the one that ends it."""
        tokens = c.tokens.tolist()
        if c.finish_reason == "stop" and tokens and tokens[-1] in self._tokenizer.all_special_ids:
            tokens.pop()
        text = str(self._tokenizer.decode(tokens, skip_special_tokens=False))
        for stop in c.sampling.stop:
            text = text.split(stop, 1)[0]
        return text


def _named(find: Any, key: str, name: str) -> Any:
    try:
        return find(name)
    except KeyError as e:
        raise ConfigError(f"vLLM knows no {key} {name!r}: {e.args[0]}", key=f"explorer.rollout_model.{key}", given=name) from None
