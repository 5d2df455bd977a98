"""Names that configurations of this family lead to and that are no key of the schema: command-line options, metrics, plugin arguments.

Only those that are not active yet stand here; `rft doctor --keys` lists them.  Invariant: what exists is not in it.
"""

from __future__ import annotations

_ASYNC = "comes with sync_style: fully_async; until then see experience/staleness and rollout/model_version"

LATER_OUTSIDE: dict[str, str] = {
    **dict.fromkeys(("trainer/idle_ratio", "explorer/idle_ratio"), "comes later; see the perf/ and sync/ times"),
    **dict.fromkeys(
        [
            f"buffer/{m}"
            for m in (
                "stale_samples_processed",
                "stale_trajectories_processed",
                "partial_num",
                "partial_ratio",
                "max_partial_span",
            )
        ],
        _ASYNC,
    ),
}
