"""`trainer.trainer_config.<veRL path>`: veRL's own spelling of a key, moved to the native key
before anything is validated.

Knows veRL's table and no schema.  Invariant: afterwards no `trainer_config` is left, every value in
it has been moved, ignored with a warning, or refused, and a moved value keeps the line that it was
written on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from rft.config.foreign import ForeignKeys, Origins
from rft.config.schema.source import Loc, dotted
from rft.config.yamlfile import scalar
from rft.errors import ConfigError, raise_all
from rft.extras.migrate.compat.keys.verl_keys import ALIASES, Row, by_path, nearest

HERE = ("trainer", "trainer_config")
# the flat form: trainer_config.actor.* for trainer_config.actor_rollout_ref.actor.*
_GROUPS = ("actor", "model", "ref", "rollout")
# any key may stand below
_OPEN = ("actor_rollout_ref.model.override_config", "actor_rollout_ref.rollout.engine_kwargs.vllm")
_MINI_BATCH = (
    "is not an option of the trainer: a train step has buffer.batch_size tasks (veRL's "
    "ppo_mini_batch_size, in prompts) and "
    "buffer.train_batch_size = batch_size x repeat_times experiences; write those, and remove this"
)
# other names of the same choice; a name that is not listed stays as it is
_VALUES: dict[str, dict[Any, Any]] = {
    "actor_rollout_ref.actor.strategy": {"fsdp": "fsdp2"},
    "actor_rollout_ref.ref.strategy": {"fsdp": "fsdp2"},
    "critic.strategy": {"fsdp": "fsdp2"},
    "actor_rollout_ref.actor.kl_loss_type": {"kl": "k1", "mse": "k2", "k3": "low_var_kl"},
    "actor_rollout_ref.rollout.name": {"hf": "transformers"},
}
_SAME = {  # derived rows that are another name of their target, value for value
    "actor_rollout_ref.actor.optim.clip_grad",
    "actor_rollout_ref.actor.optim.lr_decay_style",
    "actor_rollout_ref.ref.strategy",
    "actor_rollout_ref.ref.ulysses_sequence_parallel_size",
    "actor_rollout_ref.rollout.name",
    "actor_rollout_ref.rollout.prompt_length",
    "actor_rollout_ref.rollout.response_length",
    "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz",
    "critic.strategy",
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
_OWN = ("trainer.", "algorithm.", "data.", "reward_model.", "ray_init.")
"""Groups that Trinity-RFT fills in from its own keys; of them only what `_HONOURED` names is read.
"""
_HONOURED = ("trainer.critic_warmup", "trainer.balance_batch", "trainer.max_actor_ckpt_to_keep")
_CORRECTION = "algorithm.rollout_correction."
_REFERENCE = re.compile(r"\$\{trainer\.trainer_config\.([\w.]+)\}")
_MEGATRON = re.compile(r"(^|\.)megatron(\.|$)")

Values = dict[str, Any]


class VerlKeys(ForeignKeys):
    def expand(
        self, values: Values, origins: Origins, same_layer: Callable[[Loc], bool]
    ) -> list[str]:
        """Moves what stands below trainer.trainer_config in `values` and `origins`; what was
        ignored, as warnings.

        A native key that is written too, with another value, is an error if `same_layer` says that
        it was written in the same place; otherwise it is an earlier layer (a base file under the
        file, the file under an override) and gives way. Raises ConfigError or ConfigErrors.
        """
        trainer = values.get("trainer")
        if not isinstance(trainer, dict) or "trainer_config" not in trainer:
            return []
        given = trainer.pop("trainer_config")
        where = {at: o for at, o in origins.items() if at[:2] == HERE}
        for at in where:
            del origins[at]
        if given is None:
            return []
        if not isinstance(given, dict):
            raise ConfigError(
                "must be a mapping of veRL's keys, such as actor_rollout_ref",
                key=dotted(HERE),
                given=given,
            )
        warnings: list[str] = []
        idle: dict[str, str] = {}  # sections without effect: why
        errors: list[ConfigError] = []
        moved: dict[str, tuple[Loc, Any]] = {}
        refuse_megatron(given, where)
        for loc, name, value in _leaves(given, ()):
            if _MEGATRON.search(name):
                idle[dotted((*HERE, *loc[: loc.index("megatron") + 1]))] = (
                    "trainer.trainer_strategy is fsdp2"
                )
                continue
            if value == {} or (value is None and any(n.startswith(f"{name}.") for n in _known())):
                continue  # an empty group
            written = (*HERE, *loc)
            origin = next(
                (o for at, o in where.items() if at[: len(written)] == written[: len(at)]), ""
            )
            try:
                target = _target(name, value)
                if target is None:
                    warnings.append(f"{dotted(written)} is ignored: {_why_ignored(name)}")
                    continue
                key = target[0]
                new = _pointed(target[1])
                if key in moved and moved[key][1] != new:
                    other, earlier = moved[key]
                    raise _differs(value, dotted(other), earlier, key, origin)
                moved[key] = (written, new)
                put(values, origins, key, new, written, origin, same_layer)
            except ConfigError as e:
                errors.append(
                    ConfigError(
                        e.message + (f"  ({origin})" if origin else ""),
                        key=dotted(written),
                        given=value,
                    )
                )
        raise_all(errors)
        return warnings + [f"{section} has no effect: {why}" for section, why in idle.items()]


def refuse_megatron(given: Values, where: Origins) -> None:
    """One error for a whole configuration of Megatron."""
    for at, name, value in _leaves(given, ()):
        if name.endswith(".strategy") and str(value).strip().lower() == "megatron":
            text = (
                "Megatron is not offered: leave out strategy and the sections called megatron; "
                "the trainer is FSDP2"
            )
            line = where.get((*HERE, *at), "")
            raise ConfigError(
                text + (f"  ({line})" if line else ""), key=dotted((*HERE, *at)), given=value
            )


def _pointed(value: Any) -> Any:
    """References to keys below trainer_config as references to the native keys."""

    def moved(found: re.Match[str]) -> str:
        row = native(found[1])
        return f"${{{row.targets[0]}}}" if row is not None and len(row.targets) == 1 else found[0]

    return _REFERENCE.sub(moved, value) if isinstance(value, str) else value


def _why_ignored(name: str) -> str:
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
    found = by_path().get(_full(name))
    return found or by_path().get(name)


def _full(name: str) -> str:
    name = f"actor_rollout_ref.{name}" if name.partition(".")[0] in _GROUPS else name
    return ALIASES.get(name, name)


def _leaves(given: Any, loc: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str, Any]]:
    """(keys as written, veRL's full name, value) of everything below trainer_config."""
    name = _full(".".join(loc))
    row_of_its_own = name in by_path() and not any(n.startswith(f"{name}.") for n in by_path())
    if isinstance(given, dict) and given and not row_of_its_own:
        for k, v in given.items():
            yield from _leaves(v, (*loc, str(k)))
    else:
        yield loc, name, given


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
    if name.rpartition(".")[2] == "ppo_mini_batch_size":
        raise ConfigError(_MINI_BATCH)
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
            value, str
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


def put(
    values: Values,
    origins: Origins,
    key: str,
    new: Any,
    written: Loc,
    origin: str,
    same_layer: Callable[[Loc], bool],
) -> None:
    loc: Loc = tuple(key.split("."))
    place: Any = values
    for i, part in enumerate(loc[:-1]):
        inner = place.get(part)
        if inner is None:
            inner = place[part] = {}
            origins.pop(loc[: i + 1], None)
        if not isinstance(inner, dict):
            raise ConfigError(
                f"belongs to {key}, but {dotted(loc[: i + 1])} is {inner!r}; write a mapping there"
            )
        place = inner
    last = str(loc[-1])
    if last in place and place[last] != new and same_layer(loc):
        there = next((o for at, o in origins.items() if at[: len(loc)] == loc), "")
        raise _differs(new, key, place[last], key, there)
    place[last] = new
    for at in [at for at in origins if at[: len(loc)] == loc]:
        del origins[at]
    origins[loc] = f"{origin or 'given'}, as {dotted(written)}"


def _differs(value: Any, other: str, earlier: Any, key: str, where: str) -> ConfigError:
    place = f" ({where})" if where else ""
    also = f"; both mean {key}" if other != key else ""
    return ConfigError(
        f"is {value!r}, but {other} is {earlier!r}{place}{also}, two spellings of one key.  Write "
        f"one of them"
    )
