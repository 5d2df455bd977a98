"""Distillation from the teacher's most likely tokens on a model: gradients of all weights against
transformers in float64, in every layout and cut, and the whole path from an engine to the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from rft.algorithm.settings import AlgorithmSettings
from rft.engine.built_in import make
from rft.engine.settings import EngineSettings
from rft.errors import RunFailed
from rft.trainer.loop.learner import Learner
from rft.trainer.rows import batch_builder
from rft.trainer.rows.pack import Budget, RankBatch, TrainRow, plan
from rft.trainer.settings import LearnerSettings
from rft.types.block import decode, encode
from rft.types.completion import Turn
from rft.types.experience import Experience, from_completions
from rft.types.ids import GroupId
from rft.types.ports import GenerateRequest, GroupStats, Lease, ScoreRow
from rft.types.task import SamplingArgs
from rft.workflow.run_rows import _with_teacher
from tests.helpers.distill_reference import V, reference


def taught(rows: list[TrainRow], k: int) -> list[TrainRow]:
    rng = np.random.default_rng(7)
    made = []
    for row in rows:
        count = int(row.loss_mask.sum())
        logits = rng.normal(0, 2, (count, V))
        logprobs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        ids = np.argsort(-logprobs, axis=1)[:, :k]
        top = np.take_along_axis(logprobs, ids, 1)
        others = np.maximum(1 - np.exp(top).sum(1, keepdims=True), 0)
        with np.errstate(divide="ignore"):
            top = np.concatenate([top, np.log(others)], 1)
        top = np.maximum(top, -65504 if k < V else -60000).astype(np.float16)
        if k == V:
            top[:, -1] = -65504
        made.append(msgspec.structs.replace(row, top_ids=ids.astype(np.int32), top_logprobs=top))
    return made


@pytest.mark.e2e
@pytest.mark.parametrize("layout", ["shared", "packed", "padded"])
@pytest.mark.parametrize("k", [5, V])
def test_gradients_are_those_of_float64(
    layout: str,
    k: int,
    settings: Callable[..., LearnerSettings],
    rows: list[TrainRow],
) -> None:
    from transformers import AutoModelForCausalLM

    learner = Learner(settings(row_layout=layout))
    learner.policy.double()
    model: Any = AutoModelForCausalLM.from_pretrained(
        learner.settings.model_path, dtype=torch.float64
    )
    given = taught(rows, k)
    for kind in ("forward", "reverse", "jsd", "skew_forward", "skew_reverse"):
        algorithm = AlgorithmSettings(
            advantage_fn="none",
            policy_loss_fn="distill_top",
            policy_loss_fn_args={"k": k, "divergence": kind},
        )
        learner.algorithm = batch_algorithm(algorithm)
        expected = reference(model, given, kind)
        for tokens in (4000, 40):
            (cut,) = plan(given, 1, Budget(tokens, layout=layout))  # type: ignore[arg-type]
            batch = RankBatch(
                step=1,
                micro_batches=tuple(tuple(given[i] for i in m) for m in cut),
                tokens=float(sum(r.loss_mask.sum() for r in given)),
                rows=float(len(given)),
            )
            found = learner.gradient(batch)
            off = sum(float((found[n] - g).square().sum()) for n, g in expected.items())
            size = sum(float(g.square().sum()) for g in expected.values())
            assert size > 0 and off**0.5 <= 1e-6 * size**0.5, (kind, tokens, (off / size) ** 0.5)


def batch_algorithm(settings: AlgorithmSettings) -> Any:
    from rft.algorithm.composition import build

    return build(settings)


async def experiences(folder: Path, k: int, temperature: float) -> list[Experience]:
    """Answers of the tiny model that it scored behind another prompt."""
    engine = await make(
        EngineSettings(
            engine_type="transformers", model_path=str(folder), max_model_len=80, fixed_weights=True
        )
    )
    made = []
    try:
        for i in range(3):
            sampling = SamplingArgs(temperature=temperature, max_tokens=5, seed=i)
            chat = ({"role": "user", "content": f"{i}+2?"},)
            (c,) = await engine.generate(GenerateRequest(messages=chat, sampling=sampling))
            told = GenerateRequest(messages=({"role": "user", "content": f"{i}+2? {i + 2}"},))
            row = ScoreRow(
                tokens=c.tokens, prompt_length=0, prompt=told, temperature=temperature, top=k
            )
            scores = await engine.score(row)
            id = GroupId(1, 0, 0, i).run(0)
            x = from_completions(id, [c], taskset="t", task_index=i, workflow="w", reward=0.0)
            made.append(_with_teacher(x, [Turn(messages=chat, completion=c, teacher=scores)]))
    finally:
        await engine.close()
    return made


@pytest.mark.parametrize(("k", "temperature"), [(4, 1.0), (4, 0.7), (V, 1.0)])
async def test_an_engines_likeliest_tokens_reach_the_loss(
    k: int, temperature: float, tiny_model: Path, settings: Callable[..., LearnerSettings]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    stored = await experiences(tiny_model, k, temperature)
    rows = decode(encode(stored))
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_model)
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64)
    for i, x in enumerate(rows):
        chat = [{"role": "user", "content": f"{i}+2? {i + 2}"}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        written = x.tokens[x.loss_mask].tolist()
        with torch.no_grad():
            logits = model(torch.tensor([prompt + written])).logits[0, len(prompt) - 1 : -1]
        logprobs = (logits / temperature).log_softmax(-1)
        assert x.teacher_top_ids is not None and x.teacher_top_logprobs is not None
        ids = torch.from_numpy(x.teacher_top_ids.astype(np.int64))
        assert torch.equal(logprobs.gather(1, ids), logprobs.topk(k).values)
        others = logprobs.scatter(1, ids, -torch.inf).logsumexp(-1, keepdim=True)
        wanted = torch.cat([logprobs.gather(1, ids), others], 1).clamp(min=-65504)
        np.testing.assert_allclose(
            x.teacher_top_logprobs.astype(np.float64), wanted.numpy(), rtol=1e-3, atol=1e-6
        )
    stats = tuple(GroupStats(group=str(x.group), rewards=(0.0,), mean=0.0, std=0.0) for x in rows)
    lease = Lease(step=1, frame=encode(rows), groups=stats)
    decoded = batch_builder.decode_lease(lease, teacher_top=k)
    assert all(r.top_ids is not None and r.top_ids.shape[1] == k for r in decoded.rows)
    with pytest.raises(RunFailed, match=f"has {k} most likely tokens.*loss reads 7.*args.k"):
        batch_builder.decode_lease(lease, teacher_top=7)
    assert batch_builder.decode_lease(lease).rows[0].top_ids is None, "another loss reads none"
    size = len(encode(rows)) - len(
        encode(
            [
                msgspec.structs.replace(x, teacher_top_ids=None, teacher_top_logprobs=None)
                for x in rows
            ]
        )
    )
    tokens = sum(x.num_response_tokens for x in rows)
    assert size <= tokens * (4 * k + 2 * (k + 1)) + 200 * len(rows)


@pytest.mark.parametrize(
    ("ids", "logprobs", "says"),
    [
        (np.zeros((5, 2), np.int64), None, "must be int32"),
        (np.zeros((5, 2), np.int32), None, "float16 [5, 3]"),
        (np.zeros((4, 2), np.int32), np.zeros((4, 3), np.float16), "must be int32 [5, k]"),
        (np.zeros((5, 2), np.int32), np.zeros((5, 3), np.float16), "twice at one position"),
        (-np.arange(10).reshape(5, 2).astype(np.int32), np.zeros((5, 3), np.float16), "negative"),
        (np.arange(10).reshape(5, 2).astype(np.int32), np.ones((5, 3), np.float16), "at most 0"),
        (
            np.arange(10).reshape(5, 2).astype(np.int32),
            np.full((5, 3), np.nan, np.float16),
            "must be finite",
        ),
    ],
)
async def test_damaged_likeliest_tokens_are_refused(
    ids: np.ndarray, logprobs: np.ndarray | None, says: str, tiny_model: Path
) -> None:
    (x, *_) = await experiences(tiny_model, 4, 1.0)
    with pytest.raises(ValueError, match=f".*{says}".replace("[", r"\[").replace("]", r"\]")):
        msgspec.structs.replace(x, teacher_top_ids=ids, teacher_top_logprobs=logprobs)


async def test_more_tokens_than_the_vocabulary_has_are_refused(tiny_model: Path) -> None:
    with pytest.raises(ValueError, match=r"260 most likely tokens.*vocabulary has 259"):
        await experiences(tiny_model, V + 1, 1.0)
