"""`trainer.trainer_config.<veRL path>`: veRL's own spelling of a key, moved to the native key.

Depends on veRL's table and no schema.  Invariant: afterwards there is no `trainer_config`; every
value below it has been moved, dropped with its reason, or refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from rft.config.schema.source import Loc, dotted
from rft.config.yamlfile import scalar
from rft.errors import ConfigError, raise_all
from rft.extras.migrate.compat.keys.verl_keys import ALIASES, LAYOUT, Row, by_path, nearest

HERE = ("trainer", "trainer_config")
# the flat form: trainer_config.actor.* for trainer_config.actor_rollout_ref.actor.*
_GROUPS = ("actor", "model", "ref", "rollout")
# any key may stand below
_OPEN = ("actor_rollout_ref.model.override_config", "actor_rollout_ref.rollout.engine_kwargs.vllm")
_SET_BY_ITSELF = {  # what Trinity-RFT writes over, whatever stands there
    "ppo_mini_batch_size": "a step has buffer.batch_size tasks and buffer.train_batch_size rows",
    "total_training_steps": "buffer.total_steps, or the rows there are, end a run",
}
# other names of the same choice; a name that is not listed stays as it is
_VALUES: dict[str, dict[Any, Any]] = {
    "actor_rollout_ref.actor.kl_loss_type": {"kl": "k1", "mse": "k2", "k3": "low_var_kl"},
    "actor_rollout_ref.actor.freeze_vision_tower": {True: False, False: True},
    "actor_rollout_ref.rollout.name": {"hf": "transformers"},
    "actor_rollout_ref.model.use_remove_padding": LAYOUT,
    "critic.model.use_remove_padding": LAYOUT,
}
_SAME = {  # derived rows that are another name of their target, value for value
    "actor_rollout_ref.actor.optim.clip_grad",
    "actor_rollout_ref.actor.optim.lr_decay_style",
    "actor_rollout_ref.ref.ulysses_sequence_parallel_size",
    "actor_rollout_ref.rollout.name",
    "actor_rollout_ref.rollout.prompt_length",
    "actor_rollout_ref.rollout.response_length",
    "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz",
    "critic.shuffle",
    "critic.loss_agg_mode",
    "critic.checkpoint.save_contents",
    "critic.optim.warmup_style",
    "critic.optim.lr_scheduler_type",
    "critic.optim.lr_warmup_steps",
    "critic.optim.min_lr_ratio",
    "critic.model.external_lib",
    "critic.model.fsdp_config.fsdp_size",
}
_OWN = (
    "trainer.",
    "algorithm.",
    "data.",
    "reward_model.",
    "ray_init.",
    "custom_reward_function.",
)
"""Groups that Trinity-RFT fills in from its own keys; of them only what `_HONOURED` names is read.
"""
_HONOURED = ("trainer.critic_warmup", "trainer.balance_batch", "trainer.max_actor_ckpt_to_keep")
_CORRECTION = "algorithm.rollout_correction."
_INNER = re.compile(r"\$\{trainer\.trainer_config\.([\w.]+)\}")
_MEGATRON = re.compile(r"(^|\.)megatron(\.|$)")

Values = dict[str, Any]
Where = Callable[[Loc], str]
"""Returns "line 12" for the place of a key, "" for an unknown one."""


def move_trainer_config(
    values: Values, where: Where
) -> tuple[list[tuple[Loc, str]], dict[Loc, str]]:
    """Move what stands below trainer.trainer_config in `values` to the native keys.

    Returns (moved, dropped): pairs of (place, native key), and the reason by place.  Raises
    ConfigErrors with everything that has no native key, or that differs from a native key which is
    written too.
    """
    trainer = values.get("trainer")
    if not isinstance(trainer, dict) or "trainer_config" not in trainer:
        return [], {}
    config = trainer.pop("trainer_config")
    if config is None:
        return [], {}
    if not isinstance(config, dict):
        text = "must be a mapping of veRL's keys, such as actor_rollout_ref"
        raise ConfigError(text, key=dotted(HERE), given=config)
    refuse_megatron(config, where)
    dropped: dict[Loc, str] = {}
    moved: list[tuple[Loc, str]] = []
    errors: list[ConfigError] = []
    for path, name, value in _leaves(config, ()):
        loc: Loc = (*HERE, *path)
        if _MEGATRON.search(name):
            section = loc[: loc.index("megatron") + 1]
            dropped[section] = "the one trainer is FSDP2"
            continue
        if value == {} or (value is None and any(n.startswith(f"{name}.") for n in _known())):
            continue  # an empty group
        try:
            value = _referred(value, config)
            target = _target(name, value)
            if target is None:
                dropped[loc] = _why_ignored(name)
                continue
            key, new = target[0], _pointed(target[1])
            earlier = next((dotted(other) for other, k in moved if k == key), key)
            put(values, key, new, earlier, where)
            moved.append((loc, key))
        except ConfigError as e:
            line = f"  ({where(loc)})" if where(loc) else ""
            errors.append(ConfigError(e.message + line, key=dotted(loc), given=value))
    raise_all(errors)
    return moved, dropped


def refuse_megatron(config: Values, where: Where) -> None:
    """Raise one error for a whole configuration of Megatron."""
    for path, name, value in _leaves(config, ()):
        if name.endswith(".strategy") and str(value).strip().lower() == "megatron":
            text = (
                "Megatron is not offered: leave out strategy and the sections called megatron; "
                "the trainer is FSDP2"
            )
            line = where((*HERE, *path))
            raise ConfigError(
                text + (f"  ({line})" if line else ""), key=dotted((*HERE, *path)), given=value
            )


def _pointed(value: Any) -> Any:
    """References to keys below trainer_config as references to the native keys."""

    def moved(reference: re.Match[str]) -> str:
        row = native(reference[1])
        return (
            f"${{{row.targets[0]}}}" if row is not None and len(row.targets) == 1 else reference[0]
        )

    return _INNER.sub(moved, value) if isinstance(value, str) else value


def _why_ignored(name: str) -> str:
    if text := _SET_BY_ITSELF.get(name.rpartition(".")[2]):
        return text
    if "hybrid_engine" in name:
        return "mode says whether engines and trainer share their GPUs"
    if name.startswith(_OWN) and name not in _HONOURED:
        row = by_path().get(name)
        return (
            f"{' and '.join(row.targets)} is read"
            if row and row.targets
            else (row.note if row else "") or "nothing reads it"
        )
    return by_path()[name].note or "it is always so here"


def native(name: str) -> Row | None:
    """The row of a veRL path, in any of the accepted spellings (with or without
    `trainer.trainer_config.`, flat or not).
    """
    name = name.removeprefix("trainer.trainer_config.")
    row = by_path().get(_full(name))
    return row or by_path().get(name)


def _full(name: str) -> str:
    name = f"actor_rollout_ref.{name}" if name.partition(".")[0] in _GROUPS else name
    return ALIASES.get(name, name)


def _leaves(config: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str, Any]]:
    """(keys as written, veRL's full name, value) of everything below trainer_config."""
    name = _full(".".join(path))
    row_of_its_own = name in by_path() and not any(n.startswith(f"{name}.") for n in by_path())
    if isinstance(config, dict) and config and not row_of_its_own:
        for k, v in config.items():
            yield from _leaves(v, (*path, str(k)))
    else:
        yield path, name, config


def _known() -> list[str]:
    return [
        n for n in by_path() if n.startswith(("actor_rollout_ref.", "critic.")) or n in _HONOURED
    ]


def _below_open(name: str) -> str:
    return next((o for o in _OPEN if name == o or name.startswith(f"{o}.")), "")


def _target(name: str, value: Any) -> tuple[str, Any] | None:
    """(native key, value for it), or None for what is ignored.  Raises ConfigError for what is
    neither.
    """
    if name.rpartition(".")[2] in _SET_BY_ITSELF:
        return None
    if name.startswith(_CORRECTION):
        return name, value
    if (
        name.startswith(_OWN) and (name not in _HONOURED or value is None)
    ) or "hybrid_engine" in name:
        return None
    row = by_path().get(name) if name in _known() else None
    if row is None:
        return _open_target(name), value
    off = value is None or _is_default(row, value)
    if row.kind == "n/a" or (row.kind == "refused" and off):
        return None
    if row.kind == "refused":
        raise ConfigError(f"is not offered: {row.note}; remove it")
    simple = len(row.targets) == 1 and "[i]" not in row.targets[0]
    if simple and (row.kind == "native" or name in _SAME):
        if isinstance(value, str) and "${" in value and name in _VALUES:
            raise ConfigError(
                f"its value has another name here, so an interpolation cannot be read; write "
                f"{row.targets[0]}"
            )
        return row.targets[0], _VALUES.get(name, {}).get(value, value) if isinstance(
            value, str | bool
        ) else value
    if row.kind == "derived" and off:
        return None
    instead = f"write the native key {' and '.join(row.targets)}" if row.targets else "remove it"
    raise ConfigError(f"has no plain counterpart{f' ({row.note})' if row.note else ''}; {instead}")


def _open_target(name: str) -> str:
    if base := _below_open(name):
        return f"{by_path()[base].targets[0]}{name.removeprefix(base)}"
    near = nearest(name, _known())
    hint = f"  Did you mean {near}?" if near else ""
    raise ConfigError(f"unknown key: veRL's table has no {name}.{hint}")


def _is_default(row: Row, value: Any) -> bool:
    """Whether `value` is what veRL does anyway."""
    text = re.sub(r" \(doc YAML\)| later| \(overwritten\)", "", row.default)
    return any(
        part and part[0] not in "=—" and scalar(part) == value
        for part in map(str.strip, text.split(";"))
    )


def _referred(value: Any, config: Values, most: int = 8) -> Any:
    """The value that a reference into trainer.trainer_config stands for; other values as they are."""
    match = _INNER.fullmatch(value) if isinstance(value, str) else None
    if match is None or not most:
        return value
    place: Any = config
    for part in match[1].split("."):
        if not isinstance(place, dict) or part not in place:
            return value
        place = place[part]
    return value if isinstance(place, dict) else _referred(place, config, most - 1)


def put(values: Values, key: str, new: Any, spelling: str, where: Where) -> None:
    """Write `new` under the dotted `key`.

    Raises ConfigError if another value is there already; `spelling` is the key that wrote it.
    """
    *above, last = key.split(".")
    section = values
    for i, part in enumerate(above):
        inner = section.get(part)
        if inner is None:
            inner = section[part] = {}
        if not isinstance(inner, dict):
            raise ConfigError(
                f"belongs to {key}, but {'.'.join(above[: i + 1])} is {inner!r}; write a mapping "
                f"there"
            )
        section = inner
    if last in section and section[last] != new:
        line = where((*above, last))
        place = f" ({line})" if line else ""
        also = f"; both mean {key}" if spelling != key else ""
        raise ConfigError(
            f"is {new!r}, but {spelling} is {section[last]!r}{place}{also}, two spellings of one "
            f"key.  Write one of them"
        )
    section[last] = new
