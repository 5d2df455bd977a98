"""Turn an image into what a vision-language model reads: pixel values, and tokens in the prompt.

Engine and trainer use this one function, so both compute the same values from the same file; the
hash of these values travels with each row.  Values are computed with Pillow (transformers' "pil"
backend) on every machine.  Depends on no model weights and no tokenizer.

Invariant: `process` depends only on the file, the model's preprocessor_config.json and `args`.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import xxhash

from rft.errors import SetupError
from rft.images.decode import decode
from rft.types.images import ImagePlace

CACHE_BYTES = 256 << 20
_NO_ARGS: Mapping[str, Any] = {}


class Family(NamedTuple):
    """How a family of models writes an image into a prompt."""

    placeholder: str  # written by the chat template, once for each image
    token: str  # repeated; its embeddings are replaced by the image's
    around: tuple[str, str]  # text before and after the repeated token, in place of the placeholder
    # (configuration of the model, of the processor, grid) -> number of tokens
    num_tokens: Callable[[dict[str, Any], Any, Sequence[int]], int]
    on_vllm: bool = False  # vLLM's log-probs were compared


def _merged(config: dict[str, Any], processor: Any, grid: Sequence[int]) -> int:
    return int(np.prod(grid)) // int(processor.merge_size) ** 2


def _fixed(config: dict[str, Any], processor: Any, grid: Sequence[int]) -> int:
    return int(config.get("mm_tokens_per_image", 256))


_QWEN = Family("<|image_pad|>", "<|image_pad|>", ("", ""), _merged, on_vllm=True)
FAMILIES = {  # by model_type of config.json
    "qwen2_vl": _QWEN,
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": _QWEN,
    "gemma3": Family(
        "<start_of_image>",
        "<image_soft_token>",
        ("\n\n<start_of_image>", "<end_of_image>\n\n"),
        _fixed,
    ),
}


def family_of(folder: str | Path) -> tuple[dict[str, Any], Family] | None:
    """Return the configuration and family of a model's folder; None as `ImageProcessor.of_model`."""
    file = Path(folder) / "config.json"
    described = ("preprocessor_config.json", "processor_config.json")
    if not file.is_file() or not any((file.parent / x).is_file() for x in described):
        return None
    config = json.loads(file.read_text(encoding="utf-8"))
    family = FAMILIES.get(config.get("model_type", ""))
    return None if family is None else (config, family)


class PreparedImage(NamedTuple):
    """One image for the model."""

    pixel_values: np.ndarray  # float32, with the leading axis that batches are joined along
    grid: tuple[int, ...]  # patches (time, height, width), or () for images of one size
    text: str  # in place of the chat template's placeholder
    num_tokens: int
    size: tuple[int, int]  # of the file: width and height in pixels, turned as EXIF says
    hash: str  # xxh3-128 of the shape and the values


def tower_arrays(images: Sequence[PreparedImage]) -> dict[str, np.ndarray]:
    """Return what the vision tower reads, by the names of the model's forward."""
    arrays = {"pixel_values": np.concatenate([image.pixel_values for image in images])}
    if images[0].grid:
        arrays["image_grid_thw"] = np.array([image.grid for image in images])
    return arrays


class ShownImage(NamedTuple):
    """An image of a sequence, and the positions of its features among the sequence's tokens."""

    image: PreparedImage
    at: np.ndarray  # int64 [features]


Sight = Sequence[ShownImage]  # of one sequence


class ImageProcessor:
    """The image part of a model's processor; results are kept in memory up to CACHE_BYTES.

    May be called from several threads.
    """

    def __init__(
        self,
        folder: str | Path,
        config: dict[str, Any],
        family: Family,
        *,
        args: Mapping[str, Any] = _NO_ARGS,
        trust_remote_code: bool = False,
    ) -> None:
        """`args` replace entries of preprocessor_config.json.  Raises SetupError."""
        from transformers import AutoImageProcessor

        try:
            self._processor = AutoImageProcessor.from_pretrained(
                folder, backend="pil", trust_remote_code=trust_remote_code, **args
            )
        except (OSError, ValueError, TypeError, ImportError) as e:
            raise SetupError(f"no image processor could be loaded from {folder}: {e}") from e
        known = type(self._processor).valid_kwargs.__annotations__
        if unknown := sorted(args.keys() - known.keys()):
            raise SetupError(
                f"model.image_processor_args: {type(self._processor).__name__} of {folder} has no "
                f"{', '.join(unknown)}; leave them out"
            )
        if self._processor.to_dict().get("do_pan_and_scan"):
            raise SetupError(
                f"{folder}: do_pan_and_scan cuts an image into several; set it to false in "
                f"preprocessor_config.json"
            )
        self.family = family
        self._config = config
        self._folder = folder
        self._cache: OrderedDict[bytes, PreparedImage] = OrderedDict()
        self._cached_bytes = 0
        self._lock = threading.Lock()

    @classmethod
    def of_model(
        cls,
        folder: str | Path,
        *,
        args: Mapping[str, Any] = _NO_ARGS,
        trust_remote_code: bool = False,
    ) -> Self | None:
        """Load the processor of a model's folder; None if the folder has none, or is of a family
        that is not offered with images.
        """
        described = family_of(folder)
        if described is None:
            return None
        return cls(folder, *described, args=args, trust_remote_code=trust_remote_code)

    @property
    def image_token_id(self) -> int:
        """The id of the repeated token."""
        config = self._config
        return int(
            config["image_token_id"] if "image_token_id" in config else config["image_token_index"]
        )

    def process(self, data: bytes) -> PreparedImage:
        """Raises ValueError for a file that cannot be decoded, or a shape that the model cannot read."""
        with self._lock:
            if (cached := self._cache.get(data)) is not None:
                self._cache.move_to_end(data)
                return cached
        done = self._process(data)
        with self._lock:
            if data not in self._cache:
                self._cache[data] = done
                self._cached_bytes += done.pixel_values.nbytes
            while self._cached_bytes > CACHE_BYTES and len(self._cache) > 1:
                self._cached_bytes -= self._cache.popitem(last=False)[1].pixel_values.nbytes
        return done

    def _process(self, data: bytes) -> PreparedImage:
        picture = decode(data)
        try:
            out = self._processor([picture], return_tensors="np")
        except (ValueError, TypeError) as e:
            width, height = picture.size
            raise ValueError(f"an image of {width} x {height} pixels: {e}") from e
        values = np.ascontiguousarray(out["pixel_values"], np.float32)
        values.flags.writeable = False
        grid = tuple(int(n) for n in out["image_grid_thw"][0]) if "image_grid_thw" in out else ()
        count = self.family.num_tokens(self._config, self._processor, grid)
        before, after = self.family.around
        digest = xxhash.xxh3_128(repr(values.shape).encode())
        digest.update(values.data)
        text = f"{before}{self.family.token * count}{after}"
        return PreparedImage(values, grid, text, count, picture.size, digest.hexdigest())

    def expand(self, pieces: Sequence[str], images: Sequence[PreparedImage]) -> list[str]:
        """Replace the placeholders in consecutive pieces of a rendered chat, in order.  Raises
        ValueError unless there is one for each image.
        """
        parts = [piece.split(self.family.placeholder) for piece in pieces]
        count = sum(map(len, parts)) - len(parts)
        if count != len(images):
            raise ValueError(
                f"the prompt has {count} placeholders ({self.family.placeholder}) and "
                f"{len(images)} images; the chat template must write one for each image, and no "
                f"text may contain it"
            )
        texts = iter([image.text for image in images])
        return [first + "".join(next(texts) + part for part in rest) for first, *rest in parts]

    def places(
        self,
        tokens: Sequence[int],
        names: Sequence[str],
        images: Sequence[PreparedImage],
        start: int = 0,
    ) -> tuple[ImagePlace, ...]:
        """Find the images among the tokens of a prompt, from `start` on.  Raises ValueError unless
        their placeholder tokens are exactly those of the images.
        """
        later = np.asarray(tokens[start:], np.int64)
        positions = (start + np.flatnonzero(later == self.image_token_id)).tolist()
        expected = sum(x.num_tokens for x in images)
        if len(positions) != expected:
            raise ValueError(
                f"the prompt has {len(positions)} placeholder tokens of images, and its "
                f"{len(images)} images have {expected}; no text may contain {self.family.token}"
            )
        places = []
        at = 0
        for name, image in zip(names, images, strict=True):
            first = positions[at]
            at += image.num_tokens
            last = positions[at - 1]
            places.append(ImagePlace(name, first, last + 1 - first, image.grid, image.hash))
        return tuple(places)
