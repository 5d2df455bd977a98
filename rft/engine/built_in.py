"""The built-in engines by name, and the factory that starts an engine from its settings.

An engine's library is imported only when that engine is requested.  Invariant: the result of `make`
fulfils `rft.types.ports.Engine`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import rft.plugins as plugins
from rft.engine.base import BaseEngine
from rft.engine.settings import EngineSettings
from rft.errors import ConfigError

BUILT_IN = {
    "vllm": "rft.engine.vllm:VllmEngine",
    "transformers": "rft.engine.transformers:TransformersEngine",
    "scripted": "rft.engine.scripted:ScriptedEngine",
    "external": "rft.engine.external:ExternalEngine",
}
"""Module and class of each engine with a short name; all other engines are plugins."""

CLASSIFIERS = {  # for task: score
    "vllm": "rft.engine.vllm:VllmClassifier",
    "transformers": "rft.engine.classifier:ClassifierEngine",
}


def find(name: str, *, task: str = "generate") -> plugins.Plugin:
    """Return the engine named by `engine_type`: a built-in name, a plugin's name, `pkg.module:Name`
    or `path/file.py:Name`.
    """
    registered = plugins.REGISTRY.names("engine")
    if name not in BUILT_IN and ":" not in name and name not in registered:
        raise ConfigError(
            f"unknown engine {name!r}.  Known: {', '.join(sorted({*BUILT_IN, *registered}))}.",
            key="engine_type",
            given=name,
        )
    target = name if name in registered else BUILT_IN.get(name, name)
    if task == "score" and name in BUILT_IN:
        if name not in CLASSIFIERS:
            raise ConfigError(
                f"engine_type {name} gives no scores; use {' or '.join(CLASSIFIERS)}",
                key="task",
                given="score",
            )
        target = CLASSIFIERS[name]
    plugin = plugins.REGISTRY.get("engine", target)
    if not (isinstance(plugin.obj, type) and issubclass(plugin.obj, BaseEngine)):
        raise ConfigError(
            f"{name!r} is not an engine: derive it from rft.engine.base.BaseEngine",
            key="engine_type",
            given=name,
        )
    return dataclasses.replace(plugin, args=plugin.obj.Args)


def own_args(plugin: plugins.Plugin, arguments: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Check `arguments` against the `Args` of an engine plugin; return them with defaults."""
    if plugin.args is not None:
        return plugins.checked_args(plugin, arguments, key=key)
    if arguments:
        raise ConfigError(
            f"{plugin.name} takes no arguments; a pydantic model Args in its class names them",
            key=key,
            given=dict(arguments),
        )
    return {}


async def make(settings: EngineSettings) -> BaseEngine:
    """Start an engine of `settings.engine_type`."""
    plugins.import_library(settings.external_lib)
    plugin = find(settings.engine_type, task=settings.task)
    if settings.engine_type not in BUILT_IN:
        args = own_args(plugin, settings.extra_engine_args, "extra_engine_args")
        settings = dataclasses.replace(settings, extra_engine_args=args)
    started: BaseEngine = await plugin.obj.start(settings)
    return started
