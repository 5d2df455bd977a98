"""Find and build the payload storage that settings or a ledger name."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Mapping
from pathlib import Path

from rft.buffer.settings import BufferSettings
from rft.buffer.storage.base import Storage
from rft.errors import ConfigError
from rft.plugins import REGISTRY, Plugin, checked_args, derived

STORAGE_KEY = "buffer.trainer_input.experience_buffer"
# environment variable: comma-separated references that a ledger may name as its storage
TRUSTED = "RFT_STORAGE_CODE"
_CONFIGURED: set[str] = set()


def make_storage(settings: BufferSettings) -> Storage:
    """Return the payload storage that the settings name.

    Raises PluginError for an unknown storage, ConfigError for invalid arguments.
    """
    plugin = _storage_plugin(settings.storage_type)
    if not inspect.isclass(plugin.obj):
        raise ConfigError(
            f"storage {plugin.name!r} must be a class X(Storage) of rft.buffer.storage.base",
            key=f"{STORAGE_KEY}.storage_type",
        )
    args = checked_args(plugin, settings.storage_args, key=f"{STORAGE_KEY}.storage_args")
    _CONFIGURED.add(storage_reference(settings.storage_type))
    try:
        return derived(plugin.obj, Storage)(settings, **args)
    except TypeError as e:
        raise ConfigError(
            f"storage {plugin.name!r} cannot be made: {e}; its __init__ takes the settings and "
            f"each field of its Args by name",
            key=f"{STORAGE_KEY}.storage_type",
        ) from e


def stored_by(about: Mapping[str, str], name: str, folder: Path) -> Storage:
    """Return the storage of a ledger for reading; `about` is the content of its table `meta`.

    A ledger is untrusted input: code that it names runs only if a configuration of this process, or
    TRUSTED, names it too.  Raises ConfigError.
    """
    kind = about.get("storage", about["storage_type"])
    if ":" in kind and kind not in _CONFIGURED | set(os.environ.get(TRUSTED, "").split(",")):
        raise ConfigError(
            f"the ledger of {folder.parent} names code as its storage, which is not run by itself; "
            f"if it is yours, set {TRUSTED}={kind}",
            key="RUN",
            given=kind,
        )
    try:
        args = json.loads(about.get("storage_args", "{}"))
        path = about["storage_path"] or None
    except (ValueError, KeyError) as e:
        raise ConfigError(
            f"the ledger of {folder.parent} does not say how its payload is stored: {e}", key="RUN"
        ) from None
    return make_storage(
        BufferSettings(
            name=name, folder=folder, storage_type=kind, storage_args=args, storage_path=path
        )
    )


def storage_reference(name: str) -> str:
    """Return a name by which a process in any folder finds the storage without its configuration."""
    plugin = _storage_plugin(name)
    if not plugin.source.endswith(".py") or Path(plugin.source).resolve().is_relative_to(
        Path(__file__).parent
    ):
        return name
    return f"{Path(plugin.source).expanduser().resolve()}:{plugin.obj.__name__}"


def _storage_plugin(name: str) -> Plugin:
    REGISTRY.scan_package("rft.buffer.storage")
    return REGISTRY.get("storage", name)
