"""Give vLLM prompts with images that are already tokens and pixel values.

vLLM's own processors are not called: engine and trainer read the same values, and the hash of
these values keys vLLM's caches.  Invariant: a prompt's tokens reach the model as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rft.images.processor import Sight
from rft.types.images import ImagePlace


def engine_input(prompt: list[int], places: Sequence[ImagePlace], sight: Sight) -> Any:
    """Return vLLM's input for a prompt, with the images that stand at `places`."""
    from vllm import TokensPrompt

    if not places:
        return TokensPrompt(prompt_token_ids=prompt)
    import torch
    from vllm.inputs.engine import mm_input
    from vllm.multimodal.inputs import PlaceholderRange

    ranges = []
    for place, shown in zip(places, sight, strict=True):
        mask = torch.zeros(place.length, dtype=torch.bool)
        mask[torch.from_numpy(shown.at - place.start)] = True
        ranges.append(
            PlaceholderRange(place.start, place.length, None if bool(mask.all()) else mask)
        )
    return mm_input(
        prompt,
        _fields(sight),
        {"image": [place.pixels for place in places]},
        {"image": ranges},
    )


def _fields(sight: Sight) -> Any:
    """Return the pixel values of images, each as one item, by the names that vLLM's models read."""
    import torch
    from transformers import BatchFeature
    from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems

    images = [shown.image for shown in sight]
    sizes = torch.tensor([len(image.pixel_values) for image in images])
    values = torch.from_numpy(np.concatenate([image.pixel_values for image in images]))
    arrays = {"pixel_values": values}
    fields = {"pixel_values": MultiModalFieldConfig.flat_from_sizes("image", sizes)}
    if images[0].grid:
        arrays["image_grid_thw"] = torch.tensor([image.grid for image in images])
        fields["image_grid_thw"] = MultiModalFieldConfig.batched("image", keep_on_cpu=True)
    else:
        arrays["num_patches"] = sizes
        fields["num_patches"] = MultiModalFieldConfig.batched("image", keep_on_cpu=True)
    return MultiModalKwargsItems.from_hf_inputs(BatchFeature(arrays), fields)
