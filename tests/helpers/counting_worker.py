"""vLLM's worker as the engine has it, which counts what its model computes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from rft.engine.vllm_cpu import CacheWorker


class CountingWorker(CacheWorker):
    computed = 0

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        super().initialize_from_config(kv_cache_config)
        self.model_runner.execute_model = partial(self._counted, self.model_runner.execute_model)

    def _counted(self, execute: Callable[..., Any], scheduled: Any, *args: Any) -> Any:
        self.computed += scheduled.total_num_scheduled_tokens
        return execute(scheduled, *args)

    def computed_tokens(self) -> int:
        return self.computed
