"""`rft explain`: one key, and what veRL and Trinity-RFT call it; or one of their names, and the
keys that it became.

Depends on the two tables of foreign names and what `rft.config.describe` says of ours.  Invariant:
nothing is described twice.
"""

from __future__ import annotations

import importlib.resources
import re
from dataclasses import replace
from functools import cache

from rft.config.describe import Description, described, listed, own, unknown
from rft.config.schema.walk import all_keys
from rft.extras.migrate.compat.keys.verl_keys import Row, by_path, by_target
from rft.extras.migrate.compat.keys.verl_spellings import native


def describe(name: str) -> list[Description]:
    """The key called `name`: ours, with or without list indexes, veRL's, or Trinity-RFT's.  veRL's
    may have become several; a last part alone means every key that ends in it.

    Raises ConfigError naming the nearest key, or what to do about a key that is not offered.
    """
    key = name.strip().removeprefix("--")
    if description := described(key):
        return [_named(description)]
    if (row := native(key)) is not None:
        return _of_verl(row, key)
    ours = own(trinity().get(listed(key), ""))
    if ours is not None and (description := described(ours)):
        return [replace(_named(description), asked=key)]
    if descriptions := _ending_in(key):
        return descriptions
    raise unknown(key)


def _ending_in(last: str) -> list[Description]:
    """Every key that has this last part, ours or, by what it became, a related tool's; each of ours
    once.
    """
    names = [*all_keys(), *(path for path in (*by_path(), *trinity()) if own(path) is None)]
    descriptions = [
        description
        for name in names
        if name != last and name.rpartition(".")[2] == last
        for description in describe(name)
    ]
    once: dict[str, Description] = {}
    for description in descriptions:
        once.setdefault(
            description.key if description.key != "none" else description.asked, description
        )
    # the policy's before a critic's
    return sorted(once.values(), key=lambda d: (d.key == "none", d.key.count(".")))


def _named(description: Description) -> Description:
    """With the names of the related tools; an evaluation taskset shares the training taskset's."""
    key = listed(description.key)
    train_key = re.sub(
        r"^(buffer\.explorer_input\.)(taskset|eval_tasksets\[\])(?=\.)", r"\1tasksets[]", key
    )
    rows = by_target().get(key) or by_target().get(train_key, ())
    theirs = [name for name, ours in trinity().items() if ours == train_key]
    argument = re.fullmatch(r"(.+_args)\.\w+", key)
    # of a part, workflow or reward
    if argument and (above := own(argument[1])) and own(key) is None:
        trinity_name = above
    else:
        trinity_name = "the same" if train_key in theirs else ", ".join(theirs) or "none"
    return replace(description, verl=tuple(row.name for row in rows), trinity=trinity_name)


def _of_verl(row: Row, name: str) -> list[Description]:
    descriptions = []
    for target in row.targets:
        description = described(target)
        if description is not None:
            description = _named(description)
        else:
            kind = "metric" if row.section == 21 else "command-line option"
            description = Description(
                key=target, meaning=f"a {kind}", type=kind, default="", verl=(row.name,)
            )
        descriptions.append(replace(description, asked=name, note=row.note))
    if not descriptions:
        words = {
            "derived": "follows from other keys",
            "n/a": "is not taken over",
            "refused": "is not offered",
        }
        meaning = f"{words[row.kind]}: {row.note}"
        descriptions = [
            Description(
                key="none", asked=name, meaning=meaning, type="", default="", verl=(row.name,)
            )
        ]
    return descriptions


@cache
def trinity() -> dict[str, str]:
    """Trinity-RFT's key → ours, for all keys of its schema; a key that is not offered stands for
    itself.
    """
    text = (
        importlib.resources.files("rft.extras.migrate.compat.keys")
        .joinpath("data/trinity_keys.txt")
        .read_text(encoding="utf-8")
    )
    keys: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("#") or not line:
            continue
        section, _, names = line.partition(":")
        for name in names.split():
            theirs, _, ours = name.partition("=")
            path = f"{section}.{theirs}" if section else theirs
            keys[path] = ours or path
            parents = path.split(".")
            for end in range(1, len(parents)):
                above = ".".join(parents[:end]).removesuffix("[]")
                keys.setdefault(above, above)
    return keys
