"""What shows in one explore batch that a policy collapses, or is paid for something else than its
task: entropy, copies, length.

Knows groups as they were played; no history: what a change means is decided by
`rft.monitor.alarms`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rft.taskset.near_duplicates import earlier, signatures
from rft.workflow.group import PlayedGroup

LONG_ANSWER = 16  # tokens from which on equal answers to different tasks are no coincidence
LONGEST_COMPARED = 1024  # tokens of an answer, and answers of a batch, that are compared
MOST_COMPARED = 512


def collapse_metrics(groups: Sequence[PlayedGroup]) -> dict[str, float]:
    """Names as in docs/reference/metrics.md; one that the batch says nothing about is left out."""
    found = {
        "rollout/entropy": _entropy(groups),
        "rollout/copied_answers": _copied(groups),
        "rollout/reward_length_corr": _length_correlation(groups),
    }
    return {name: value for name, value in found.items() if value is not None}


def _entropy(groups: Sequence[PlayedGroup]) -> float | None:
    """Mean of -log-prob over sampled tokens, nats: its expectation is the entropy of what was
    sampled from.
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
    """Share of tasks that have an answer which is nearly that of another task, among those with
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
    """Pearson's, of reward and response length (all rows of a run), each less the mean of its
    group.
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
