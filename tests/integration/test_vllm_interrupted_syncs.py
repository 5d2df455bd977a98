"""Two hundred interrupted syncs of a real vLLM engine while it answers: every proven token is of
wholly one version's weights.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rft.engine.environment import cpu_environment
from rft.engine.settings import EngineSettings
from rft.engine.vllm import VllmEngine
from rft.errors import WeightSyncFailed
from rft.sync.schedule import Schedule
from rft.sync.settings import FixedSync, SyncRuntime
from rft.sync.synchronizer import Synchronizer
from rft.sync.transport.memory import MemoryTransport
from rft.testing.engine_contract import ask, shaken
from rft.types.completion import Completion
from rft.types.ids import Version
from rft.types.ports import LoadReport, ScoreRow, WeightManifest

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
TRIALS = 200
NEAR = 1e-3  # nats
# by the canary, when requests may have gone on under the new label
SEEN_LATE = ("score", "sync.skip")
TIED = {"lm_head.weight": "model.embed_tokens.weight"}
BROKEN = (
    "sync.skip",
    "sync.stale_head",
    "sync.corrupt_byte",
    "sync.missing_tensor",
    "sync.wrong_version",
)


class Model:
    """The trainer's side: any version's weights, their log-probs, their scores for the canary."""

    def __init__(self, folder: Path) -> None:
        self._base = {n: w.numpy() for n, w in load_file(folder / "model.safetensors").items()}
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._holds = -1
        self.newest = 0
        self.failing = False

    def weights(self, step: int) -> dict[str, torch.Tensor]:
        return {n: torch.from_numpy(w) for n, w in shaken(self._base, step).items()}

    def logprobs(self, step: int, tokens: Sequence[int], start: int) -> np.ndarray:
        """Of tokens[start:] under the weights of `step`."""
        if self._holds != step:
            self._model.load_state_dict(self.weights(step), strict=False)
            self._model.tie_weights()
            self._holds = step
        ids = torch.tensor([list(tokens)])
        with torch.no_grad():
            table = self._model(ids).logits[0, start - 1 : -1].log_softmax(-1)
        return table.gather(1, ids[0, start:, None])[:, 0].numpy()

    async def score(self, rows: Sequence[ScoreRow]) -> list[np.ndarray]:
        if self.failing:
            self.failing = False
            raise RuntimeError("a rank is gone")
        return [self.logprobs(self.newest, r.tokens.tolist(), r.prompt_length) for r in rows]

    def error(self, made: Completion) -> float:
        """Largest difference to the weights that each token says it is of."""
        tokens = [*made.prompt_tokens.tolist(), *made.tokens.tolist()]
        begin = len(made.prompt_tokens)
        worst = 0.0
        for span in made.version_spans:
            want = self.logprobs(span.version.step, tokens[: begin + span.end], begin + span.start)
            worst = max(worst, float(np.abs(want - made.logprobs[span.start : span.end]).max()))
        return worst


class Faulty(VllmEngine):
    """Its next load fails at the point `breaks`.

    The worker is another process, which fails by the number of a load: of six each is broken in its
    own way, but for the last.  Loads in between are of damaged weights, which never touch the
    model.
    """

    breaks = ""
    loads = 0
    plan = ",".join(
        f"{point}:{6 * n + i + 1}" for n in range(1000) for i, point in enumerate(BROKEN)
    )

    async def load(self, manifest: WeightManifest) -> LoadReport:
        wanted = BROKEN.index(self.breaks) if self.breaks else len(BROKEN)
        self.breaks = ""
        first = msgspec.structs.replace(manifest.tensors[0], xxh3_128="0" * 32)
        damaged = msgspec.structs.replace(manifest, tensors=(first, *manifest.tensors[1:]))
        while self.loads % 6 != wanted:
            assert (await super().load(damaged)).bad_hash
        return await super().load(manifest)

    def count(self) -> None:
        """What the worker is asked is not taken back when the call is cancelled, so it counts."""
        call = self._llm.collective_rpc

        async def counted(method: str, **kwargs: Any) -> Any:
            self.loads += method == "rft_load"
            return await asyncio.shield(call(method, **kwargs))

        self._llm.collective_rpc = counted


async def test_two_hundred_interrupted_syncs(
    tiny_model: Path, environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = EngineSettings(
        model_path=str(tiny_model), max_model_len=501, max_num_seqs=64, kv_cache_bytes=1 << 28
    )
    for name, value in {**cpu_environment(settings), "RFT_FAULT": Faulty.plan}.items():
        environment.setenv(name, value)
    engine, transport, model = (
        await Faulty.start(settings),
        MemoryTransport(tmp_path),
        Model(tiny_model),
    )
    engine.count()
    sync = Synchronizer(
        FixedSync(sync_timeout=120),
        SyncRuntime(),
        [engine],
        model,
        Schedule(),
        [[5 + i, 6, 7 + i] for i in range(8)],
        Version(1, 0),
    )
    random_ = random.Random(0)
    ended = {"old": 0, "new": 0}
    checked = {"whole": 0, "several": 0, "withheld": 0}
    try:
        served = 0
        usual = 0.5
        await publish(sync, transport, model, 0)
        answering: set[asyncio.Task[list[Completion]]] = set()
        looks: list[asyncio.Task[None]] = []
        for trial in range(1, TRIALS + 1):
            how = random_.choice([*["cancel"] * 5, "score", *BROKEN])
            if how in SEEN_LATE:  # is tried again only while nothing is under way
                await asyncio.gather(*answering)
                answering.clear()
            while len(answering) < 4 and how not in SEEN_LATE:
                answer = asyncio.create_task(
                    engine.generate(ask(max_tokens=random_.randrange(20, 160), ignore_eos=True))
                )
                answering.add(answer)
                looks.append(asyncio.create_task(look(sync, model, answer, checked)))
            model.failing = how == "score"
            engine.breaks = how if how in BROKEN else ""
            began = asyncio.get_running_loop().time()
            task = asyncio.create_task(publish(sync, transport, model, trial, served))
            if how == "cancel":
                await asyncio.wait({task}, timeout=random_.uniform(0, 1.2 * usual))
                task.cancel()
            (result,) = await asyncio.gather(task, return_exceptions=True)
            model.failing = False
            engine.breaks = ""
            if isinstance(result, asyncio.CancelledError):
                ended["old"] += 1
                model.newest = served
                transport.release(Version(1, trial))
            else:
                assert not isinstance(result, BaseException), result
                ended["new"] += 1
                served = trial
                usual = asyncio.get_running_loop().time() - began
            (now,) = await engine.generate(ask(n=1, max_tokens=24, ignore_eos=True))
            # by whichever attempt
            assert [s.version.published for s in now.version_spans] == [Version(1, served)], (
                trial,
                how,
            )
            assert model.error(now) <= NEAR, (trial, how, model.error(now))
            answering = {a for a in answering if not a.done()}
        await publish(sync, transport, model, TRIALS + 1, served)
        await asyncio.gather(*looks)
    finally:
        await engine.close()
        transport.close()
    print(ended, checked)
    assert min(ended.values()) >= 20 and min(checked["whole"], checked["several"]) >= 20, (
        ended,
        checked,
    )


async def publish(
    sync: Synchronizer,
    transport: MemoryTransport,
    model: Model,
    step: int,
    served: int | None = None,
) -> None:
    model.newest = step
    await sync.publish(transport.stage(Version(1, step), model.weights(step).items(), TIED))
    if served is not None:
        transport.release(Version(1, served))


async def look(
    sync: Synchronizer,
    model: Model,
    answer: asyncio.Task[list[Completion]],
    checked: dict[str, int],
) -> None:
    """An answer that the explorer would append is of the versions that it says; one that it would
    not is withheld.
    """
    (made,) = await answer
    try:
        for span in made.version_spans:
            await sync.wait_verified(span.version)
    except WeightSyncFailed:
        checked["withheld"] += 1
        return
    checked["several" if len(made.version_spans) > 1 else "whole"] += 1
    assert model.error(made) <= NEAR, made.version_spans
