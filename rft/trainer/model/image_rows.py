"""Read the images of a micro-batch's rows, and put their features among the embeddings of the rows'
tokens.

The features go to the places that a row names, as in engines: a placeholder that the policy sampled
is text like any other token.  Depends on what transformers' models have in common (image features,
3-d positions, kinds of tokens), not on losses.  Invariant: an image that occurs several times in a
micro-batch is computed once, and its values are those that the engine read.
"""

from __future__ import annotations

import inspect
import io
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from rft.engine.forwards import body_of
from rft.engine.vision import chosen_features, tells_types
from rft.errors import ConfigError, RunFailed
from rft.images.processor import ImageProcessor, PreparedImage, family_of, tower_arrays
from rft.trainer.model.batch import ImageInputs, MicroBatch
from rft.trainer.model.upload import upload
from rft.trainer.rows.pack import RowImage, TrainRow
from rft.trainer.settings import LearnerSettings
from rft.types.images import Image, ImagePlace


def tower(lm: Any) -> list[torch.nn.Parameter]:
    """Return the parameters of the tower for images and of its projection: all outside of the text
    layers and the output layer.  Empty for a model without a tower.
    """
    if not hasattr(lm.config, "vision_config"):
        return []
    text = {id(p) for p in lm.get_decoder().parameters()}
    if (head := lm.get_output_embeddings()) is not None:
        text |= {id(p) for p in head.parameters()}
    return [p for p in lm.parameters() if id(p) not in text]


_TYPES = ("token_type_ids", "mm_token_type_ids")  # names of transformers, by family


class ImageReader:
    """Adds the images of rows to micro-batches of the model `lm`."""

    def __init__(self, lm: Any, settings: LearnerSettings) -> None:
        if settings.sequence_parallel > 1:
            raise ConfigError(
                "a row shows an image, and ranks cannot share rows with images.  Write 1",
                key="trainer.ulysses_sequence_parallel_size",
                given=settings.sequence_parallel,
            )
        body = body_of(lm)
        processor = ImageProcessor.of_model(
            settings.model_path,
            args=settings.image_processor_args,
            trust_remote_code=settings.trust_remote_code,
        )
        if processor is None or not hasattr(body, "get_image_features"):
            raise RunFailed(
                f"a row shows an image, and {type(lm).__name__} of model type "
                f"{lm.config.model_type} is trained on texts alone"
            )
        self._processor = processor
        self.token = processor.image_token_id
        # in families whose tokens of an image see each other, such as Gemma 3
        self.needs_padding = tells_types(body)
        self._rope: Any = getattr(body, "get_rope_index", None)
        self._types = next(
            (n for n in _TYPES if n in inspect.signature(lm.forward).parameters), None
        )

    @staticmethod
    def reads(settings: LearnerSettings) -> bool:
        """Return whether rows of the model may show images."""
        folder = settings.model_path
        return settings.sequence_parallel == 1 and family_of(folder) is not None

    def example(self, seed: int) -> tuple[ImagePlace, bytes]:
        """Return a picture of random pixels, and its place at the beginning of a row."""
        from PIL import Image as Picture

        pixels = np.random.default_rng(seed).integers(0, 256, (40 + 24 * seed, 64, 3), np.uint8)
        file = io.BytesIO()
        Picture.fromarray(pixels).save(file, "PNG")
        image = Image.of(file.getvalue())
        read = self._processor.process(image.data)
        return ImagePlace(image.sha256, 0, read.num_tokens, read.grid, read.hash), image.data

    def placed(self, rows: Sequence[TrainRow], micro: MicroBatch) -> MicroBatch:
        """Return `micro` with the images of its `rows`.

        Raises RunFailed for an image that does not fit its place, or whose values are not those that
        the engine read.
        """
        width = max(len(row.inputs) for row in rows)
        types = np.zeros((len(rows), width), np.int64)
        flat_types = np.zeros(micro.input_ids.numel(), np.int64)
        first: dict[str, int] = {}  # image -> its first feature
        images: list[PreparedImage] = []
        order: list[np.ndarray] = []
        places: list[np.ndarray] = []
        grids: list[tuple[int, ...]] = []
        count = 0
        for number, row in enumerate(rows):
            for image in row.shown:
                name = image.place.sha256
                read = self._read(image)
                at = self._at(row, image, read)
                if name not in first:
                    first[name] = count
                    images.append(read)
                    count += read.num_tokens
                types[number, at] = 1
                grids.append(read.grid)
                place = micro.paths[number][at]
                if not flat_types[place[0]]:  # rows may share it
                    flat_types[place] = 1
                    places.append(place)
                    order.append(first[name] + np.arange(read.num_tokens))
        device = micro.input_ids.device
        flat = np.concatenate(places)
        in_order = np.argsort(flat)
        return replace(
            micro,
            position_ids=self._positions(rows, types, grids, micro),
            images=ImageInputs(
                arrays={
                    name: upload(array, device) for name, array in tower_arrays(images).items()
                },
                types=upload(flat_types, device).view_as(micro.input_ids),
                places=upload(flat[in_order], device),
                order=upload(np.concatenate(order)[in_order], device),
            ),
        )

    def reference_inputs(self, row: TrainRow, device: str) -> dict[str, torch.Tensor]:
        """Return what transformers' own forward reads for `row` alone."""
        inputs = {"input_ids": torch.from_numpy(row.tokens)[None].long()}
        if not row.images:
            return {name: tensor.to(device) for name, tensor in inputs.items()}
        images = [self._read(image) for image in row.images]
        types = torch.zeros(1, len(row.tokens), dtype=torch.int64)
        for image, read in zip(row.images, images, strict=True):
            types[0, self._at(row, image, read)] = 1
        if self._types is not None:
            inputs[self._types] = types
        inputs |= {name: torch.from_numpy(array) for name, array in tower_arrays(images).items()}
        return {name: tensor.to(device) for name, tensor in inputs.items()}

    def _read(self, image: RowImage) -> PreparedImage:
        place = image.place
        read = self._processor.process(image.data)
        if place.pixels != read.hash:
            raise RunFailed(
                f"image {place.sha256}: the trainer reads other pixel values (hash {read.hash}) than "
                f"the engine (hash {place.pixels}).  Both need the same model folder, arguments of "
                f"the image processor and versions of transformers and Pillow"
            )
        return read

    def _at(self, row: TrainRow, image: RowImage, read: PreparedImage) -> np.ndarray:
        """Return the positions of the image's features in its row."""
        place = image.place
        inside = row.tokens[place.start : place.start + place.length]
        at: np.ndarray = place.start + np.flatnonzero(inside == self.token)
        if len(at) != read.num_tokens:
            raise RunFailed(
                f"image {place.sha256} has {read.num_tokens} features, and its place, tokens "
                f"{place.start} to {place.start + place.length} of a row, has {len(at)} placeholders "
                f"(token {self.token})"
            )
        return at

    def _positions(
        self,
        rows: Sequence[TrainRow],
        types: np.ndarray,
        grids: list[tuple[int, ...]],
        micro: MicroBatch,
    ) -> torch.Tensor:
        """Return the positions that the model's own method gives rows alone, [3, S, W] or [3, 1, T];
        for a model without such a method those of `micro`.
        """
        if self._rope is None:
            return micro.position_ids
        lengths = np.array([len(row.inputs) for row in rows])
        mask = torch.from_numpy(np.arange(types.shape[1]) < lengths[:, None])
        kinds = torch.from_numpy(types)
        positions, _ = self._rope(
            torch.zeros_like(kinds),
            mm_token_type_ids=kinds,
            image_grid_thw=torch.tensor(grids),
            attention_mask=mask,
        )
        placed = np.zeros((3, micro.input_ids.numel()), np.int64)
        for number, path in enumerate(micro.paths):
            placed[:, path] = positions[:, number, : len(path)].numpy()
        return upload(placed, micro.input_ids.device).view(3, *micro.input_ids.shape)


def hidden_states(lm: Any, batch: MicroBatch) -> torch.Tensor:
    """Return the last hidden states [S, W, H] or [1, T, H] of rows with images."""
    images = batch.images
    assert images is not None
    body = body_of(lm)
    learns = torch.is_grad_enabled() and any(p.requires_grad for p in tower(lm))
    with torch.set_grad_enabled(learns):
        out = body.get_image_features(**images.arrays, return_dict=True)
    show = images.types.bool()
    tokens = lm.get_input_embeddings()(batch.input_ids.masked_fill(show, 0))
    features = chosen_features(out.pooler_output, images.order).to(tokens.dtype)
    embeds = tokens.flatten(0, 1).index_copy(0, images.places, features).view_as(tokens)
    inputs: dict[str, Any] = {
        "inputs_embeds": embeds,
        "position_ids": batch.position_ids,
        "attention_mask": batch.attention_mask,
        "use_cache": False,
    }
    if batch.tree is not None:
        inputs["tree"] = batch.tree
    model = lm.get_decoder()
    if (deep := getattr(out, "deepstack_features", None)) is not None:
        inputs["visual_pos_masks"] = show
        inputs["deepstack_visual_embeds"] = [
            chosen_features(layer, images.order).to(tokens.dtype) for layer in deep
        ]
    elif tells_types(body):
        model = body  # tokens of an image see each other
        inputs["token_type_ids"] = images.types
    hidden: torch.Tensor = model(**inputs).last_hidden_state
    return hidden
