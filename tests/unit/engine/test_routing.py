"""Which experts vLLM's runner for CPUs chose is found again by request, and by slot of its cache,
at a cost that grows with the tokens.

The runner here has the attributes of vLLM's that are read, and plans chunks as its scheduler may;
tests/integration/test_vllm_experts.py has the real one.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from rft.engine.vllm_routing import Routing
from rft.types.experts import Sizes

BLOCK = 4
LAYERS = 2
SIZES = Sizes(8, 2)


class FullAttentionSpec:
    block_size = BLOCK


def experts(tokens: Sequence[int]) -> np.ndarray:
    """What a token goes through follows from its id: uint8 [T, layers, 2]."""
    return np.array(
        [[[t % 8, (t + layer + 1) % 8] for layer in range(LAYERS)] for t in tokens], np.uint8
    ).reshape(-1, LAYERS, 2)


class Runner:
    """One model runner with requests of given tokens."""

    def __init__(self, num_blocks: int = 256) -> None:
        self.requests: dict[str, Any] = {}
        self.input_batch = SimpleNamespace(req_ids=[])
        group = SimpleNamespace(kv_cache_spec=FullAttentionSpec())
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=[group], num_blocks=num_blocks)
        self.layers = [
            SimpleNamespace(router=SimpleNamespace(set_capture_fn=self._captured))
            for _ in range(LAYERS)
        ]
        self._capture: list[Any] = []
        self.tokens: dict[str, list[int]] = {}

    def _captured(self, fn: Any) -> None:
        self._capture.append(fn)

    def routing(self) -> Routing:
        config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=2))
        return Routing(SimpleNamespace(model_runner=self, vllm_config=config), self.layers, SIZES)

    def add(self, name: str, tokens: list[int], blocks: list[int], computed: int = 0) -> None:
        """A request whose first `computed` tokens are in the cache."""
        self.requests[f"{name}-01234567"] = SimpleNamespace(
            num_computed_tokens=computed, block_ids=[blocks]
        )
        self.tokens[f"{name}-01234567"] = tokens
        self.input_batch.req_ids.append(f"{name}-01234567")

    def execute_model(self, scheduled: Any) -> None:
        counts = scheduled.num_scheduled_tokens
        found = [
            experts(self.tokens[r][self.requests[r].num_computed_tokens :][: counts.get(r, 0)])
            for r in self.input_batch.req_ids
        ]
        for layer, capture in enumerate(self._capture):
            capture(torch.from_numpy(np.concatenate(found)[:, layer].astype(np.int32)))

    def step(self, **chunks: int) -> None:
        counts = {f"{name}-01234567": count for name, count in chunks.items()}
        self.routed(SimpleNamespace(num_scheduled_tokens=counts))
        for request, count in counts.items():
            self.requests[request].num_computed_tokens += count

    def end(self, name: str) -> None:
        del self.requests[f"{name}-01234567"]
        self.input_batch.req_ids.remove(f"{name}-01234567")

    @property
    def routed(self) -> Any:
        return self.__dict__["execute_model"]  # what `Routing` has put in its place


def test_chunks_of_any_size_and_cached_prompts() -> None:
    runner = Runner()
    routing = runner.routing()
    long = list(range(5, 405))
    short = [3, 9, 4]
    runner.add("long", long, list(range(100)))
    runner.add("short", short, [200])
    runner.step(long=3, short=3)  # the first chunk is what the budget had left
    runner.step(long=397)
    for name, tokens in (("short", short), ("long", long)):
        runner.end(name)
        assert np.array_equal(routing.take([name])[0], experts(tokens))
    again = [*long[:8], 77, 78]
    runner.add("again", again, [0, 1, 201], computed=8)  # its prompt is in the cache
    runner.step(again=2)
    assert np.array_equal(routing.take(["again"])[0], experts(again))


def test_an_answer_costs_as_much_as_it_is_long() -> None:
    runner = Runner()
    routing = runner.routing()
    looked_up: list[int] = []
    slots = routing._slots_of

    def counted(blocks: Sequence[Sequence[int]], start: int, end: int) -> np.ndarray:
        looked_up.append(end - start)
        return slots(blocks, start, end)

    routing._slots_of = counted  # type: ignore[method-assign]
    tokens = list(range(500))
    runner.add("one", tokens, list(range(125)))
    runner.step(one=10)
    for _ in range(490):
        runner.step(one=1)
    assert sum(looked_up) == 500
    assert np.array_equal(routing.take(["one"])[0], experts(tokens))
