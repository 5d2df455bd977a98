"""Sharded files of a checkpoint: damage is named, other cuts are read, what is written later is
what was taken.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rft.errors import CheckpointInvalid, RunFailed
from rft.trainer.checkpoint import manifest as manifests
from rft.trainer.checkpoint import shards
from rft.trainer.checkpoint.checkpoints import BestSteps, Checkpoints
from rft.trainer.loop.learner import Learner
from rft.trainer.model import tensors
from rft.trainer.model.tensors import Files, Piece
from rft.trainer.rows.pack import RankBatch, TrainRow
from rft.trainer.settings import LearnerSettings, OptimizerConfig
from rft.types.ids import Version
from rft.types.ports import Consumption
from tests.helpers.counted import Counted

USED = Consumption(num_uses=1, digest="ab" * 16, cursor=1)
Settings = Callable[..., LearnerSettings]
Batch = Callable[..., RankBatch]


def cut(folder: Path, whole: dict[str, torch.Tensor], count: int, step: int) -> None:
    """Write `whole` as `count` ranks would, rows dealt like FSDP2 does."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(count):
        pieces = []
        for name, t in whole.items():
            size = -(-t.shape[0] // count)
            mine = t[rank * size : (rank + 1) * size]
            if len(mine):
                pieces.append(Piece(name, tuple(t.shape), min(rank * size, t.shape[0]), mine))
        path = folder / f"model-{rank + 1:05d}-of-{count:05d}.safetensors"
        tensors.write_pieces(path, pieces, {shards.STEP: str(step)})


WHOLE = {
    "w": torch.randn(7, 5),
    "b": torch.arange(3, dtype=torch.bfloat16),
    "one": torch.randn(1, 4),
}


def test_a_rank_that_helps_to_gather_is_never_ahead_of_the_one_that_writes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NCCL counts from where a collective is asked for: a rank that asked for all of them would be
    ended while a slow disk is written.
    """
    seen: list[str] = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: seen.append("waited"))
    tensors.write(None, {}, ((seen.append(name), (name, t))[1] for name, t in WHOLE.items()))
    assert seen == ["w", "waited", "b", "waited", "one", "waited"]


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_any_cut_gives_the_tensors_back(count: int, tmp_path: Path) -> None:
    cut(tmp_path, WHOLE, count, 1)
    files = shards.find(tmp_path, "model")
    assert {n: files.shape(n) for n in files} == {n: tuple(t.shape) for n, t in WHOLE.items()}
    for name, t in WHOLE.items():
        assert torch.equal(files.read(name), t)
        into = torch.full(t.shape, 9.0)
        files.fill(name, into)
        assert torch.equal(into, t.float())
    assert set(load_file(files.paths[0])) == set(WHOLE), (
        "any safetensors library reads a file by itself"
    )


@pytest.mark.parametrize("how", ["flip", "truncate", "delete", "swap"])
async def test_damaged_shards_are_named_and_passed_over(
    how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def fill(aside: Path, step: int) -> dict[str, str]:
        cut(aside / "trainer", {n: t + step for n, t in WHOLE.items()}, 2, step)
        return {}

    checkpoints = Checkpoints(tmp_path, keep=0)
    first, second = [
        await checkpoints.save(Version(1, n), None, USED, lambda f, n=n: fill(f, n)) for n in (1, 2)
    ]  # type: ignore[misc]
    name = "model-00002-of-00002.safetensors"
    damaged = second.folder / "trainer" / name
    other = first.folder / "trainer" / name
    if how == "flip":
        data = bytearray(damaged.read_bytes())
        data[-3] ^= 0x10
        damaged.write_bytes(data)
    elif how == "truncate":
        damaged.write_bytes(damaged.read_bytes()[:-7])
    elif how == "delete":
        damaged.unlink()
    else:
        shutil.copyfile(other, damaged)
    found = manifests.latest(tmp_path)
    assert found is not None and found.version == Version(1, 1) and f"trainer/{name}" in caplog.text
    if how != "flip":  # what the headers alone tell, without a manifest
        with pytest.raises(CheckpointInvalid, match=name):
            files = shards.find(damaged.parent, "model")
            for tensor in files:
                files.read(tensor)


@pytest.mark.parametrize(
    "data",
    [b"", b"\xff" * 8, (5).to_bytes(8, "little") + b"{}", (2).to_bytes(8, "little") + b"[]"],
)
def test_what_is_not_safetensors_is_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(data)
    with pytest.raises(CheckpointInvalid, match=r"x.safetensors: cannot be read"):
        Files([tmp_path / "x.safetensors"])


def test_offsets_outside_the_file_are_refused(tmp_path: Path) -> None:
    head = json.dumps({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    (tmp_path / "x.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + b"\0" * 8)
    with pytest.raises(CheckpointInvalid, match=r"w does not have the bytes"):
        Files([tmp_path / "x.safetensors"])


def test_what_was_taken_is_written_though_training_went_on(
    settings: Settings, rows: list[TrainRow], make_batch: Batch, tmp_path: Path
) -> None:
    learner = Learner(settings())
    learner.step(make_batch(rows, learner.settings))
    learner.save(str(tmp_path / "now"), 1)
    learner.take(1)
    learner.step(make_batch(rows, learner.settings, step=2))
    hashes = learner.write(str(tmp_path / "later"))
    for kind in ("model", "optimizer"):
        name = f"{kind}-00001-of-00001.safetensors"
        assert (tmp_path / "now" / name).read_bytes() == (tmp_path / "later" / name).read_bytes()
    files = [p for p in (tmp_path / "later").rglob("*") if p.is_file()]
    assert hashes == {str(p.relative_to(tmp_path / "later")): manifests.hash_of(p) for p in files}
    assert "pretrained/config.json" in hashes


async def test_a_damaged_checkpoint_is_pruned_first(tmp_path: Path) -> None:
    async def fill(aside: Path) -> dict[str, str]:
        cut(aside / "trainer", WHOLE, 2, 1)
        return {}

    checkpoints = Checkpoints(tmp_path, keep=1)
    await checkpoints.save(Version(1, 1), None, USED, fill)
    (tmp_path / "global_step_1" / "manifest.json").write_text("{")
    await checkpoints.save(Version(1, 2), None, USED, fill)
    assert [p.name for p in manifests.committed(tmp_path)] == ["global_step_2"]


async def test_a_crash_while_writing_leaves_the_earlier_one(tmp_path: Path) -> None:
    """At most one is written at a time; while it is, the one before counts."""
    started = threading.Event()
    go = threading.Event()

    async def fill(aside: Path) -> dict[str, str]:
        cut(aside / "trainer", WHOLE, 2, 2)
        started.set()
        await asyncio.to_thread(go.wait, 20)
        raise OSError("the disk is gone")

    async def whole(aside: Path) -> dict[str, str]:
        cut(aside / "trainer", WHOLE, 2, 1)
        return {}

    checkpoints = Checkpoints(tmp_path, keep=1)
    await checkpoints.save(Version(1, 1), None, USED, whole)
    writing = asyncio.ensure_future(checkpoints.save(Version(1, 2), None, USED, fill))
    await asyncio.to_thread(started.wait, 20)
    found = manifests.latest(tmp_path)
    assert found is not None and found.version.step == 1
    go.set()
    with pytest.raises(OSError, match="the disk is gone"):
        await writing
    found = manifests.latest(tmp_path)
    assert found is not None and found.version.step == 1


async def test_the_best_is_kept_beside_the_newest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = tmp_path / "metrics.jsonl"
    lines = [
        {"role": "explorer", "step": s, "time": 0.0, "values": {"reward/x": v}}
        for s, v in [(1, 0.2), (2, 0.9), (3, None), (4, 0.9), (5, 0.1)]
    ]
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    best = BestSteps(metrics, "reward/x", "max")
    assert best(range(9)) == {4} and best((1, 2, 3)) == {2} and best((3,)) == set()
    assert BestSteps(metrics, "reward/x", "min")(range(9)) == {5}
    assert not caplog.text
    for _ in range(2):  # saves
        assert BestSteps(metrics, "reward/y", "max")(range(9)) == set()
    assert caplog.text.count("has no reward/y so far.  Did you mean reward/x?") == 1, (
        "a name that is written wrong is told, once"
    )

    async def fill(aside: Path) -> dict[str, str]:
        return {}

    folder = tmp_path / "checkpoints"
    folder.mkdir()
    for step in range(1, 7):
        await Checkpoints(folder, keep=1, spare=best).save(Version(1, step), None, USED, fill)
    assert [manifests.step_of(f) for f in manifests.committed(folder)] == [4, 6]


async def test_one_whose_evaluation_has_not_ended_is_kept(tmp_path: Path) -> None:
    """Evaluations end many steps later: in the background, or where the trainer has rows to go on
    with.
    """
    metrics = tmp_path / "metrics.jsonl"
    folder = tmp_path / "checkpoints"
    folder.mkdir()

    async def fill(aside: Path) -> dict[str, str]:
        return {}

    def told(role: str, step: int, **values: float) -> None:
        named = {name.replace("__", "/"): value for name, value in values.items()}
        with metrics.open("a") as file:
            file.write(
                json.dumps({"role": role, "step": step, "time": 0.0, "values": named}) + "\n"
            )

    checkpoints = Checkpoints(folder, keep=1, spare=BestSteps(metrics, "eval/x/score", "max"))

    async def saved(*steps: int) -> list[int]:
        for step in steps:
            await checkpoints.save(Version(1, step), None, USED, fill)
        return [manifests.step_of(f) for f in manifests.committed(folder)]

    told("eval", 1, eval__x__due=1, eval__y__due=1)
    assert await saved(1, 2, 3) == [1, 3]
    told("eval", 1, eval__y__time=9.0)
    told("synchronizer", 3, sync__version=3, explorer__idle_ratio=0.0)
    assert await saved(4, 5) == [1, 3, 5], (
        "the other taskset says nothing of it; the next evaluation may be of what is served"
    )
    told("eval", 1, eval__x__score=0.9, eval__x__time=9.0)
    told("eval", 3, eval__x__due=1, eval__y__due=1)
    told("synchronizer", 6, sync__version=6, explorer__idle_ratio=0.0)
    assert await saved(6, 7) == [1, 3, 6, 7]
    told("eval", 3, eval__x__score=0.5, eval__x__time=9.0)
    told("eval", 6, eval__x__due=1, eval__y__due=1)
    assert await saved(8) == [1, 6, 8], "the best one, and the one that is evaluated"
    # the run was killed and goes on: that evaluation never ends
    told("synchronizer", 8, sync__version=8)
    assert await saved(9, 10) == [1, 8, 10]


def test_the_best_checkpoint_is_found_without_reading_all_metrics_again(tmp_path: Path) -> None:
    """Lines of Python for each further save."""
    metrics = tmp_path / "metrics.jsonl"
    best = BestSteps(metrics, "eval/x/score", "max")

    def lines(records: int) -> int:
        with metrics.open("a") as file:
            for step in range(records):
                file.write(
                    json.dumps(
                        {
                            "role": "eval",
                            "step": step,
                            "time": 0.0,
                            "values": {"eval/x/score": step},
                        }
                    )
                    + "\n"
                )
        best(range(5))
        with metrics.open("a") as file:
            file.write(
                json.dumps(
                    {
                        "role": "eval",
                        "step": 3,
                        "time": 0.0,
                        "values": {"eval/x/score": 1e6 + records},
                    }
                )
                + "\n"
            )
        with Counted() as counted:
            assert best(range(5)) == {3}
        return counted.lines

    few = lines(4)
    many = lines(1000)
    assert many < few + 10, (few, many)
    with metrics.open("a") as file:
        file.write("{}\n")
    with pytest.raises(RunFailed, match="is not a metric record"):
        best(range(5))


@pytest.mark.parametrize("name", ["nadam", "radam", "adagrad", "sgd"])
def test_every_optimizer_goes_on_bit_for_bit(
    name: Any, settings: Settings, rows: list[TrainRow], make_batch: Batch, tmp_path: Path
) -> None:
    own = settings(
        optim=OptimizerConfig(
            optimizer_type=name, lr=1e-3, momentum=0.9, decay_norms_and_biases=False
        )
    )
    whole = Learner(own)
    second = Learner(own)
    for step in (1, 2):
        whole.step(make_batch(rows, own, step=step))
    whole.save(str(tmp_path), 2)
    second.load(str(tmp_path))
    before = {n: p.detach().clone() for n, p in second.policy.names().items()}
    for learner in (whole, second):
        learner.step(make_batch(rows, own, step=3))
    assert all(torch.equal(p, second.policy.names()[n]) for n, p in whole.policy.names().items())
    assert any(not torch.equal(p, before[n]) for n, p in second.policy.names().items())
    with pytest.raises(CheckpointInvalid, match=rf"state is of {name}, not of adamw"):
        Learner(settings()).load(str(tmp_path))
    weights_only = Learner(settings(load_contents=("model",)))
    weights_only.load(str(tmp_path))
    assert not weights_only.optimizer.state


def test_norms_and_biases_can_be_left_undecayed(settings: Settings) -> None:
    groups = Learner(
        settings(optim=OptimizerConfig(decay_norms_and_biases=False, weight_decay=0.1))
    ).optimizer.param_groups
    assert [(g["weight_decay"], {p.ndim for p in g["params"]}) for g in groups] == [
        (0.1, {2}),
        (0.0, {1}),
    ]


def test_only_what_was_asked_for_is_saved(
    settings: Settings, rows: list[TrainRow], make_batch: Batch, tmp_path: Path
) -> None:
    learner = Learner(settings(save_contents=("model",)))
    learner.step(make_batch(rows, learner.settings))
    learner.save(str(tmp_path), 1)
    assert shards.kinds(tmp_path) == {"model"}
    again = Learner(settings())
    again.load(str(tmp_path))
    assert not again.optimizer.state
    with pytest.raises(
        CheckpointInvalid,
        match=r"holds no optimizer state; take optimizer out of trainer.checkpoint.load_contents",
    ):
        Learner(settings(load_contents=("model", "optimizer"))).load(str(tmp_path))
    assert np.array_equal(learner.score([rows])[0][0]["old"], again.score([rows])[0][0]["old"])
