"""How often the canary refuses right weights, and how often it passes wrong ones, in bfloat16 and
with a real model.

    python scripts/canary_noise.py [--model FOLDER] [--engine vllm|transformers] [--seeds 12]
    [--json]

Engine and trainer hold the model's weights, both in bfloat16, on the CPU.  Each seed draws other
probe prompts, and has a canary of its own that judges its probe as that of a first version: a
refusal is a false alarm.  Then the trainer gets wrong weights one after the other, as if the engine
had not loaded what was published, and every canary judges its probe again: a pass is a miss.
Differences are in nats, means over the 64 tokens of a probe; `error / limit` is that of the mean.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rft.engine.environment import cpu_environment
from rft.engine.settings import EngineSettings
from rft.errors import WeightSyncFailed
from rft.extras.doctor.machine_checks import engine_and_learner
from rft.launch.start import probe_prompts
from rft.sync.canary import Canary, Probe
from rft.sync.settings import FixedSync, SyncRuntime
from rft.sync.transport.memory import MemoryTransport
from rft.testing.models import smollm2
from rft.trainer.loop.learner import Learner
from rft.trainer.loop.ranks import Ranks
from rft.trainer.model import tensors
from rft.trainer.settings import LearnerSettings
from rft.types.ids import Version
from rft.types.noise import Difference
from rft.types.ports import ScoreRow

VERSION = Version(1, 0)
# learning rates: Adam's first step moves every weight by one
STEPS = (1e-4, 1e-3, 2e-3, 4e-3, 1e-2)
Fault = Callable[[dict[str, torch.Tensor]], None]


@dataclass
class Seed:
    canary: Canary
    probe: Probe
    error: Difference  # with the right weights
    refused: bool


def faults(layers: int) -> Iterator[tuple[str, Fault]]:
    def part(weights: dict[str, torch.Tensor], layer: int) -> list[torch.Tensor]:
        return [w for name, w in weights.items() if f"layers.{layer}." in name and w.ndim > 1]

    def unloaded(layer: int, only: int | None = None) -> Fault:
        def change(weights: dict[str, torch.Tensor]) -> None:
            matrices = part(weights, layer)
            for w in matrices if only is None else [matrices[only % len(matrices)]]:
                w.normal_(std=float(w.std()))

        return change

    def swapped(layer: int) -> Fault:
        def change(weights: dict[str, torch.Tensor]) -> None:
            for a, b in zip(part(weights, layer), part(weights, layer + 1), strict=True):
                kept = a.clone()
                a.copy_(b)
                b.copy_(kept)

        return change

    def step(lr: float) -> Fault:
        def change(weights: dict[str, torch.Tensor]) -> None:
            for w in weights.values():
                w.add_(lr * torch.randn_like(w).sign())

        return change

    for layer in range(0, layers, max(1, layers // 6)):
        yield f"layer {layer} was not loaded", unloaded(layer)
        yield f"one matrix of layer {layer} was not loaded", unloaded(layer, only=layer)
    for layer in range(0, layers - 1, max(1, layers // 3)):
        yield f"layers {layer} and {layer + 1} are swapped", swapped(layer)
    for lr in STEPS:
        yield f"weights are one step of {lr:g} old", step(lr)


async def measure(kind: str, settings: LearnerSettings, count: int, folder: Path) -> dict[str, Any]:
    runtime = SyncRuntime(engine_dtype=settings.dtype, trainer_dtype=settings.dtype)
    async with engine_and_learner(kind, settings) as (engine, learner):
        ranks = Ranks(learner)
        transport = MemoryTransport(folder)
        try:
            await engine.pause()
            if not (report := await engine.load(await ranks.stage(VERSION, transport))).intact:
                raise RuntimeError(f"the engine did not load the model: {report}")
            await engine.resume()
            seeds = []
            for number in range(count):
                canary = Canary(
                    FixedSync(),
                    runtime,
                    probe_prompts(settings.model_path, runtime.canary_prompts, number),
                    ranks,
                )
                probe = await canary.probe(engine, VERSION)
                refused = await is_refused(canary, probe)
                seeds.append(Seed(canary, probe, await error(ranks, probe), refused))
                note(
                    f"seed {number}: {seeds[-1].error}, from now on allowed {canary.limit}, "
                    f"refused: {refused}"
                )
            return summary(settings, kind, seeds, await under_faults(seeds, ranks, learner))
        finally:
            transport.close()


async def is_refused(canary: Canary, probe: Probe) -> bool:
    try:
        await canary.check([probe], [])
    except WeightSyncFailed as failure:
        note(str(failure))
        return True
    return False


async def error(ranks: Ranks, probe: Probe) -> Difference:
    rows = [
        ScoreRow(
            tokens=np.concatenate([prompt, tokens]).astype(np.int32), prompt_length=len(prompt)
        )
        for prompt, tokens in zip(probe.prompts, probe.tokens, strict=True)
    ]
    return Difference.from_values(
        np.concatenate(await ranks.score(rows)) - np.concatenate(probe.logprobs)
    )


async def under_faults(
    seeds: list[Seed], ranks: Ranks, learner: Learner
) -> dict[str, list[Difference]]:
    """The differences of every seed's probe."""
    weights = {name: tensors.local(p) for name, p in learner.policy.named_parameters()}
    right = {name: w.clone() for name, w in weights.items()}
    layers = 1 + max(
        int(name.split("layers.")[1].split(".")[0]) for name in weights if "layers." in name
    )
    found: dict[str, list[Difference]] = {}
    for name, change in faults(layers):
        torch.manual_seed(0)
        change(weights)
        found[name] = [await error(ranks, seed.probe) for seed in seeds]
        for n, w in right.items():
            weights[n].copy_(w)
        note(f"{name}: {statistics.median(e.mean for e in found[name]):.3f}")
    return found


def summary(
    settings: LearnerSettings, kind: str, seeds: list[Seed], wrong: dict[str, list[Difference]]
) -> dict[str, Any]:
    ratios = [math.log(s.error.mean / s.canary.limit.mean) for s in seeds]
    tail = -statistics.fmean(ratios) / statistics.stdev(ratios)
    bands: dict[str, list[bool]] = {
        "at most 1": [],
        "1 to 1.5": [],
        "1.5 to 2": [],
        "more than 2": [],
    }
    for differences in wrong.values():
        times = statistics.median(
            d.mean / s.canary.limit.mean for d, s in zip(differences, seeds, strict=True)
        )
        band = list(bands)[(times > 1) + (times > 1.5) + (times > 2)]
        bands[band] += [d.within(s.canary.limit) for d, s in zip(differences, seeds, strict=True)]
    return {
        "model": Path(settings.model_path).name,
        "engine": kind,
        "dtype": settings.dtype,
        "tokens": seeds[0].probe.num_tokens,
        "error_mean": spread([s.error.mean for s in seeds]),
        "error_largest": spread([s.error.largest for s in seeds]),
        "limit_mean": spread([s.canary.limit.mean for s in seeds]),
        "limit_largest": spread([s.canary.limit.largest for s in seeds]),
        "false_alarms": f"{sum(s.refused for s in seeds)} of {len(seeds)}",
        # of so few seeds no fit says less
        "false_alarm_rate": max(1e-9, statistics.NormalDist().cdf(-tail)),
        "missed": {band: f"{sum(passed)} of {len(passed)}" for band, passed in bands.items()},
        "wrong": {
            name: {
                "error_mean": spread([d.mean for d in differences]),
                "refused": f"{sum(not d.within(s.canary.limit) for d, s in zip(differences, seeds, strict=True))} of {len(seeds)}",
            }
            for name, differences in wrong.items()
        },
    }


def spread(values: list[float]) -> list[float]:
    """Smallest, median and largest."""
    return [float(f"{v:.3g}") for v in (min(values), statistics.median(values), max(values))]


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def show(found: dict[str, Any]) -> None:
    for name in ("error_mean", "limit_mean", "error_largest", "limit_largest"):
        print(
            f"{name:15} {' / '.join(f'{v:g}' for v in found[name])} nats (smallest / median / "
            f"largest of the seeds)"
        )
    print(
        f"false alarms    {found['false_alarms']}; by a log-normal fit of error / limit at most "
        f"{found['false_alarm_rate']:.0e}"
    )
    print("\nwrong weights, by their median error / limit: how many passed")
    for band, passed in found["missed"].items():
        print(f"  {band:12} {passed}")
    print("\n| wrong weights | error, nats | refused |\n|---|---|---|")
    for name, row in found["wrong"].items():
        print(f"| {name} | {' / '.join(f'{v:g}' for v in row['error_mean'])} | {row['refused']} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description="False alarms and misses of the canary in a short type."
    )
    parser.add_argument("--model", type=Path, help="a folder; the quickstart's model without")
    parser.add_argument("--engine", choices=("vllm", "transformers"), default="vllm")
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--json", action="store_true", help="one line of JSON, not a table")
    args = parser.parse_args()
    model = str(args.model or smollm2())
    env = cpu_environment(
        EngineSettings(engine_type=args.engine, dtype="bfloat16", model_path=model)
    )
    # it has to be there when libraries are loaded
    if any(os.environ.get(name) != value for name, value in env.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **env})
    settings = LearnerSettings(model_path=model, dtype="bfloat16", cpu_threads=os.cpu_count() or 1)
    with tempfile.TemporaryDirectory(prefix="rft-canary-") as folder:
        found = asyncio.run(measure(args.engine, settings, args.seeds, Path(folder)))
    if args.json:
        print(json.dumps(found))
    else:
        show(found)


if __name__ == "__main__":
    main()
