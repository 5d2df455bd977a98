"""The loop with a real learner, buffer, transport and checkpoints; only the engines' side is played
by the test.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rft.algorithm.settings import AlgorithmSettings, CorrectionConfig
from rft.buffer.buffer import Buffer
from rft.buffer.settings import BufferSettings
from rft.errors import DeadlineExceeded, RunFailed, WeightSyncFailed
from rft.sync.transport.checkpoint import CheckpointTransport
from rft.trainer.checkpoint import manifest as manifests
from rft.trainer.loop.learner import Learner
from rft.trainer.loop.ranks import Ranks
from rft.trainer.loop.trainer import Trainer
from rft.trainer.rows.pack import TrainRow
from rft.trainer.settings import LearnerSettings, TrainerSettings
from rft.types.block import encode
from rft.types.completion import VersionSpan
from rft.types.experience import Experience, SamplingRecord
from rft.types.ids import GroupId, Version
from rft.types.metrics import Metric, MetricRecord
from rft.types.ports import ScoreRow, WeightManifest
from rft.types.task import SamplingArgs
from tests.helpers import simulated


class Sync:
    """Asks for scores while publishing, as the canary does."""

    def __init__(self) -> None:
        self.published: list[Version] = []
        self.trained_steps: list[int] = []
        self.finished: int | None = None
        self.refuse: Version | None = None
        self.scorer: Trainer | None = None
        self.scores: list[np.ndarray] = []

    async def publish(self, manifest: WeightManifest) -> list[Metric]:
        assert self.scorer is not None
        if manifest.version == self.refuse:
            raise WeightSyncFailed("engine-0 does not serve it")
        rows = [
            ScoreRow(tokens=np.array([1, 5, 6, 7], np.int32), prompt_length=2),
            ScoreRow(tokens=np.array([1, 5], np.int32), prompt_length=2),
        ]
        scores = await self.scorer.score(rows)
        assert [len(s) for s in scores] == [2, 0]
        self.scores.append(scores[0])
        self.published.append(manifest.version)
        return []

    async def step_started(self, step: int) -> None:
        assert not self.trained_steps or step > max(self.trained_steps)

    async def step_finished(self, step: int, *, finished: bool = False) -> None:
        if finished:
            self.finished = step
        else:
            self.trained_steps.append(step)


class Sink:
    def __init__(self) -> None:
        self.records: list[MetricRecord] = []
        self.logged = asyncio.Event()

    async def log(self, record: MetricRecord) -> None:
        self.records.append(record)
        self.logged.set()

    async def samples(self, name: str, step: int, rows: list[dict[str, Any]]) -> None:
        raise AssertionError("the trainer shows no samples")


def group(lineage: int, batch: int, *, poison: bool = False) -> bytes:
    """Two runs; the batch number is their task.  `poison`: a log-prob so low that the ratio's loss
    is not finite.
    """
    rows = []
    for run in range(2):
        tokens = np.array([1, 40 + batch, 6, 7 + run, 9, 2], np.int32)
        rows.append(
            Experience(
                id=GroupId(lineage, 0, batch, 0).run(run),
                taskset="t",
                task_index=batch,
                workflow="w",
                status="complete",
                tokens=tokens,
                loss_mask=np.arange(6) > 2,
                logprobs=np.where(np.arange(6) > 2, -5.5, 0).astype(np.float32),
                version_spans=(VersionSpan(Version(lineage, 0), 3, 6),),
                # log-probs at a temperature that float32 cannot divide by are not finite
                sampling=(
                    SamplingRecord(
                        start=3, end=6, sampling=SamplingArgs(temperature=1e-40 if poison else 1.0)
                    ),
                ),
                reward=float(run),
            )
        )
    return encode(rows)


@pytest.fixture
async def buffer(tmp_path: Path) -> AsyncIterator[Buffer]:
    made = Buffer(BufferSettings(folder=tmp_path / "buffer"))
    await made.open()
    yield made
    await made.close()


class Stage:
    """One trainer lineage and everything around it."""

    def __init__(
        self,
        buffer: Buffer,
        tmp_path: Path,
        learner: Learner,
        lineage: int,
        parent: manifests.Manifest | None = None,
        **changes: Any,
    ):
        self.sync = Sync()
        self.sink = Sink()
        self.settings = TrainerSettings(
            **{
                "total_steps": 3,
                "batch_groups": 1,
                "batch_rows": None,
                "checkpoint_dir": tmp_path / "checkpoints",
                **changes,
            }
        )
        self.learner = learner
        self.ranks = Ranks(learner)
        self.transport = CheckpointTransport(tmp_path / f"sync{lineage}")
        self.trainer = Trainer(
            self.settings,
            self.ranks,
            buffer.reader(lineage),
            self.sync,
            self.sink,
            transport=self.transport,
            lineage=lineage,
            start_step=parent.version.step if parent else 0,
            parent=parent.version if parent else None,
            must_publish=lambda step: step % 2 == 0,
        )
        self.sync.scorer = self.trainer


async def fill(buffer: Buffer, lineage: int, batches: range, **what: Any) -> None:
    writer = buffer.writer(lineage)
    for batch in batches:
        await writer.append(group(lineage, batch, **what), accepted=True)
        await writer.close_batch(batch, accepted=1, expected=1, reasons={})


@pytest.fixture
def learner(settings: Callable[..., LearnerSettings]) -> Callable[..., Learner]:
    return lambda **changes: Learner(settings(**changes))


async def test_a_run_from_base_model_to_export(
    buffer: Buffer, tmp_path: Path, learner: Callable[..., Learner]
) -> None:
    lineage = (await buffer.start_lineage(None, None)).lineage
    await fill(buffer, lineage, range(3))
    stage = Stage(buffer, tmp_path, learner(), lineage, save_interval=2)
    await stage.trainer.run()
    assert stage.sync.published == [Version(lineage, 0), Version(lineage, 2), Version(lineage, 3)]
    assert stage.sync.trained_steps == [1, 3] and stage.sync.finished == 3
    assert not np.array_equal(stage.sync.scores[0], stage.sync.scores[1])
    assert [p.name for p in manifests.committed(stage.settings.checkpoint_dir)] == [
        "global_step_2",
        "global_step_3",
    ]
    last = manifests.latest(stage.settings.checkpoint_dir)
    assert last is not None and (last.version, last.parent) == (Version(lineage, 3), None)
    assert (
        last.consumption == await buffer.consumption(lineage, 3) and last.consumption.num_uses == 6
    )
    assert (last.folder / "huggingface" / "config.json").is_file()
    assert not (stage.settings.checkpoint_dir / "global_step_2" / "huggingface").exists()
    first = stage.sink.records[0]
    assert (first.role, first.step) == ("trainer", 1)
    assert first.values["experience/staleness/max"] == 0.0 and first.values["train/finite"] == 1.0
    assert 0 < first.values["mismatch/abs_diff_mean"] <= first.values["mismatch/abs_diff_max"]
    # written by the weights before step 1
    assert "mismatch/abs_diff_mean" not in stage.sink.records[1].values
    assert first.values["actor/grad_norm"] > 0 and first.values["time/train_s"] > 0


def test_a_step_is_saved_at_its_age_while_the_trainer_waits(
    tmp_path: Path, learner: Callable[..., Learner]
) -> None:
    """N25: a service waits for rewards, and its last steps were in no checkpoint however long that
    took.
    """

    async def play() -> list[tuple[str, float]]:
        buffer = Buffer(BufferSettings(folder=tmp_path / "buffer"))
        await buffer.open()
        lineage = (await buffer.start_lineage(None, None)).lineage
        await fill(buffer, lineage, range(2))
        stage = Stage(
            buffer, tmp_path, learner(), lineage, save_after_s=600.0, read_deadline_s=1800.0
        )
        saved: list[tuple[str, float]] = []
        save = stage.trainer._checkpoints.save

        async def timed(version: Version, *given: Any) -> manifests.Manifest:
            saved.append((str(version), simulated.now()))
            return await save(version, *given)

        stage.trainer._checkpoints.save = timed  # type: ignore[method-assign]
        with pytest.raises(DeadlineExceeded):  # the third batch never comes
            await stage.trainer.run()
        await buffer.close()
        return saved

    saved = simulated.run(play())
    assert saved == [("1:2", 600.0)], "once, when the first of both steps is so old"
    assert [p.name for p in manifests.committed(tmp_path / "checkpoints")] == ["global_step_2"]


async def test_a_publication_that_the_explorer_asks_for_is_no_wait_for_rows(
    buffer: Buffer, tmp_path: Path, learner: Callable[..., Learner]
) -> None:
    """It counted as both, so that the parts of a step were longer than the step."""
    lineage = (await buffer.start_lineage(None, None)).lineage
    await fill(buffer, lineage, range(1))
    stage = Stage(buffer, tmp_path, learner(), lineage, total_steps=2)
    stage.trainer.on_demand = True

    class Asking(Sync):
        async def wait_for_demand(self, step: int) -> bool:
            return (step == 1 and Version(lineage, 1) not in self.published) or bool(
                await asyncio.Event().wait()
            )

        async def publish(self, manifest: WeightManifest) -> list[Metric]:
            if manifest.version.step == 1:
                await asyncio.sleep(0.3)
                await fill(buffer, lineage, range(1, 2))
            return await super().publish(manifest)

    stage.trainer.sync = stage.sync = Asking()
    stage.sync.scorer = stage.trainer
    await stage.trainer.run()
    v = stage.sink.records[1].values
    parts = [v[f"time/{name}_s"] for name in ("wait", "train", "sync")]
    assert parts[2] > 0.3 and sum(parts) <= v["perf/step_s"] + 0.01 and parts[0] >= 0


async def test_resumed_ends_with_the_weights_of_an_uninterrupted_run(
    buffer: Buffer, tmp_path: Path, learner: Callable[..., Learner]
) -> None:
    lineage = (await buffer.start_lineage(None, None)).lineage
    await fill(buffer, lineage, range(4))
    whole = Stage(buffer, tmp_path, learner(), lineage, total_steps=4, save_interval=2)
    await whole.trainer.run()
    expected = load_file(
        tmp_path / "checkpoints" / "global_step_4" / "trainer" / "model-00001-of-00001.safetensors"
    )

    # as if killed before the commit of step 4
    (tmp_path / "checkpoints" / "global_step_4" / "manifest.json").unlink()
    found = manifests.latest(tmp_path / "checkpoints")
    assert found is not None and found.version.step == 2
    second = (await buffer.start_lineage(found.version, found.consumption)).lineage
    stage = Stage(buffer, tmp_path, learner(), second, found, total_steps=4)
    await stage.ranks.load(found.folder)
    writer = buffer.writer(second)
    held = {h.batch for h in await writer.stored_groups(found.consumption.cursor)}
    for batch in range(found.consumption.cursor, 4):
        if batch not in held:
            await writer.append(group(second, batch), accepted=True)
        await writer.close_batch(batch, accepted=1, expected=1, reasons={})
    await stage.trainer.run()
    assert stage.sync.published[0] == Version(second, 2)
    last = manifests.latest(tmp_path / "checkpoints")
    assert last is not None and (last.version, last.parent) == (Version(second, 4), found.version)
    weights = load_file(last.folder / "trainer" / "model-00001-of-00001.safetensors")
    assert all(torch.equal(weights[n], t) for n, t in expected.items())


async def test_end_of_data_finishes_early(
    buffer: Buffer, tmp_path: Path, learner: Callable[..., Learner]
) -> None:
    lineage = (await buffer.start_lineage(None, None)).lineage
    await fill(buffer, lineage, range(1))
    await buffer.writer(lineage).finish("the tasksets are over")
    stage = Stage(buffer, tmp_path, learner(), lineage, save_hf_checkpoint="never")
    await stage.trainer.run()
    assert stage.sync.finished == 1 and stage.sync.published[-1] == Version(lineage, 1)
    assert [p.name for p in manifests.committed(stage.settings.checkpoint_dir)] == ["global_step_1"]


async def test_non_finite_steps_are_explained_and_end_the_run_with_a_checkpoint(
    buffer: Buffer,
    tmp_path: Path,
    learner: Callable[..., Learner],
    settings: Callable[..., LearnerSettings],
) -> None:
    lineage = (await buffer.start_lineage(None, None)).lineage
    await fill(buffer, lineage, range(3), poison=True)
    made = learner()
    before = {n: p.detach().clone() for n, p in made.policy.names().items()}
    stage = Stage(buffer, tmp_path, made, lineage, total_steps=9)
    with pytest.raises(RunFailed, match="the last 3 train steps, up to step 3"):
        await stage.trainer.run()
    assert all(torch.equal(before[n], p) for n, p in made.policy.names().items())
    last = manifests.latest(stage.settings.checkpoint_dir)
    assert last is not None and last.version.step == 3 and last.consumption.num_uses == 0
    assert [r.values["train/finite"] for r in stage.sink.records] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("stuck", ["policy", "critic"])
async def test_one_of_policy_and_critic_that_never_learns_ends_the_run(
    stuck: str, buffer: Buffer, tmp_path: Path, learner: Callable[..., Learner]
) -> None:
    lineage = (await buffer.start_lineage(None, None)).lineage
    await fill(buffer, lineage, range(4))
    made = learner(algorithm=AlgorithmSettings(algorithm_type="ppo", advantage_fn="ppo"))

    def broken(lr: float) -> float:
        made.optimizer.zero_grad()
        return float("nan")

    if stuck == "policy":
        made._update = broken  # type: ignore[method-assign]
    else:
        made.critic.update = broken  # type: ignore[method-assign, union-attr]
    stage = Stage(buffer, tmp_path, made, lineage, total_steps=4)
    with pytest.raises(RunFailed, match="the last 3 train steps, up to step 3"):
        await stage.trainer.run()
    last = manifests.latest(stage.settings.checkpoint_dir)
    assert last is not None and last.consumption.num_uses == 6, (
        "the other one has learnt from the rows"
    )


async def test_a_step_whose_tokens_are_all_rejected_is_explained_and_the_run_goes_on(
    buffer: Buffer, tmp_path: Path, learner: Callable[..., Learner]
) -> None:
    lineage = (await buffer.start_lineage(None, None)).lineage
    await fill(buffer, lineage, range(3))
    correction = CorrectionConfig(rollout_rs="token_k2", rollout_rs_threshold=1e-12)
    made = learner(
        algorithm=AlgorithmSettings(bypass_old_logprobs=False, rollout_correction=correction)
    )
    before = {n: p.detach().clone() for n, p in made.policy.names().items()}
    stage = Stage(buffer, tmp_path, made, lineage)
    await stage.trainer.run()
    assert all(torch.equal(before[n], p) for n, p in made.policy.names().items())
    last = manifests.latest(stage.settings.checkpoint_dir)
    assert last is not None and last.version.step == 3 and last.consumption.num_uses == 0
    assert (await buffer.audit()).discarded == {"rejected": 6}
    for record in stage.sink.records:
        assert (
            record.values["rollout_corr/rollout_rs_masked_fraction"] == 1.0
            and "actor/loss" not in record.values
        )


async def test_several_passes_are_one_use_and_the_window_begins_with_each_version(
    buffer: Buffer, tmp_path: Path, learner: Callable[..., Learner]
) -> None:
    lineage = (await buffer.start_lineage(None, None)).lineage
    await fill(buffer, lineage, range(4))
    made = learner(
        ppo_epochs=3, algorithm=AlgorithmSettings(bypass_old_logprobs=False, proximal_window=True)
    )
    stage = Stage(buffer, tmp_path, made, lineage, total_steps=4)  # publishes after steps 2 and 4
    await stage.trainer.run()
    last = manifests.latest(stage.settings.checkpoint_dir)
    assert last is not None and last.consumption.num_uses == 8
    told = [r.values for r in stage.sink.records]
    assert [v["train/updates"] for v in told] == [3.0] * 4
    page = json.loads((last.folder / "trainer" / "state.json").read_text())
    assert page["updates"] == 12, "optimizer updates; the learning rate counts steps"
    assert told[1]["actor/ppo_kl"] != 0 and told[0]["rollout_corr/kl"] != 0


@pytest.mark.e2e
async def test_ppo_goes_on_from_its_checkpoint(
    buffer: Buffer, tmp_path: Path, learner: Callable[..., Learner]
) -> None:
    ppo = AlgorithmSettings(algorithm_type="ppo", advantage_fn="ppo", kl_penalty_fn="k2")
    lineage = (await buffer.start_lineage(None, None)).lineage
    await fill(buffer, lineage, range(4))
    whole = Stage(buffer, tmp_path, learner(algorithm=ppo), lineage, total_steps=4, save_interval=2)
    await whole.trainer.run()
    names = (
        "model-00001-of-00001",
        "critic_model-00001-of-00001",
        "critic_optimizer-00001-of-00001",
    )
    folder = tmp_path / "checkpoints" / "global_step_4"
    expected = {n: load_file(folder / "trainer" / f"{n}.safetensors") for n in names}
    values = [r.values for r in whole.sink.records]
    assert all(
        v["critic/vf_loss"] > 0 and "critic/vf_explained_var" in v and "advantage/kl" in v
        for v in values
    )
    assert values[0]["critic/values/mean"] == 0.0 != values[1]["critic/values/mean"]

    (folder / "manifest.json").unlink()
    found = manifests.latest(tmp_path / "checkpoints")
    assert found is not None and found.version.step == 2
    second = (await buffer.start_lineage(found.version, found.consumption)).lineage
    stage = Stage(buffer, tmp_path, learner(algorithm=ppo), second, found, total_steps=4)
    await stage.ranks.load(found.folder)
    writer = buffer.writer(second)
    held = {h.batch for h in await writer.stored_groups(found.consumption.cursor)}
    for batch in range(found.consumption.cursor, 4):
        if batch not in held:
            await writer.append(group(second, batch), accepted=True)
        await writer.close_batch(batch, accepted=1, expected=1, reasons={})
    await stage.trainer.run()
    again = [r.values["critic/vf_loss"] for r in stage.sink.records]
    assert again == [v["critic/vf_loss"] for v in values[2:]]
    for name, tensors in expected.items():
        made = load_file(folder / "trainer" / f"{name}.safetensors")
        assert all(torch.equal(made[n], t) for n, t in tensors.items())


@pytest.mark.parametrize("contents", [("model", "optimizer", "extra"), ("hf_model", "optimizer")])
async def test_stop_ends_a_wait_and_saves(
    buffer: Buffer, tmp_path: Path, learner: Callable[..., Learner], contents: tuple[str, ...]
) -> None:
    lineage = (await buffer.start_lineage(None, None)).lineage
    await fill(buffer, lineage, range(1))
    stage = Stage(buffer, tmp_path, learner(save_contents=contents), lineage)
    running = asyncio.ensure_future(stage.trainer.run())
    async with asyncio.timeout(120):
        await stage.sink.logged.wait()
        await stage.trainer.stop()
        await running
    assert stage.sync.finished is None
    found = manifests.latest(stage.settings.checkpoint_dir)
    assert found is not None and found.version.step == 1
    await Ranks(learner(save_contents=contents)).load(found.folder)  # its weights are there


async def test_weights_that_no_engine_serves_end_the_run(
    buffer: Buffer, tmp_path: Path, learner: Callable[..., Learner]
) -> None:
    lineage = (await buffer.start_lineage(None, None)).lineage
    await fill(buffer, lineage, range(3))
    stage = Stage(buffer, tmp_path, learner(), lineage)
    stage.sync.refuse = Version(lineage, 2)
    with pytest.raises(WeightSyncFailed, match="engine-0"):
        await stage.trainer.run()


async def test_the_shortest_rows_of_the_first_batch_are_checked_once(
    learner: Callable[..., Learner], rows: list[TrainRow], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = learner()
    given = []
    monkeypatch.setattr(
        made, "check_rows", lambda rows: given.append([len(r.tokens) for r in rows])
    )
    ranks = Ranks(made)
    for _ in range(2):
        await ranks.check_rows(rows)
    assert given == [sorted(len(r.tokens) for r in rows)[:4]] and len(rows) > 4, (
        "no more is sent to the other ranks"
    )


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({}, "trainer.max_token_len_per_gpu .now 16384"),
        (
            {"use_dynamic_bsz": False, "micro_batch_size": 5},
            "trainer.micro_batch_size_per_gpu .now 5",
        ),
    ],
)
async def test_running_out_of_memory_names_the_remedy(
    changes: dict[str, Any],
    remedy: str,
    learner: Callable[..., Learner],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from rft.errors import OutOfMemory

    made = learner(**changes)

    def full(*_: Any, **__: Any) -> None:
        torch.empty(1 << 60)

    monkeypatch.setattr(made.policy, "forward", full)
    with pytest.raises(OutOfMemory, match=f"ran out of cpu memory while scoring.  Lower {remedy}"):
        await Ranks(made).score([ScoreRow(tokens=np.array([1, 2, 3], np.int32), prompt_length=1)])


@pytest.mark.e2e
async def test_checkpoints_written_while_steps_go_on_are_the_same(
    buffer: Buffer, tmp_path: Path, learner: Callable[..., Learner]
) -> None:
    """Although each is written only after the next step has changed weights and optimizer."""

    async def saved(aside: bool) -> list[dict[str, manifests.FileFact]]:
        lineage = (await buffer.start_lineage(None, None)).lineage
        await fill(buffer, lineage, range(4))
        made = learner()
        root = tmp_path / f"aside {aside}"
        write = made.write
        train = made.step
        trained = [0]
        news = threading.Condition()

        def after_the_next(folder: str) -> dict[str, str]:
            number = manifests.step_of(Path(folder).parent.with_suffix(""))
            with news:
                assert news.wait_for(lambda: not aside or trained[0] > number or number == 4, 60)
            return write(folder)

        def step(*args: Any) -> Any:
            result = train(*args)
            with news:
                trained[0] += 1
                news.notify_all()
            return result

        made.write = after_the_next  # type: ignore[method-assign]
        made.step = step
        stage = Stage(
            buffer,
            root,
            made,
            lineage,
            total_steps=4,
            save_interval=1,
            max_checkpoints_to_keep=0,
            async_save=aside,
        )
        await stage.trainer.run()
        found = [manifests.read(f) for f in manifests.committed(root / "checkpoints")]
        assert [m.version.step for m in found] == [1, 2, 3, 4]
        return [
            {name: fact for name, fact in m.files.items() if name.startswith("trainer/")}
            for m in found
        ]

    files = await saved(True)
    assert files == await saved(False)
    weights = "trainer/model-00001-of-00001.safetensors"
    assert all(a[weights] != b[weights] for a, b in itertools.pairwise(files)), (
        "each is of its own step"
    )


async def test_a_checkpoint_that_cannot_be_written_ends_the_run(
    buffer: Buffer, tmp_path: Path, learner: Callable[..., Learner]
) -> None:
    lineage = (await buffer.start_lineage(None, None)).lineage
    await fill(buffer, lineage, range(4))
    made = learner()
    stage = Stage(
        buffer,
        tmp_path,
        made,
        lineage,
        total_steps=4,
        save_interval=1,
        max_checkpoints_to_keep=0,
        async_save=True,
    )

    def full(folder: str) -> dict[str, str]:
        raise OSError(28, "No space left on device", folder)

    made.write = full  # type: ignore[method-assign]
    with pytest.raises(OSError, match="No space left"):
        await stage.trainer.run()
    assert manifests.latest(tmp_path / "checkpoints") is None
