"""Every algorithm from its own defaults, as a configuration gives them: the first step on the tiny
model, against formulas in float64.

Formulas are written here once more in numpy.  Log-probs are those of transformers in float64, row
by row, without packing or sharing; rows are stored ones, and teachers, states and steps of runs
that no workflow gives yet are written into them.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rft.algorithm.catalog import algorithms
from rft.config.load import from_dict
from rft.config.plan import Facts
from rft.config.resolve import resolve
from rft.trainer.loop.learner import Learner
from rft.trainer.loop.ranks import Ranks
from rft.trainer.rows import batch_builder
from rft.trainer.settings import LearnerSettings
from rft.types.block import encode
from rft.types.completion import VersionSpan
from rft.types.experience import Experience, SamplingRecord
from rft.types.ids import ExperienceId, Version
from rft.types.ports import GroupStats, Lease
from rft.types.task import SamplingArgs

Array = np.ndarray
K = 12  # max_response_tokens
TOP = 20  # likely tokens of a teacher
STEPPED = ("multi_step_grpo", "gigpo")
REWARDS = {0: [1.0, 0.0, 0.5, 0.0], 1: [0.0, 1.0, 1.0, 0.25], 2: [1.0, 1.0, 1.0, 1.0]}
# task: runs: steps
STEPS = {0: [[0.0, 1.0], [0.5, 0.0], [0.0]], 1: [[1.0], [0.0, 0.0], [0.0, 2.0]]}


def configured(name: str, model: Path) -> LearnerSettings:
    """What the trainer gets of a configuration that names the algorithm and nothing of it else."""
    data = algorithms()[name].data
    rows = {"path": "rft.testing.tiny:copy_tasks", "storage_type": "file"}
    tasks = {
        "taskset": {"path": "rft.testing.tiny:copy_tasks"},
        "default_workflow_type": "simple_workflow",
    }
    buffer: dict[str, Any] = {"batch_size": 3, "total_steps": 10}
    if data is not None:
        buffer["trainer_input"] = {"experience_buffer": rows}
    else:
        buffer["explorer_input"] = {**tasks, "default_reward_fn_type": "exact_answer"}
    if algorithms()[name].sample_strategy == "mix":
        buffer["trainer_input"] = {"auxiliary_buffers": {"sft_dataset": rows}}
    written = {
        "mode": "both" if data is None else "train",
        "model": {"model_path": str(model), "max_prompt_tokens": 20, "max_response_tokens": K},
        "algorithm": {"algorithm_type": name},
        "buffer": buffer,
    }
    made = resolve(from_dict(written), Facts(cpus=1, gpus=0)).learner
    return replace(made, max_token_len_per_gpu=32)  # several micro-batches


# ---------------------------------------------------------------- rows


@dataclass
class Row:
    """A stored row and what the formulas read of it; arrays are float64 over its trained tokens."""

    x: Experience
    lp: Array
    ref: Array
    every: Array  # [L, V], log-probs of all tokens

    @property
    def likely(self) -> tuple[Array, Array]:
        """Probabilities [L, TOP + 1] of the teacher and of the policy."""
        assert self.x.teacher_top_ids is not None and self.x.teacher_top_logprobs is not None
        trained = self.x.loss_mask[4:]
        t = np.exp(self.x.teacher_top_logprobs[trained].astype(np.float64))
        ids = self.x.teacher_top_ids[trained].astype(np.int64)
        s = np.exp(np.take_along_axis(self.every, ids, 1))
        others = 1 - s.sum(1, keepdims=True)
        return t / t.sum(1, keepdims=True), np.concatenate([s, others], 1)

    @property
    def r(self) -> float:
        return float(self.x.reward or 0.0)

    @property
    def n(self) -> int:
        return len(self.lp)

    @property
    def old(self) -> Array:
        return self.x.logprobs[self.x.loss_mask].astype(np.float64)

    @property
    def teacher(self) -> Array:
        assert self.x.teacher_logprobs is not None
        return self.x.teacher_logprobs[self.x.loss_mask].astype(np.float64)


def plain(folder: Path, tokens: Array, mask: Array, scale: float = 1.0) -> Array:
    """Log-probs of the masked tokens by transformers alone, float64; `scale`: of all weights."""
    every = distributions(folder, tokens, mask, scale)
    found: Array = np.take_along_axis(every, tokens[mask][:, None].astype(np.int64), 1)[:, 0]
    return found


def distributions(folder: Path, tokens: Array, mask: Array, scale: float = 1.0) -> Array:
    """Log-probs of all tokens of the vocabulary where the masked ones stand."""
    from transformers import AutoModelForCausalLM

    if (key := (folder, scale)) not in _MODELS:
        _MODELS[key] = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        with torch.no_grad():
            for p in _MODELS[key].parameters():
                p.mul_(scale)
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    with torch.no_grad():
        logprobs = _MODELS[key](ids).logits[0, :-1].log_softmax(-1).numpy()
    found: Array = logprobs[mask[1:]]
    return found


_MODELS: dict[tuple[Path, float], Any] = {}


def experience(name: str, folder: Path, task: int, run: int, step: int, reward: float) -> Row:
    rng = np.random.default_rng((task, run, step))
    count = 4 + int(rng.integers(3, 9))
    tokens = rng.integers(3, 250, count).astype(np.int32)
    tokens[:4] = 5 + task
    mask = np.arange(count) >= 4
    if run == 1:
        mask[6] = False  # a tool's token
    lp = plain(folder, tokens, mask)
    given = algorithms()[name].data is not None
    expert = algorithms()[name].sample_strategy == "mix" and (task + run) % 3 == 0
    logprobs = np.zeros(count, np.float32)
    teacher = np.zeros(count, np.float32)
    if not (given or expert):
        # of a policy a few steps ago
        logprobs[mask] = np.minimum(lp + rng.normal(0, 0.3, len(lp)), -0.01)
        teacher[mask] = -rng.exponential(4, len(lp))
    x = Experience(
        id=ExperienceId(1, 0, 0, task, run, step=step),
        taskset="t",
        task_index=task,
        workflow="w",
        status="complete",
        tokens=tokens,
        loss_mask=mask,
        logprobs=logprobs,
        has_logprobs=not (given or expert),
        version_spans=() if given or expert else (VersionSpan(Version(1, 0), 4, count),),
        sampling=()
        if given or expert
        else (SamplingRecord(start=4, end=count, sampling=SamplingArgs(temperature=1.0)),),
        reward=None if given or expert else reward,
        reward_parts={} if given or expert else {"right": reward, "short": float(run)},
        is_expert=given or expert,
        teacher_logprobs=teacher,
        teacher_spans=(VersionSpan(Version(1, 0), 4, count),),
        teacher_top_ids=np.array([rng.permutation(250)[:TOP] for _ in mask[4:]], np.int32),
        teacher_top_logprobs=np.log(rng.dirichlet(np.ones(TOP + 1), count - 4)).astype(np.float16),
        info={"baseline_reward": 0.25, "env_state_hash": step}
        | ({"label": task != 1} if algorithms()[name].data == "labels" and run % 2 == 0 else {}),
    )
    ref = plain(folder, tokens, mask, 1.05)
    return Row(x, lp, ref, distributions(folder, tokens, mask))


def stored(name: str, folder: Path) -> list[Row]:
    if name in STEPPED:
        return [
            experience(name, folder, task, run, step, r)
            for task, runs in STEPS.items()
            for run, rewards in enumerate(runs)
            for step, r in enumerate(rewards)
        ]
    tasks = (
        {task: rewards[:2] for task, rewards in REWARDS.items()}
        if algorithms()[name].data == "pairs"
        else REWARDS
    )
    return [
        experience(name, folder, task, run, 0, r)
        for task, rewards in tasks.items()
        for run, r in enumerate(rewards)
    ]


def leased(rows: list[Row]) -> Lease:
    groups = []
    for group in dict.fromkeys(str(row.x.group) for row in rows):
        mine = [row for row in rows if str(row.x.group) == group and not row.x.is_expert]
        rewards = tuple(row.r for row in mine)
        groups.append(
            GroupStats(
                group=group,
                rewards=rewards,
                mean=float(np.mean(rewards)) if mine else 0.0,
                std=float(np.std(rewards, ddof=1)) if len(mine) > 1 else 0.0,
                runs=tuple(row.x.id.run for row in mine),
                steps=tuple(row.x.id.step for row in mine),
                lengths=tuple(row.n for row in mine),
                parts=tuple(dict(row.x.reward_parts) for row in mine),
            )
        )
    return Lease(step=1, frame=encode([row.x for row in rows]), groups=tuple(groups))


# ---------------------------------------------------------------- advantages


def grouped(rows: list[Row]) -> Iterator[tuple[list[int], Array]]:
    for group in dict.fromkeys(str(row.x.group) for row in rows):
        at = [i for i, row in enumerate(rows) if str(row.x.group) == group]
        yield at, np.array([rows[i].r for i in at])


def per_group(f: Callable[[Array, Array], Array]) -> Callable[[list[Row]], list[Array]]:
    """`f(rewards, lengths)` of each group, one number per row."""

    def of(rows: list[Row]) -> list[Array]:
        found = [np.zeros(0)] * len(rows)
        for at, r in grouped(rows):
            for i, a in zip(at, f(r, np.array([rows[i].n for i in at])), strict=True):
                found[i] = np.full(rows[i].n, a)
        return found

    return of


def standard(r: Array) -> Array:
    scored: Array = (r - r.mean()) / (r.std(ddof=1) + 1e-6) if np.ptp(r) else np.zeros(len(r))
    return scored


def white(arrays: list[Array]) -> list[Array]:
    every = np.concatenate(arrays)
    return [(a - every.mean()) / math.sqrt(every.var(ddof=1) + 1e-8) for a in arrays]


def passk(r: Array, lengths: Array) -> Array:
    best, second = np.sort(r)[::-1][:2]
    return (
        np.where(r == best, (best - second) / (r.std(ddof=1) + 1e-6), 0.0)
        if np.ptp(r)
        else np.zeros(len(r))
    )


def gpg(rows: list[Row]) -> list[Array]:
    alpha = len(rows) / sum(row.r != 0 for row in rows)
    return per_group(lambda r, lengths: alpha * (r - r.mean()))(rows)


def gdpo(rows: list[Row]) -> list[Array]:
    """Each part by its group, their sum by the step; a group without a difference adds nothing."""
    of_parts = []
    for part in ("right", "short"):
        numbers = np.zeros(len(rows))
        for at, _ in grouped(rows):
            numbers[at] = standard(np.array([rows[i].x.reward_parts[part] for i in at]))
        of_parts.append(numbers)
    total = np.sum(of_parts, axis=0)
    total = (total - total.mean()) / (total.std(ddof=1) + 1e-6)
    return [np.full(row.n, a) for row, a in zip(rows, total, strict=True)]


def step_wise(rows: list[Row]) -> list[Array]:
    last = {task: [run[-1] for run in runs] for task, runs in STEPS.items()}
    return [np.full(row.n, standard(np.array(last[row.x.id.task]))[row.x.id.run]) for row in rows]


def gigpo(rows: list[Row]) -> list[Array]:
    """No step has a reward of its own: the run's counts, at its last step."""
    last = {task: np.array([run[-1] for run in runs]) for task, runs in STEPS.items()}
    to_come = np.array([last[row.x.id.task][row.x.id.run] for row in rows])  # not discounted
    found = []
    for row, value in zip(rows, to_come, strict=True):
        # told apart by the step's number inside of its task, as in the paper
        state = (row.x.id.task, row.x.id.step)
        same = to_come[[(other.x.id.task, other.x.id.step) == state for other in rows]]
        of_task = last[row.x.id.task]
        episode = (of_task[row.x.id.run] - of_task.mean()) / (1 + 1e-6)
        found.append(np.full(row.n, episode + (value - same.mean()) / (1 + 1e-6)))
    return found


def jsd(row: Row) -> Array:
    mixture = np.log(0.5 * np.exp(row.old) + 0.5 * np.exp(row.teacher))
    gain: Array = 0.5 * (mixture - row.old)
    return gain


ADVANTAGES: dict[str, Callable[[list[Row]], list[Array]]] = {
    "none": lambda rows: [np.zeros(row.n) for row in rows],
    "grpo": per_group(lambda r, n: standard(r)),
    "dr_grpo": per_group(lambda r, n: r - r.mean()),
    "dro": per_group(lambda r, n: r - r.mean()),
    # the critic says 0 at first
    "ppo": lambda rows: white([np.full(row.n, row.r) for row in rows]),
    # undiscounted, paid at the end
    "reinforceplusplus": lambda rows: white([np.full(row.n, row.r) for row in rows]),
    "reinforceplusplus_baseline": lambda rows: white(per_group(lambda r, n: r - r.mean())(rows)),
    "remax": lambda rows: [np.full(row.n, row.r - 0.25) for row in rows],
    "rloo": per_group(lambda r, n: r - (r.sum() - r) / (len(r) - 1)),
    "opmd": per_group(lambda r, n: r - r.mean()),
    "asymre": per_group(lambda r, n: r - r.mean() + 0.1),
    "reinforce": per_group(lambda r, n: r),
    "rec": per_group(lambda r, n: r - r.mean()),
    "opo": per_group(lambda r, n: r - (n * r).sum() / n.sum()),
    "gpg": gpg,
    "gdpo": gdpo,
    "maxrl": per_group(lambda r, n: (r - r.mean()) / r.mean()),
    "grpo_passk": per_group(passk),
    "step_wise_grpo": step_wise,
    "gigpo": gigpo,
    "on_policy_distill": lambda rows: [row.teacher - row.old for row in rows],
    "jsd": lambda rows: [jsd(row) for row in rows],
}


# ---------------------------------------------------------------- losses
Losses = list[Array]  # of the tokens of each row


@dataclass
class Choice:
    """The loss as one number, or those that it may be."""

    values: list[float]


def mean(values: Losses, mode: str = "token-mean") -> float:
    match mode:
        case "token-mean":
            return float(sum(v.sum() for v in values) / sum(map(len, values)))
        case "run-mean":  # each row is a run
            return float(np.mean([v.mean() for v in values]))
        case "seq-mean-token-sum":
            return float(np.mean([v.sum() for v in values]))
    assert mode == "seq-mean-token-sum-norm"
    return float(np.mean([v.sum() / K for v in values]))


def tokens(f: Callable[[Array, Array, Array], Array]) -> Callable[[list[Row], list[Array]], Losses]:
    """`f(log-probs, old ones, advantages)` of each row."""
    return lambda rows, a: [f(row.lp, row.old, adv) for row, adv in zip(rows, a, strict=True)]


def clipped(low: float, high: float, dual: float = 3.0) -> Callable[[Array, Array, Array], Array]:
    def f(lp: Array, old: Array, a: Array) -> Array:
        rho = np.exp(lp - old)
        worse = np.maximum(-a * rho, -a * np.clip(rho, 1 - low, 1 + high))
        return np.where(a < 0, np.minimum(worse, -a * dual), worse)

    return f


def gspo(lp: Array, old: Array, a: Array) -> Array:
    rho = np.full(len(lp), np.exp((lp - old).mean()))
    return np.maximum(-a * rho, -a * np.clip(rho, 1 - 3e-4, 1 + 4e-4))


def geo_mean(lp: Array, old: Array, a: Array) -> Array:
    v = lp - old
    sign = np.sign(a)
    return np.full(
        len(lp),
        -a.mean() * np.exp((sign * np.minimum(sign * v, sign * np.clip(v, -0.4, 0.4))).mean()),
    )


def sapo(lp: Array, old: Array, a: Array) -> Array:
    tau = np.where(a > 0, 1.0, 1.05)
    return -a * 4 / tau / (1 + np.exp(-tau * (np.exp(lp - old) - 1)))


def sppo(lp: Array, old: Array, a: Array) -> Array:
    rho = np.exp(lp - old)
    return np.where((rho >= 1 / 1.3) & (rho <= 1.3), -a * (lp - old), 0.0)


def dppo(limit: float, moved: Callable[[Array, Array], Array]) -> Callable[..., Array]:
    """`moved(p, q)`: the divergence of a token, of the sign of p - q."""

    def f(lp: Array, old: Array, a: Array) -> Array:
        by = moved(np.exp(lp), np.exp(old))
        out = ((a > 0) & (by > limit)) | ((a < 0) & (by < -limit))
        return np.where(out, 0.0, -a * np.minimum(np.exp(lp - old), 20) * lp)

    return f


def kl_of(p: Array, q: Array) -> Array:
    rest = (1 - q) * np.log((1 - q + 1e-8) / (1 - p + 1e-8))
    return np.sign(p - q) * np.abs(q * np.log(q / p) + rest)


def vespo(lp: Array, old: Array, a: Array) -> Array:
    w = np.exp((lp - old).sum())
    return -a * lp * np.where(a >= 0, w**2 * np.exp(3 * (1 - w)), w**3 * np.exp(2 * (1 - w)))


def forking(rows: list[Row], a: list[Array]) -> Losses:
    """DAPO on the fifth of the tokens with the highest entropy."""
    (model,) = [m for (_, scale), m in _MODELS.items() if scale == 1.0]
    found = []
    for row in rows:
        ids = torch.from_numpy(row.x.tokens.astype(np.int64))[None]
        with torch.no_grad():
            logits = model(ids).logits[0, :-1].log_softmax(-1)
        entropies = -(logits.exp() * logits).sum(-1).numpy()
        found.append(entropies[row.x.loss_mask[1:]])
    limit = np.quantile(np.concatenate(found), 0.8)
    every = tokens(clipped(0.2, 0.28))(rows, a)
    assert not isinstance(every, Choice)
    return [v * (h >= limit) for v, h in zip(every, found, strict=True)]


def of_pairs(
    value: Callable[[Row], float], loss: Callable[[float, float], float]
) -> Callable[[list[Row], list[Array]], Choice]:
    """The mean over pairs of `loss(chosen, rejected)`."""

    def f(rows: list[Row], a: list[Array]) -> Choice:
        values = [value(row) for row in rows]
        return Choice([float(np.mean(list(map(loss, values[0::2], values[1::2]))))])

    return f


def odds(mean: float) -> float:
    return mean - math.log(1 - math.exp(mean))


def mixed(imitate: Callable[[Array], Array]) -> Callable[[list[Row], list[Array]], Choice]:
    def f(rows: list[Row], a: list[Array]) -> Choice:
        own = [(row, adv) for row, adv in zip(rows, a, strict=True) if not row.x.is_expert]
        usual = mean([clipped(0.2, 0.2)(row.lp, row.old, adv) for row, adv in own])
        return Choice(
            [0.9 * usual + 0.1 * mean([imitate(row.lp) for row in rows if row.x.is_expert])]
        )

    return f


def m2po(rows: list[Row], a: list[Array]) -> Choice:
    v = np.concatenate([row.lp - row.old for row in rows])
    adv = np.concatenate(a)
    onwards = sorted(np.flatnonzero(adv * v > 0), key=lambda t: v[t] ** 2)
    while onwards and np.mean(v[onwards] ** 2) > 0.04:
        v[onwards.pop()] = -np.inf  # ratio 0
    return Choice([float((-adv * np.exp(v)).sum() / len(v))])


def covariances(rows: list[Row], a: list[Array]) -> tuple[Array, Array, Array]:
    lp = np.concatenate([row.lp for row in rows])
    adv = np.concatenate(a)
    return (
        (adv - adv.mean()) * (lp - lp.mean()),
        lp - np.concatenate([row.old for row in rows]),
        adv,
    )


def kl_cov(rows: list[Row], a: list[Array]) -> Choice:
    c, v, adv = covariances(rows, a)
    return Choice([float(((-adv * np.exp(v)).sum() + abs(v[np.argmax(c)])) / len(v))])


def clip_cov(rows: list[Row], a: list[Array]) -> Choice:
    """One token is drawn."""
    c, v, adv = covariances(rows, a)
    rho = np.exp(v)
    plainly = -adv * rho
    held = -adv * np.clip(rho, 0.8, 1.2)
    every = np.maximum(plainly, held)
    among = np.flatnonzero((held <= plainly) & (c > 1) & (c < 5))
    assert len(among), "the rows have a token that may be drawn"
    return Choice([float((every.sum() - every[t]) / len(v)) for t in among])


def kl(p: Array, q: Array) -> Array:
    found: Array = (p * np.log(p / q)).sum(1)
    return found


def over_likely(t: Array, s: Array) -> Array:
    m = (t + s) / 2
    return (kl(t, m) + kl(s, m)) / 2


def sdpo(rows: list[Row], a: list[Array]) -> Losses:
    return [over_likely(*row.likely) * np.minimum(np.exp(row.lp - row.old), 2) for row in rows]


def kto(rows: list[Row], a: list[Array]) -> Choice:
    """Every second row is a prompt with the answer of another."""
    over = [float((row.lp - row.ref).sum()) for row in rows]
    point = max(0.0, float(np.mean(over[1::2])))
    sides = [
        r - point if row.x.info["label"] else point - r
        for row, r in zip(rows, over, strict=True)
        if "label" in row.x.info
    ]
    return Choice([float(np.mean([1 / (1 + math.exp(0.1 * side)) for side in sides]))])


def raft(rows: list[Row], a: list[Array]) -> Choice:
    return Choice([mean([-rows[at[int(np.argmax(r))]].lp for at, r in grouped(rows)])])


LOSSES: dict[str, Callable[[list[Row], list[Array]], Losses | Choice]] = {
    "ppo": tokens(clipped(0.2, 0.2)),
    "dapo": tokens(clipped(0.2, 0.28)),
    "opmd": tokens(lambda lp, old, a: -a * lp / 2),
    "topr": tokens(
        lambda lp, old, a: -a * lp * np.where(a <= 0, np.minimum(np.exp(lp - old), 1), 1)
    ),
    "cispo": tokens(lambda lp, old, a: -a * lp * np.clip(np.exp(lp - old), 0, 1.28)),
    "gspo": tokens(gspo),
    "sapo": tokens(sapo),
    "rec": tokens(lambda lp, old, a: -a * lp),
    "gpg": tokens(lambda lp, old, a: -a * lp),
    "sppo": tokens(sppo),
    "geo_mean": tokens(geo_mean),
    "sft": tokens(lambda lp, old, a: -lp),
    "mix": mixed(lambda lp: -lp),
    "mix_chord": mixed(lambda lp: -lp * np.exp(lp) * (1 - np.exp(lp))),
    "m2po": m2po,
    "kl_cov": kl_cov,
    "clip_cov": clip_cov,
    "dpo": of_pairs(
        lambda row: 0.1 * float((row.lp - row.ref).sum()),
        lambda good, bad: math.log1p(math.exp(bad - good)),
    ),
    "ipo": of_pairs(
        lambda row: float((row.lp - row.ref).sum()), lambda good, bad: (good - bad - 5) ** 2
    ),
    "simpo": of_pairs(
        lambda row: 2 * float(row.lp.mean()),
        lambda good, bad: math.log1p(math.exp(bad - good + 1)),
    ),
    "orpo": of_pairs(
        lambda row: float(row.lp.mean()),
        lambda good, bad: -good + 0.1 * math.log1p(math.exp(odds(bad) - odds(good))),
    ),
    "kto": kto,
    "dppo_tv": tokens(dppo(0.15, lambda p, q: p - q)),
    "dppo_kl": tokens(dppo(0.05, kl_of)),
    "dro": tokens(lambda lp, old, a: -a * lp + 0.5 * (lp - old) ** 2),
    "vespo": tokens(vespo),
    "forking_tokens": forking,
    "opd_topk": lambda rows, a: [kl(*row.likely[::-1]) for row in rows],
    "gkd": lambda rows, a: [over_likely(*row.likely) for row in rows],
    "opsd": lambda rows, a: [kl(*row.likely) for row in rows],
    "sdft": lambda rows, a: [kl(*row.likely[::-1]) for row in rows],
    "sdpo": sdpo,
    "raft": raft,
}
MODES = {"dr_grpo": "seq-mean-token-sum-norm", "luspo": "seq-mean-token-sum"} | dict.fromkeys(
    ("gspo", "sapo", "gmpo"), "run-mean"
)


def expected(name: str, rows: list[Row]) -> list[float]:
    d = algorithms()[name]
    own = [row for row in rows if not row.x.is_expert]
    made = iter(ADVANTAGES[name if name in ADVANTAGES else d.advantage_fn](own))
    a = [np.zeros(row.n) if row.x.is_expert else next(made) for row in rows]
    found = LOSSES[name if name in LOSSES else d.policy_loss_fn](rows, a)
    if isinstance(found, Choice):
        return found.values
    return [mean(found, MODES.get(name, "token-mean"))]


# ---------------------------------------------------------------- one step


@pytest.fixture(scope="module")
def model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of decided views: some tokens are likely, others hardly possible."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("decided") / "model"
    shutil.copytree(tiny_model, folder)
    decided = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        decided.get_input_embeddings().weight.mul_(6)
    decided.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", algorithms())
async def test_the_first_step_is_the_formula(name: str, model: Path) -> None:
    learner = Learner(configured(name, model))
    if learner.reference is not None:
        with torch.no_grad():
            for p in learner.reference.parameters():
                p.mul_(1.05)
    ranks = Ranks(learner)
    rows = stored(name, model)
    needs = ranks.algorithm.needs
    given = batch_builder.decode_lease(
        leased(rows), samples=needs.samples, pairs=needs.pairs, teacher_top=needs.teacher_top
    )
    made = batch_builder.build_step(
        given,
        ranks.algorithm,
        ranks.budget,
        world_size=1,
        computed=await ranks.prepare(given.rows),
        seed=1,
        critic_budget=ranks.critic_budget,
        factors=ranks.factors,
    )
    # these leave most rows out
    assert len(made.shares[0].micro_batches) > (0 if name in ("raft", "grpo_passk") else 1)
    before = {n: p.detach().clone() for n, p in learner.policy.names().items()}
    report = await ranks.step(made.shares, made.critic)
    loss = report.sums["loss"] / made.tokens
    may_be = expected(name, rows)
    assert any(loss == pytest.approx(value, rel=2e-5, abs=2e-6) for value in may_be), (loss, may_be)
    assert report.finite and 0 < report.grad_norm < math.inf
    numbers = [*report.sums.values(), *report.maxima.values(), *made.metrics.values()]
    after = learner.policy.names()
    assert np.isfinite(numbers).all() and all(bool(torch.isfinite(p).all()) for p in after.values())
    assert any(bool((p != before[n]).any()) for n, p in after.items())
