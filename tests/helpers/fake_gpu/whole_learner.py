"""The whole learner on the fake GPU: construction, scores, a train step and the weights it hands out.

`python -m tests.helpers.fake_gpu.whole_learner LIBRARY` reads the names of cases from standard
input, one a line, and prints one JSON object a line: where the host waits for the device within a
step, and which tensors cross from the host, by file and function.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rft.algorithm.settings import AlgorithmSettings
from rft.trainer.rows.pack import RankBatch, TrainRow
from rft.trainer.settings import LearnerSettings, LoraSettings
from rft.types.ids import Version
from rft.types.ports import WeightManifest
from tests.helpers import families
from tests.helpers.fake_gpu import load

KL = AlgorithmSettings(kl_loss_fn="k3")
PPO = AlgorithmSettings(algorithm_type="ppo", advantage_fn="ppo")


@dataclass(frozen=True)
class Case:
    """A family, what differs from the defaults, and the values that rows bring along."""

    family: str = "qwen3"
    world_size: int = 4
    row_values: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)


def case(family: str = "qwen3", world_size: int = 4, rows: Any = (), **settings: Any) -> Case:
    settings = {"row_layout": "shared", "dtype": "bfloat16", **settings}
    return Case(family, world_size, tuple(rows), settings)


CASES: dict[str, Case] = {
    "shared": case(),
    "packed": case(row_layout="packed"),
    "padded": case(row_layout="padded"),
    "one rank": case(world_size=1),
    "one rank, float32": case(world_size=1, dtype="float32"),
    "kl": case(algorithm=KL),
    "reference on the host": case(algorithm=KL, ref_offload=True),
    "critic": case(algorithm=PPO, rows=("old", "values", "returns")),
    "lora": case(lora=LoraSettings(rank=8)),
    "lora merged": case(lora=LoraSettings(rank=8, merge=True)),
    "policy on the host": case(offload_policy=True),
    "checkpointing": case(gradient_checkpointing=True),
    "checkpoints on the host": case(gradient_checkpointing=True, activation_offload=True),
    "two epochs": case(ppo_epochs=2, shuffle_minibatches=True),
    "replicas": case(fsdp_size=2, reduce_dtype="bfloat16"),
    "sequences cut": case(sequence_parallel=2),
    "kept log-probs": case(keep_trainer_logprobs=True),
    "deterministic": case(deterministic=True),
    "sdpa": case(attn_implementation="sdpa"),
    "sdpa, packed": case("gemma3_text", row_layout="packed", attn_implementation="sdpa"),
    "balanced experts": case("qwen3_moe", router_aux_loss_coef=0.01),
    **{
        family: case(family)
        for family in (
            "llama",
            "qwen2",
            "qwen3_moe",
            "gemma3_text",
            "gpt_oss",
            "phi3",
            "olmo2",
            "mixtral",
            "granite",
            "glm4",
            "cohere",
        )
    },
    **{
        family: case(family, row_layout="packed")
        for family in ("qwen3_5_text", "nemotron_h", "granitemoehybrid", "lfm2")
    },
}


def rows(names: tuple[str, ...]) -> tuple[TrainRow, ...]:
    """Return four rows of one group, of unequal length and temperature, with zeros for `names`."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(3, 100, 24)
    batch = []
    for i in range(4):
        answer = rng.integers(3, 100, 20 + 3 * i)
        tokens = np.concatenate([prompt, answer]).astype(np.int32)
        mask = np.arange(len(tokens)) >= len(prompt)
        zeros = np.zeros(len(answer), np.float32)
        values: dict[str, Any] = dict.fromkeys(names, zeros)
        batch.append(
            TrainRow(
                tokens=tokens,
                loss_mask=mask,
                logprobs=np.where(mask, -4.0, 0).astype(np.float32),
                temperatures=0.7 if i % 2 else 1.0,
                advantages=zeros + 1,
                group="g",
                **values,
            )
        )
    return tuple(batch)


class _Staged:
    """A transport that notes what it is given."""

    def __init__(self) -> None:
        self.kinds: set[str] = set()

    def stage(self, version: Any, tensors: Any, tied: Any) -> Any:
        self.kinds |= {f"{t.device.type} {str(t.dtype).removeprefix('torch.')}" for _, t in tensors}
        return WeightManifest(version=version, transport="noted", path="", tensors=())


def play(gpu: Any, case: Case) -> dict[str, Any]:
    """Build, score, train, publish; return what happened on the way."""
    from rft.trainer.loop.learner import Learner
    from rft.trainer.model import loading, row_proof, sharding
    from tests.helpers.fake_gpu import device

    folder = Path(tempfile.mkdtemp()) / "model"
    families.make(case.family, folder, words=True)
    sharding.join = lambda *_: device.join(case.world_size)
    loading.fill = lambda *_, **__: None
    row_proof.prove = lambda model, settings, **_: settings.row_layout
    settings = LearnerSettings(
        model_path=str(folder), device="cuda", world_size=case.world_size, **case.settings
    )
    micro = rows(case.row_values)
    staged = _Staged()
    with device.running(gpu):
        learner = Learner(settings, 0, None)
        reference = ("ref",) if learner.algorithm.needs.reference else ()
        learner.score([micro], ("old", "entropy", *reference))
        batch = RankBatch(
            step=1, micro_batches=(micro, ()), tokens=100.0, rows=4.0, positions=200.0
        )
        gpu.waits.clear()
        gpu.copies.clear()
        result = learner.step(batch, batch if learner.critic is not None else None)
        waits, copies = sorted(set(gpu.waits)), sorted(set(gpu.copies))
        count = len(gpu.copies)
        learner.stage(Version(1, 1), staged)  # type: ignore[arg-type]
        learner.close()
    return {
        "waits": waits,
        "copies": copies,
        "copies_of_a_step": count,
        "updates": result.updates,
        "staged": sorted(staged.kinds),
    }


def main() -> None:
    load(Path(sys.argv[1]))
    from tests.helpers.fake_gpu import device

    gpu = device.install()
    for name in sys.stdin.read().splitlines():
        began = time.perf_counter()
        try:
            played = play(gpu, CASES[name])
        except Exception as e:  # every case is reported, the failed ones too
            frames = traceback.extract_tb(e.__traceback__)
            last = [f"{f.filename}:{f.lineno}" for f in frames if "/rft/" in f.filename][-1:]
            played = {"error": f"{type(e).__name__}: {str(e)[:500]} at {' '.join(last)}"}
        played["seconds"] = round(time.perf_counter() - began, 1)
        print(json.dumps({"case": name, **played}), flush=True)


if __name__ == "__main__":
    main()
