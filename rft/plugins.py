"""Finding things by name: five doors, one registry, no table to edit.

A configuration names a plugin as `name`, `pkg.module:Name`, `path/file.py:Name`.  Plain names are marked with a decorator made by
`kind(...)` in a file of the built-in folder, a `--plugin-dir`, or a module of the entry-point group `rft.plugins`.
A file that fails to import stops everything with its traceback; nothing is skipped.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from rft.errors import ConfigError, PluginError

GROUP = "rft.plugins"
T = TypeVar("T")


@dataclass(frozen=True)
class Plugin:
    """One found thing.  `args` is the pydantic model its arguments are checked against, if it has one."""

    kind: str
    name: str
    obj: Any
    source: str
    args: type | None = None


class Registry:
    """All plugins of this process, by (kind, name)."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], Plugin] = {}
        self._scanned: set[str] = set()
        self._lock = threading.RLock()

    def add(self, plugin: Plugin) -> None:
        key = (plugin.kind, plugin.name)
        with self._lock:
            old = self._found.get(key)
            if old is not None and old.source != plugin.source:
                raise PluginError(
                    f"{plugin.kind} {plugin.name!r} is defined twice: in {old.source} and in {plugin.source}. Rename one of them."
                )
            self._found[key] = plugin

    def scan_folder(self, folder: Path) -> None:
        """Import every *.py file of `folder` that does not begin with an underscore."""
        folder = folder.resolve()
        if not folder.is_dir():
            raise PluginError(f"plugin folder {folder} does not exist or is not a folder")
        if folder.stat().st_mode & 0o002:
            raise PluginError(f"plugin folder {folder} can be written by everyone; refusing to import from it (chmod o-w)")
        for path in sorted(folder.glob("*.py")):
            if not path.name.startswith("_"):
                import_file(path)

    def scan_package(self, package: str) -> None:
        """Import every module of an installed package (the built-in folders)."""
        with self._lock:
            if package in self._scanned:
                return
            self._scanned.add(package)
        root = importlib.import_module(package)
        for folder in root.__path__:
            for path in sorted(Path(folder).glob("*.py")):
                if not path.name.startswith("_"):
                    _guarded(f"{package}.{path.stem}", partial(importlib.import_module, f"{package}.{path.stem}"))

    def scan_entry_points(self) -> None:
        """Import every module that an installed distribution names in the entry-point group `rft.plugins`."""
        for entry in importlib.metadata.entry_points(group=GROUP):
            _guarded(f"entry point {entry.name} = {entry.value}", entry.load)

    def get(self, kind: str, name: str) -> Plugin:
        """The plugin called `name`: a marked name, `pkg.module:Name` or `path/file.py:Name`."""
        if ":" in name:
            return _fitted(self._by_path(kind, name))
        with self._lock:
            found = self._found.get((kind, name))
        if found is not None:
            return _fitted(found)
        known = self.names(kind)
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"  Did you mean {near[0]}?" if near else ""
        raise PluginError(
            f"unknown {kind} {name!r}.  Known: {', '.join(known) or 'none'}.{hint}  "
            "A plugin of your own is found with --plugin-dir DIR, as pkg.module:Name or as path/file.py:Name."
        )

    def names(self, kind: str) -> list[str]:
        with self._lock:
            return sorted(n for k, n in self._found if k == kind)

    def all(self, kind: str | None = None) -> list[Plugin]:
        with self._lock:
            return sorted((p for p in self._found.values() if kind in (None, p.kind)), key=lambda p: (p.kind, p.name))

    def _by_path(self, kind: str, name: str) -> Plugin:
        where, _, attribute = name.rpartition(":")
        if where.endswith(".py"):
            module = import_file(Path(where).expanduser())
        else:
            module = _guarded(name, partial(_import_named, kind, name, where))
        if not hasattr(module, attribute):
            raise PluginError(
                f"{kind} {name!r}: {where} has no {attribute!r}; it defines {', '.join(_public(module)) or 'nothing'}"
            )
        obj = getattr(module, attribute)
        marked = getattr(obj, "__rft_plugin__", None)
        if marked is not None and marked.kind != kind:
            raise PluginError(f"{kind} {name!r} is a {marked.kind}")
        return Plugin(kind, name, obj, where, marked.args if marked is not None else getattr(obj, "Args", None))


def _fitted(plugin: Plugin) -> Plugin:
    """A class of another shape brings a class method `__rft_adapt__`, which gives the class of ours that stands for it."""
    if (adapt := getattr(plugin.obj, "__rft_adapt__", None)) is None:
        return plugin
    obj = adapt()
    return replace(plugin, obj=obj, args=getattr(obj, "Args", None))


REGISTRY = Registry()


def kind(name: str) -> Callable[..., Callable[[T], T]]:
    """Makes the decorator for one kind of plugin: `workflow = kind("workflow")`, then `@workflow("my_name", args=MyArgs)`."""

    def mark(plugin_name: str, *, args: type | None = None) -> Callable[[T], T]:
        def register(obj: T) -> T:
            module = sys.modules.get(getattr(obj, "__module__", ""))
            source = getattr(module, "__file__", None) or getattr(obj, "__module__", "?")
            plugin = Plugin(name, plugin_name, obj, str(source), args if args is not None else getattr(obj, "Args", None))
            REGISTRY.add(plugin)
            obj.__rft_plugin__ = plugin  # type: ignore[attr-defined]
            return obj

        return register

    return mark


def import_file(path: Path) -> ModuleType:
    """Import one Python file, once per process; its module name is made from its path."""
    path = path.resolve()
    if not path.is_file():
        raise PluginError(f"plugin file {path} does not exist")
    name = f"rft_plugin_{path.stem}_{hashlib.sha256(os.fsencode(path)).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]

    def load() -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        return module

    loaded: ModuleType = _guarded(str(path), load)
    return loaded


def checked_args(plugin: Plugin, args: Mapping[str, Any], *, key: str = "") -> dict[str, Any]:
    """Keyword arguments for `plugin`: `args` checked against its `Args` model, or against its signature if it has none.

    `key` is the configuration key they were written under, for the message of the ConfigError.
    """
    what = f"{plugin.kind} {plugin.name!r}"
    if plugin.args is not None:
        known = list(plugin.args.model_fields)  # type: ignore[attr-defined]
    else:
        parameters = inspect.signature(plugin.obj).parameters.values()
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            return dict(args)
        known = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY or (inspect.isclass(plugin.obj) and p.name != "self")]
    for name in args:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"  Did you mean {near[0]}?" if near else ""
            raise ConfigError(f"unknown argument {name!r} for {what}.  Known: {', '.join(known) or 'none'}.{hint}", key=key)
    if plugin.args is None:
        return dict(args)
    try:
        model = plugin.args(**args)
    except ValueError as e:  # pydantic's ValidationError
        faults = [f"{'.'.join(map(str, f['loc']))}: {f['msg']}, given {f['input']!r}" for f in e.errors()]  # type: ignore[attr-defined]
        raise ConfigError(f"arguments of {what}: {'; '.join(faults)}", key=key) from None
    return {name: getattr(model, name) for name in known}


def load_all(plugin_dirs: Iterable[str | Path] = ()) -> None:
    """Everything a configuration may name: shipped workflows, rewards and operators, entry points, then the given folders."""
    REGISTRY.scan_package("rft.reward")
    REGISTRY.scan_package("rft.buffer.operators")
    REGISTRY.scan_folder(shipped_workflows())
    REGISTRY.scan_entry_points()
    for folder in plugin_dirs:
        REGISTRY.scan_folder(Path(folder).expanduser())


def may_come(name: str, plugin_dirs: Iterable[str]) -> bool:
    """Whether `name`, which is not marked yet, may be found once everything is loaded."""
    return ":" in name or any(True for _ in plugin_dirs) or bool(importlib.metadata.entry_points(group=GROUP))


def shipped_workflows() -> Path:
    """The folder of shipped workflows: beside the package in a source tree, inside it in a wheel."""
    inside = Path(__file__).parent / "_workflows"
    return inside if inside.is_dir() else Path(__file__).parent.parent / "workflows"


def _import_named(kind: str, name: str, where: str) -> ModuleType:
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as e:
        if e.name is None or not f"{where}.".startswith(f"{e.name}."):
            raise  # the module is there; something that it imports is not
        raise PluginError(
            f"{kind} {name!r}: {e}.  Add its folder to PYTHONPATH or install it; a file can be named as path/file.py:Name"
        ) from None


def _guarded(what: str, load: Callable[[], Any]) -> Any:
    try:
        return load()
    except PluginError:
        raise
    except (Exception, SystemExit):
        raise PluginError(f"plugin {what} failed to import:\n{traceback.format_exc()}") from None


def _public(module: ModuleType) -> list[str]:
    return sorted(
        n for n, v in vars(module).items() if not n.startswith("_") and getattr(v, "__module__", None) == module.__name__
    )
