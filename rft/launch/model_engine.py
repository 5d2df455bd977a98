"""One engine of `rft doctor --model`, in a process of its own: KIND DEVICE MODEL RANK WORLD FOLDER.

A trainer beside it publishes two versions in float32, as a run does: the model's weights, then all of them a little changed.  The engine
verifies, probes and serves each, and the canary compares it with the trainer.  What it sampled with the first one is written to FOLDER,
beside a line that says whether all of it held.  Knows engines, the trainer and weight updates; compares nothing with transformers.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from msgspec import Struct

from rft.engine.settings import EngineSettings
from rft.launch.machine import Line

if TYPE_CHECKING:
    from rft.trainer.learner import Learner

ANSWERS = "answers.json"
_PROMPTS, _TOKENS = (4, 9, 17), 16
_SHAKEN = 0.02  # by how much of its size a weight changes from one version to the next
_TIMEOUT_S = 120.0


class Sampled(Struct, frozen=True, kw_only=True):
    """One prompt and what the engine sampled after it, with its log-probs."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]


class Served(Struct, frozen=True, kw_only=True):
    """What an engine sampled with the model's weights, and the canary's largest difference of each version, in nats."""

    sampled: list[Sampled]
    canary: list[float]


def main(kind: str, device: str, model: str, rank: str, world: str, folder: str) -> int:
    """Writes the answers and one line.  Exit code 1 where there are none."""
    if importlib.util.find_spec(kind) is None:
        line = Line(topic=kind, state="note", text="not installed")
    else:
        logging.disable(logging.ERROR)
        try:
            served = asyncio.run(_served(kind, device, model, Path(folder)))
            (Path(folder) / f"{kind}.{ANSWERS}").write_bytes(msgspec.json.encode(served))
            line = Line(topic=kind, state="ok", text=f"{len(served.canary)} versions")
        except Exception as e:  # an engine's library may raise anything; what it says is the answer
            line = Line(topic=kind, state="failed", text=f"{type(e).__name__}: {e}"[:800])
    (Path(folder) / f"{kind}.jsonl").write_bytes(msgspec.json.encode(line) + b"\n")
    return int(line.state == "failed")


async def _served(kind: str, device: str, model: str, folder: Path) -> Served:
    from rft.engine.base import make
    from rft.sync.transport.memory import MemoryTransport
    from rft.trainer.learner import Learner
    from rft.trainer.ranks import Ranks
    from rft.trainer.settings import LearnerSettings

    engine = await make(
        EngineSettings(
            engine_type=kind,
            name=kind,
            model_path=model,
            device=device,
            dtype="float32",
            max_model_len=64,
            max_num_seqs=8,
            gpu_memory_utilization=0.3,
            kv_cache_bytes=64 << 20,
        )
    )
    transport = MemoryTransport(folder)
    try:
        learner = Learner(LearnerSettings(model_path=model, device=device, row_layout="padded"))
        return await _synced(engine, Ranks(learner), learner, transport, model)
    finally:
        await engine.close()
        transport.close()


async def _synced(engine: Any, ranks: Any, learner: Learner, transport: Any, model: str) -> Served:
    from rft.launch.start import probe_prompts, vocab_size
    from rft.sync.canary import Canary
    from rft.sync.engines import EngineSet
    from rft.sync.settings import SyncSettings
    from rft.sync.update import Rounds, WeightUpdates
    from rft.sync.waits import Waits
    from rft.types.ids import Version

    draw, size = np.random.default_rng(2), vocab_size(model)
    settings = SyncSettings(timeout_s=_TIMEOUT_S)
    engines = EngineSet(engine, (), Waits(_TIMEOUT_S), _TIMEOUT_S, None, lambda owner, why: None)
    canary = Canary(settings, probe_prompts(model, settings.canary_prompts, 0), ranks)
    updates = WeightUpdates(settings, engines, canary, Rounds(None, _TIMEOUT_S))
    first = await updates.run(await ranks.stage(Version(1, 0), transport), _nothing)
    sampled = [await _answer(engine, draw.integers(size, size=length).tolist()) for length in _PROMPTS]
    await ranks.aside(_shake, learner)
    second = await updates.run(await ranks.stage(Version(1, 1), transport), _nothing)
    return Served(sampled=sampled, canary=[first[0].verdict.max_abs, second[0].verdict.max_abs])


async def _nothing() -> None:
    return


async def _answer(engine: Any, prompt: list[int]) -> Sampled:
    from rft.types.ports import GenerateRequest
    from rft.types.task import SamplingArgs

    sampling = SamplingArgs(temperature=1.0, max_tokens=_TOKENS, ignore_eos=True, seed=1)
    (done,) = await engine.generate(GenerateRequest(prompt_tokens=tuple(prompt), sampling=sampling))
    return Sampled(prompt=prompt, tokens=list(map(int, done.tokens)), logprobs=list(map(float, done.logprobs)))


def _shake(learner: Learner) -> None:
    """Change every weight, as a step would."""
    import torch

    with torch.no_grad():
        for parameter in learner.policy.names().values():
            size = float(parameter.square().mean().sqrt())
            parameter.add_(torch.randn_like(parameter), alpha=_SHAKEN * (size + _SHAKEN))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
