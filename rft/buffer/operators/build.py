"""From the written list of operators to objects, in the one order they may stand in.  Knows no particular operator."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from typing import Any

from rft.buffer.operators.base import STAGES, Operator, engines_named
from rft.buffer.operators.settings import OperatorSettings
from rft.errors import ConfigError, PluginError
from rft.plugins import REGISTRY, checked_args

REFUSED = dict.fromkeys(
    ("data_juicer", "data-juicer", "datajuicer", "DataJuicerOperator"),
    "Data-Juicer is not offered.  Use reward_shaping_mapper with numbers that the reward or the workflow reports, deduplicate, or an "
    "operator of your own (docs/howto/operator.md)",
)


def build(settings: Sequence[OperatorSettings], engines: Collection[str] | None = None) -> list[Operator]:
    """The operators, made with their checked arguments.  Plugins must be loaded.  `engines`: those that arguments may name; None = any.

    Raises ConfigError for arguments and for an order that differs from STAGES, PluginError for an unknown name.
    """
    made = [_build(s, engines) for s in settings]
    for before, after, where in zip(made, made[1:], settings[1:], strict=False):
        if STAGES.index(before.stage) > STAGES.index(after.stage):
            raise ConfigError(
                f"{where.name} ({after.stage}) stands behind an operator of stage {before.stage}; operators run in the order "
                f"{', '.join(STAGES)}.  Write them so: {', '.join(_sorted(settings, made))}",
                key=where.key,
                given=where.name,
            )
    return made


def _build(settings: OperatorSettings, engines: Collection[str] | None) -> Operator:
    name, key = settings.name, settings.key
    if name in REFUSED:
        raise ConfigError(REFUSED[name], key=f"{key}.name", given=name)
    try:
        plugin = REGISTRY.get("operator", name)
    except PluginError as e:
        raise ConfigError(e.message, key=f"{key}.name", given=name) from None
    cls: Any = plugin.obj
    if not inspect.isclass(cls) or not issubclass(cls, Operator) or getattr(cls, "stage", None) not in STAGES:
        raise ConfigError(
            f"operator {name!r} must be a class X(Operator) of rft.buffer.operators.base with `stage`, one of {', '.join(STAGES)}",
            key=f"{key}.name",
            given=name,
        )
    args = checked_args(plugin, settings.args, key=f"{key}.args")
    if engines is not None and plugin.args is not None:
        for argument, engine in engines_named(plugin.args, args).items():
            if engine not in engines:
                raise ConfigError(
                    f"no engine has this name; there is {', '.join(engines)} (explorer.auxiliary_models)",
                    key=f"{key}.args.{argument}",
                    given=engine,
                )
    made: Operator = cls(**args)
    return made


def _sorted(settings: Sequence[OperatorSettings], made: Sequence[Operator]) -> list[str]:
    pairs = sorted(zip(settings, made, strict=True), key=lambda pair: STAGES.index(pair[1].stage))
    return [s.name for s, _ in pairs]
