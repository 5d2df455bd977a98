"""Finding things by name: five doors, one registry, no table to edit.

A configuration names a plugin as `name`, `pkg.module:Name`, `path/file.py:Name`.  Plain names are
marked with a decorator made by `kind(...)` in a file of the built-in folder, a `--plugin-dir`, or a
module of the entry-point group `rft.plugins`. A file that fails to import stops everything with its
traceback; nothing is skipped.
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
# a thread that asks for a file which another one imports gets the whole module
_IMPORTING = threading.RLock()


@dataclass(frozen=True)
class Plugin:
    """One found thing.  `args` is the pydantic model its arguments are checked against, if it has
    one.
    """

    kind: str
    name: str
    obj: Any
    source: str
    args: type | None = None


@dataclass(frozen=True)
class Verb:
    """A command of the program `rft`.  `entry`: "package.module:function" or that of a typer app."""

    help: str
    example: str
    entry: str


@dataclass(frozen=True)
class Extra:
    """What a folder below rft/extras adds to the core, which runs without it.

    `verbs`: by name.  `plugins`: modules that register rewards, workflows and the like.
    `entries`: "package.module:function" by kind and name, loaded where the core asks for the kind.
    """

    verbs: Mapping[str, Verb] = field(default_factory=dict)
    plugins: tuple[str, ...] = ()
    entries: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


@cache
def extras() -> dict[str, Extra]:
    """What each installed extra adds, by its name: EXTRA of each rft/extras/NAME/extra.py."""
    folders = sorted((Path(__file__).parent / "extras").glob("*/extra.py"))
    names = [path.parent.name for path in folders]
    return {name: load_entry(f"rft.extras.{name}.extra:EXTRA") for name in names}


def extra_entries(kind: str) -> dict[str, str]:
    """The entries of one kind that extras add, by name; `load_entry` imports one."""
    tables = [extra.entries.get(kind, {}) for extra in extras().values()]
    return {name: entry for table in tables for name, entry in table.items()}


def extra_entry(kind: str, name: str, *, key: str) -> Any:
    """Import one entry.  Raises ConfigError for the configuration key where no extra adds it."""
    entry = extra_entries(kind).get(name)
    if entry is None:
        text = f"needs what an extra adds ({kind} {name!r}), and rft/extras has none that does"
        raise ConfigError(text, key=key, given=name)
    return load_entry(entry)


def load_entry(entry: str) -> Any:
    """The object that "package.module:name" names."""
    module, _, name = entry.partition(":")
    return getattr(importlib.import_module(module), name)


class Provider:
    """Base of what writes fields into experiences that only some algorithms read.

    `gives`: "info.NAME" or a field's name, several of them, or a static method that returns them
    for the arguments of the plugin.
    """

    gives: ClassVar[Any] = ()

    @classmethod
    def provides(cls, args: Mapping[str, Any]) -> set[str]:
        """What `gives` declares for these arguments."""
        return set(cls.gives(args) if callable(cls.gives) else cls.gives)


class WithArgs:
    """A class whose keyword arguments become `args`, an object of its `Args`."""

    Args: ClassVar[type[Any]]

    def __init__(self, **args: Any) -> None:
        self.args: Any = self.Args(**args)


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
                    f"{plugin.kind} {plugin.name!r} is defined twice: in {old.source} and in "
                    f"{plugin.source}. Rename one of them."
                )
            self._found[key] = plugin

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
        """The plugin called `name`: a marked name, `pkg.module:Name` or `path/file.py:Name`."""
        if ":" in name:
            return _fitted(self._by_path(kind, name))
        with self._lock:
            found = self._found.get((kind, name))
        if found is not None:
            return _fitted(found)
        known = self.names(kind)
        raise PluginError(
            f"unknown {kind} {name!r}.  Known: {', '.join(known) or 'none'}.{nearest(name, known)} "
            f" "
            "Your own plugin is found with --plugin-dir DIR, as pkg.module:Name or as "
            "path/file.py:Name."
        )

    def names(self, kind: str) -> list[str]:
        with self._lock:
            return sorted(n for k, n in self._found if k == kind)

    def all(self, kind: str | None = None) -> list[Plugin]:
        with self._lock:
            return sorted(
                (p for p in self._found.values() if kind in (None, p.kind)),
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
    """What its decorator made of `obj`; None for one without a decorator, and for a class whose
    parent alone has one.
    """
    marked: Plugin | None = _attribute(obj, "__rft_plugin__")
    return marked if marked is not None and marked.obj is obj else None


def unmarked(kind: str, name: str, obj: Any) -> Plugin:
    """An object without a decorator, as the plugin it may serve as."""
    return Plugin(kind, name, obj, str(_attribute(obj, "__module__") or "?"), _args_of(obj))


def _args_of(obj: Any) -> type | None:
    args: type | None = _attribute(obj, "Args")
    return args


def _attribute(obj: Any, name: str) -> Any:
    """The one place that asks an unknown object for an attribute; None where it has none."""
    return getattr(obj, name, None)


def _fitted(plugin: Plugin) -> Plugin:
    """A class of another shape brings a class method `__rft_adapt__`, which gives the class of ours
    that stands for it.
    """
    if (adapt := _attribute(plugin.obj, "__rft_adapt__")) is None:
        return plugin
    obj = adapt()
    return replace(plugin, obj=obj, args=_args_of(obj))


REGISTRY = Registry()


def kind(name: str) -> Callable[..., Callable[[T], T]]:
    """Makes the decorator for one kind of plugin: `workflow = kind("workflow")`, then
    `@workflow("my_name", args=MyArgs)`.
    """

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
    """The file that defines `obj`, else its module's name."""
    module = str(_attribute(obj, "__module__") or "?")
    return str(_attribute(sys.modules.get(module), "__file__") or module)


def derived(cls: type[Any], base: type[T]) -> type[T]:
    """`cls`, or where it does not derive from `base` a class of its name that derives from both:
    `base` brings the hooks it lacks.
    """
    if issubclass(cls, base):
        return cls
    names = {n: v for n, v in vars(cls).items() if n in ("__module__", "__qualname__", "__doc__")}
    return type(cls.__name__, (cls, base), names)


def hooks(obj: object, base: type) -> dict[str, Any]:
    """Those public attributes of `base` that `obj`, a function or an object of another class, has
    itself.
    """
    return {
        name: getattr(obj, name)
        for name in vars(base)
        if not name.startswith("_") and hasattr(obj, name)
    }


def import_file(path: Path) -> ModuleType:
    """Import one Python file, once per process; its module name is made from its path."""
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
    """Keyword arguments for `plugin`: `args` checked against its `Args` model, or against its
    signature if it has none.

    `key` is the configuration key they were written under, for the message of the ConfigError.
    """
    what = f"{plugin.kind} {plugin.name!r}"
    if plugin.args is not None:
        known = list(plugin.args.model_fields)  # type: ignore[attr-defined]
    else:
        parameters = inspect.signature(plugin.obj).parameters.values()
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            return dict(args)
        own = inspect.isclass(plugin.obj)  # of a function those that it is given are not written
        known = [
            p.name
            for p in parameters
            if p.name != "self" and (own or p.kind is p.KEYWORD_ONLY or p.default is not p.empty)
        ]
    for name in args:
        if name not in known:
            told = f"Known: {', '.join(known) or 'none'}.{nearest(name, known)}"
            raise ConfigError(f"unknown argument {name!r} for {what}.  {told}", key=key)
    if plugin.args is None:
        return dict(args)
    try:
        model = plugin.args(**args)
    except ValueError as e:  # pydantic's ValidationError
        said = [
            (".".join(map(str, f["loc"])), f["msg"].removeprefix("Value error, "), f["input"])
            for f in e.errors()  # type: ignore[attr-defined]
        ]
        faults = [
            f"{name + ': ' if name else ''}{text}, given {value!r}" for name, text, value in said
        ]
        raise ConfigError(f"arguments of {what}: {'; '.join(faults)}", key=key) from None
    return {name: getattr(model, name) for name in known}


def check_call(plugin: Plugin, keywords: Mapping[str, Any], *given: Any, key: str) -> None:
    """Raises ConfigError unless the plugin, a function or a class, can be called with these."""
    try:
        inspect.signature(plugin.obj).bind(*given, **keywords)
    except TypeError as e:
        raise ConfigError(
            f"{plugin.kind} {plugin.name!r} cannot be called with its arguments: {e}", key=key
        ) from None


def load_all(plugin_dirs: Iterable[str | Path] = ()) -> None:
    """Everything a configuration may name: what is shipped, entry points, then the given folders."""
    load_shipped()
    REGISTRY.scan_entry_points()
    for folder in plugin_dirs:
        REGISTRY.scan_folder(Path(folder).expanduser())


def load_shipped() -> None:
    """Shipped workflows, rewards and operators, also those of extras."""
    REGISTRY.scan_package("rft.reward")
    REGISTRY.scan_package("rft.buffer.operators")
    REGISTRY.scan_folder(shipped_workflows())
    for extra in extras().values():
        for name in extra.plugins:
            _guarded(name, partial(importlib.import_module, name))


def import_library(name: str | None) -> None:
    """Import `model.external_lib`, which may register models.  Raises ConfigError where it cannot
    be imported.
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
    """Whether `name`, which is not marked yet, may be found once everything is loaded."""
    return (
        ":" in name
        or any(True for _ in plugin_dirs)
        or bool(importlib.metadata.entry_points(group=GROUP))
    )


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
