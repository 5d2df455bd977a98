"""What every section of the written configuration shares: strictness, documentation, enums that ignore case.

Knows nothing about loading.  The invariant: each field carries its meaning, and its unit where it has one; the reference page, the
JSON Schema and `rft explain` read them from here, so a key is described in one place.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


class Section(BaseModel):
    """One mapping of the YAML file.  Unknown keys are errors, values are never changed afterwards."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())


@dataclass(frozen=True)
class Later:
    """Marks what is accepted and not active yet: a key, a whole section, or single values of a key.

    `instead` says what happens today or what to write.  A run whose configuration uses it is refused, unless it is `harmless`: then
    the same weights come out, only speed, memory or an extra file differ, and the run starts with a warning.
    """

    instead: str
    harmless: bool = False
    values: tuple[Any, ...] = ()  # empty: every value that is not the default


@dataclass(frozen=True)
class Moot:
    """Marks what files of related tools bring along and what can have no meaning here, now or later.

    `instead` is the reason, or what to write.  A written value is refused; if it is `harmless`, a run starts with a warning instead.
    """

    instead: str
    harmless: bool = False
    values: tuple[Any, ...] = ()  # empty: every value that is not the default


def key(
    default: Any, doc: str, *, unit: str = "", on_resume: str = "refuse", later: Later | Moot | None = None, **constraints: Any
) -> Any:
    """A documented key.  `on_resume`: "safe" if it may change when a run is resumed, "refuse" if that would be another run."""
    extra: dict[str, Any] = {k: v for k, v in (("unit", unit), ("on_resume", on_resume)) if v}
    return Field(default, description=doc, json_schema_extra=extra | _marked(later), **constraints)


def section(model: type[Section], doc: str, *, later: Later | Moot | None = None, **more: Any) -> Any:
    """A sub-section with all its defaults."""
    return Field(default_factory=model, description=doc, json_schema_extra=_marked(later) or None, **more)


def _marked(later: Later | Moot | None) -> dict[str, Any]:
    if later is None:
        return {}
    mark = {k: v for k, v in dataclasses.asdict(later).items() if v}
    return {"not_active": mark | ({"moot": True} if isinstance(later, Moot) else {})}


def _lower(value: Any) -> Any:
    return value.strip().lower() if isinstance(value, str) else value


IgnoreCase = BeforeValidator(_lower)
"""Put beside a Literal of lower-case names: `Annotated[Literal["a", "b"], IgnoreCase]`."""


def renamed(**names: str) -> BeforeValidator:
    """Other spellings of an enum's values that people bring along, e.g. renamed(offline="checkpoint")."""
    return BeforeValidator(lambda v: names.get(_lower(v), _lower(v)) if isinstance(v, str) else v)


NAME = r"^[^\W_.][^/\\\x00-\x1f]*$"
Name = Annotated[str, Field(pattern=NAME, max_length=120)]
"""A piece of a path: begins with a letter or digit, holds no slash."""

Args = dict[str, Any]
"""Arguments of a plugin; checked against the plugin's own `Args` model."""
