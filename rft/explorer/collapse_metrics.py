"""Metrics of one explore batch that reveal a collapsing policy or reward hacking: entropy, copies,
length.

Depends on the groups before the operators, on no history: `rft.monitor.alarms` judges changes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rft.taskset.near_duplicates import earlier, signatures
from rft.workflow.group import PlayedGroup

LONG_ANSWER = 16  # minimum tokens for which equal answers to different tasks are no coincidence
LONGEST_COMPARED = 1024  # compared tokens per answer; MOST_COMPARED: compared answers per batch
MOST_COMPARED = 512


def collapse_metrics(groups: Sequence[PlayedGroup]) -> dict[str, float]:
    """Return metrics named as in docs/reference/metrics.md; undefined metrics are left out."""
    shares = {
        "rollout/entropy": _entropy(groups),
        "rollout/copied_answers": _copied(groups),
        "rollout/reward_length_corr": _length_correlation(groups),
    }
    return {name: value for name, value in shares.items() if value is not None}


def _entropy(groups: Sequence[PlayedGroup]) -> float | None:
    """Return the mean of -log-prob over sampled tokens in nats, an estimate of the sampling
    entropy.
    """
    sampled = [
        r.logprobs[r.loss_mask]
        for g in groups
        for r in g.rows
        if r.has_logprobs and not r.is_expert
    ]
    tokens = sum(map(len, sampled))
    return (
        -float(sum(values.sum(dtype=np.float64) for values in sampled)) / tokens if tokens else None
    )


def _copied(groups: Sequence[PlayedGroup]) -> float | None:
    """Return the share of tasks with an answer nearly equal to another task's, among tasks with
    long answers.
    """
    last = [(str(g.id), run.experiences[-1]) for g in groups for run in g.runs]
    answers = [
        (task, r.tokens[r.loss_mask][:LONGEST_COMPARED])
        for task, r in last
        if r.num_response_tokens >= LONG_ANSWER
    ]
    answers = answers[:: -(-len(answers) // MOST_COMPARED) or 1]
    tasks = [task for task, _ in answers]
    if len(set(tasks)) < 2:
        return None
    pairs = earlier(
        signatures([tokens for _, tokens in answers], size=16), threshold=0.9, labels=tasks
    )
    return len({tasks[k] for pair in pairs for k in pair}) / len(set(tasks))


def _length_correlation(groups: Sequence[PlayedGroup]) -> float | None:
    """Return Pearson's correlation of reward and response length (all rows of a run), each centred
    within its group.
    """
    apart = []
    for g in groups:
        scored = [
            (run.value, sum(r.num_response_tokens for r in run.experiences))
            for run in g.runs
            if run.value is not None
        ]
        if len(scored) > 1:
            values = np.array(scored, np.float64)
            apart.append(values - values.mean(axis=0))
    if not apart:
        return None
    reward, length = np.concatenate(apart).T
    scale = float(np.sqrt((reward**2).sum() * (length**2).sum()))
    return float((reward * length).sum()) / scale if scale > 1e-12 else None
