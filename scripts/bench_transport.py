"""How long a version takes from the trainer's memory into a real vLLM engine, by transport and
phase.

    python scripts/bench_transport.py MODEL [--method memory --method nccl ...] [--repeat 5] [--tp
    1] [--bucket-mb 64] [--overlap]

One engine on the CPU; the trainer's side is this process, and the engine's workers are processes of
their own.  Independent of canaries and schedules.  The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from rft.engine.environment import cpu_environment
from rft.engine.settings import EngineSettings
from rft.sync.settings import FixedSync, NcclConfig, SyncConfig
from rft.sync.transport.choose import make
from rft.sync.update import Rounds
from rft.types.ids import Version
from rft.types.ports import Engine, LoadReport, Sender, WeightManifest

PHASES = (
    "stage",
    "pause",
    "meeting",
    "transfer",
    "verify",
    "model",
    "load",
    "resume",
    "publish_to_resumed",
)


class Side:
    """The trainer's side with one transport.  Usable for any started engine."""

    def __init__(self, config: SyncConfig, workers: int, folder: Path, model: Path) -> None:
        from safetensors.torch import load_file

        self.transport: Any = make(config, folder)
        self._tensors = {
            n: t for file in sorted(model.glob("*.safetensors")) for n, t in load_file(file).items()
        }
        self._rounds, self._workers = (
            Rounds(cast(Sender, self.transport), config.sync_timeout),
            workers,
        )
        self._step = 0

    async def publish(self, engine: Engine, lineage: int) -> dict[str, float]:
        """Seconds of each phase of one version."""
        self._step += 1
        at = [time.perf_counter()]
        manifest = await asyncio.to_thread(
            self.transport.stage, Version(lineage, self._step), self._moved(), {}
        )
        at.append(time.perf_counter())
        await engine.pause()
        at.append(time.perf_counter())
        report = await self._load(engine, manifest)
        at.append(time.perf_counter())
        await engine.resume()
        at.append(time.perf_counter())
        if not report.intact:
            raise RuntimeError(f"{manifest.transport}: {report}")
        if self._step > 1:
            self.transport.release(Version(lineage, self._step - 1))
        stage, pause, load, resume = (b - a for a, b in itertools.pairwise(at))
        inside = {
            "meeting": report.meeting_s,
            "transfer": report.transfer_s,
            "verify": report.verify_s,
        }
        inside["model"] = report.load_s - sum(inside.values())
        return {
            "stage": stage,
            "pause": pause,
            **inside,
            "load": load,
            "resume": resume,
            "publish_to_resumed": at[-1] - at[0],
        }

    async def _load(self, engine: Engine, manifest: WeightManifest) -> LoadReport:
        if manifest.broadcast is None:
            return await engine.load(manifest)
        return (
            await self._rounds.load(manifest, {0: self._workers}, lambda i, sent: engine.load(sent))
        )[0]

    def _moved(self) -> Iterator[tuple[str, Any]]:
        for name, tensor in self._tensors.items():
            if self._step > 1 and tensor.is_floating_point():
                tensor.mul_(1 + 1e-6)
            yield name, tensor


async def measure(
    model: Path,
    methods: Sequence[str],
    *,
    repeat: int,
    tp: int = 1,
    bucket_mb: int | None = 1024,
    overlap: bool = False,
) -> dict[str, dict[str, float]]:
    """Median seconds by phase, for each transport; the first version, which forms groups and
    allocates, stands as `first`.
    """
    from rft.engine.vllm import VllmEngine

    engine_settings = EngineSettings(
        model_path=str(model),
        max_model_len=512,
        max_num_seqs=32,
        kv_cache_bytes=1 << 28,
        tensor_parallel_size=tp,
    )
    os.environ.update(cpu_environment(engine_settings) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"})
    engine = await VllmEngine.start(engine_settings)
    rounds: dict[str, list[dict[str, float]]] = {method: [] for method in methods}
    try:
        with tempfile.TemporaryDirectory(prefix="rft-bench-") as folder:
            sides = {}
            for method in methods:
                nccl = NcclConfig(
                    bucketed_broadcast=bucket_mb is not None,
                    bucket_size_mb=bucket_mb or 1,
                    overlap_broadcast_and_load=overlap,
                )
                config = FixedSync(sync_method=method, nccl=nccl, sync_timeout=300.0)
                sides[method] = Side(config, tp, Path(folder), model)
            try:
                for _ in range(repeat + 1):  # in turns, so that all meet the same machine
                    for lineage, (method, side) in enumerate(sides.items(), 1):
                        rounds[method].append(await side.publish(engine, lineage))
            finally:
                for side in sides.values():
                    side.transport.close()
    finally:
        await engine.close()
    return {
        method: {p: statistics.median(r[p] for r in told[1:]) for p in PHASES}
        | {"first": told[0]["publish_to_resumed"]}
        for method, told in rounds.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--method", action="append", choices=["memory", "checkpoint", "nccl"])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--bucket-mb", type=int, default=1024, help="0: tensor by tensor")
    parser.add_argument("--overlap", action="store_true")
    a = parser.parse_args()
    methods = a.method or ["memory", "checkpoint", "nccl"]
    found = asyncio.run(
        measure(
            a.model,
            methods,
            repeat=a.repeat,
            tp=a.tp,
            bucket_mb=a.bucket_mb or None,
            overlap=a.overlap,
        )
    )
    for method, phases in found.items():
        print(f"{method:11}", "  ".join(f"{name} {value:.3f}" for name, value in phases.items()))
    print(
        json.dumps(
            {
                "name": "transport",
                "model": a.model.name,
                "seconds": found,
                "load_average": os.getloadavg()[0],
            }
        )
    )


if __name__ == "__main__":
    main()
