"""Choose transformers' auto class for a model, for the trainer and the `transformers` engine."""

from __future__ import annotations

from typing import Any


def auto_class(config: Any) -> Any:
    """Return the auto class that builds the language model of `config` with its output layer.

    Families without a causal class, such as Qwen2.5-VL, have one for images and text.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    images: Any = AutoModelForImageTextToText
    causal: Any = AutoModelForCausalLM
    kind = type(config)
    shows = kind in images._model_mapping and kind not in causal._model_mapping
    return images if shows else causal
