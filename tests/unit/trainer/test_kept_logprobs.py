"""The ledger keeps what the weights before a step give every trained token, whichever way the step
computes its rows.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rft.algorithm.settings import AlgorithmSettings, CorrectionConfig
from rft.buffer.buffer import Buffer
from rft.buffer.query import open_run
from rft.buffer.settings import BufferSettings
from rft.trainer.loop.learner import Learner
from rft.trainer.loop.ranks import Ranks
from rft.trainer.loop.trainer import Trainer
from rft.trainer.settings import CriticSettings, LearnerSettings, OptimizerConfig, TrainerSettings
from rft.types.block import encode
from rft.types.completion import VersionSpan
from rft.types.experience import Experience, SamplingRecord
from rft.types.ids import GroupId, Version
from rft.types.metrics import MetricRecord
from rft.types.task import SamplingArgs

# most tokens of these random rows
REJECTS = CorrectionConfig(rollout_rs="token_k1", rollout_rs_threshold="0.99_1.01")
PPO = AlgorithmSettings(algorithm_type="ppo", advantage_fn="ppo")
WAYS: dict[str, dict[str, Any]] = {
    "shared": {},
    "small micro-batches": {"max_token_len_per_gpu": 30},
    "packed": {"row_layout": "packed"},
    "padded": {"row_layout": "padded"},
    "several passes in any order": {
        "ppo_epochs": 2,
        "shuffle_minibatches": True,
        "max_token_len_per_gpu": 30,
    },
    "fixed micro-batches": {"use_dynamic_bsz": False, "micro_batch_size": 2},
    "the critic alone": {"algorithm": PPO, "critic": CriticSettings(warmup=1)},
    "with a critic": {"algorithm": PPO},
    "drawn rows": {"algorithm": AlgorithmSettings(sample_strategy="pf_ppo")},
    "rejected tokens": {
        "algorithm": AlgorithmSettings(bypass_old_logprobs=False, rollout_correction=REJECTS)
    },
}


class Records:
    """Metrics of each step."""

    def __init__(self) -> None:
        self.values: list[dict[str, float]] = []

    async def log(self, record: MetricRecord) -> None:
        self.values.append(record.values)

    async def samples(self, name: str, step: int, rows: list[dict[str, Any]]) -> None:
        raise AssertionError("the trainer shows no samples")


def experience(task: int, run: int, reward: float) -> Experience:
    """Of 9 to 14 tokens; run 1 has a second turn, after two tokens of a tool."""
    draw = np.random.default_rng([task, run])
    tokens = np.concatenate([[1, 40 + task, 41], draw.integers(3, 250, 6 + run + 2 * task)]).astype(
        np.int32
    )
    mask = np.arange(len(tokens)) > 2
    if run == 1:
        mask[[5, 6]] = False
    turns = ((3, 5), (7, len(tokens))) if run == 1 else ((3, len(tokens)),)
    heat = SamplingArgs(temperature=1.0 + 0.3 * run)
    return Experience(
        id=GroupId(1, 0, 0, task).run(run),
        taskset="t",
        task_index=task,
        workflow="w",
        status="complete",
        tokens=tokens,
        loss_mask=mask,
        logprobs=np.where(mask, draw.normal(-5.5, 0.2, len(tokens)), 0).astype(np.float32),
        version_spans=tuple(VersionSpan(Version(1, 0), *turn) for turn in turns),
        sampling=tuple(SamplingRecord(start=a, end=b, sampling=heat) for a, b in turns),
        reward=reward,
    )


GROUPS = [
    [experience(0, run, float(reward)) for run, reward in enumerate((0, 3, 4))],
    [experience(1, run, 1.0) for run in range(3)],
]  # one is skipped
# GRPO's: the mean is 7/3, the unbiased deviation sqrt(13/3)
ADVANTAGES = [np.array([-7, 2, 5]) / 39**0.5, [0.0, 0.0, 0.0]]


@pytest.fixture
async def buffer(tmp_path: Path) -> AsyncIterator[Buffer]:
    made = Buffer(BufferSettings(folder=tmp_path / "buffer"))
    await made.open()
    await made.start_lineage(None, None)
    for group in GROUPS:
        await made.writer(1).append(encode(group), accepted=True)
    await made.writer(1).close_batch(0, accepted=len(GROUPS), expected=len(GROUPS), reasons={})
    yield made
    await made.close()


async def train(buffer: Buffer, tmp_path: Path, learner: Learner) -> Records:
    settings = TrainerSettings(
        total_steps=1,
        batch_groups=2,
        batch_rows=None,
        checkpoint_dir=tmp_path / "checkpoints",
        save_hf_checkpoint="never",
    )
    records = Records()
    trainer = Trainer(
        settings,
        Ranks(learner),
        buffer.reader(1),
        None,
        records,
        transport=None,
        lineage=1,
        start_step=0,
        parent=None,
        must_publish=lambda step: False,
    )
    await trainer.run()
    return records


def plainly(folder: Path, rows: list[Experience]) -> dict[str, np.ndarray]:
    """float32 [T] of each row from transformers' own forward; 0 where no token is trained."""
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = {}
    for row in rows:
        ids = torch.from_numpy(row.tokens)[None].long()
        with torch.no_grad():
            logp = (
                lm(input_ids=ids, use_cache=False).logits[0, :-1] / row.temperature
            ).log_softmax(-1)
        given = np.concatenate([[0], logp.gather(1, ids[0, 1:, None])[:, 0].numpy()])
        found[str(row.id)] = np.where(row.loss_mask, given, 0).astype(np.float32)
    return found


@pytest.mark.parametrize("way", WAYS)
async def test_every_trained_token_has_the_trainers_number(
    way: str,
    buffer: Buffer,
    tmp_path: Path,
    tiny_model: Path,
    settings: Callable[..., LearnerSettings],
) -> None:
    learner = Learner(
        settings(keep_trainer_logprobs=True, optim=OptimizerConfig(lr=1e-2), **WAYS[way])
    )
    records = await train(buffer, tmp_path, learner)
    rows = [row for group in GROUPS for row in group]
    wanted = plainly(tiny_model, rows)
    with open_run(tmp_path) as questions:
        kept = questions.trainer_tokens([str(row.id) for row in rows])
        for row in rows:
            assert np.abs(kept[str(row.id)].logprobs - wanted[str(row.id)]).max() <= 1e-5
            columns = "token_start, logprob, trainer_logprob, advantage, num_tokens"
            sql = f"SELECT {columns} FROM v_tokens WHERE id = '{row.id}' ORDER BY token_start"
            with questions.ask(sql) as answer:
                asked = list(answer.rows)
            generated = np.concatenate([np.arange(s.start, s.end) for s in row.version_spans])
            assert [(at, n) for at, *_, n in asked] == [(at, 1) for at in generated.tolist()]
            assert np.array_equal(
                np.array([a[1] for a in asked], np.float32), row.logprobs[generated]
            )
            assert np.array_equal(
                np.array([a[2] for a in asked], np.float32), kept[str(row.id)].logprobs[generated]
            )
            taught = np.array([a[3] for a in asked], np.float32)
            assert np.array_equal(taught, kept[str(row.id)].advantages[generated], equal_nan=True)
            if "algorithm" not in WAYS[way]:
                assert taught == pytest.approx(ADVANTAGES[row.id.task][row.id.run], abs=1e-4)
    if way == "shared":  # where the step computes nothing, there is a number all the same
        assert records.values[0]["experience/skipped_rows"] == 3
        apart = max(
            float(np.abs(kept[str(r.id)].logprobs - r.logprobs)[r.loss_mask].max())
            for r in GROUPS[0]
        )
        assert records.values[0]["mismatch/abs_diff_max"] == pytest.approx(apart, rel=1e-5), (
            "what the metric was made of"
        )
    if way == "rejected tokens":
        assert 0 < records.values[0]["rollout_corr/rollout_rs_masked_fraction"] < 1
    assert (await buffer.audit()).ok


async def test_a_run_that_keeps_none_does_nothing_for_it(
    buffer: Buffer,
    tmp_path: Path,
    settings: Callable[..., LearnerSettings],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    learner = Learner(settings())
    scored: list[object] = []
    score = learner.score
    monkeypatch.setattr(learner, "score", lambda *a: scored.append(a) or score(*a))
    step = learner.step
    told = []

    def noted(*given: Any) -> Any:
        told.append(step(*given))
        return told[-1]

    monkeypatch.setattr(learner, "step", noted)
    await train(buffer, tmp_path, learner)
    assert not scored and [r.logprobs for r in told] == [[]]
    with (
        open_run(tmp_path) as questions,
        questions.ask("SELECT count(*) FROM token_logprobs") as answer,
    ):
        assert list(answer.rows) == [(0,)]


async def test_the_training_is_the_same(
    buffer: Buffer, tmp_path: Path, settings: Callable[..., LearnerSettings]
) -> None:
    keeps = Learner(settings(keep_trainer_logprobs=True))
    await train(buffer, tmp_path, keeps)
    other = Buffer(BufferSettings(folder=tmp_path / "other" / "buffer"))
    await other.open()
    await other.start_lineage(None, None)
    for group in GROUPS:
        await other.writer(1).append(encode(group), accepted=True)
    await other.writer(1).close_batch(0, accepted=2, expected=2, reasons={})
    plain = Learner(settings())
    await train(other, tmp_path / "other", plain)
    await other.close()
    assert all(
        torch.equal(a, b)
        for a, b in zip(keeps.policy.parameters(), plain.policy.parameters(), strict=True)
    )
