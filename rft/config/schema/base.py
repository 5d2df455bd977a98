"""What every section of the written configuration shares: strictness, documentation, enums that ignore case.

Knows nothing about loading.  The invariant: each field carries its meaning, and its unit where it has one; the reference page, the
JSON Schema and `rft explain` read them from here, so a key is described in one place.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


class Section(BaseModel):
    """One mapping of the YAML file.  Unknown keys are errors, values are never changed afterwards."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())


def key(default: Any, doc: str, *, unit: str = "", on_resume: str = "refuse", **constraints: Any) -> Any:
    """A documented key.  `on_resume`: "safe" if it may change when a run is resumed, "refuse" if that would be another run."""
    extra: dict[str, Any] = {k: v for k, v in (("unit", unit), ("on_resume", on_resume)) if v}
    return Field(default, description=doc, json_schema_extra=extra, **constraints)


def section(model: type[Section], doc: str, **more: Any) -> Any:
    """A sub-section with all its defaults."""
    return Field(default_factory=model, description=doc, **more)


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
