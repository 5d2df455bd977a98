"""How rows are cut where a model is only run forward: the log-probs before a step, and the reference model.

Part of `resolve`; the same rules hold here.  Knows no torch.  Invariant: how rows are cut changes memory and speed, never a log-prob.
"""

from __future__ import annotations

from typing import Any

from rft.config.problems import Problems
from rft.config.schema.root import RunConfig
from rft.trainer.settings import ForwardSettings


def learner(config: RunConfig, budget: int, longest: int, p: Problems) -> dict[str, Any]:
    """Fields of `LearnerSettings`.  `budget`: tokens of a training micro-batch on one rank; `longest`: of an experience."""
    t, r = config.trainer, config.trainer.ref
    longest = -(-longest // t.ulysses_sequence_parallel_size)  # the ranks' budgets are added
    training = ForwardSettings(
        max_token_len_per_gpu=budget, micro_batch_size=None if t.use_dynamic_bsz else t.micro_batch_size_per_gpu
    )
    keys = ("trainer.log_prob_micro_batch_size_per_gpu", "trainer.log_prob_max_token_len_per_gpu")
    log_prob = _cut(
        training, t.use_dynamic_bsz, t.log_prob_micro_batch_size_per_gpu, t.log_prob_max_token_len_per_gpu, keys, longest, p
    )
    keys = ("trainer.ref.log_prob_micro_batch_size_per_gpu", "trainer.ref.max_token_len_per_gpu")
    dynamic = log_prob.micro_batch_size is None if r.use_dynamic_bsz is None else r.use_dynamic_bsz
    if not dynamic and r.log_prob_micro_batch_size_per_gpu is None and log_prob.micro_batch_size is None:
        p.error(keys[0], "is required with trainer.ref.use_dynamic_bsz: false")
    ref = _cut(log_prob, dynamic, r.log_prob_micro_batch_size_per_gpu, r.max_token_len_per_gpu, keys, longest, p)
    return {"log_prob": None if log_prob == training else log_prob, "ref": None if ref == log_prob == training else ref}


def _cut(
    base: ForwardSettings, dynamic: bool, rows: int | None, tokens: int | None, keys: tuple[str, str], longest: int, p: Problems
) -> ForwardSettings:
    """`base` with what is written: `rows` or `tokens`, under `keys`."""
    if dynamic:
        if rows is not None:
            p.warn(f"{keys[0]} has no effect: micro-batches are cut by tokens (use_dynamic_bsz: true)")
        if tokens is not None and tokens < longest:
            p.error(
                keys[1], f"is {tokens} tokens; the longest experience may have {longest} on a rank (max_model_len)", given=tokens
            )
    elif tokens is not None:
        p.warn(f"{keys[1]} has no effect: micro-batches are cut by rows (use_dynamic_bsz: false)")
    return ForwardSettings(
        max_token_len_per_gpu=tokens or base.max_token_len_per_gpu,
        micro_batch_size=None if dynamic else rows or base.micro_batch_size,
    )
