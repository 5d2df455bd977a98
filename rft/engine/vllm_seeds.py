"""Seeded requests in vLLM's runner for CPUs, which ends the engine where the prompt of one is
computed in pieces.

After each piece but the last the runner takes back the random number that it has drawn, in a way
that generators on CPU do not offer.
"""

from __future__ import annotations

from typing import Any

import torch


class Generator(torch.Generator):
    """One that can be set back before a request's first token.  Later, where a request is computed
    again, the number is skipped.
    """

    written: list[int]

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> torch.Generator:
        return self if self.written else self.manual_seed(self.initial_seed())


class Requests(dict[str, Any]):
    """The runner's requests by name."""

    def __setitem__(self, name: str, request: Any) -> None:
        if request.generator is not None:
            generator = Generator()
            generator.set_state(request.generator.get_state())
            generator.written = request.output_token_ids
            request.generator = generator
        super().__setitem__(name, request)
