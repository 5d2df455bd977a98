"""Record the routed experts of vLLM's tokens inside its worker, for vLLM's CPU runner, which does
not report them.

Experts are stored per cache slot, so that a prompt found in the cache has them too, and per request
until they are taken.  Depends on vLLM's first model runner.
Invariant: the experts returned for a position are those that computed its cached keys.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from rft.types.experts import Sizes

_SUFFIX = len("-01234567")  # of the suffix vLLM adds to a request's name
_KEPT = 4  # times `max_num_seqs` requests are kept without a reader


class Routing:
    """Routed experts of one worker."""

    def __init__(self, worker: Any, layers: Sequence[Any], sizes: Sizes) -> None:
        """`layers`: vLLM's expert layers in order."""
        self._runner = worker.model_runner
        self._sizes = sizes
        self._chosen: dict[int, torch.Tensor] = {}
        self._slots: np.ndarray | None = None  # [slots of the cache, layers, chosen]
        # by name: [positions, layers, chosen], with spare capacity
        self._requests: OrderedDict[str, np.ndarray] = OrderedDict()
        self._lengths: dict[str, int] = {}  # number of recorded positions by name
        self._limit = _KEPT * worker.vllm_config.scheduler_config.max_num_seqs
        self._layers = len(layers)
        for number, layer in enumerate(layers):
            layer.router.set_capture_fn(partial(self._chosen.__setitem__, number))
        execute: Callable[..., Any] = self._runner.execute_model
        self._runner.execute_model = partial(self._execute, execute)

    def take(self, names: Sequence[str]) -> list[np.ndarray]:
        """Remove and return the experts of ended requests, by vLLM's names without the suffix.
        Raises KeyError.
        """
        experts = []
        for name in names:
            length = self._lengths.pop(name)
            experts.append(self._requests.pop(name)[:length])
        return experts

    def _execute(
        self, execute: Callable[..., Any], scheduled: Any, *args: Any, **kwargs: Any
    ) -> Any:
        self._chosen.clear()
        out = execute(scheduled, *args, **kwargs)
        if self._chosen:
            self._keep(scheduled.num_scheduled_tokens)
        return out

    def _keep(self, counts: dict[str, int]) -> None:
        rows = (
            torch.stack([self._chosen[i] for i in range(self._layers)], 1)
            .numpy()
            .astype(self._sizes.dtype)
        )
        at = 0
        for request in self._runner.input_batch.req_ids:
            count = counts.get(request, 0)
            self._add(request, rows[at : at + count])
            at += count

    def _add(self, request: str, rows: np.ndarray) -> None:
        state = self._runner.requests[request]
        name = request[:-_SUFFIX]
        start = state.num_computed_tokens
        end = start + len(rows)
        cache = self._cache()
        if name not in self._requests:
            self._requests[name] = np.empty((max(64, 2 * end), *rows.shape[1:]), rows.dtype)
            self._requests[name][:start] = cache[self._slots_of(state.block_ids, 0, start)]
            self._forget()
        if (room := len(self._requests[name])) < end:
            more = np.empty((max(room, end - room), *rows.shape[1:]), rows.dtype)
            self._requests[name] = np.concatenate([self._requests[name], more])
        self._requests[name][start:end] = cache[self._slots_of(state.block_ids, start, end)] = rows
        self._lengths[name] = end

    def _slots_of(self, blocks: Sequence[Sequence[int]], start: int, end: int) -> np.ndarray:
        """Return the cache slots of the positions [start, end)."""
        group = self._group()
        size = self._runner.kv_cache_config.kv_cache_groups[group].kv_cache_spec.block_size
        first = start // size
        positions = np.arange(start, end)
        block_ids = np.asarray(blocks[group][first : -(-end // size)], np.int64)[
            positions // size - first
        ]
        slots: np.ndarray = block_ids * size + positions % size
        return slots

    def _group(self) -> int:
        """Return the cache group that keeps every position: full attention."""
        groups = self._runner.kv_cache_config.kv_cache_groups
        return next(
            (
                i
                for i, g in enumerate(groups)
                if type(g.kv_cache_spec).__name__ == "FullAttentionSpec"
            ),
            0,
        )

    def _cache(self) -> np.ndarray:
        if self._slots is None:
            config = self._runner.kv_cache_config
            size = config.kv_cache_groups[self._group()].kv_cache_spec.block_size
            self._slots = np.zeros(
                (config.num_blocks * size, self._layers, self._sizes.chosen), self._sizes.dtype
            )
        return self._slots

    def _forget(self) -> None:
        """Drop the oldest abandoned requests."""
        running = {request[:-_SUFFIX] for request in self._runner.requests}
        for name in [n for n in self._requests if n not in running][
            : max(0, len(self._requests) - self._limit)
        ]:
            del self._requests[name], self._lengths[name]
