"""Peak bytes of a trainer rank's GPU over two steps of real size, counted on the fake GPU.

`python -m tests.helpers.fake_gpu.count_memory LIBRARY CONFIG` reads JSON lists from standard input,
one a line: tokens of a prompt, then overrides.  It prints one JSON object a line, with the estimate
beside the count; neither has the CUDA context.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from rft.config.plan import Facts, Plan
from rft.preflight import lora_checks, model_folder
from rft.preflight.check import check
from rft.preflight.memory_trainer import trainer
from rft.preflight.model_folder import shape
from rft.trainer.rows import pack
from rft.trainer.rows.pack import Budget, RankBatch, TrainRow
from tests.helpers.fake_gpu import load


def rows(plan: Plan, prompt: int) -> list[TrainRow]:
    """A train batch in which every run writes all that it may."""
    response = plan.learner.max_response_tokens
    rng = np.random.default_rng(0)
    batch = []
    for group in range(plan.trainer.batch_groups or 1):
        start = rng.integers(3, 250, prompt)
        for _ in range(plan.num_runs):
            tokens = np.concatenate([start, rng.integers(3, 250, response)]).astype(np.int32)
            mask = np.arange(len(tokens)) >= prompt
            more: dict[str, Any] = {
                "advantages": np.full(response, rng.normal(), np.float32),
                "group": str(group),
            }
            batch.append(
                TrainRow(
                    tokens=tokens,
                    loss_mask=mask,
                    logprobs=np.where(mask, -1.0, 0).astype(np.float32),
                    temperatures=1.0,
                    **more,
                )
            )
    return batch


def count(gpu: Any, plan: Plan, prompt: int) -> dict[str, Any]:
    """Peaks of rank 0, and what the micro-batches of the steps were."""
    from rft.trainer.loop.learner import Learner
    from rft.trainer.model import loading, lora, row_proof, sharding
    from tests.helpers.fake_gpu import device

    s = plan.learner
    sharding.join = lambda *_: device.join(s.world_size)
    vars(lora)["fingerprint"] = lambda folder: "0"
    loading.readable = lambda *_: True
    loading.fill = lambda *_, **__: None
    row_proof.prove = lambda model, settings, **_: settings.row_layout
    began = time.perf_counter()
    with device.running(gpu):
        learner = Learner(s, 0, None)
        batch = rows(plan, prompt)
        size = s.sequence_parallel
        budget = Budget(
            s.max_token_len_per_gpu * size,
            s.row_layout,
            None if s.use_dynamic_bsz else s.micro_batch_size,
        )
        cut = pack.plan(batch, s.world_size // size, budget)[0]
        micros = tuple(tuple(batch[i] for i in micro) for micro in cut)
        weights = gpu.live
        gpu.vocabulary = learner.policy.lm.config.vocab_size
        gpu.logit_rows = 0
        peaks = []
        for step in (1, 2):  # from the second on the moments are there
            gpu.peak = gpu.live
            learner.step(RankBatch(step=step, micro_batches=micros[:step], tokens=1.0, rows=1.0))
            peaks.append(gpu.peak)
        learner.close()
    config = model_folder.sizes(s.model_path)
    assert config is not None
    sizes = shape(*config)
    trained = None if s.lora is None else lora_checks.parameters(s.lora, sizes, None)
    role = trainer(plan, 0, sizes, prompt, trained=trained)
    return {
        "weights": weights,
        "peak": max(peaks),
        "estimate": sum(t.nbytes for t in role.terms if t.name != "CUDA context"),
        "terms": {t.name: t.nbytes for t in role.terms},
        "micro_batches": len(micros),
        "rows": len(micros[0]),
        "logit_rows": gpu.logit_rows,
        "trained": sum(int(row.loss_mask.sum()) for row in micros[0]),
        "seconds": time.perf_counter() - began,
    }


def main() -> None:
    load(Path(sys.argv[1]))
    from tests.helpers.fake_gpu import device

    gpu = device.install()
    for line in sys.stdin:
        prompt, *overrides = json.loads(line)
        facts = Facts(cpus=2, gpus=8, memory=None, gpu_memory=None, disk=lambda folder: None)
        report = check(sys.argv[2], overrides, facts=facts, schema_only=True)
        if (plan := report.plan) is None:
            raise SystemExit("\n".join(map(str, report.errors)))
        gc.collect()
        print(json.dumps(count(gpu, plan, prompt)), flush=True)


if __name__ == "__main__":
    main()
