"""Sections and runtime facts of a synchronizer from one set of options."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from rft.sync.settings import FixedSync, NcclConfig, SyncConfig, SyncRuntime

_RUNTIME = {field.name for field in fields(SyncRuntime)}


class SmallBuckets(NcclConfig):
    """Buckets of `size` bytes, where whole megabytes are too many; None: tensor by tensor."""

    size: int | None

    @property
    def bucket_bytes(self) -> int | None:
        return self.size


def sync_config(**options: Any) -> tuple[SyncConfig, SyncRuntime]:
    runtime = {name: options.pop(name) for name in _RUNTIME & options.keys()}
    return FixedSync(**options), SyncRuntime(**runtime)
