"""Shared parts of engines that hold a model and its tokenizer: prompt tokens, completion records,
load checks.

Depends on neither vLLM nor transformers.  Invariant: nothing is generated before the first load,
except with `fixed_weights`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import xxhash

from rft.engine.base import BaseEngine, RequestFailed, check_base, check_row, row_behind
from rft.engine.chat import Chat, load_tokenizer
from rft.engine.settings import EngineSettings
from rft.engine.spans import TextSpans, in_policy_tokens
from rft.errors import ConfigError, EngineFailed, SetupError
from rft.types.completion import Completion, FinishReason, TokenScores, VersionSpan
from rft.types.images import ImagePlace
from rft.types.metrics import Metric
from rft.types.ports import GenerateRequest, ScoreRow, WeightManifest
from rft.types.thoughts import THINK, THINK_END, split_thought

LONG_CHARS = 1 << 16  # size from which messages and tools are tokenised in a thread
log = logging.getLogger(__name__)


class Parsers:
    """Extracts reasoning and tool calls from an answer's text with the vLLM parsers of the
    settings.

    Only the parsed text changes; tokens and log-probs stay as generated.  Raises SetupError without
    vLLM, ConfigError for unknown names.
    """

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
                f"{settings.name}: tool_call_parser and reasoning_parser are vLLM's, and it cannot "
                f"be imported ({e}); install it, or leave "
                "them out and read the answer's text in the workflow"
            ) from e
        if settings.tool_call_parser is not None:
            self._tools = _named(
                ToolParserManager.get_tool_parser, "tool_call_parser", settings.tool_call_parser
            )
        if settings.reasoning_parser is not None:
            self._reasoning = _named(
                ReasoningParserManager.get_reasoning_parser,
                "reasoning_parser",
                settings.reasoning_parser,
            )

    def __call__(self, c: Completion, request: GenerateRequest) -> Completion:
        """Return `c` with reasoning and, if the request had tools, tool calls extracted from its
        text.
        """
        if self._reasoning is None and (self._tools is None or not request.tools):
            return c
        try:
            return self._parsed(c, request.tools, {**self._kwargs, **request.chat_template_args})
        except Exception as e:  # parsers fail in any way on model output and client tools
            raise RequestFailed(
                f"the answer's reasoning or tool calls could not be read: {type(e).__name__}: {e}"
            ) from e

    def _parsed(
        self, c: Completion, tools: Sequence[dict[str, Any]], template_args: dict[str, Any]
    ) -> Completion:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        arguments = {
            "tools": [dict(t) for t in tools] or None,
            "chat_template_kwargs": template_args,
        }
        chat_request = ChatCompletionRequest(messages=[], model="policy", **arguments)
        text = c.text
        thought, answer = split_thought(text, opened=c.in_thought)
        calls: list[dict[str, Any]] = []
        reasoning = ""
        if self._reasoning is not None:
            parser = self._reasoning(self._tokenizer, chat_template_kwargs=template_args)
            parser.adjust_initial_state_from_prompt(c.prompt_tokens.tolist())
            extracted_reasoning, rest = parser.extract_reasoning(text, chat_request)
            # some parsers end a thought at its first call
            early = thought and len(rest or "") > len(answer)
            reasoning = (
                thought.removeprefix(THINK).removesuffix(THINK_END)
                if early
                else extracted_reasoning or ""
            )
            answer = answer if early else rest or ""
        if self._tools is not None and tools:
            extracted = self._tools(self._tokenizer, chat_request.tools).extract_tool_calls(
                answer, chat_request
            )
            if extracted.tools_called:
                answer = extracted.content or ""
                calls = [_call(call.function) for call in extracted.tool_calls]
        # equal completions give equal ids
        name = xxhash.xxh3_64_hexdigest(c.prompt_tokens.tobytes() + c.tokens.tobytes())
        return msgspec.structs.replace(  # Mistral's templates require ids of nine letters or digits
            c,
            text=answer if self._reasoning is not None else thought + answer if calls else text,
            in_thought=c.in_thought and self._reasoning is None,
            reasoning=reasoning,
            tool_calls=tuple(
                {"id": f"{name[: 9 - len(str(i))]}{i}", **call} for i, call in enumerate(calls)
            ),
        )


def _call(function: Any) -> dict[str, Any]:
    """Return a call in OpenAI's form.  Lone surrogates, which parsers decode from `\\ud800` and
    which cannot be stored, are escaped again.
    """
    named = {"name": function.name, "arguments": function.arguments}
    return {
        "type": "function",
        "function": {k: v.encode("utf-8", "backslashreplace").decode() for k, v in named.items()},
    }


def _named(find: Any, key: str, name: str) -> Any:
    try:
        return find(name)
    except KeyError as e:
        raise ConfigError(
            f"vLLM knows no {key} {name!r}: {e.args[0]}",
            key=f"explorer.rollout_model.{key}",
            given=name,
        ) from None


class LocalEngine(BaseEngine):
    """Base class: `generate` starts with `prompt` and ends with `completion` per answer; `load`
    starts with `check_load`.
    """

    COUNTED = (
        "requests",
        "prompt_tokens",
        "prefilled_tokens",
        "recomputed_tokens",
        "generated_tokens",
    )

    def __init__(self, settings: EngineSettings, chat: Chat) -> None:
        super().__init__(settings)
        self._chat = chat
        self._spans: TextSpans | None = None
        if settings.policy_tokenizer is not None:
            policy = replace(settings, tokenizer_path=settings.policy_tokenizer)
            self._spans = TextSpans(chat, load_tokenizer(policy))
        self._parse = Parsers(settings, chat.tokenizer)
        self._paused = False

    async def prompt(self, request: GenerateRequest, limit: int | None = None) -> list[int]:
        """Return the prompt's tokens, at most `limit` (None: as the settings say).

        Raises PromptTooLong or ValueError for an invalid request, EngineFailed before the first
        load.
        """
        self._check_loaded()
        # would block the event loop for seconds
        if request.images or len(str((request.messages, request.tools))) > LONG_CHARS:
            return await asyncio.to_thread(self._chat.encode, request, limit)
        return self._chat.encode(request, limit)

    async def score(self, row: ScoreRow) -> TokenScores:
        """Score with the current weights, at the row's temperature."""
        if self._spans is None:
            return await self.score_own(row)
        ours, spans = await asyncio.to_thread(self._spans.read, row)
        assert row.logprobs is not None, "`read` checks it"
        return in_policy_tokens(spans, await self.score_own(ours), row.logprobs)

    async def score_own(self, row: ScoreRow) -> TokenScores:
        """Score tokens of this model's tokenizer."""
        raise NotImplementedError

    async def row(self, row: ScoreRow, longest: int) -> tuple[ScoreRow, list[int]]:
        """Return a row to score with its prompt rendered, and its tokens."""
        self._check_loaded()
        if row.top > (known := len(self._chat.tokenizer)):
            raise ValueError(
                f"{self.settings.name}: {row.top} most likely tokens were asked for, and the "
                f"vocabulary has {known}"
            )
        if row.prompt is not None:
            prompt = await self.prompt(row.prompt, longest - len(row.tokens))
            row = row_behind(prompt, row, self._chat.places(row.prompt, prompt))
        vocab_size = self._chat.vocab_size
        tokens = check_row(row, self.settings, longest=longest, vocab_size=vocab_size)
        return row, tokens

    def _check_loaded(self) -> None:
        if self.version is None:
            raise EngineFailed(
                f"{self.settings.name}: no weights were loaded yet; an engine serves only versions "
                f"that were published to it"
            )

    def completion(
        self,
        request: GenerateRequest,
        prompt: Sequence[int],
        tokens: Sequence[int] | np.ndarray,
        logprobs: Sequence[float] | np.ndarray,
        *,
        reason: FinishReason,
        spans: Sequence[VersionSpan],
        experts: np.ndarray | None = None,
        places: tuple[ImagePlace, ...] = (),
    ) -> Completion:
        """Build the record of one answer, with reasoning and tool calls extracted.  Raises
        RequestFailed if parsing fails.
        """
        stopped = reason == "stop"
        text, stop_text = (
            self._chat.decode_stopped(tokens, request.sampling.stop)
            if stopped
            else (self._chat.decode(tokens), "")
        )
        completion = Completion(
            prompt_tokens=np.array(prompt, np.int32),
            tokens=np.array(tokens, np.int32),
            logprobs=np.asarray(logprobs, np.float32),
            text=text,
            finish_reason=reason,
            version_spans=tuple(spans),
            sampling=request.sampling,
            engine=self.settings.name,
            stop_text=stop_text,
            in_thought=self._chat.opens_thought(prompt),
            routed_experts=experts,
            images=places,
        )
        return self._parse(completion, request)

    async def check_load(self, manifest: WeightManifest) -> None:
        """Raise EngineFailed if loading is not allowed now, WeightSyncFailed for an adapter of
        another base.
        """
        if self.settings.fixed_weights:
            raise EngineFailed(
                f"{self.settings.name}: its weights are fixed (fixed_weights); nothing can be "
                f"published to it"
            )
        if not self._paused and self.version is not None:
            raise EngineFailed(
                f"{self.settings.name}: load needs a paused engine; call pause first"
            )
        if manifest.adapter is not None and self.version is None:
            await asyncio.to_thread(
                check_base, self.settings.name, self.settings.model_path, manifest.adapter
            )

    async def metrics(self) -> list[Metric]:
        return [
            *await super().metrics(),
            Metric("engine/tokenization_differs", float(self._chat.differing), "sum"),
        ]
