"""Counters of the judges in this process.  Pure; depends on no judge."""

from __future__ import annotations

from dataclasses import asdict, dataclass

_BY_NAME: dict[str, JudgeMetrics] = {}


@dataclass
class JudgeMetrics:
    """Totals of all judges with one name since the start."""

    calls: int = 0  # model calls, including retries
    cache_hit: int = 0
    shared: int = 0  # the same question was in progress
    unreadable: int = 0  # replies without a readable verdict
    timeouts: int = 0
    unscored: int = 0  # questions without a verdict
    empty: int = 0  # empty answers, scored without a call
    pairs: int = 0  # pairwise: answers compared in both orders
    order_flips: int = 0  # pairwise: the verdict depended on the order
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float = 0.0
    seconds: float = 0.0

    @property
    def used(self) -> bool:
        return any(asdict(self).values())


def for_judge(name: str) -> JudgeMetrics:
    return _BY_NAME.setdefault(name, JudgeMetrics())


def counts() -> dict[str, float]:
    """Return metrics of every active judge: "judge/<name>/calls", ..., and "/latency", mean seconds
    per call.
    """
    metrics: dict[str, float] = {}
    for name, m in _BY_NAME.items():
        if m.used:
            counts = asdict(m)
            seconds = counts.pop("seconds")
            metrics |= {f"judge/{name}/{what}": float(value) for what, value in counts.items()}
            metrics[f"judge/{name}/latency"] = seconds / m.calls if m.calls else 0.0
    return metrics
