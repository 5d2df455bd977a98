"""Share the prompts of a group in vLLM's CPU runner: each prompt is computed once, up to its last
token but one.

vLLM shares only full cache blocks, so each answer of a group would recompute the end of its prompt:
12 of 44 tokens with blocks of 32.  Here a request's prompt counts as computed if another request of
the same step has computed or is computing the same prompt.  Each layer copies the blocks after
writing its keys and values, and only the last token is computed, whose logits are needed.

Invariant: a request whose blocks are copied is scheduled in the same step, so it still owns them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch


class SharedPrompts:
    """Prompt sharing of one worker whose cache is full attention in all layers."""

    @classmethod
    def for_worker(cls, worker: Any, kv_cache_config: Any) -> SharedPrompts | None:
        """Return None for another kind of cache or cache update, or without prefix caching."""
        from vllm.model_executor.layers.attention import Attention
        from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

        kinds = [type(group.kv_cache_spec).__name__ for group in kv_cache_config.kv_cache_groups]
        contexts = worker.vllm_config.compilation_config.static_forward_context.values()
        layers = [x for x in contexts if isinstance(x, AttentionLayerBase)]
        written = all(
            isinstance(x, Attention) and not x.attn_backend.forward_includes_kv_cache_update
            for x in layers
        )
        if (
            kinds != ["FullAttentionSpec"]
            or not written
            or not worker.cache_config.enable_prefix_caching
        ):
            return None
        return cls(
            worker.model_runner,
            kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size,
            [x.impl for x in layers],
        )

    def __init__(self, runner: Any, block_size: int, writers: list[Any]) -> None:
        self._runner = runner
        self._block_size = block_size
        # (request with the prompt, request that needs a copy, first and last token of the copy)
        self._pairs: list[tuple[str, str, int, int]] = []
        self._blocks: torch.Tensor | None = None  # [2, copies]: source and destination blocks
        for writer in writers:
            writer.do_kv_cache_update = partial(self._write, writer.do_kv_cache_update)

    def shorten(self, scheduled: Any) -> Any:
        """Reduce each new request whose prompt another request has to one token in vLLM's
        SchedulerOutput.
        """
        self._pairs = []
        self._blocks = None
        if not scheduled.scheduled_new_reqs:
            return scheduled
        counts = dict(scheduled.num_scheduled_tokens)
        cached = scheduled.scheduled_cached_reqs
        holders: dict[Any, str] = {}
        for name, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            state = self._runner.requests[name]
            if (key := _key(state)) is not None and computed + counts[name] >= len(
                state.prompt_token_ids
            ):
                holders[key] = name
        requests = [
            self._shortened(request, holders, counts) for request in scheduled.scheduled_new_reqs
        ]
        total = sum(counts.values())
        return replace(
            scheduled,
            scheduled_new_reqs=requests,
            num_scheduled_tokens=counts,
            total_num_scheduled_tokens=total,
        )

    def _shortened(self, request: Any, holders: dict[Any, str], counts: dict[str, int]) -> Any:
        name = request.req_id
        start = request.num_computed_tokens
        key = _key(request)
        if key is None or start + counts[name] != len(request.prompt_token_ids):
            return request
        if (holder := holders.setdefault(key, name)) == name or counts[name] == 1:
            return request
        last = start + counts[name] - 1
        self._pairs.append((holder, name, start, last))
        counts[name] = 1
        return replace(request, num_computed_tokens=last)

    def _write(
        self,
        write: Callable[..., None],
        layer: Any,
        key: Any,
        value: Any,
        kv_cache: torch.Tensor,
        slots: Any,
    ) -> None:
        write(layer, key, value, kv_cache, slots)
        if self._pairs:
            if self._blocks is None:
                self._blocks = self._copies()
            kv_cache[self._blocks[1]] = kv_cache[self._blocks[0]]

    def _copies(self) -> torch.Tensor:
        states = self._runner.requests
        size = self._block_size
        blocks = [
            (states[holder].block_ids[0][i], states[name].block_ids[0][i])
            for holder, name, start, last in self._pairs
            for i in range(start // size, last // size + 1)
        ]
        return torch.tensor(blocks).T


def _key(request: Any) -> Any:
    """Return a key that is equal for requests with equal prompt keys and values; None if the whole
    prompt must be computed.
    """
    if request.prompt_token_ids is None or request.mm_features or request.prompt_embeds is not None:
        return None
    if request.sampling_params is None or request.sampling_params.prompt_logprobs is not None:
        return None
    return (request.lora_request and request.lora_request.lora_int_id, *request.prompt_token_ids)
