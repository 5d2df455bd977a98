"""Compare the tokenizer of an auxiliary model with the policy's: a teacher scores the policy's tokens
by their ids.

Depends on tokenizer.json, not on models.  Invariant: files are read, no tokenizer is built.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from rft.config.plan import Plan
from rft.engine.settings import AuxiliarySettings
from rft.preflight.model_folder import ModelFiles


def compared(plan: Plan, policy: ModelFiles | None) -> Plan:
    """Return `plan` with the reason for each auxiliary model that cannot score the policy's tokens.

    `policy`: None: its files are not known.
    """
    if policy is None:
        return plan
    return replace(plan, auxiliary=tuple(_compared(m, policy.folder) for m in plan.auxiliary))


def _compared(model: AuxiliarySettings, policy: Path) -> AuxiliarySettings:
    e = model.engines[0]
    other = e.external is not None or e.engine_type == "scripted" or e.task != "generate"
    if other or e.policy_tokenizer is not None:
        return model
    difference = difference_of(policy, Path(e.tokenizer_path or e.model_path))
    if not difference:
        return model
    text = (
        f"auxiliary model {model.name} has another tokenizer than the policy ({difference}), so it "
        f"cannot score the policy's tokens; use a teacher of the policy's family, or with "
        f"on_policy_distill or jsd write alignment: text"
    )
    return replace(model, unscorable=text)


def difference_of(one: Path, other: Path) -> str:
    """Describe a token id that means different texts in two tokenizer folders; "" if none does or a
    folder has no tokenizer.json.
    """
    files = [folder / "tokenizer.json" for folder in (one, other)]
    if one == other or not all(f.is_file() for f in files):
        return ""
    texts = [f.read_bytes() for f in files]
    if texts[0] == texts[1]:
        return ""
    ours, theirs = (_vocabulary(json.loads(text)) for text in texts)
    for i in sorted(ours.keys() | theirs.keys()):
        if ours.get(i) != theirs.get(i):
            return f"token {i} is {theirs.get(i)!r} there and {ours.get(i)!r} here"
    return ""


def _vocabulary(tokenizer: dict[str, Any]) -> dict[int, str]:
    """Return id -> token."""
    vocabulary = tokenizer["model"].get("vocab") or {}
    if isinstance(vocabulary, list):  # of a unigram model: [token, score]
        ids = {i: str(entry[0]) for i, entry in enumerate(vocabulary)}
    else:
        ids = {int(i): str(token) for token, i in vocabulary.items()}
    return ids | {int(t["id"]): str(t["content"]) for t in tokenizer.get("added_tokens") or ()}
