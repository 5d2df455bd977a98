"""What the arguments of all algorithm parts share.  Torch-free."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Args(BaseModel):
    """Base of all arguments: unknown keys, wrong types, NaN and infinity are errors, and nothing changes afterwards."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class NoArgs(Args):
    """For parts that take no arguments."""


def waiting(
    default: Any, instead: str, *, description: str, harmless: bool = False, values: tuple[Any, ...] = (), **constraints: Any
) -> Any:
    """An argument that is accepted and not active yet: `instead` says what happens today; with `values`, only those are meant.

    `harmless` as in the configuration's schema: the run may start, because the weights that come out are the same.
    """
    mark: Any = {"instead": instead} | ({"harmless": True} if harmless else {}) | ({"values": values} if values else {})
    return Field(default, description=description, json_schema_extra={"not_active": mark}, **constraints)
