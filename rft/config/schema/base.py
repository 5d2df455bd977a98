"""What every section of the written configuration shares: strictness, documentation, enums that
ignore case.

Knows nothing about loading.  The invariant: each field carries its meaning, and its unit where it
has one; the reference page, the JSON Schema and `rft explain` read them from here, so a key is
described in one place.  What keys of one section need of each other are its `rules`; what they need
of other sections and of the machine is decided by `resolve`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Annotated, Any, ClassVar, Protocol

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    model_serializer,
)


class Told(Protocol):
    """Who hears what is wrong or worth saying."""

    def error(self, key: str, message: str) -> None: ...
    def warn(self, text: str) -> None: ...


class Section(BaseModel):
    """One mapping of the YAML file.  Unknown keys are errors, values are never changed afterwards."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=()
    )
    implied: ClassVar[tuple[str, ...]] = ()
    """Keys that count as written where they have their default, too: without them other keys decide
    the value.
    """

    @model_serializer(mode="wrap")
    def _dumped(
        self, handler: SerializerFunctionWrapHandler, info: SerializationInfo
    ) -> dict[str, Any]:
        """With any context: without what is implied, so that what is read again means the same."""
        left_out = set(self.implied) - self.model_fields_set if info.context else set()
        return {name: value for name, value in handler(self).items() if name not in left_out}

    def rules(self, at: str, told: Told) -> None:
        """What the keys of this section need of each other, and which of them do nothing beside
        others; `at` is the section's key.
        """

    def written(self, name: str) -> bool:
        """Whether a key has another value than its default."""
        return bool(
            getattr(self, name)
            != type(self).model_fields[name].get_default(call_default_factory=True)
        )

    def idle(self, at: str, names: Iterable[str], why: str, told: Told) -> None:
        """Warns of those keys that are written although nothing reads them."""
        for name in names:
            if self.written(name):
                told.warn(f"{at}.{name} has no effect: {why}")


def sections(section: Section, key: str = "", path: str = "") -> Iterator[tuple[str, str, Section]]:
    """(key, path of the schema, section) of a section and all below it: tasksets[0].format has the
    path tasksets[].format.
    """
    yield key, path, section
    for name in type(section).model_fields:
        value = getattr(section, name)
        here = f"{key}.{name}".lstrip(".")
        of = f"{path}.{name}".lstrip(".")
        inner = [(here, of, value)]
        if isinstance(value, tuple):
            inner = [(f"{here}[{i}]", f"{of}[]", x) for i, x in enumerate(value)]
        elif isinstance(value, dict):
            inner = [(f"{here}.{k}", f"{of}.*", x) for k, x in value.items()]
        for at, kind, x in inner:
            if isinstance(x, Section):
                yield from sections(x, at, kind)


def key(
    default: Any, doc: str, *, unit: str = "", on_resume: str = "refuse", **constraints: Any
) -> Any:
    """A documented key, which may not change when a run is resumed: that would be another run."""
    return Field(
        default,
        description=doc,
        json_schema_extra={**({"unit": unit} if unit else {}), "on_resume": on_resume},
        **constraints,
    )


safe_key = partial(key, on_resume="safe")
"""A key that may change when a run is resumed."""


def section(model: type[Section], doc: str, **more: Any) -> Any:
    """A sub-section with all its defaults."""
    return Field(default_factory=model, description=doc, **more)


def _lower(value: Any) -> Any:
    return value.strip().lower() if isinstance(value, str) else value


IgnoreCase = BeforeValidator(_lower)
"""Put beside a Literal of lower-case names: `Annotated[Literal["a", "b"], IgnoreCase]`."""


def shipped(*names: str) -> BeforeValidator:
    """Put beside `str` where plugins may be named too: our own names are written in any case,
    others are left as they are.
    """
    return BeforeValidator(lambda v: _lower(v) if _lower(v) in names else v)


def renamed(**names: str) -> BeforeValidator:
    """Other spellings of an enum's values that people bring along, e.g.
    renamed(offline="checkpoint").
    """
    return BeforeValidator(lambda v: names.get(_lower(v), _lower(v)) if isinstance(v, str) else v)


NAME = r"^[^\W_.][^/\\\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]*$"
Name = Annotated[str, Field(pattern=NAME, max_length=120)]
"""A piece of a path: begins with a letter or digit, holds no slash, and nothing that is not seen or
turns the text around it.
"""

Args = dict[str, Any]
"""Arguments of a plugin; checked against the plugin's own `Args` model."""
