"""One engine of `rft doctor --model`, in a separate process: KIND DEVICE MODEL RANK WORLD FOLDER.

A trainer publishes two versions in float32, as in a run: the model's weights, then all weights
slightly changed.  The engine verifies, probes and serves each version, and the canary compares it
with the trainer.  The samples of the first version are written to FOLDER, and a line reports
success.  Depends on engines, the trainer and weight updates; compares nothing with transformers.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from msgspec import Struct

from rft.extras.doctor import machine_checks
from rft.extras.doctor.check_line import TRANSPORTS, Line
from rft.sync.settings import FixedSync, SyncRuntime
from rft.trainer.settings import LearnerSettings
from rft.types.modelfiles import vocab_size

if TYPE_CHECKING:
    from rft.trainer.loop.learner import Learner

ANSWERS = "answers.json"
_PROMPTS = (4, 9, 17)
_TOKENS = 16
_SHAKEN = 0.02  # relative change of a weight between the versions
_TIMEOUT_S = 120.0


class Sampled(Struct, frozen=True, kw_only=True):
    """A prompt and the engine's sampled tokens, with their log-probs."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]


class Served(Struct, frozen=True, kw_only=True):
    """An engine's samples with the model's weights, and the canary's largest difference of each
    version, in nats.
    """

    sampled: list[Sampled]
    canary: list[float]


def serves(
    kind: str, device: str, model: str, rank: int, world: int, folder: Path
) -> Iterator[Line]:
    """Run the engine and write its answers."""
    logging.disable(logging.ERROR)
    served = asyncio.run(_served(kind, device, model, folder))
    (folder / f"{kind}.{ANSWERS}").write_bytes(msgspec.json.encode(served))
    yield machine_checks.ok(kind, f"{len(served.canary)} versions")


CHECKS: dict[str, machine_checks.Check] = {kind: partial(serves, kind) for kind in TRANSPORTS}


async def _served(kind: str, device: str, model: str, folder: Path) -> Served:
    from rft.trainer.loop.ranks import Ranks

    settings = LearnerSettings(model_path=model, device=device, row_layout="padded")
    config = FixedSync(sync_timeout=_TIMEOUT_S)
    runtime = SyncRuntime(retries=0)
    sampled: list[Sampled] = []
    async with machine_checks.engine_and_learner(kind, settings) as (engine, learner):
        ranks = Ranks(learner)

        async def sample_and_shake(_: object) -> None:
            draw = np.random.default_rng(2)
            size = vocab_size(Path(model))
            sampled.extend(
                [
                    await _answer(engine, draw.integers(size, size=length).tolist())
                    for length in _PROMPTS
                ]
            )
            await ranks.aside(_shake, learner)

        first, second, _ = await machine_checks.two_versions(
            engine, ranks, config, runtime, 1, folder, sample_and_shake
        )
    return Served(sampled=sampled, canary=[first, second])


async def _answer(engine: Any, prompt: list[int]) -> Sampled:
    from rft.types.ports import GenerateRequest
    from rft.types.task import SamplingArgs

    sampling = SamplingArgs(temperature=1.0, max_tokens=_TOKENS, ignore_eos=True, seed=1)
    (done,) = await engine.generate(GenerateRequest(prompt_tokens=tuple(prompt), sampling=sampling))
    return Sampled(
        prompt=prompt, tokens=list(map(int, done.tokens)), logprobs=list(map(float, done.logprobs))
    )


def _shake(learner: Learner) -> None:
    """Change every weight, like a train step."""
    import torch

    with torch.no_grad():
        for parameter in learner.policy.names().values():
            size = float(parameter.square().mean().sqrt())
            parameter.add_(torch.randn_like(parameter), alpha=_SHAKEN * (size + _SHAKEN))


if __name__ == "__main__":
    sys.exit(machine_checks.main(CHECKS, *sys.argv[1:]))
