"""Overrides of rotary embeddings in config.json, for trainer, engines and exported models alike.

Depends on the names of transformers 4 (`rope_theta`, `rope_scaling`) and 5 (`rope_parameters`).
Invariant: results are complete and need no further merge.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rft.errors import ConfigError
from rft.types.row_layout import text_config

KINDS = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
_BEYOND = ("linear", "dynamic", "yarn")  # extend the trained positions by a factor
_OLD = ("rope_theta", "rope_scaling")


def applied(config: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    """Return `override` of `config` (config.json) with `rope_parameters` in place of `rope_theta` and
    `rope_scaling`.

    Raises ConfigError for a model with several kinds of embeddings.
    """
    if not any(override.get(name) is not None for name in _OLD):
        return dict(override)
    had = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if any(isinstance(value, Mapping) for value in had.values()) or "text_config" in config:
        raise ConfigError(
            "this model has rotary embeddings of several kinds; write all of them as "
            f"model.override_config.{'text_config.' * ('text_config' in config)}rope_parameters",
            key="model.rope_theta"
            if override.get("rope_scaling") is None
            else "model.rope_scaling",
        )
    new = dict(override.get("rope_scaling") or had)
    theta = (
        override.get("rope_theta")
        or new.get("rope_theta")
        or had.get("rope_theta")
        or config.get("rope_theta")
    )
    if theta is None:
        raise ConfigError("is needed: config.json has none to keep", key="model.rope_theta")
    kind = new.pop("type", None)
    new = {"rope_type": kind or "default", **new, "rope_theta": theta}
    if "partial_rotary_factor" in had:
        new.setdefault("partial_rotary_factor", had["partial_rotary_factor"])
    if (
        new["rope_type"] in ("yarn", "longrope", "llama3")
        and (trained := _trained(config, had)) is not None
    ):
        new.setdefault("original_max_position_embeddings", trained)
    return {
        **{name: value for name, value in override.items() if name not in _OLD},
        "rope_parameters": new,
    }


def applied_to(folder: str | Path, override: Mapping[str, Any]) -> dict[str, Any]:
    """Call `applied` for the config.json in `folder`."""
    if not any(override.get(name) is not None for name in _OLD):
        return dict(override)
    return applied(json.loads((Path(folder) / "config.json").read_text(encoding="utf-8")), override)


def replaced(config: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    """Return `config` with `override`, for an exported model."""
    new = applied(config, override)
    base = (
        {name: value for name, value in config.items() if name not in _OLD}
        if "rope_parameters" in new
        else config
    )
    parts = {  # transformers changes the named entries of a part
        name: {**part, **new[name]}
        for name, part in base.items()
        if name.endswith("_config") and isinstance(part, Mapping) and name in new
    }
    return {**base, **new, **parts}


def positions(config: Mapping[str, Any], override: Mapping[str, Any]) -> int | None:
    """Return the number of positions of the language model, or None if config.json has none."""
    new = text_config(replaced(config, override))
    longest = new.get("max_position_embeddings")
    rope = new.get("rope_parameters") or {}
    if (
        not isinstance(longest, int)
        or override.get("rope_scaling") is None
        or rope.get("rope_type") not in _BEYOND
    ):
        if isinstance(longest, int):
            return longest
        return None
    return max(
        longest,
        int(rope.get("original_max_position_embeddings", longest) * float(rope.get("factor", 1.0))),
    )


def _trained(config: Mapping[str, Any], had: Mapping[str, Any]) -> int | None:
    return had.get("original_max_position_embeddings") or config.get("max_position_embeddings")
