"""Find plugins by name in one registry; no table needs editing.

A configuration names a plugin as `name` (no transport), `pkg.module:Name` or `path/file.py:Name`.
Names are registered by a decorator of `kind(...)`, in a built-in folder, a `--plugin-dir`, or a
module of the entry-point group `rft.plugins`, named like this module.  A file that fails to import
stops everything with its traceback.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, TypeVar

from rft.errors import ConfigError, PluginError, nearest, own_lines

GROUP = "rft.plugins"
T = TypeVar("T")
# prevents a thread from getting a module that another thread is still importing
_IMPORTING = threading.RLock()


@dataclass(frozen=True)
class Plugin:
    """A registered object.  `args`: pydantic model of its arguments, if any."""

    kind: str
    name: str
    obj: Any
    source: str
    args: type | None = None


@dataclass(frozen=True)
class CliCommand:
    """A command of `rft`.  `entry`: "package.module:name" of a function or a typer app."""

    help: str
    example: str
    entry: str


@dataclass(frozen=True)
class Extra:
    """Additions of a folder below rft/extras to the core, which runs without it.

    `commands`: by name.  `plugins`: modules that register plugins.  `entries`:
    "package.module:function" by kind and name, loaded when the core needs the kind.
    """

    commands: Mapping[str, CliCommand] = field(default_factory=dict)
    plugins: tuple[str, ...] = ()
    entries: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


@cache
def extras() -> dict[str, Extra]:
    """Return EXTRA of each rft/extras/NAME/extra.py by name."""
    folders = sorted((Path(__file__).parent / "extras").glob("*/extra.py"))
    names = [path.parent.name for path in folders]
    return {name: load_entry(f"rft.extras.{name}.extra:EXTRA") for name in names}


def extra_entries(kind: str) -> dict[str, str]:
    """Return entries of one kind of all extras, by name; `load_entry` imports one."""
    tables = [extra.entries.get(kind, {}) for extra in extras().values()]
    return {name: entry for table in tables for name, entry in table.items()}


def extra_entry(kind: str, name: str, *, key: str) -> Any:
    """Import one entry.  Raises ConfigError at `key` if no extra has it."""
    entry = extra_entries(kind).get(name)
    if entry is None:
        text = f"needs what an extra adds ({kind} {name!r}), and rft/extras has none that does"
        raise ConfigError(text, key=key, given=name)
    return load_entry(entry)


def refused_names(kind: str) -> dict[str, str]:
    """Return advice by name for plugins of other programs that rft does not have."""
    refused: dict[str, str] = {}
    for entry in extra_entries(f"refused_{kind}").values():
        refused |= load_entry(entry)
    return refused


def load_entry(entry: str) -> Any:
    """Import the object "package.module:name"."""
    module, _, name = entry.partition(":")
    return getattr(importlib.import_module(module), name)


class Provider:
    """Base of plugins that write optional fields into experiences.

    `gives`: field names ("info.NAME" for an entry of info), or a static method that returns them
    for the plugin's arguments.
    """

    gives: ClassVar[Any] = ()

    @classmethod
    def provides(cls, args: Mapping[str, Any]) -> set[str]:
        """Return the fields of `gives` for these arguments."""
        return set(cls.gives(args) if callable(cls.gives) else cls.gives)


class WithArgs:
    """A class whose keyword arguments become `args`, an instance of its `Args`."""

    Args: ClassVar[type[Any]]

    def __init__(self, **args: Any) -> None:
        self.args: Any = self.Args(**args)


class Registry:
    """All plugins of this process, by (kind, name)."""

    def __init__(self) -> None:
        self._plugins: dict[tuple[str, str], Plugin] = {}
        self._scanned: set[str] = set()
        self._lock = threading.RLock()

    def add(self, plugin: Plugin) -> None:
        key = (plugin.kind, plugin.name)
        with self._lock:
            old = self._plugins.get(key)
            if old is not None and old.source != plugin.source:
                raise PluginError(
                    f"{plugin.kind} {plugin.name!r} is defined twice: in {old.source} and in "
                    f"{plugin.source}. Rename one of them."
                )
            self._plugins[key] = plugin

    def scan_folder(self, folder: Path) -> None:
        """Import every *.py file of `folder` that does not begin with an underscore."""
        folder = folder.resolve()
        if not folder.is_dir():
            raise PluginError(f"plugin folder {folder} does not exist or is not a folder")
        if folder.stat().st_mode & 0o002:
            raise PluginError(
                f"plugin folder {folder} can be written by everyone; refusing to import from it "
                f"(chmod o-w)"
            )
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
                    _guarded(
                        f"{package}.{path.stem}",
                        partial(importlib.import_module, f"{package}.{path.stem}"),
                    )

    def scan_entry_points(self) -> None:
        """Import every module that an installed distribution names in the entry-point group
        `rft.plugins`.
        """
        for entry in importlib.metadata.entry_points(group=GROUP):
            _guarded(f"entry point {entry.name} = {entry.value}", entry.load)

    def get(self, kind: str, name: str) -> Plugin:
        """Return a plugin by name, `pkg.module:Name` or `path/file.py:Name`."""
        if ":" in name:
            return _fitted(self._by_path(kind, name))
        with self._lock:
            plugin = self._plugins.get((kind, name))
        if plugin is not None:
            return _fitted(plugin)
        names = self.names(kind)
        raise PluginError(
            f"unknown {kind} {name!r}.{nearest(name, names)}  Known: {', '.join(names) or 'none'}.  "
            "Your own plugin is found with --plugin-dir DIR, as pkg.module:Name or as "
            "path/file.py:Name."
        )

    def names(self, kind: str) -> list[str]:
        with self._lock:
            return sorted(n for k, n in self._plugins if k == kind)

    def all(self, kind: str | None = None) -> list[Plugin]:
        with self._lock:
            return sorted(
                (p for p in self._plugins.values() if kind in (None, p.kind)),
                key=lambda p: (p.kind, p.name),
            )

    def _by_path(self, kind: str, name: str) -> Plugin:
        where, _, attribute = name.rpartition(":")
        if where.endswith(".py"):
            module = import_file(Path(where).expanduser())
        else:
            module = _guarded(name, partial(_import_named, kind, name, where))
        if not hasattr(module, attribute):
            raise PluginError(
                f"{kind} {name!r}: {where} has no {attribute!r}; it defines "
                f"{', '.join(_public(module)) or 'nothing'}"
            )
        obj = getattr(module, attribute)
        if (marked := mark_of(obj)) is not None and marked.kind != kind:
            raise PluginError(f"{kind} {name!r} is a {marked.kind}")
        return Plugin(kind, name, obj, where, marked.args if marked is not None else _args_of(obj))


def mark_of(obj: Any) -> Plugin | None:
    """Return the plugin that a decorator of `obj` itself, not of its base, registered."""
    marked: Plugin | None = _attribute(obj, "__rft_plugin__")
    if marked is not None and marked.obj is obj:
        return marked
    return None


def unmarked(kind: str, name: str, obj: Any) -> Plugin:
    """Wrap an object without a decorator as a plugin."""
    return Plugin(kind, name, obj, str(_attribute(obj, "__module__") or "?"), _args_of(obj))


def _args_of(obj: Any) -> type | None:
    args: type | None = _attribute(obj, "Args")
    return args


def _attribute(obj: Any, name: str) -> Any:
    """Return an attribute of an unknown object, or None."""
    return getattr(obj, name, None)


def _fitted(plugin: Plugin) -> Plugin:
    """Replace a foreign class by the result of its class method `__rft_adapt__`."""
    if (adapt := _attribute(plugin.obj, "__rft_adapt__")) is None:
        return plugin
    obj = adapt()
    return replace(plugin, obj=obj, args=_args_of(obj))


REGISTRY = Registry()


def kind(name: str) -> Callable[..., Callable[[T], T]]:
    """Make the decorator of one kind of plugin, used as `@workflow("my_name", args=MyArgs)`."""

    def mark(plugin_name: str, *, args: type | None = None) -> Callable[[T], T]:
        def register(obj: T) -> T:
            if args is not None and inspect.isclass(obj):
                obj.Args = args  # type: ignore[attr-defined]
            plugin = Plugin(
                name, plugin_name, obj, _source(obj), args if args is not None else _args_of(obj)
            )
            REGISTRY.add(plugin)
            obj.__rft_plugin__ = plugin  # type: ignore[attr-defined]
            return obj

        return register

    return mark


class Decorators:
    """One decorator for each kind of plugin: `@register.reward("exact_answer")`,
    `@register.workflow("quiz", args=QuizArgs)`.
    """

    workflow = staticmethod(kind("workflow"))
    reward = staticmethod(kind("reward"))
    tool = staticmethod(kind("tool"))
    task_source = staticmethod(kind("task_source"))
    task_operator = staticmethod(kind("task_operator"))
    selector = staticmethod(kind("selector"))
    operator = staticmethod(kind("operator"))
    priority = staticmethod(kind("priority"))
    storage = staticmethod(kind("storage"))
    engine = staticmethod(kind("engine"))
    transport = staticmethod(kind("transport"))
    monitor = staticmethod(kind("monitor"))
    advantage = staticmethod(kind("advantage_fn"))
    policy_loss = staticmethod(kind("policy_loss_fn"))
    policy_extra = staticmethod(kind("policy_extra"))
    kl_loss = staticmethod(kind("kl_loss_fn"))
    kl_penalty = staticmethod(kind("kl_penalty_fn"))
    entropy_loss = staticmethod(kind("entropy_loss_fn"))
    sample_strategy = staticmethod(kind("sample_strategy"))


register = Decorators()


def _source(obj: Any) -> str:
    """Return the file of `obj`, else its module's name."""
    module = str(_attribute(obj, "__module__") or "?")
    return str(_attribute(sys.modules.get(module), "__file__") or module)


def derived(cls: type[Any], base: type[T]) -> type[T]:
    """Return `cls`, or a class derived from both if `cls` does not derive from `base`."""
    if issubclass(cls, base):
        return cls
    names = {n: v for n, v in vars(cls).items() if n in ("__module__", "__qualname__", "__doc__")}
    return type(cls.__name__, (cls, base), names)


def hooks(obj: object, base: type) -> dict[str, Any]:
    """Return the public attributes of `base` that `obj`, of any class, has."""
    return {
        name: getattr(obj, name)
        for name in vars(base)
        if not name.startswith("_") and hasattr(obj, name)
    }


def import_file(path: Path) -> ModuleType:
    """Import a Python file once per process, with a module name made from its path."""
    path = path.resolve()
    if not path.is_file():
        raise PluginError(f"plugin file {path} does not exist")
    name = f"rft_plugin_{path.stem}_{hashlib.sha256(os.fsencode(path)).hexdigest()[:8]}"

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

    with _IMPORTING:
        return sys.modules[name] if name in sys.modules else _guarded(str(path), load)  # type: ignore[no-any-return]


def checked_args(plugin: Plugin, args: Mapping[str, Any], *, key: str = "") -> dict[str, Any]:
    """Check `args` against the `Args` model of `plugin`, or its signature, and return them.

    `key`: configuration key for the ConfigError.
    """
    what = f"{plugin.kind} {plugin.name!r}"
    if plugin.args is not None:
        names = list(plugin.args.model_fields)  # type: ignore[attr-defined]
    else:
        parameters = inspect.signature(plugin.obj).parameters.values()
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            return dict(args)
        is_class = inspect.isclass(plugin.obj)  # the program passes a function's required arguments
        names = [
            p.name
            for p in parameters
            if p.name != "self"
            and (is_class or p.kind is p.KEYWORD_ONLY or p.default is not p.empty)
        ]
    for name in args:
        if name not in names:
            allowed = f"Known: {', '.join(names) or 'none'}.{nearest(name, names)}"
            raise ConfigError(f"unknown argument {name!r} for {what}.  {allowed}", key=key)
    if plugin.args is None:
        return dict(args)
    try:
        model = plugin.args(**args)
    except ValueError as e:  # pydantic's ValidationError
        faults = []
        for f in e.errors():  # type: ignore[attr-defined]
            name = ".".join(map(str, f["loc"]))
            text = f["msg"].removeprefix("Value error, ")
            faults.append(f"{name + ': ' if name else ''}{text}, given {f['input']!r}")
        raise ConfigError(f"arguments of {what}: {'; '.join(faults)}", key=key) from None
    return {name: getattr(model, name) for name in names}


def check_call(plugin: Plugin, keywords: Mapping[str, Any], *positional: Any, key: str) -> None:
    """Raise ConfigError unless the plugin, a function or a class, accepts these arguments."""
    try:
        inspect.signature(plugin.obj).bind(*positional, **keywords)
    except TypeError as e:
        raise ConfigError(
            f"{plugin.kind} {plugin.name!r} cannot be called with its arguments: {e}", key=key
        ) from None


def load_all(plugin_dirs: Iterable[str | Path] = ()) -> None:
    """Load shipped plugins, entry points, then the folders."""
    load_shipped()
    REGISTRY.scan_entry_points()
    for folder in plugin_dirs:
        REGISTRY.scan_folder(Path(folder).expanduser())


def load_shipped() -> None:
    """Load shipped workflows, rewards and operators, including those of extras."""
    REGISTRY.scan_package("rft.reward")
    REGISTRY.scan_package("rft.buffer.operators")
    REGISTRY.scan_folder(shipped_workflows())
    for extra in extras().values():
        for name in extra.plugins:
            _guarded(name, partial(importlib.import_module, name))


def import_library(name: str | None) -> None:
    """Import `model.external_lib`, which may register models.

    Raises ConfigError if the import fails.
    """
    if name is None or name in sys.modules:
        return
    logging.getLogger(__name__).warning(
        "model.external_lib: importing %s, which may run any code with your rights", name
    )
    try:
        importlib.import_module(name)
    except (Exception, SystemExit) as e:
        raise ConfigError(
            f"cannot be imported: {type(e).__name__}: {e}", key="model.external_lib", given=name
        ) from e


def may_come(name: str, plugin_dirs: Iterable[str]) -> bool:
    """Return whether loading all plugins may register `name`."""
    return (
        ":" in name
        or any(True for _ in plugin_dirs)
        or bool(importlib.metadata.entry_points(group=GROUP))
    )


def shipped_workflows() -> Path:
    """Return the folder of shipped workflows, of the source tree or of a wheel."""
    inside = Path(__file__).parent / "_workflows"
    if inside.is_dir():
        return inside
    return Path(__file__).parent.parent / "workflows"


def _import_named(kind: str, name: str, where: str) -> ModuleType:
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as e:
        if e.name is None or not f"{where}.".startswith(f"{e.name}."):
            raise  # the module exists, but one of its imports does not
        raise PluginError(
            f"{kind} {name!r}: {e}.  Add its folder to PYTHONPATH or install it; a file can be "
            f"named as path/file.py:Name"
        ) from None


def _guarded(what: str, load: Callable[[], Any]) -> Any:
    try:
        return load()
    except PluginError:
        raise
    except (Exception, SystemExit) as e:
        raise PluginError(f"plugin {what} failed to import:\n{own_lines(e)}") from None


def _public(module: ModuleType) -> list[str]:
    return sorted(
        n
        for n, v in vars(module).items()
        if not n.startswith("_") and _attribute(v, "__module__") == module.__name__
    )
