"""kill -9 between and inside the phases of a step, the same command again: the final weights are
those of a run without faults, bit by bit.

Fault points are those of `rft.fault_injection.TRAINER_POINTS`; one run is killed at ten of them,
one after the other, drawn from a seed.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rft.fault_injection import TRAINER_POINTS
from rft.trainer.checkpoint import manifest as manifests
from tests.helpers import runs
from tests.helpers.command import rft

CONFIG = Path(__file__).parents[1] / "integration" / "tiny_config.yaml"

CHILD = Path(__file__).parent / "resume_child.py"
# reached more than once in a step or a save
SEVERAL = ("checkpoint.files", "trainer.update.before", "trainer.update.after")
PARITY = """
def parity(task, transcript):  # earned by half of all answers from the first step on, so that every step moves the weights
    return float(int(transcript.turns[-1].completion.tokens[-1]) % 2)
"""
KINDS = {
    "grpo": (),
    "all that has a state": (
        *(
            "algorithm.algorithm_type=ppo",
            "trainer.ppo_epochs=2",
            "trainer.shuffle_minibatches=true",
            "trainer.critic_warmup=2",
        ),
        *(
            "algorithm.kl_penalty_fn=k1",
            "algorithm.kl_penalty_fn_args={adaptive: true, target_kl: 0.001, horizon: 100}",
        ),
        *("algorithm.entropy_loss_fn_args.entropy_coef=0.01", "trainer.checkpoint.async_save=true"),
        *("algorithm.optimizer.lr_scheduler_type=cosine", "algorithm.optimizer.lr_warmup_steps=5"),
    ),
    "a moving average that teaches": (
        "algorithm.algorithm_type=opd_topk",
        "buffer.explorer_input.default_workflow_type=on_policy_distill_workflow",
        "buffer.explorer_input.taskset.workflow_args.teacher=ema",
        "explorer.auxiliary_models=[{name: ema, model_path: '${model.model_path}', "
        "engine_type: transformers, moving_average: 0.9}]",
    ),
}


def changes(root: Path, model: Path, steps: int, kind: str) -> list[str]:
    reward = root / "parity.py"
    reward.write_text(PARITY)
    return [
        *(
            f"model.model_path={model}",
            f"checkpoint_root_dir={root}",
            f"trainer.total_steps={steps}",
            "deterministic=true",
        ),
        *(
            "buffer.batch_size=2",
            "algorithm.repeat_times=4",
            "trainer.save_interval=3",
            "trainer.max_checkpoints_to_keep=2",
        ),
        *(
            "trainer.cpu_threads=1",
            f"buffer.explorer_input.default_reward_fn_type={reward}:parity",
            *KINDS[kind],
        ),
    ]


def folder(root: Path) -> Path:
    return root / "project" / "group" / "name"


def hashes(root: Path, steps: int) -> dict[str, str]:
    """sha256 of what the last checkpoint holds of the trainer, weights and optimizer averages among
    it.
    """
    newest = manifests.latest(folder(root) / "checkpoints")
    assert newest is not None and newest.version.step == steps
    return {
        name: hashlib.sha256((newest.folder / name).read_bytes()).hexdigest()
        for name in newest.files
        if "trainer" in name
    }


def play(root: Path, model: Path, steps: int, kind: str, faults: list[str]) -> None:
    """The run `whole` without faults and the run `killed` with them, each of which kills it once."""
    plans = []
    for name, given in (("whole", []), ("killed", faults)):
        (root / name).mkdir()
        plan = {
            "name": name,
            "config": str(CONFIG),
            "changes": changes(root / name, model, steps, kind),
            "faults": given,
        }
        plans.append(plan)
    (root / "plans.json").write_text(json.dumps(plans))
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(CHILD), str(root / "plans.json")],
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
        env=env,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    ended = [(a["name"], a["code"]) for a in map(json.loads, done.stdout.splitlines())]
    assert ended == [("whole", 0), *[("killed", -9)] * len(faults), ("killed", 0)], (
        done.stdout + done.stderr[-4000:]
    )
    assert hashes(root / "killed", steps) == hashes(root / "whole", steps)
    accounted(root / "killed", steps)


def accounted(root: Path, steps: int) -> None:
    done = rft("buffer", "audit", folder(root), "--json")
    account = json.loads(done.output)
    assert (
        done.code == 0
        and account["balanced"]
        and account["used_twice"] == 0
        and account["used"] == steps * 2 * 4
    ), account


@pytest.mark.parametrize(
    "kind", ["grpo", pytest.param("a moving average that teaches", marks=pytest.mark.slow)]
)
def test_killed_in_mid_step_and_in_mid_checkpoint(
    tiny_model: Path, tmp_path: Path, kind: str
) -> None:
    # in step 5; between weights and optimizer of step 6
    faults = ["trainer.update.after:5", "checkpoint.files:2"]
    play(tmp_path, tiny_model, 7, kind, faults)


@pytest.mark.slow
def test_two_ranks_on_ray_that_write_their_checkpoints_aside(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Both ranks of the trainer are killed between the files of a checkpoint that is written while
    steps go on.
    """
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()

    def run(name: str, **environment: str) -> Any:
        more = ("trainer.world_size=2", "trainer.checkpoint.async_save=true")
        given = changes(tmp_path / name, tiny_model, 7, "grpo")
        run = runs.Run("run", "-c", str(CONFIG), *given, *more, env=environment)
        return run.end(), run.output

    code, output = run("whole")
    assert code == 0, output
    code, output = run("killed", RFT_FAULT="checkpoint.files:2")
    assert code == 4 and "trainer-" in output and "died" in output, output
    assert manifests.committed(folder(tmp_path / "killed") / "checkpoints") == []
    code, output = run("killed")
    assert code == 0, output
    files = hashes(tmp_path / "whole", 7)
    assert {f"trainer/model-0000{rank}-of-00002.safetensors" for rank in (1, 2)} <= set(files)
    assert hashes(tmp_path / "killed", 7) == files
    accounted(tmp_path / "killed", 7)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(2))
def test_ten_random_kills(tiny_model: Path, tmp_path: Path, kind: str, seed: int) -> None:
    dice = random.Random(seed)
    points = dice.sample(TRAINER_POINTS, 10)
    faults = [
        f"{p}:{dice.randint(1, 2 if p.startswith('checkpoint') and p not in SEVERAL else 4)}"
        for p in points
    ]
    play(tmp_path, tiny_model, 30, kind, faults)
