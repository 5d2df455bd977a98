"""Resource limits of this process."""

from __future__ import annotations

import resource


def address_space() -> int:
    """Return the bytes of this process that RLIMIT_AS counts; 0 without /proc."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except FileNotFoundError:
        return 0


def limit(what: int, most: int) -> None:
    """Set a resource limit, at most the present hard limit."""
    hard = resource.getrlimit(what)[1]
    if hard != resource.RLIM_INFINITY:
        most = hard if most == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(what, (most, most))


def limit_memory(more_mb: int) -> None:
    """Limit memory to `more_mb` beyond the present use; no limit without /proc."""
    if now := address_space():
        limit(resource.RLIMIT_AS, now + (more_mb << 20))
