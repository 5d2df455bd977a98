"""The table of veRL's keys as data: what each name became here, its default as a value, and the
nearest name.

Depends on the form of `data/verl_keys.tsv`, not on what its rows are for.  Invariant: a Row says what
its line says, nothing is added; a default is what the row says, read as YAML, and one that follows
another key is None.
"""

from __future__ import annotations

import csv
import difflib
import importlib.resources
import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, cast

from rft.config import yamlfile

# n/a changes nothing here; refused would change results
Kind = Literal["native", "derived", "n/a", "refused"]
MAIN = frozenset({*range(1, 17), 22})
"""Sections of the ordinary trainer; 22 are keys of launch scripts that veRL's documents do not
have, 23 those of sft_trainer.
"""

LAYOUT = {True: "auto", False: "padded"}
"""use_remove_padding -> row_layout."""

_ACTOR = "actor_rollout_ref.actor"
_MODEL = "actor_rollout_ref.model"
_REF = "actor_rollout_ref.ref"
_RM = "reward_model"
_ROLLOUT = "actor_rollout_ref.rollout"
ALIASES = {  # other spellings of veRL's own, older and newer ones
    **{
        f"{_ACTOR}.{n}": f"{_ACTOR}.policy_loss.{n}"
        for n in ("loss_mode", "kl_cov_ratio", "ppo_kl_coef")
    },
    **{
        f"{_ACTOR}.clip_cov_{n}": f"{_ACTOR}.policy_loss.clip_cov_{n}"
        for n in ("ratio", "lb", "ub")
    },
    **{f"{_ACTOR}.policy_loss.{n}": f"{_ACTOR}.{n}" for n in ("tau_pos", "tau_neg")},
    f"{_ACTOR}.checkpoint.contents": f"{_ACTOR}.checkpoint.save_contents",
    f"{_ACTOR}.fsdp_config.strategy": f"{_ACTOR}.strategy",
    f"{_MODEL}.lora.rank": f"{_MODEL}.lora_rank",
    f"{_MODEL}.lora.alpha": f"{_MODEL}.lora_alpha",
    f"{_MODEL}.lora.target_modules": f"{_MODEL}.target_modules",
    f"{_MODEL}.enable_activation_offloading": f"{_MODEL}.enable_activation_offload",
    f"{_MODEL}.external_libs": f"{_MODEL}.external_lib",
    f"{_MODEL}.torch_dtype": f"{_ACTOR}.fsdp_config.model_dtype",
    f"{_REF}.fsdp_config.strategy": f"{_REF}.strategy",
    f"{_ROLLOUT}.n_val": f"{_ROLLOUT}.val_kwargs.n",  # these two of DeepScaleR's copy
    f"{_ROLLOUT}.val_temperature": f"{_ROLLOUT}.val_kwargs.temperature",
    "critic.checkpoint.contents": "critic.checkpoint.save_contents",
    **{
        f"{r}.fsdp_config.ulysses_sequence_parallel_size": f"{r}.ulysses_sequence_parallel_size"
        for r in (_ACTOR, _REF)
    },
    **{
        f"{_RM}.overlong_buffer.{n}": f"{_RM}.reward_kwargs.overlong_buffer_cfg.{n}"
        for n in ("enable", "len", "log", "penalty_factor")
    },
    "data.tool_config_path": f"{_ROLLOUT}.multi_turn.tool_config_path",
    "trainer.val_generations_to_log_to_wandb": "trainer.log_val_generations",
    "reward_manager": f"{_RM}.reward_manager",
    "reward_manager.name": f"{_RM}.reward_manager",
    "ray_kwargs.ray_init.num_cpus": "ray_init.num_cpus",
    "ray_kwargs.timeline_json_file": "ray_init.timeline_json_file",
}


@dataclass(frozen=True)
class Row:
    """One name of veRL's documents.

    Example: section 3, name "actor_rollout_ref.actor.grad_clip", kind "native", default "1.0",
    targets ("trainer.grad_clip",).
    """

    section: int  # of the table, 1 to 23
    name: str  # with a remark where a name occurs twice: "data.prompt_key (evaluation)"
    kind: Kind
    default: str  # veRL's, as its documents write it
    # schema keys, command-line options (`rft bench --input`) or metrics (section 21)
    targets: tuple[str, ...]
    note: str

    @property
    def path(self) -> str:
        """The name without its remark."""
        return self.name.partition(" (")[0]


@cache
def rows() -> tuple[Row, ...]:
    """Every row, in the order of the table."""
    text = (
        importlib.resources.files("rft.extras.migrate.compat.keys")
        .joinpath("data/verl_keys.tsv")
        .read_text(encoding="utf-8")
    )
    lines = csv.DictReader(text.splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE)
    return tuple(
        Row(
            section=int(line["section"]),
            name=line["name"],
            kind=cast(Kind, line["kind"]),
            default=line["default"],
            targets=tuple(t.strip() for t in (line["targets"] or "").split(";") if t.strip()),
            note=line["note"] or "",
        )
        for line in lines
    )


@cache
def by_path() -> dict[str, Row]:
    """Path → row, of all sections."""
    return by_name(frozenset(row.section for row in rows()))


@cache
def by_target() -> dict[str, tuple[Row, ...]]:
    """Schema key, option or metric → the rows that became it, list indexes written []."""
    targets: dict[str, list[Row]] = {}
    for row in rows():
        for target in row.targets:
            targets.setdefault(re.sub(r"\[\w*\]", "[]", target), []).append(row)
    return {target: tuple(target_rows) for target, target_rows in targets.items()}


@cache
def by_name(sections: frozenset[int] = MAIN) -> dict[str, Row]:
    """Rows of some sections by their path.  Where a name occurs twice the first one holds: the FSDP
    form before the Megatron form.
    """
    by_path: dict[str, Row] = {}
    for row in rows():
        if row.section in sections:
            by_path.setdefault(row.path, row)
    return by_path


def default(key: str, sections: frozenset[int] = MAIN) -> Any:
    """veRL's default of a key; None if it has none."""
    row = by_name(sections).get(key)
    return _value(row.default) if row else None


def nearest(key: str, keys: Collection[str]) -> str:
    """The known key that was probably meant: the same last name elsewhere, or a similar one; "" if
    none is near.
    """
    last = key.rsplit(".", 1)[-1]
    if moved := [k for k in keys if k.rsplit(".", 1)[-1] == last]:
        close = difflib.get_close_matches(key, moved, n=1, cutoff=0.3)
    else:  # the groups alone may not make two keys similar
        alike = set(
            difflib.get_close_matches(
                last, sorted({k.rsplit(".", 1)[-1] for k in keys}), n=20, cutoff=0.6
            )
        )
        close = difflib.get_close_matches(
            key, [k for k in keys if k.rsplit(".", 1)[-1] in alike], n=1, cutoff=0.6
        )
    return close[0] if close else ""


@cache
def _value(text: str) -> Any:
    if text.startswith("—"):
        return None
    text = (
        re.sub(r"\s*(later|\(overwritten\))$", "", text.rpartition("; ")[2])
        .partition(" (")[0]
        .strip()
    )
    if (
        not text
        or text[0] == "="
        or text.startswith(("same as", "HF ", "null /"))
        or text in ("unset", "on")
    ):
        return None
    return yamlfile.scalar(text)
