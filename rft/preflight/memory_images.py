"""Estimate the memory of images in a step, beside the layers of the language model.

Depends on the allocations of `rft.trainer`, by formula.
"""

from __future__ import annotations

from typing import NamedTuple

from rft.preflight.memory_terms import BYTES
from rft.preflight.model_folder import ModelShape
from rft.trainer.settings import LearnerSettings


class ImageBytes(NamedTuple):
    """Bytes of images while the language model's backward pass runs, and while that of the tower's
    last and of its first layer runs (0: the tower is frozen).
    """

    text: int = 0
    last: int = 0
    first: int = 0


def image_bytes(shape: ModelShape, s: LearnerSettings, positions: int, patches: int) -> ImageBytes:
    """Return the bytes for `patches` of images among `positions` of a micro-batch.

    Pixels in float32, and the embeddings among which features are put.  A tower that is trained
    stores 9 hidden states of a layer, 3 more where positions turn queries and keys, what its MLP
    does, and 3 for each projection of features.
    """
    t = shape.tower
    if t is None or not patches:
        return ImageBytes()
    item = BYTES[s.dtype]
    nbytes = patches * t.patch * (4 + (item if item < 4 else 0))
    nbytes += positions * shape.hidden * item
    if not s.train_vision:
        return ImageBytes(nbytes)
    stream = patches * t.hidden * item
    numbers = (12 if t.rotary else 9) * t.hidden + (4 if t.gated else 2) * t.mlp
    layer = patches * numbers * item
    work = patches * item * (2 * t.hidden + (2 if t.gated else 1) * t.mlp)
    stored, again = (stream, layer - stream) if s.gradient_checkpointing else (layer, 0)
    nbytes += stream + 3 * t.deep * stream
    last = nbytes + t.layers * stored
    return ImageBytes(last + 3 * stream, last + again + work, nbytes + stored + again + work)
