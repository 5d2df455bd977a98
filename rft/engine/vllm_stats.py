"""Sum up what vLLM's scheduler reports after each step.  vLLM recognizes stat loggers by their
methods.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from rft.types.metrics import Metric

RECENT = 64  # steps


class Stats:
    """A stat logger of vLLM.  All counts start with the engine; `..._steps` are sums over steps, to
    be divided by `steps`.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._running = self._waiting = self._preempted = self._cache_asked = self._cache_hit = 0
        self._kv_cache = 0.0
        # (end of a step, its generated tokens)
        self._written: deque[tuple[float, int]] = deque(maxlen=RECENT)

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Count a step; vLLM's calls without scheduler_stats end aborted requests."""
        if iteration_stats is not None:
            self._preempted += iteration_stats.num_preempted_reqs
            self._written.append((time.monotonic(), iteration_stats.num_generation_tokens))
        if scheduler_stats is None:
            return
        self.steps += 1
        self._running += scheduler_stats.num_running_reqs
        self._waiting += scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
        self._kv_cache += scheduler_stats.kv_cache_usage
        cache = scheduler_stats.prefix_cache_stats
        self._cache_asked += cache.queries
        self._cache_hit += cache.hits

    def resumed(self) -> None:
        """Restart the token rate after a pause."""
        self._written.clear()

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second over the last steps since the last pause; 0 before two steps."""
        if len(self._written) < 2 or (passed := self._written[-1][0] - self._written[0][0]) <= 0:
            return 0.0
        return sum(tokens for _, tokens in list(self._written)[1:]) / passed

    def metrics(self) -> list[Metric]:
        counted = {
            "steps": self.steps,
            "running_steps": self._running,
            "waiting_steps": self._waiting,
            "kv_cache_steps": self._kv_cache,
            "preemptions": self._preempted,
            "prefix_cache_queries": self._cache_asked,
            "prefix_cache_hits": self._cache_hit,
        }
        return [Metric(f"engine/{name}", float(value), "sum") for name, value in counted.items()]

    def log(self) -> None: ...

    def log_engine_initialized(self) -> None: ...

    def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None: ...


def without_prometheus(manager: Any) -> None:
    """Remove vLLM's Prometheus exporter, which works for every token although nothing is served."""
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    manager.stat_loggers = [
        logger for logger in manager.stat_loggers if not isinstance(logger, PrometheusStatLogger)
    ]
