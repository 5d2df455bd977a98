"""Collects errors, warnings, notes and derived values while a configuration is resolved, so that all are reported at once."""

from __future__ import annotations

from rft.config.plan import Derived
from rft.errors import ConfigError, ConfigErrors


class Problems:
    def __init__(self) -> None:
        self.errors: list[ConfigError] = []
        self.warnings: list[str] = []
        self.notes: list[str] = []
        self.derived: list[Derived] = []

    def error(self, key: str, message: str, given: object = None) -> None:
        if not any(e.key == key and e.message == message for e in self.errors):
            self.errors.append(ConfigError(message, key=key, given=given))

    def take(self, error: ConfigError) -> None:
        self.errors.extend(error.errors if isinstance(error, ConfigErrors) else [error])

    def warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def derive(self, key: str, value: object, why: str) -> None:
        self.derived.append(Derived(key=key, value=value, why=why))

    def raise_if_any(self) -> None:
        if self.errors:
            raise ConfigErrors(self.errors)
