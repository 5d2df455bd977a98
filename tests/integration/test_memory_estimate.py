"""The memory estimate against real processes: a trainer of its own kind, and whole runs of the
quickstart.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rft.config.plan import Facts
from rft.engine.environment import ALLOCATOR, library
from rft.preflight.check import check

ROOT = Path(__file__).parents[2]
ROWS = ROOT / "tests" / "unit" / "config" / "data" / "rows.jsonl"
GOOD = ROWS.parent / "good" / "short.yaml"

# Trains random rows of the sizes that the configuration allows and prints its own high-water mark.
TRAIN = """
import json, sys
from pathlib import Path
import numpy as np
import ray
from rft.preflight.memory_trainer import micro_batch
from rft.config.plan import Facts
from rft.preflight.check import check
from rft.trainer.loop.learner import Learner
from rft.trainer.rows.pack import Budget, RankBatch, TrainRow, plan

made = check(sys.argv[1], sys.argv[2:], facts=Facts(cpus=2, gpus=0), schema_only=True).plan
prompt, response, runs = 40, 24, 8
rng = np.random.default_rng(0)
learner = Learner(made.learner)
for step in (1, 2):  # from the second on the moments are there
    rows = []
    for group in range(made.trainer.batch_groups):
        start = rng.integers(3, 250, prompt)
        for _ in range(runs):
            tokens = np.concatenate([start, rng.integers(3, 250, response)]).astype(np.int32)
            ones = np.ones(len(tokens), np.float32)
            rows.append(TrainRow(tokens=tokens, loss_mask=np.arange(len(tokens)) >= prompt, logprobs=-5 * ones, temperatures=ones,
                                 advantages=np.full(response, rng.normal(), np.float32), group=str(group)))
    s = made.learner
    (cut,) = plan(rows, 1, Budget(s.max_token_len_per_gpu, s.row_layout))
    micros = tuple(tuple(rows[i] for i in micro) for micro in cut)
    learner.step(RankBatch(step=step, micro_batches=micros, tokens=float(len(rows) * response), rows=float(len(rows))))
lines = Path("/proc/self/status").read_text().splitlines()
print(next(int(l.split()[1]) * 1024 for l in lines if l.startswith("VmHWM:")))
"""
STEP = (
    "model.max_prompt_tokens=40",
    "model.max_response_tokens=24",
    "buffer.batch_size=8",
    "algorithm.repeat_times=8",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 38 million parameters: enough to weigh more than the libraries."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("models") / "middle"
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=10,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)
    return folder


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.skipif(
    library(ALLOCATOR) is None, reason=f"{ALLOCATOR} is not installed; without it peaks are higher"
)
@pytest.mark.parametrize(
    "given",
    [
        (),
        ("trainer.enable_gradient_checkpointing=true",),
        pytest.param(("trainer.max_token_len_per_gpu=512",), marks=pytest.mark.slow),
        pytest.param(
            ("trainer.row_layout=padded", "trainer.max_token_len_per_gpu=1024"),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["as it is", "checkpointing", "small budget", "padded"],
)
def test_trainer(model: Path, given: tuple[str, ...]) -> None:
    overrides = [
        f"model.model_path={model}",
        f"buffer.explorer_input.taskset.path={ROWS}",
        *STEP,
        *given,
    ]
    report = check(GOOD, overrides, facts=Facts(cpus=2, gpus=0), schema_only=True)
    (estimate,) = [r.nbytes for r in report.memory if r.role == "trainer-0"]
    command = [sys.executable, "-c", TRAIN, str(GOOD), *overrides]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, check=False, env=_environment()
    )
    assert done.returncode == 0, done.stderr
    assert estimate == pytest.approx(int(done.stdout.split()[-1]), rel=0.15)


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(1200)
def test_runs_of_the_quickstart() -> None:
    """Every role within 15 % of its measured peak, in settings that move them apart."""
    command = [sys.executable, str(ROOT / "scripts" / "measure_memory.py"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1100, check=False)
    assert done.stdout, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert len({row["setting"] for row in rows}) >= 5
    assert [row for row in rows if not 0.85 <= row["ratio"] <= 1.15] == []
    assert done.returncode == 0


def _environment() -> dict[str, str]:
    from rft.engine.environment import trainer_environment

    return {**os.environ, **trainer_environment(2)}
