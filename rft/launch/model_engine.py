"""One engine of `rft doctor --model`, in a process of its own: KIND DEVICE MODEL RANK WORLD FOLDER.

It answers a few random prompts in float32; what it sampled is written to FOLDER, beside a line that says whether it could.  Knows
engines; compares nothing.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct

from rft.engine.settings import EngineSettings
from rft.launch.machine import Line

ANSWERS = "answers.json"
_PROMPTS, _TOKENS = (4, 9, 17), 16


class Sampled(Struct, frozen=True, kw_only=True):
    """One prompt and what the engine sampled after it, with its log-probs."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]


def main(kind: str, device: str, model: str, rank: str, world: str, folder: str) -> int:
    """Writes the answers and one line.  Exit code 1 where there are none."""
    if importlib.util.find_spec(kind) is None:
        line = Line(topic=kind, state="note", text="not installed")
    else:
        try:
            answers = asyncio.run(_answers(kind, device, model))
            (Path(folder) / f"{kind}.{ANSWERS}").write_bytes(msgspec.json.encode(answers))
            line = Line(topic=kind, state="ok", text=f"{len(answers)} answers")
        except Exception as e:  # an engine's library may raise anything; what it says is the answer
            line = Line(topic=kind, state="failed", text=f"{type(e).__name__}: {e}"[:800])
    (Path(folder) / f"{kind}.jsonl").write_bytes(msgspec.json.encode(line) + b"\n")
    return int(line.state == "failed")


async def _answers(kind: str, device: str, model: str) -> list[Sampled]:
    from rft.engine.base import make
    from rft.types.ports import GenerateRequest
    from rft.types.task import SamplingArgs

    config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    size = int(config.get("text_config", config)["vocab_size"])
    draw = np.random.default_rng(2)
    settings = EngineSettings(
        engine_type=kind, name=kind, model_path=model, device=device, dtype="float32", max_model_len=64, max_num_seqs=4,
        gpu_memory_utilization=0.3, kv_cache_bytes=64 << 20, fixed_weights=True,
    )  # fmt: skip
    engine = await make(settings)
    try:
        found = []
        for length in _PROMPTS:
            prompt = draw.integers(size, size=length).tolist()
            sampling = SamplingArgs(temperature=1.0, max_tokens=_TOKENS, ignore_eos=True, seed=1)
            (done,) = await engine.generate(GenerateRequest(prompt_tokens=tuple(prompt), sampling=sampling))
            found.append(Sampled(prompt=prompt, tokens=list(map(int, done.tokens)), logprobs=list(map(float, done.logprobs))))
        return found
    finally:
        await engine.close()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
