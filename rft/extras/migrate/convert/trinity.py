"""A YAML file of Trinity-RFT → the values of a configuration, and what became of its keys.

Depends on tables of names, not on what the keys configure.  Invariant: a key that is written is in
the result, renamed, dropped with its reason, or the conversion is refused.
"""

from __future__ import annotations

import copy
import fnmatch
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rft.config import yamlfile
from rft.config.extends import read_config_text
from rft.config.hints import refuse_other_tools
from rft.config.schema.source import Loc, dotted
from rft.errors import ConfigError, raise_all
from rft.extras.migrate.compat.keys.not_offered import INSTEAD, value_hint
from rft.extras.migrate.compat.keys.trinity_keys import DROPPED, MOVED, RENAMED
from rft.extras.migrate.compat.keys.verl_keys import LAYOUT
from rft.extras.migrate.compat.keys.verl_spellings import move_trainer_config, put

_PLUGINS = ("default_workflow_type", "default_eval_workflow_type", "default_reward_fn_type")
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+(?<!\.py)")
_INTERVAL = "synchronizer.sync_interval"
_OFF = "it is off here too"


@dataclass(frozen=True)
class KeyChange:
    """A key that was renamed (`text`: its new name), added or dropped (`text`: the reason)."""

    key: str
    text: str
    line: int  # 0 if unknown


@dataclass
class ConvertedFile:
    """The values of the new file; the changes in the order of the old one."""

    values: dict[str, Any]
    renamed: list[KeyChange] = field(default_factory=list)
    added: list[KeyChange] = field(default_factory=list)
    dropped: list[KeyChange] = field(default_factory=list)


def convert_file(path: Path) -> ConvertedFile:
    """Convert a YAML file.  Raises ConfigErrors naming each key that has no counterpart."""
    values, lines = yamlfile.parse(read_config_text(path), path.name)
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds no mapping; a file of Trinity-RFT has model, buffer, ...")
    stages = values.get("stages")
    for tree in (values, *(stages if isinstance(stages, list) else ())):
        _include_trainer_file(tree, path)
    return convert(values, lines)


def _include_trainer_file(tree: Any, path: Path) -> None:
    """Put the keys of the file that trainer_config_path names below trainer_config."""
    trainer = _section(tree, ["trainer"])
    name = str(trainer.get("trainer_config_path") or "")
    if not name or trainer.get("trainer_config"):
        return
    # paths of such files begin at the folder of all examples, where the program is started
    folders = (Path(), *path.absolute().parents)
    found = next((f / name for f in folders if (f / name).is_file()), None)
    found = found or path.with_name(Path(name).name)
    if not found.is_file():
        raise ConfigError(
            f"given {name}, which is neither here nor in a folder above {path}; put that file there",
            key="trainer.trainer_config_path",
            given=name,
        )
    values, _ = yamlfile.parse(read_config_text(found), found.name)
    if not isinstance(values, dict):
        raise ConfigError(f"{found} holds no mapping; it must have veRL's actor_rollout_ref, ...")
    reference = re.compile(rf"\$\{{(?=({'|'.join(map(re.escape, values))})\.)")
    trainer["trainer_config"] = _below_trainer(values, reference)
    del trainer["trainer_config_path"]


def _below_trainer(value: Any, reference: re.Pattern[str]) -> Any:
    """With references from the top of veRL's file as references from the top of Trinity-RFT's."""
    if isinstance(value, dict):
        return {k: _below_trainer(v, reference) for k, v in value.items()}
    if isinstance(value, list):
        return [_below_trainer(v, reference) for v in value]
    return reference.sub("${trainer.trainer_config.", value) if isinstance(value, str) else value


def convert(values: dict[str, Any], lines: Mapping[Loc, int]) -> ConvertedFile:
    """Convert the values of a file in place; `lines` as from `yamlfile.parse`.

    Raises ConfigErrors naming each key that has no counterpart.
    """
    refuse_other_tools(values)
    file = ConvertedFile(values)
    _convert_tree(values, (), lines, file)
    common = {name: section for name, section in values.items() if name != "stages"}
    stages: Any = values.get("stages")
    errors: list[ConfigError] = []
    for i, stage in enumerate(stages if isinstance(stages, list) else ()):
        if not isinstance(stage, dict):
            continue
        tree = copy.deepcopy(common | stage)  # a moved key may change a section of the file
        try:
            _convert_tree(tree, ("stages", i), lines, file)
        except ConfigError as e:
            errors += [_below(("stages", i), x) for x in e.errors]
        changed = {name for name in tree if name in stage or tree[name] != common.get(name)}
        stages[i] = {name: section for name, section in tree.items() if name in changed}
    raise_all(errors)
    return file


def _below(at: Loc, error: ConfigError) -> ConfigError:
    key = f"{dotted(at)}.{error.key}" if at else error.key
    return ConfigError(error.message, key=key, given=error.given)


def _convert_tree(
    tree: dict[str, Any], at: Loc, lines: Mapping[Loc, int], file: ConvertedFile
) -> None:
    """Convert the sections of a file, or those of the stage at `at`."""

    def line(loc: Loc) -> int:
        place = (*at, *loc)
        return min((n for leaf, n in lines.items() if leaf[: len(place)] == place), default=0)

    def where(loc: Loc) -> str:
        return f"line {line(loc)}" if line(loc) else ""

    def change(loc: Loc, text: str) -> KeyChange:
        return KeyChange(dotted((*at, *loc)), text, line(loc))

    moved, dropped = move_trainer_config(tree, where)
    file.renamed += [change(loc, key) for loc, key in moved]
    file.dropped += [change(loc, reason) for loc, reason in dropped.items()]
    _choose_sync_interval(tree, change, file)
    _move_run_counts(tree, change, file)
    _move_expert_rows(tree, change, file)
    for old, new in MOVED.items():
        *above, last = old.split(".")
        section = _section(tree, above)
        if last not in section:
            continue
        loc: Loc = (*above, last)
        value = section.pop(last)
        if value is None:
            file.dropped.append(change(loc, "is not set"))
            continue
        value = LAYOUT.get(value, value) if new.endswith("row_layout") else value
        try:
            put(tree, new, value, new, where)
        except ConfigError as e:
            text = e.message + (f"  ({where(loc)})" if where(loc) else "")
            raise ConfigError(text, key=old, given=value) from None
        file.renamed.append(change(loc, new))
    for section, at_section in list(mappings(tree)):
        if at_section[:1] == ("stages",):
            continue
        for name in list(section):
            _convert_key(section, (*at_section, name), change, file)
    _train_vision(tree, change, file)
    _name_plugins(tree)


def _convert_key(section: dict[str, Any], loc: Loc, change: Any, file: ConvertedFile) -> None:
    name = str(loc[-1])
    value = section[name]
    key = dotted(loc)
    is_off = not value
    if hint := value_hint(key, value):
        raise ConfigError(hint, key=key, given=value)
    if reason := _lookup(DROPPED, key) or (_OFF if is_off and _lookup(INSTEAD, key) else ""):
        del section[name]
        file.dropped.append(change(loc, reason))
    elif value is None and name == "path":
        del section[name]
        file.dropped.append(change(loc, "is not set"))
    elif new := _lookup(RENAMED, key):
        if new in section and section[new] != value:
            raise ConfigError(
                f"is {value!r}, but {new} is {section[new]!r}, two spellings of one key.  Write "
                f"one of them",
                key=key,
                given=value,
            )
        section[new] = section.pop(name)
        file.renamed.append(change(loc, new))


def _choose_sync_interval(tree: dict[str, Any], change: Any, file: ConvertedFile) -> None:
    """Write the interval of the side that decides in `sync_style` as sync_interval."""
    section = _section(tree, ["synchronizer"])
    style = str(section.get("sync_style") or "fixed").strip().lower()
    for side in ("explorer", "trainer"):
        name = f"{side}_sync_interval"
        if (interval := section.pop(name, None)) is None:
            continue
        loc = ("synchronizer", name)
        if style == "fixed" or ("explorer" in style) == (side == "explorer"):
            put(tree, _INTERVAL, interval, dotted(loc), lambda at: "")
            file.renamed.append(change(loc, _INTERVAL))
        else:
            file.dropped.append(change(loc, f"in sync_style {style} the other side decides"))


def _move_run_counts(tree: dict[str, Any], change: Any, file: ConvertedFile) -> None:
    """Write rollout_args.n as repeat_times of its taskset."""
    for section, loc in list(mappings(tree)):
        args = section.get("rollout_args")
        if loc[:1] != ("stages",) and isinstance(args, dict) and "n" in args:
            section.setdefault("repeat_times", section["rollout_args"].pop("n"))
            at_n = (*loc, "rollout_args", "n")
            file.renamed.append(change(at_n, dotted((*loc, "repeat_times"))))


def _move_expert_rows(tree: dict[str, Any], change: Any, file: ConvertedFile) -> None:
    """Rows of sft_warmup_dataset are those of an expert where an algorithm mixes them in; without
    steps of a warm-up nothing else reads them.
    """
    section = _section(tree, ["buffer", "trainer_input"])
    loc = ("buffer", "trainer_input", "sft_warmup_dataset")
    if "sft_warmup_dataset" not in section or section.get("sft_warmup_steps"):
        return
    rows = section.pop("sft_warmup_dataset")
    if str(_section(tree, ["algorithm"]).get("algorithm_type")).startswith("mix"):
        section.setdefault("auxiliary_buffers", {})["sft_dataset"] = rows
        file.renamed.append(change(loc, "buffer.trainer_input.auxiliary_buffers.sft_dataset"))
    else:
        file.dropped.append(change(loc, "sft_warmup_steps is 0: nothing reads it"))


def _train_vision(tree: dict[str, Any], change: Any, file: ConvertedFile) -> None:
    """Train the vision tower where rows show images, unless an adapter alone is trained."""
    inputs = mappings(_section(tree, ["buffer"]))
    shows = any(_section(section, ["format"]).get("image_key") for section, _ in inputs)
    written = "train_vision" in _section(tree, ["trainer"])
    if shows and not written and not _section(tree, ["model"]).get("lora_configs"):
        put(tree, "trainer.train_vision", True, "trainer.train_vision", lambda at: "")
        text = "true: Trinity-RFT trains the vision tower too"
        file.added.append(change(("trainer", "train_vision"), text))


def _lookup(table: Mapping[str, str], key: str) -> str:
    return next((text for p, text in table.items() if fnmatch.fnmatchcase(key, p)), "")


def _section(tree: Any, path: list[str]) -> dict[str, Any]:
    """The mapping at `path`; an empty one if there is none."""
    for part in path:
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree if isinstance(tree, dict) else {}


def mappings(value: Any, loc: Loc = ()) -> Iterator[tuple[dict[str, Any], Loc]]:
    """Yield every mapping in `value` with its place, the outer ones first."""
    if isinstance(value, dict):
        yield value, loc
    inner: Any = value.items() if isinstance(value, dict) else ()
    for name, child in enumerate(value) if isinstance(value, list) else inner:
        yield from mappings(child, (*loc, name))


def _name_plugins(tree: dict[str, Any]) -> None:
    """Write dotted paths of workflows, rewards and operators as pkg.module:Name."""
    for section, loc in mappings(tree):
        names = ("name",) if "operators" in loc[-2:-1] else _PLUGINS
        for name in names:
            path = section.get(name)
            if isinstance(path, str) and _DOTTED.fullmatch(path):
                section[name] = ":".join(path.rsplit(".", 1))
