"""Rows with images: log-probs and gradients are those of plain transformers, whatever the cut."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image as Picture
from safetensors.torch import load_file

from rft.algorithm.settings import AlgorithmSettings
from rft.errors import ConfigError, RunFailed
from rft.images.processor import ImageProcessor
from rft.testing import tiny_vision
from rft.trainer.checkpoint import hf_folder
from rft.trainer.loop.learner import Learner
from rft.trainer.model.image_rows import ImageReader
from rft.trainer.rows.pack import Budget, RankBatch, RowImage, TrainRow, plan
from rft.trainer.settings import LearnerSettings, LoraSettings
from rft.types.images import Image
from rft.types.row_layout import AskedLayout
from tests.helpers import shown

Settings = Callable[..., LearnerSettings]
Batch = Callable[..., RankBatch]
ON_POLICY = AlgorithmSettings(loss_agg_mode="token-mean")
SFT = AlgorithmSettings(algorithm_type="sft", advantage_fn="none", policy_loss_fn="sft")
DPO = AlgorithmSettings(algorithm_type="dpo", advantage_fn="none", policy_loss_fn="dpo")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shown.make(tmp_path_factory.mktemp("vision") / "model", "qwen2_5_vl")


def cut(rows: list[TrainRow], tokens: int) -> list[list[TrainRow]]:
    (micro_batches,) = plan(rows, 1, Budget(tokens))
    return [[rows[i] for i in micro] for micro in micro_batches]


@pytest.mark.parametrize(
    "family",
    [
        "qwen2_5_vl",
        *(pytest.param(f, marks=pytest.mark.e2e) for f in tiny_vision.FAMILIES[1:]),
    ],
)
def test_log_probs_and_gradient_are_those_of_transformers(
    family: str, tmp_path: Path, settings: Settings, make_batch: Batch
) -> None:
    folder = shown.make(tmp_path / family, family)
    rows = shown.rows(folder)
    values, gradient = shown.gradient(shown.reference(folder), folder, rows)
    rows = [
        msgspec.structs.replace(row, logprobs=shown.spread(row, lp))
        for row, lp in zip(rows, values, strict=True)
    ]
    for train_vision, layout in (
        (True, "shared"),
        (False, "shared"),
        (False, "packed"),
        (False, "padded"),
    ):
        expected = {n: g for n, g in gradient.items() if train_vision or not shown.of_tower(n)}
        own = settings(
            model_path=str(folder),
            algorithm=ON_POLICY,
            train_vision=train_vision,
            row_layout=layout,
        )
        learner = Learner(own)
        own = learner.settings
        assert own.image_layout == ("padded" if family == "gemma3" else layout)
        for tokens in (16384, 90):
            batch = make_batch(rows, replace(own, max_token_len_per_gpu=tokens))
            micro_batches = [list(micro) for micro in batch.micro_batches]
            assert len(micro_batches) == 1 or tokens == 90
            for micro, scores in zip(micro_batches, learner.score(micro_batches), strict=True):
                for row, score in zip(micro, scores, strict=True):
                    want = row.logprobs[row.loss_mask]
                    assert score["old"] == pytest.approx(want, rel=1e-5, abs=1e-5)
            assert shown.apart(learner.gradient(batch), expected) <= 1e-5


@pytest.mark.parametrize("layout", ["shared", "packed"])
def test_rows_share_a_prompt_only_with_the_same_image(
    layout: AskedLayout, folder: Path, settings: Settings
) -> None:
    row = next(row for row in shown.rows(folder) if len(row.images) == 1)
    (image,) = row.images
    size = Picture.open(io.BytesIO(image.data)).size
    data = tiny_vision.picture((10, 250, 30), size=size, seed=9)
    processor = ImageProcessor.of_model(folder)
    assert processor is not None
    place = msgspec.structs.replace(
        image.place, sha256=Image.of(data).sha256, pixels=processor.process(data).hash
    )
    other = msgspec.structs.replace(row, images=(RowImage(place, data),))
    model = shown.reference(folder)
    (scores,) = Learner(settings(model_path=str(folder), row_layout=layout)).score(
        [[row, other, row]]
    )
    for shows, score in zip((row, other, row), scores, strict=True):
        want = shown.logprobs(model, folder, shows).detach().numpy()
        assert score["old"] == pytest.approx(want, rel=1e-5, abs=1e-5)
    assert np.abs(scores[0]["old"] - scores[1]["old"]).max() > 1e-3


def test_an_unexact_layout_of_images_is_padded_by_name(
    folder: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    right = ImageReader._positions

    def wrong(self: ImageReader, rows: Any, types: Any, grids: Any, micro: Any) -> torch.Tensor:
        found = right(self, rows, types, grids, micro)
        return found if micro.tree is None else found.roll(1, -1)

    monkeypatch.setattr(ImageReader, "_positions", wrong)
    learner = Learner(settings(model_path=str(folder), row_layout="packed"))
    assert learner.settings.image_layout == "padded"
    assert "rows with images are padded: the largest difference" in caplog.text


def test_sft_and_dpo_have_the_gradient_of_transformers(
    folder: Path, settings: Settings, make_batch: Batch
) -> None:
    """That of DPO at the reference model: beta / 2 (rejected - chosen) for each pair."""
    given = shown.rows(folder)
    model = shown.reference(folder)
    for algorithm, signs in ((SFT, [1.0] * 6), (DPO, [1.0, -1.0] * 3)):
        rows = [
            msgspec.structs.replace(
                row,
                advantages=np.full(int(row.loss_mask.sum()), sign, np.float32),
                is_expert=True,
                pair=row.group if algorithm is DPO else "",
            )
            for row, sign in zip(given, signs, strict=True)
        ]
        _, expected = shown.gradient(model, folder, rows)
        own = settings(model_path=str(folder), algorithm=algorithm)
        batch = msgspec.structs.replace(
            make_batch(rows, own),
            expert_tokens=float(sum(r.counted for r in rows)),
            expert_rows=6.0,
        )
        found = Learner(own).gradient(batch)
        tokens = sum(row.counted for row in rows)
        scale = 1.0 if algorithm is SFT else 0.1 / 2 * tokens / 3
        due = {n: g * scale for n, g in expected.items() if not shown.of_tower(n)}
        assert shown.apart(found, due) <= 1e-5


def test_an_adapter_is_put_on_the_text_layers_and_learns_from_images(
    folder: Path, settings: Settings, make_batch: Batch
) -> None:
    rows = shown.rows(folder)
    lora = LoraSettings(rank=4, alpha=8.0, target_modules="all-linear")
    own = settings(model_path=str(folder), algorithm=ON_POLICY, lora=lora)
    learner = Learner(own)
    assert learner.policy.adapter is not None
    assert all(".language_model." in f".{name}" for name in learner.policy.adapter.layers)
    (scores,) = learner.score([rows])
    model = shown.reference(folder)
    for row, score in zip(rows, scores, strict=True):  # B is 0
        want = shown.logprobs(model, folder, row).detach().numpy()
        assert score["old"] == pytest.approx(want, rel=1e-5, abs=1e-5)
    found = learner.gradient(make_batch(rows, own))
    assert found.keys() == learner.policy.trainable().keys()
    assert any(g.abs().max() > 0 for g in found.values())


def test_the_first_batch_is_compared_with_transformers(folder: Path, settings: Settings) -> None:
    rows = [row for row in shown.rows(folder) if row.group != "2"]
    learner = Learner(settings(model_path=str(folder)))
    assert learner.check_rows(rows).count("are what transformers computes") == 2
    learner._images()._rope = None  # as if its positions were those of a text
    with pytest.raises(RunFailed, match=r"as shared rows .* is not what transformers computes"):
        learner.check_rows(rows)


def test_an_image_that_does_not_fit_fails_the_run(
    folder: Path, tiny_model: Path, settings: Settings
) -> None:
    row = next(row for row in shown.rows(folder) if row.images)
    (image,) = row.images

    def changed(**fields: object) -> TrainRow:
        place = msgspec.structs.replace(image.place, **fields)
        return msgspec.structs.replace(row, images=(msgspec.structs.replace(image, place=place),))

    learner = Learner(settings(model_path=str(folder)))
    learner.score([[row]])
    for wrong, message in (
        (changed(pixels="0"), "reads other pixel values"),
        (changed(length=image.place.length - 1), "has 8 features, and its place"),
    ):
        with pytest.raises(RunFailed, match=message):
            learner.score([[wrong]])
    with pytest.raises(RunFailed, match=r"LlamaForCausalLM .* is trained on texts alone"):
        Learner(settings()).score([[row]])
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no vision tower"):
        Learner(settings(train_vision=True))


@pytest.mark.e2e
@pytest.mark.parametrize("family", tiny_vision.FAMILIES)
def test_a_trained_model_is_saved_and_exported_whole(
    family: str, tmp_path: Path, settings: Settings, make_batch: Batch
) -> None:
    from transformers import AutoModelForImageTextToText

    folder = shown.make(tmp_path / family, family)
    rows = shown.rows(folder)
    own = settings(model_path=str(folder), algorithm=ON_POLICY)
    learner = Learner(own)
    learner.step(make_batch(rows, own))
    learner.save(str(tmp_path / "step" / "trainer"), 1)
    folders = [tmp_path / "exported", tmp_path / "assembled"]
    for target in folders:
        target.mkdir()
    learner.export(str(folders[0]))
    hf_folder.assemble(tmp_path / "step" / "trainer", folders[1])
    before, *after = (load_file(f / "model.safetensors") for f in (folder, *folders))
    for found in after:
        assert found.keys() == before.keys()
        changed = {n for n, t in found.items() if not torch.equal(t, before[n])}
        assert changed and not any(map(shown.of_tower, changed))
    assert all(torch.equal(t, after[1][n]) for n, t in after[0].items())
    _, told = AutoModelForImageTextToText.from_pretrained(folders[0], output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"]
    model = shown.reference(folders[0])
    again = Learner(own)
    again.load(str(tmp_path / "step" / "trainer"))
    published = {name for name, _ in again._gathered()}
    assert published | set(again.policy.tied()) == set(dict(model.state_dict()))
    for row, score in zip(rows, again.score([rows])[0], strict=True):
        want = shown.logprobs(model, folders[0], row).detach().numpy()
        assert score["old"] == pytest.approx(want, rel=1e-5, abs=1e-5)
