"""What the judges of this process did, counted for metrics.  Pure; knows no judge."""

from __future__ import annotations

from dataclasses import asdict, dataclass

_BY_NAME: dict[str, JudgeMetrics] = {}


@dataclass
class JudgeMetrics:
    """Totals since the start, of all judges with one name."""

    calls: int = 0  # asked of the model, retries included
    cache_hit: int = 0
    shared: int = 0  # the same question was under way
    unreadable: int = 0  # replies without a readable verdict
    timeouts: int = 0
    unscored: int = 0  # questions that got no verdict
    empty: int = 0  # answers that say nothing; scored without asking
    pairs: int = 0  # pairwise: compared in both orders
    order_flips: int = 0  # pairwise: the verdict went with the place, not the answer
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float = 0.0
    seconds: float = 0.0

    @property
    def used(self) -> bool:
        return any(asdict(self).values())


def of(name: str) -> JudgeMetrics:
    return _BY_NAME.setdefault(name, JudgeMetrics())


def counts() -> dict[str, float]:
    """For metrics: "judge/<name>/calls", ..., and "/latency", mean seconds of a call, of every
    judge that did something.
    """
    found: dict[str, float] = {}
    for name, m in _BY_NAME.items():
        if m.used:
            told = asdict(m)
            seconds = told.pop("seconds")
            found |= {f"judge/{name}/{what}": float(value) for what, value in told.items()}
            found[f"judge/{name}/latency"] = seconds / m.calls if m.calls else 0.0
    return found
