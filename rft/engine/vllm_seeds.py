"""Make seeded requests work in vLLM's CPU runner when a prompt is computed in pieces.

After each piece but the last, the runner resets the random generator in a way that CPU generators
do not support, which would crash the engine.
"""

from __future__ import annotations

from typing import Any

import torch


class Generator(torch.Generator):
    """A generator that can be reset before a request's first token.

    If a request is recomputed later, the reset is skipped and the drawn number is lost.
    """

    written: list[int]

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> torch.Generator:
        return self if self.written else self.manual_seed(self.initial_seed())


class Requests(dict[str, Any]):
    """The runner's requests by name; each seeded one gets a resettable generator."""

    def __setitem__(self, name: str, request: Any) -> None:
        if request.generator is not None:
            generator = Generator()
            generator.set_state(request.generator.get_state())
            generator.written = request.output_token_ids
            request.generator = generator
        super().__setitem__(name, request)
