"""What this process may take, for good."""

from __future__ import annotations

import resource


def address_space() -> int:
    """Bytes of this process as RLIMIT_AS counts them; 0 where there is no /proc."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except FileNotFoundError:
        return 0


def limit(what: int, most: int) -> None:
    """Sets a resource limit, never above the limit that there is."""
    hard = resource.getrlimit(what)[1]
    most = (
        most
        if hard == resource.RLIM_INFINITY
        else hard
        if most == resource.RLIM_INFINITY
        else min(most, hard)
    )
    resource.setrlimit(what, (most, most))


def limit_memory(more_mb: int) -> None:
    """At most `more_mb` beyond what this process has; no limit where there is no /proc, where the
    kernel would not keep it.
    """
    if now := address_space():
        limit(resource.RLIMIT_AS, now + (more_mb << 20))
