"""Rows with 0, 1 and 2 images of unequal size for the tiny models that read images, and what plain
transformers computes for each row alone.  Knows the families' formats; nothing of the trainer's
forward.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rft.images.processor import ImageProcessor
from rft.testing import tiny_vision
from rft.trainer.rows.pack import RowImage, TrainRow
from rft.types.images import Image, ImagePlace

_SIZES = ((20, 31), (32, 16), (17, 40))  # width, height


def make(folder: Path, family: str) -> Path:
    """Write a tiny model whose weights are large enough that images matter."""
    from safetensors.torch import load_file, save_file

    tiny_vision.make(folder, family)
    file = folder / "model.safetensors"
    weights = {n: t * 3 if t.dim() > 1 else t for n, t in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})
    return folder


def image(
    processor: ImageProcessor, words: Any, file: bytes, at: int
) -> tuple[list[int], RowImage]:
    """Return the tokens of an image that begins at token `at` of a row, and its place."""
    read = processor.process(file)
    tokens: list[int] = words.encode(read.text)
    mine = [at + i for i, token in enumerate(tokens) if token == processor.image_token_id]
    sha256 = Image.of(file).sha256
    place = ImagePlace(sha256, mine[0], mine[-1] + 1 - mine[0], read.grid, read.hash)
    return tokens, RowImage(place, file)


def rows(folder: Path) -> list[TrainRow]:
    """3 groups of 2 rows with 0, 1 and 2 images; the two rows of a group show the same images, and one
    row has sampled a placeholder.
    """
    from transformers import AutoTokenizer

    draw = np.random.default_rng(5)
    words = AutoTokenizer.from_pretrained(folder)
    processor = ImageProcessor.of_model(folder)
    assert processor is not None
    files = [
        tiny_vision.picture((90, 160 * (n == 1), 200), size=size, seed=n)
        for n, size in enumerate(_SIZES)
    ]
    made = []
    for group, shows in enumerate(([], [0], [1, 2])):
        tokens = draw.integers(3, 250, 4).tolist()
        images = []
        for number in shows:
            span, shown = image(processor, words, files[number], len(tokens))
            images.append(shown)
            tokens += [*span, *draw.integers(3, 250, 3).tolist()]
        for run in range(2):
            answer = draw.integers(3, 250, 3 + 4 * run).tolist()
            if group == 2 and run == 1:
                answer[2] = processor.image_token_id
            count = len(tokens) + len(answer)
            mask = np.arange(count) >= len(tokens)
            made.append(
                TrainRow(
                    tokens=np.array([*tokens, *answer], np.int32),
                    loss_mask=mask,
                    logprobs=np.zeros(count, np.float32),
                    temperatures=1.0,
                    advantages=np.full(len(answer), draw.normal(), np.float32),
                    images=tuple(images),
                    group=str(group),
                )
            )
    return made


def reference(folder: Path) -> Any:
    """Return transformers' own model."""
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


def logprobs(model: Any, folder: Path, row: TrainRow) -> torch.Tensor:
    """Return log-probs float32 [L] of the row's trained tokens, computed for the row alone.

    Tokens up to the first sampled placeholder are computed by the model's forward; transformers
    would take a later one for an image, so the rest is computed from a cache, as in `generate`.
    """
    from PIL import Image as Picture
    from transformers import AutoImageProcessor

    ids = torch.from_numpy(row.tokens).long()[None]
    token = model.config.image_token_id
    start = int(row.loss_mask.argmax())
    inputs: dict[str, Any] = {}
    types = torch.zeros_like(ids)
    if row.images:
        pictures = [Picture.open(io.BytesIO(i.data)).convert("RGB") for i in row.images]
        batch = AutoImageProcessor.from_pretrained(folder, backend="pil")(
            images=pictures, return_tensors="pt"
        )
        inputs = {name: batch[name] for name in ("pixel_values", "image_grid_thw") if name in batch}
        types[:, :start] = (ids[:, :start] == token).long()
        if model.config.model_type == "gemma3":
            inputs["token_type_ids"] = types
        elif "qwen" in model.config.model_type:
            inputs["mm_token_type_ids"] = types
    sampled = (ids[0, start:] == token).nonzero()
    if not len(sampled):
        out = model(input_ids=ids, use_cache=False, **inputs).logits[0]
    else:
        cut = start + int(sampled[0, 0])
        first = {
            name: value[:, :cut] if "token_type" in name else value
            for name, value in inputs.items()
        }
        head = model(input_ids=ids[:, :cut], use_cache=True, **first)
        position = {}
        if (deltas := getattr(model.model, "rope_deltas", None)) is not None:
            at = torch.arange(cut, ids.shape[1]) + deltas[0]
            position = {"position_ids": at.view(1, 1, -1).expand(3, 1, -1)}
        rest = model(input_ids=ids[:, cut:], past_key_values=head.past_key_values, **position)
        out = torch.cat([head.logits[0], rest.logits[0]])
    targets = ids[0, start:, None]
    found: torch.Tensor = out[start - 1 : -1].log_softmax(-1).gather(1, targets)[:, 0]
    return found


def gradient(
    model: Any, folder: Path, rows: Sequence[TrainRow]
) -> tuple[list[np.ndarray], dict[str, torch.Tensor]]:
    """Return the log-probs of each row, and the gradient of on-policy GRPO over all of them:
    - sum of advantage * ratio / trained tokens, where each ratio is 1.
    """
    model.zero_grad()
    count = sum(int(row.loss_mask.sum()) for row in rows)
    values = []
    for row in rows:
        lp = logprobs(model, folder, row)
        ratio = (lp - lp.detach()).exp()
        (-(torch.from_numpy(row.advantages) * ratio).sum() / count).backward()
        values.append(lp.detach().numpy())
    return values, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def apart(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of a tensor, relative to the gradient's norm."""
    assert a.keys() == b.keys(), set(a) ^ set(b)
    norm = float(torch.stack([t.norm() for t in b.values()]).norm())
    return max(float((a[n] - b[n]).norm()) for n in a) / norm


def of_tower(name: str) -> bool:
    """Return whether a parameter is the vision tower's or its projection's."""
    return name.split(".")[1].startswith(("visual", "vision", "multi_modal_projector"))


def spread(row: TrainRow, values: np.ndarray) -> np.ndarray:
    """Return values [L] of the trained tokens as an array over all tokens."""
    out = np.zeros(len(row.tokens), np.float32)
    out[row.loss_mask] = values
    return out
