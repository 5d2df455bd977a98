"""Turn an image file into the values that a model's vision tower reads, for engine and trainer
alike.

Knows transformers' image processors and the files of a model folder; not tokens, rows or torch.
Invariant: the values depend on the file, the folder's processor and `changes` alone, never on other
images, so the hash of both sides is equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from rft.files.strict_json import parse_json
from rft.images.decode import decoded

GRID = "image_grid_thw"


@dataclass(frozen=True)
class Processed:
    """An image as its model reads it.

    `arrays`: by the names of the model's forward; `pixel_values` float32, [patches, values] where
    the family has a grid, else [parts, channels, height, width].
    """

    arrays: Mapping[str, np.ndarray]
    grid: tuple[int, ...]  # patches (time, height, width); () where the family has none
    tokens: int  # places of the image's features among the tokens
    pixels: str  # hash of `arrays`

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())


class ImageProcessor:
    """The image processor in the model folder `folder`, with the arguments `changes` in place of
    the folder's (such as `max_pixels`).
    """

    def __init__(
        self, folder: Path, changes: Mapping[str, Any] | None = None, *, trust: bool = False
    ) -> None:
        from transformers import AutoImageProcessor

        self._processor: Any = AutoImageProcessor.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust, **(changes or {})
        )
        self._config = parse_json((Path(folder) / "config.json").read_text(encoding="utf-8"))

    def process(self, data: bytes) -> Processed:
        """Return the values of an image file."""
        batch = self._processor(images=decoded(data), return_tensors="np")
        arrays: dict[str, np.ndarray] = {}
        for name in ("pixel_values", GRID, "pixel_attention_mask"):
            if name in batch:
                array = np.ascontiguousarray(batch[name])
                # some families put all images of a text into an outer dimension
                outer = array.ndim == {"pixel_values": 5, "pixel_attention_mask": 4}.get(name)
                arrays[name] = array[0] if outer else array
        arrays["pixel_values"] = arrays["pixel_values"].astype(np.float32, copy=False)
        grid = tuple(int(n) for n in arrays[GRID][0]) if GRID in arrays else ()
        return Processed(arrays, grid, self._tokens(arrays, grid), _hash(arrays))

    def _tokens(self, arrays: Mapping[str, np.ndarray], grid: tuple[int, ...]) -> int:
        """Return how many features the tower computes for an image."""
        if grid:
            return int(np.prod(grid)) // int(self._processor.merge_size) ** 2
        parts = len(arrays["pixel_values"])
        if (tokens := self._config.get("mm_tokens_per_image")) is not None:
            return parts * int(tokens)
        vision = self._config["vision_config"]
        side = int(vision["image_size"]) // int(vision["patch_size"])
        return parts * side**2 // int(self._config.get("scale_factor") or 1) ** 2


def _hash(arrays: Mapping[str, np.ndarray]) -> str:
    digest = xxhash.xxh3_128()
    for name, array in sorted(arrays.items()):
        digest.update(f"{name}{array.dtype}{array.shape}".encode())
        digest.update(array)
    return digest.hexdigest()
