"""What engines with mixtures of experts are compared with: transformers' own model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from rft.types.completion import Completion


def model(folder: Path) -> Any:
    """The model of `folder`, whose routers are recorded as `model.routers`."""
    import torch
    from transformers import AutoModelForCausalLM

    from rft.engine.routers import Routers

    made = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    made.routers = Routers(made)
    made.routers.recording = True
    return made


def weights(model: Any) -> dict[str, np.ndarray]:
    """As a trainer publishes them."""
    return {name: p.detach().numpy().copy() for name, p in model.named_parameters()}


def set_weights(model: Any, given: dict[str, np.ndarray]) -> None:
    import torch

    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.from_numpy(given[name]))


def compare(model: Any, c: Completion) -> tuple[float, np.ndarray]:
    """The largest difference of log-probs, and which positions of prompt and answer went through
    the experts that the model chooses.
    """
    import torch

    ids = torch.from_numpy(np.concatenate([c.prompt_tokens, c.tokens]).astype(np.int64))[None]
    with torch.no_grad():
        logits = model(ids).logits[0, len(c.prompt_tokens) - 1 : -1] / c.sampling.temperature
    want = logits.log_softmax(-1).gather(1, ids[0, len(c.prompt_tokens) :, None])[:, 0].numpy()
    assert c.routed_experts is not None and c.routed_experts.dtype == np.uint8
    chosen = np.sort(model.routers.chosen.numpy()[:-1], -1)
    assert chosen.shape == c.routed_experts.shape
    same = (chosen == np.sort(c.routed_experts, -1)).all((1, 2))
    return float(np.abs(want - c.logprobs).max()), same
