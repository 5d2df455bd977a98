"""Advantage of group-relative REINFORCE with a choice of rows (REC, arXiv:2509.24203).

Knows no tokens but for leaving out those of dropped rows.  Invariant: which rows of a group are dropped depends on the group's frozen
rewards and on the seed, never on which of its rows share the batch.
"""

from __future__ import annotations

import hashlib

import numpy as np

from rft.algorithm.advantage_args import RecArgs
from rft.algorithm.base import Advantages, StepInputs, advantage
from rft.algorithm.groups import described, equal, members
from rft.types.ports import GroupStats


@advantage("rec", args=RecArgs)
def rec(x: StepInputs, args: RecArgs) -> Advantages:
    """A = R - mean, with `std_normalize` divided by (std + epsilon), std biased (n).

    With `drop: balance`, a group with more rows below its mean than not loses surplus ones of them, drawn at random, and mean and std
    are those of the rest.  Dropped rows have advantage 0 and leave the loss and its denominators.  Equal rewards give 0.
    Values float32, keep bool: [L_i] per row.
    """
    kept = {row.group: _kept(group, args.drop, x.seed) for row, group in members(x)}
    values, keep = [], []
    for row, group in members(x):
        stays, rewards = True, np.asarray(group.rewards, np.float64)
        if (mask := kept[row.group]) is not None:
            known = described(group)
            stays = bool(mask[list(zip(known.runs, known.steps, strict=True)).index((row.run, row.step))])
            rewards = rewards[mask]
        value = 0.0
        if stays and not equal(group.rewards):
            value = (row.reward - rewards.mean()) / (rewards.std() + args.epsilon if args.std_normalize else 1.0)
        values.append(np.full(row.length, value, np.float32))
        keep.append(np.full(row.length, stays))
    dropped = 1 - float(np.mean([k.all() for k in keep])) if keep else 0.0
    return Advantages(values=values, keep=keep, metrics={"rec/dropped_rows_frac": dropped} if args.drop else {})


def _kept(group: GroupStats, drop: str | None, seed: int) -> np.ndarray | None:
    """bool [n], which members of the group stay; None: all."""
    if drop is None or equal(group.rewards):
        return None
    rewards = np.asarray(group.rewards, np.float64)
    low = np.flatnonzero(rewards < rewards.mean())
    surplus = 2 * len(low) - len(rewards)
    if surplus <= 0:
        return None
    mask = np.ones(len(rewards), np.bool_)
    mask[_generator(group.group, seed).permutation(low)[:surplus]] = False
    return mask


def _generator(group: str, seed: int) -> np.random.Generator:
    name = group.partition(".")[2] or group  # without the lineage: a run that was resumed draws as one that was not
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return np.random.default_rng(int.from_bytes(digest, "big"))
