"""What an adapter alone costs and saves against whole weights with the adapter added: bytes,
seconds of a sync, tokens per second.

    python scripts/bench_lora.py [--model FOLDER] [--rank 32] [--rounds 5] [--ways
    merged,beside,vllm]

Each way is an engine with a trainer in a process of its own; rounds go in turn, so that a busy
machine is as busy for all.  Ways: merged (whole weights are published), beside (the adapter alone,
in our layers beside vLLM's), vllm (the adapter alone, in vLLM's LoRA layers). Without --model the
tiny model.  The last line is JSON; figures of the first way are what the others are compared with.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rft.engine.environment import cpu_environment
from rft.engine.settings import EngineSettings

PROMPT = 44  # tokens, tokens, sequences: a batch of the quick start
ANSWER = 24
SEQUENCES = 32
WAYS = ("merged", "beside", "vllm")


def engine_settings(model: str, way: str, rank: int) -> EngineSettings:
    return EngineSettings(
        name=way,
        model_path=model,
        max_model_len=256,
        max_num_seqs=SEQUENCES,
        lora_rank=rank if way == "vllm" else None,
    )


async def serve(model: str, way: str, rank: int) -> None:
    """One round for each line on stdin: train nothing, publish, generate; its figures as a line on
    stdout.
    """
    import torch

    from rft.engine.vllm import VllmEngine
    from rft.sync.transport.memory import MemoryTransport
    from rft.trainer.loop.learner import Learner
    from rft.trainer.settings import LearnerSettings, LoraSettings
    from rft.types.ids import Version
    from rft.types.ports import GenerateRequest
    from rft.types.task import SamplingArgs

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print is no answer
    settings = LearnerSettings(
        model_path=model, lora=LoraSettings(rank=rank, merge=way == "merged"), cpu_threads=2
    )
    learner = Learner(settings)
    assert learner.policy.adapter is not None
    engine = await VllmEngine.start(engine_settings(model, way, rank))
    with tempfile.TemporaryDirectory() as folder:
        transport = MemoryTransport(Path(folder))
        step = 0
        while await asyncio.to_thread(sys.stdin.readline):
            with torch.no_grad():
                for name, p in learner.policy.adapter.parameters().items():
                    p.add_(
                        1e-3
                        * torch.randn(
                            p.shape, generator=torch.Generator().manual_seed(step + len(name))
                        )
                    )
            step += 1
            began = time.perf_counter()
            manifest = learner.stage(Version(1, step), transport)
            assert manifest is not None
            staged = time.perf_counter()
            await engine.pause()
            report = await engine.load(manifest)
            await engine.resume()
            loaded = time.perf_counter()
            sampling = SamplingArgs(max_tokens=ANSWER, ignore_eos=True, seed=step)
            prompts = [
                tuple((7 * i + 13 * j) % 200 + 5 for j in range(PROMPT)) for i in range(SEQUENCES)
            ]
            made = await asyncio.gather(
                *(
                    engine.generate(GenerateRequest(prompt_tokens=p, sampling=sampling))
                    for p in prompts
                )
            )
            ended = time.perf_counter()
            figures = {
                "bytes": manifest.nbytes,
                "stage_s": staged - began,
                "load_s": loaded - staged,
                "sync_s": loaded - began,
                "tokens_per_s": sum(len(c.tokens) for answer in made for c in answer)
                / (ended - loaded),
                "probe_error": report.probe_error,
            }
            print(json.dumps(figures), file=answers, flush=True)
        transport.close()
    await engine.close()


def race(
    model: str, *, rank: int = 32, rounds: int = 5, ways: tuple[str, ...] = WAYS
) -> dict[str, dict[str, float]]:
    """Medians of `rounds` rounds by way; the first round of each is a warm-up that does not count."""
    children = {}
    try:
        for way in ways:
            env = {**os.environ, **cpu_environment(engine_settings(model, way, rank))}
            call = [sys.executable, __file__, "--serve", way, "--model", model, "--rank", str(rank)]
            children[way] = subprocess.Popen(
                call, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
        for _ in range(rounds + 1):
            for way, child in children.items():
                assert child.stdin is not None and child.stdout is not None
                child.stdin.write("\n")
                child.stdin.flush()
                if not (line := child.stdout.readline()):
                    raise RuntimeError(
                        f"the engine of way {way} ended with {child.wait()}; see its messages above"
                    )
                found[way].append(json.loads(line))
    finally:
        for child in children.values():
            if child.stdin is not None:
                child.stdin.close()
        for child in children.values():
            child.wait(60)
    return {
        way: {name: statistics.median(f[name] for f in each[1:]) for name in each[0]}
        for way, each in found.items()
    }


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--model")
    p.add_argument("--rank", type=int, default=32)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--ways", default=",".join(WAYS))
    p.add_argument("--serve", help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.serve is not None:
        asyncio.run(serve(a.model, a.serve, a.rank))
        return
    with tempfile.TemporaryDirectory() as folder:
        if a.model is None:
            from rft.testing import tiny

            a.model = str(tiny.make(Path(folder) / "tiny"))
        found = race(a.model, rank=a.rank, rounds=a.rounds, ways=tuple(a.ways.split(",")))
    first = next(iter(found.values()))
    for way, figures in found.items():
        rows: list[Any] = [
            f"{figures['bytes'] / 1e6:.2f} MB ({figures['bytes'] / first['bytes']:.1%})"
        ]
        rows += [f"stage {figures['stage_s']:.3f} s", f"pause to resumed {figures['load_s']:.3f} s"]
        rows += [
            f"{figures['tokens_per_s']:.0f} tokens/s "
            f"({figures['tokens_per_s'] / first['tokens_per_s']:.2f})"
        ]
        print(f"{way:8}", *rows, sep="  ")
    print(
        json.dumps(
            {
                "name": "lora_sync",
                "model": a.model,
                "rank": a.rank,
                "rounds": a.rounds,
                "ways": found,
            }
        )
    )


if __name__ == "__main__":
    main()
