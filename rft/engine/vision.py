"""Put the features of images among the embeddings of tokens, for forwards of transformers' models.

Features go to the places that a prompt names: a placeholder that the policy sampled is text like
any other token.  Depends on what vision-language models have in common (image features, 3-d
positions, kinds of tokens), not on requests.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from rft.images.processor import Sight, tower_arrays


class VisionInputs(NamedTuple):
    """Arguments of `module` for B sequences of L tokens, beside cache and attention mask."""

    module: Any
    arguments: dict[str, Any]
    shifts: list[int]  # of each sequence: position of its next token - number of its tokens


def tells_types(body: Any) -> bool:
    """Return whether tokens of an image see each other, so the model is told the kinds of tokens."""
    return "token_type_ids" in inspect.signature(body.forward).parameters


def chosen_features(features: Any, order: torch.Tensor) -> torch.Tensor:
    """Return features [N, H] in `order` [N] from those of the images, one tensor or many."""
    every = features if isinstance(features, torch.Tensor) else torch.cat(list(features))
    return every.flatten(0, -2).index_select(0, order)


def vision_inputs(
    lm: Any, body: Any, ids: torch.Tensor, lengths: Sequence[int], sights: Sequence[Sight]
) -> VisionInputs:
    """Compute the features of the images, each once, and embed `ids` [B, L], padded at the end."""
    device = ids.device
    images = {shown.image.hash: shown.image for sight in sights for shown in sight}
    types = torch.zeros_like(ids)
    first: dict[str, int] = {}  # image -> its first feature
    count = 0
    for name, image in images.items():
        first[name] = count
        count += image.num_tokens
    order = []
    for number, sight in enumerate(sights):
        for image, at in sight:
            types[number, torch.from_numpy(at)] = 1
            order.append(first[image.hash] + torch.arange(image.num_tokens))
    at_features = torch.cat(order).to(device)
    arrays = tower_arrays(list(images.values()))
    out = body.get_image_features(
        **{name: torch.from_numpy(array).to(device) for name, array in arrays.items()},
        return_dict=True,
    )
    show = types.bool()
    tokens = lm.get_input_embeddings()(ids.masked_fill(show, 0))

    def placed(features: Any) -> torch.Tensor:
        return chosen_features(features, at_features).to(tokens.dtype)

    embeds = tokens.masked_scatter(show[..., None], placed(out.pooler_output))
    arguments: dict[str, Any] = {"inputs_embeds": embeds}
    if (deep := getattr(out, "deepstack_features", None)) is not None:
        arguments["visual_pos_masks"] = show
        arguments["deepstack_visual_embeds"] = [placed(layer) for layer in deep]
    module = lm.get_decoder()
    if tells_types(body):
        module = body
        arguments["token_type_ids"] = types
    places = torch.arange(ids.shape[1], device=device)
    if (rope := getattr(body, "get_rope_index", None)) is None:
        arguments["position_ids"] = places.expand(len(ids), -1)
        return VisionInputs(module, arguments, [0] * len(ids))
    grids = [shown.image.grid for sight in sights for shown in sight]
    arguments["position_ids"], deltas = rope(
        ids,
        mm_token_type_ids=types,
        image_grid_thw=torch.tensor(grids, device=device),
        attention_mask=(places < torch.tensor(lengths, device=device)[:, None]).long(),
    )
    return VisionInputs(module, arguments, deltas.flatten().tolist())
