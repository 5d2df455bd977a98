"""The engines that have a name, and the factory that makes one from its settings.

Knows no engine's library; each is imported when it is asked for.  Invariant: what `make` gives
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
"""Engines that have a name, and where they are; others are plugins."""

CLASSIFIERS = {  # of task: score
    "vllm": "rft.engine.vllm:VllmClassifier",
    "transformers": "rft.engine.classifier:ClassifierEngine",
}


def find(name: str, *, task: str = "generate") -> plugins.Plugin:
    """The engine that `engine_type` names: a built-in name, a plugin's name, `pkg.module:Name` or
    `path/file.py:Name`.
    """
    known = plugins.REGISTRY.names("engine")
    if name not in BUILT_IN and ":" not in name and name not in known:
        raise ConfigError(
            f"unknown engine {name!r}.  Known: {', '.join(sorted({*BUILT_IN, *known}))}.",
            key="engine_type",
            given=name,
        )
    target = name if name in known else BUILT_IN.get(name, name)
    if task == "score" and name in BUILT_IN:
        if name not in CLASSIFIERS:
            raise ConfigError(
                f"engine_type {name} gives no scores; use {' or '.join(CLASSIFIERS)}",
                key="task",
                given="score",
            )
        target = CLASSIFIERS[name]
    found = plugins.REGISTRY.get("engine", target)
    if not (isinstance(found.obj, type) and issubclass(found.obj, BaseEngine)):
        raise ConfigError(
            f"{name!r} is not an engine: derive it from rft.engine.base.BaseEngine",
            key="engine_type",
            given=name,
        )
    return dataclasses.replace(found, args=found.obj.Args)


def own_args(found: plugins.Plugin, given: Mapping[str, Any], key: str) -> dict[str, Any]:
    """`given` checked against the `Args` of an engine plugin, with their defaults."""
    if found.args is not None:
        return plugins.checked_args(found, given, key=key)
    if given:
        raise ConfigError(
            f"{found.name} takes no arguments; a pydantic model Args in its class names them",
            key=key,
            given=dict(given),
        )
    return {}


async def make(settings: EngineSettings) -> BaseEngine:
    """A started engine of `settings.engine_type`."""
    plugins.import_library(settings.external_lib)
    found = find(settings.engine_type, task=settings.task)
    if settings.engine_type not in BUILT_IN:
        args = own_args(found, settings.extra_engine_args, "extra_engine_args")
        settings = dataclasses.replace(settings, extra_engine_args=args)
    started: BaseEngine = await found.obj.start(settings)
    return started
