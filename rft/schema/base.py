"""The base of every section of a configuration: strict keys, documentation, enums in any case.

Depends on no loader and no part of a run: packages declare their sections with it, in their
`settings.py`.  Invariant: each field carries its meaning, and its unit where it has one; the
reference page, the JSON Schema and `rft explain` read them from there.  A section checks its keys
against each other in `rules`; `rft.config` checks them against other sections and the machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Protocol, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    TypeAdapter,
    ValidationError,
    model_serializer,
)
from pydantic_core import CoreSchema, core_schema


class Diagnostics(Protocol):
    """Collects errors and warnings about keys."""

    def error(self, key: str, message: str) -> None: ...
    def warn(self, text: str) -> None: ...


class Section(BaseModel):
    """One mapping of the YAML file.  Refuses unknown keys; its values never change."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=()
    )
    implied: ClassVar[tuple[str, ...]] = ()
    """Keys whose default differs in effect from the same value when written."""

    @model_serializer(mode="wrap")
    def _dump(
        self, handler: SerializerFunctionWrapHandler, info: SerializationInfo
    ) -> dict[str, Any]:
        """With any context, leave out unwritten `implied` keys, so that loading gives the same."""
        omitted = set(self.implied) - self.model_fields_set if info.context else set()
        return {name: value for name, value in handler(self).items() if name not in omitted}

    def rules(self, at: str, diagnostics: Diagnostics) -> None:
        """Check the keys of this section, whose key is `at`, against each other."""

    def is_changed(self, name: str) -> bool:
        """Return whether a key differs from its default."""
        field = type(self).model_fields[name]
        return bool(getattr(self, name) != field.get_default(call_default_factory=True))

    def warn_unused(
        self, at: str, names: Iterable[str], reason: str, diagnostics: Diagnostics
    ) -> None:
        """Warn of each changed key that has no effect."""
        for name in names:
            if self.is_changed(name):
                diagnostics.warn(f"{at}.{name} has no effect: {reason}")

    def refuse_options(
        self, at: str, names: Iterable[str], choice: str, key: str, diagnostics: Diagnostics
    ) -> None:
        """Refuse each changed key that belongs to another `choice` of `key`."""
        for name in names:
            if self.is_changed(name):
                text = belongs(choice, key, getattr(self, key))
                diagnostics.error(f"{at}.{name}", text)


def belongs(choice: str, key: str, value: object) -> str:
    """Return the message for an option of another choice, e.g. `choice` "sync_style fixed"."""
    return f"belongs to {choice}; {key} is {value}: remove it"


@dataclass(frozen=True)
class ChosenBy:
    """Metadata of a union of sections whose key `name` chooses the class.

    Each class has its value of the key as the default; the first class serves where the key is
    not written, or has no known value.
    """

    name: str

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        classes: list[type[Section]] = list(get_args(source))
        field = classes[0].model_fields[self.name]
        annotation: Any = Annotated[field.annotation, *field.metadata]
        adapter: TypeAdapter[Any] = TypeAdapter(annotation)
        tags = {self.value_of(c): f"({self.value_of(c)})" for c in classes}
        default = self.value_of(classes[0])

        def tag(section: Any) -> str:
            keys = vars(section) if isinstance(section, Section) else section
            value = keys.get(self.name, default) if isinstance(keys, dict) else default
            try:
                return tags[adapter.validate_python(value)]
            except ValidationError:
                return tags[default]  # its enum's error names all values

        variants = {tags[self.value_of(c)]: handler.generate_schema(c) for c in classes}
        return core_schema.tagged_union_schema(variants, tag)

    def value_of(self, model: type[BaseModel]) -> str:
        """Return the value of the key that chooses `model`."""
        return str(model.model_fields[self.name].default)


def sections(section: Section, key: str = "", path: str = "") -> Iterator[tuple[str, str, Section]]:
    """Yield (key, schema path, section) of a section and of all below it.

    `tasksets[0].format` has the schema path `tasksets[].format`.
    """
    yield key, path, section
    for name in type(section).model_fields:
        value = getattr(section, name)
        field_key = f"{key}.{name}".lstrip(".")
        field_path = f"{path}.{name}".lstrip(".")
        children = [(field_key, field_path, value)]
        if isinstance(value, tuple):
            children = [(f"{field_key}[{i}]", f"{field_path}[]", v) for i, v in enumerate(value)]
        elif isinstance(value, dict):
            children = [(f"{field_key}.{k}", f"{field_path}.*", v) for k, v in value.items()]
        for child_key, child_path, child in children:
            if isinstance(child, Section):
                yield from sections(child, child_key, child_path)


def key(
    default: Any, doc: str, *, unit: str = "", on_resume: str = "refuse", **constraints: Any
) -> Any:
    """Declare a documented key, which may not change when a run is resumed."""
    return Field(
        default,
        description=doc,
        json_schema_extra={**({"unit": unit} if unit else {}), "on_resume": on_resume},
        **constraints,
    )


safe_key = partial(key, on_resume="safe")
"""Declare a key that may change when a run is resumed."""


def section(model: type[Section], doc: str, **options: Any) -> Any:
    """Declare a sub-section with all its defaults."""
    return Field(default_factory=model, description=doc, **options)


def _lower(value: Any) -> Any:
    return value.strip().lower() if isinstance(value, str) else value


IgnoreCase = BeforeValidator(_lower)
"""Accepts a Literal of lower-case names in any case: `Annotated[Literal["a", "b"], IgnoreCase]`."""


def shipped(*names: str) -> BeforeValidator:
    """Accept shipped plugin names in any case; leave the names of other plugins unchanged."""
    return BeforeValidator(lambda v: _lower(v) if _lower(v) in names else v)


def renamed(**names: str) -> BeforeValidator:
    """Accept other spellings of an enum's values, e.g. renamed(offline="checkpoint")."""
    return BeforeValidator(lambda v: names.get(_lower(v), _lower(v)) if isinstance(v, str) else v)


NAME = r"^[^\W_.][^/\\\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]*$"
Name = Annotated[str, Field(pattern=NAME, max_length=120)]
"""One component of a path: begins with a letter or digit; no slash, no invisible character."""

Args = dict[str, Any]
"""Arguments of a plugin, which its `Args` model checks."""
