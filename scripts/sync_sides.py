"""One vLLM engine that gets new weights while requests run, in our way and in vLLM's own: both
sides of `bench_sync.py`'s `weight_sync`.

    python scripts/sync_sides.py SPEC.json      with {model, threads, requests, max_tokens, folder}

Protocol on the pipes: it prints {"ready": true}; {"do": "ours"} and {"do": "peer"} publish the next
weights and answer with {"seconds", "phases", "running", "aborted"} (ours: and {"canary", "limit",
"moved"}); {"do": "sample", "top_p", "sequences"} publishes the next weights, samples under them and
answers with {"abs_diff_mean", "abs_diff_max", "ratio_outside"} against the trainer's log-probs; it
ends when stdin closes.

`seconds`: from the trainer's tensors to the moment the engine goes on.  Ours: staged in memory,
hashed, verified, loaded, layers probed.  The peer: a safetensors file, synced to disk, and vLLM's
`reload_weights`.  Invariant: when a side begins, all requests are being answered.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from rft.engine.settings import EngineSettings
from rft.engine.vllm import VllmEngine
from rft.sync.schedule import Schedule
from rft.sync.settings import FixedSync, SyncRuntime
from rft.sync.synchronizer import Synchronizer
from rft.sync.transport.memory import MemoryTransport
from rft.types.completion import Completion
from rft.types.ids import Version
from rft.types.ports import GenerateRequest, ScoreRow
from rft.types.task import SamplingArgs

TIED = {"lm_head.weight": "model.embed_tokens.weight"}
RUNNING_S = 300.0
PHASES = ("pause", "load", "verify", "probe", "resume")


class Trainer:
    """Weights as a trainer holds them: each version is the model and a little noise.  Scores under
    the newest.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        given = load_file(folder / "model.safetensors")
        # in the order in which a trainer publishes
        self._base = {n: given[n] for n, _ in self._model.named_parameters()}
        self.tensors = {n: t.clone() for n, t in self._base.items()}
        self.version = Version(1, 0)

    def step(self) -> None:
        self.version = Version(1, self.version.step + 1)
        random = torch.Generator().manual_seed(self.version.step)
        for name, base in self._base.items():
            # one row for all: quick, and every tensor moves
            noise = torch.randn(base.shape[-1], generator=random)
            torch.add(base, noise, alpha=0.01 * base.std().item(), out=self.tensors[name])

    async def score(self, rows: Sequence[ScoreRow]) -> list[np.ndarray]:
        return await asyncio.to_thread(self._score, rows)

    @torch.no_grad()
    def _score(self, rows: Sequence[ScoreRow]) -> list[np.ndarray]:
        self._model.load_state_dict(self.tensors, strict=False)
        found = []
        for row in rows:
            ids = torch.from_numpy(row.tokens.astype(np.int64))[None]
            logprobs = self._model(ids).logits[0, row.prompt_length - 1 : -1].log_softmax(-1)
            found.append(logprobs.gather(1, ids[0, row.prompt_length :, None])[:, 0].numpy())
        return found


class Sides:
    def __init__(self, spec: dict[str, Any], engine: VllmEngine) -> None:
        self._spec = spec
        self._engine = engine
        self._folder = Path(spec["folder"])
        self._trainer = Trainer(Path(spec["model"]))
        self._transport = MemoryTransport(self._folder)
        self._words = (
            json.loads((Path(spec["model"]) / "config.json").read_text())["vocab_size"] - 20
        )  # the first ones are special
        prompts = [[20 + (97 * i + 7 * j) % self._words for j in range(6)] for i in range(8)]
        self._sync = Synchronizer(
            FixedSync(), SyncRuntime(), [engine], self._trainer, Schedule(), prompts, Version(1, 0)
        )
        self._running = 0
        self._all_running = asyncio.Event()
        record = engine._stats.record

        def seen(scheduler: Any, *more: Any, **named: Any) -> None:
            record(scheduler, *more, **named)
            if scheduler is not None and (n := scheduler.num_running_reqs) >= spec["requests"]:
                self._running = n
                self._all_running.set()

        engine._stats.record = seen  # type: ignore[method-assign, assignment]

    async def first(self) -> None:
        await self._publish()

    async def do(self, do: str, **order: Any) -> dict[str, Any]:
        if do == "sample":
            return await self.sample(**order)
        return await (self.ours() if do == "ours" else self.peer())

    async def ours(self) -> dict[str, Any]:
        return await self._among_requests(self._publish)

    async def peer(self) -> dict[str, Any]:
        return await self._among_requests(self._reload)

    async def sample(self, top_p: float, sequences: int) -> dict[str, Any]:
        self._trainer.step()
        await self._publish()
        made = await asyncio.gather(
            *(self._engine.generate(self._request(i, top_p=top_p)) for i in range(sequences))
        )
        rows = [
            ScoreRow(
                tokens=np.concatenate([c.prompt_tokens, c.tokens]),
                prompt_length=len(c.prompt_tokens),
            )
            for (c,) in made
        ]
        scored = await self._trainer.score(rows)
        apart = np.concatenate(
            [s - c.logprobs for s, (c,) in zip(scored, made, strict=True)]
        ).astype(np.float64)
        outside = np.abs(np.exp(apart) - 1) > 0.1
        return {
            "abs_diff_mean": float(np.abs(apart).mean()),
            "abs_diff_max": float(np.abs(apart).max()),
            "ratio_outside": float(outside.mean()),
        }

    async def _publish(self) -> dict[str, Any]:
        trainer = self._trainer
        began = time.perf_counter()
        manifest = await asyncio.to_thread(
            self._transport.stage, trainer.version, trainer.tensors.items(), TIED
        )
        staged = time.perf_counter() - began
        said = {m.name: m.value for m in await self._sync.publish(manifest)}
        phases = {
            "stage": staged,
            **{k: said[f"sync/{k}_s"] for k in PHASES if f"sync/{k}_s" in said},
        }
        seconds = staged + sum(said[f"sync/{k}_s"] for k in ("pause", "load", "resume"))
        told = {
            "canary": said["sync/canary_max_abs"],
            "limit": said["sync/canary_limit"],
            "moved": said["sync/canary_moved"],
        }
        return {"seconds": seconds, "phases": phases, **told, "canary_s": said["sync/canary_s"]}

    async def _reload(self) -> dict[str, Any]:
        began = time.perf_counter()
        await asyncio.to_thread(self._save)
        saved = time.perf_counter()
        llm = self._engine._llm
        await llm.pause_generation(mode="keep", clear_cache=True)
        paused = time.perf_counter()
        await llm.collective_rpc("reload_weights", kwargs={"weights_path": str(self._folder)})
        loaded = time.perf_counter()
        await llm.resume_generation()
        phases = {"save": saved - began, "pause": paused - saved, "load": loaded - paused}
        return {"seconds": time.perf_counter() - began, "phases": phases}

    def _save(self) -> None:
        path = self._folder / "model.safetensors"
        save_file(self._trainer.tensors, path, metadata={"format": "pt"})
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)

    async def _among_requests(self, update: Any) -> dict[str, Any]:
        self._trainer.step()
        self._all_running.clear()
        asked = [
            asyncio.ensure_future(self._engine.generate(self._request(i)))
            for i in range(self._spec["requests"])
        ]
        async with asyncio.timeout(RUNNING_S):
            await self._all_running.wait()
        answer = await update()
        done: list[Completion] = [c for made in await asyncio.gather(*asked) for c in made]
        aborted = sum(
            c.finish_reason != "length" or len(c.tokens) != self._spec["max_tokens"] for c in done
        )
        return {**answer, "running": self._running, "aborted": aborted}

    def _request(self, i: int, *, top_p: float = 1.0) -> GenerateRequest:
        tokens = tuple(20 + (i * 131 + j * 17) % self._words for j in range(40))
        sampling = SamplingArgs(
            temperature=1.0, top_p=top_p, max_tokens=self._spec["max_tokens"], ignore_eos=True
        )
        return GenerateRequest(prompt_tokens=tokens, sampling=sampling, request_id=f"r{i}")


async def main(spec: dict[str, Any]) -> None:
    torch.set_num_threads(spec["threads"])
    settings = EngineSettings(
        model_path=spec["model"],
        max_model_len=512,
        max_num_seqs=64,
        device="cpu",
        dtype="float32",
        cpu_threads=spec["threads"],
    )
    engine = await VllmEngine.start(settings)
    try:
        sides = Sides(spec, engine)
        await sides.first()
        print(json.dumps({"ready": True}), flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps(await sides.do(**json.loads(line))), flush=True)
    finally:
        await engine.close()


if __name__ == "__main__":
    asyncio.run(main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
