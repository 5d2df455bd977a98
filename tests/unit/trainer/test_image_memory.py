"""What images need in a step: the estimate beside the bytes of every tensor that the step makes."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rft.images.processor import ImageProcessor
from rft.preflight import model_folder
from rft.preflight.memory_trainer import RowsAtOnce, _moments
from rft.testing import tiny_vision
from rft.trainer.loop.learner import Learner
from rft.trainer.rows.pack import RankBatch, RowImage, TrainRow
from rft.trainer.settings import LearnerSettings
from rft.types.images import Image, ImagePlace

GROUPS = RUNS = 2
ANSWER = 16


class Sizes(NamedTuple):
    """Of a model and its pictures: `side` and `patch` in pixels."""

    hidden: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    tower_hidden: int
    tower_mlp: int
    tower_layers: int
    side: int
    patch: int


# the formulas' numbers were found with the first; activations weigh more than what does not grow
SIZES = {
    "fitted": Sizes(256, 512, 4, 8, 4, 192, 512, 6, 224, 4),
    "other": Sizes(384, 1024, 3, 12, 4, 128, 384, 5, 240, 8),
}


class Bytes(TorchDispatchMode):
    """Counts storages that operators make, as the fake GPU does, with real values."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._sizes: dict[int, int] = {}
        tensors = (*model.parameters(), *model.buffers())
        self._weights = {t.untyped_storage()._cdata for t in tensors}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor.untyped_storage())
        return out

    def _see(self, storage: Any) -> None:
        key = storage._cdata
        if key not in self._sizes and key not in self._weights:
            self._sizes[key] = storage.nbytes()
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, lambda: self._freed(key))

    def _freed(self, key: int) -> None:
        self.live -= self._sizes.pop(key)


def larger(folder: Path, family: str, sizes: Sizes) -> Path:
    """Write a random model of these sizes; Gemma's patches are of 8 pixels."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    tiny_vision.make(folder, family)
    pages = [folder / name for name in ("config.json", "preprocessor_config.json")]
    config, processor = (json.loads(page.read_text()) for page in pages)
    text = config["text_config"]
    text |= {
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.mlp,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "max_position_embeddings": 4096,
    }
    if "layer_types" in text:
        text["layer_types"] = ["full_attention"] * sizes.layers
    tower = {"hidden_size": sizes.tower_hidden, "intermediate_size": sizes.tower_mlp}
    if family == "gemma3":
        tower |= {"num_hidden_layers": sizes.tower_layers, "image_size": sizes.side}
        tower["patch_size"] = 8
        config["mm_tokens_per_image"] = (sizes.side // 8) ** 2 // (16 if sizes.patch == 4 else 4)
        processor["size"] = {"height": sizes.side, "width": sizes.side}
    else:
        tower |= {"depth": sizes.tower_layers, "out_hidden_size": sizes.hidden}
        tower["patch_size"] = processor["patch_size"] = sizes.patch
        if family == "qwen2_5_vl":
            tower["window_size"] = 4 * sizes.patch
        processor["size"] = {"shortest_edge": 64, "longest_edge": 1 << 22}
    config["vision_config"] |= tower
    for page, values in zip(pages, (config, processor), strict=True):
        page.write_text(json.dumps(values))
    model = AutoModelForImageTextToText.from_config(
        AutoConfig.from_pretrained(folder), dtype=torch.float32
    )
    model.save_pretrained(folder)
    return folder


def rows(folder: Path, side: int) -> tuple[list[TrainRow], int]:
    """Return the rows of two groups, each behind one picture, and the tokens of a picture."""
    processor = ImageProcessor.of_model(folder)
    assert processor is not None
    draw = np.random.default_rng(0)
    made = []
    for group in range(GROUPS):
        data = tiny_vision.picture((90 * group, 20, 30), size=(side, side))
        read = processor.process(data)
        begin = draw.integers(3, 200, 5)
        prompt = [*begin, *[processor.image_token_id] * read.num_tokens]
        place = ImagePlace(Image.of(data).sha256, 5, read.num_tokens, read.grid, read.hash)
        for _ in range(RUNS):
            tokens = np.array([*prompt, *draw.integers(3, 200, ANSWER)], np.int32)
            made.append(
                TrainRow(
                    tokens=tokens,
                    loss_mask=np.arange(len(tokens)) >= len(prompt),
                    logprobs=np.zeros(len(tokens), np.float32),
                    temperatures=1.0,
                    advantages=np.ones(ANSWER, np.float32),
                    group=str(group),
                    images=(RowImage(place, data),),
                )
            )
    return made, read.num_tokens


@pytest.mark.e2e
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "gemma3"])
@pytest.mark.parametrize("train_vision", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize(
    ("sizes", "checkpointing"), [("fitted", False), ("fitted", True), ("other", True)]
)
def test_the_estimate_is_at_least_what_a_step_allocates(
    family: str,
    sizes: str,
    checkpointing: bool,
    train_vision: bool,
    tmp_path: Path,
    settings: Callable[..., LearnerSettings],
) -> None:
    folder = larger(tmp_path / "model", family, SIZES[sizes])
    batch, image_tokens = rows(folder, SIZES[sizes].side)
    learner = Learner(
        settings(
            model_path=str(folder),
            row_layout="packed",
            train_vision=train_vision,
            gradient_checkpointing=checkpointing,
        )
    )
    share = RankBatch(step=1, micro_batches=(tuple(batch),), tokens=64.0, rows=4.0)
    with Bytes(learner.policy) as counted:
        learner.gradient(share)
    files = model_folder.look(str(folder))
    shape = model_folder.shape(files.config, files.tensors)
    assert shape.tower is not None
    of_tower = sum(
        p.numel()
        for name, p in learner.policy.names().items()
        if name.split(".")[1] in ("visual", "vision_tower", "multi_modal_projector")
    )
    assert shape.tower.parameters == of_tower
    count = len(batch)
    length = len(batch[0].inputs)
    micro = RowsAtOnce(
        alone=True,
        rows=count,
        positions=count * length,
        rooted=count * length,
        keys=0,
        masked=0,
        pairs=count * length * length,
        trained=count * ANSWER,
        patches=GROUPS * image_tokens * shape.tower.patches,
    )
    s = learner.settings
    trained = shape.parameters - (0 if train_vision else of_tower)
    peak = max(m.nbytes for m in _moments(shape, s, micro, 4 * trained, False, False))
    print(family, sizes, checkpointing, train_vision, peak / counted.peak)
    assert 1 <= peak / counted.peak <= 1.15
