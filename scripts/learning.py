"""Does it learn?  Tiny models, whole runs in one process, several seeds; each goal is measured on
rows that were never trained.

    python scripts/learning.py [--only ppo,sft] [--seeds 0,1,2] [--write]
    python scripts/learning.py --only moe,hybrid,colour [--write]     experts with vLLM, linear attention, pictures
    python scripts/learning.py --only frozen_lake,judge [--seeds 42,1,2] [--write]     SmolLM2-135M-Instruct, `rft run` with vLLM

`--write` puts the table into docs/measured/learning.md.  Exit code 1 if a goal is missed.  A seed
is that of the model's random weights (those of SmolLM2 are given), of the data and of the sampling.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import datetime
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rft.algorithm.catalog import algorithm_defaults
from rft.algorithm.settings import AlgorithmSettings
from rft.engine.built_in import make as make_engine
from rft.launch.execute import execute
from rft.monitor.read import read, series
from rft.preflight.check import load_plan
from rft.sync.transport.memory import MemoryTransport
from rft.testing import tiny, tiny_vision
from rft.trainer.loop.ranks import Ranks
from rft.trainer.rows import batch_builder
from rft.types.block import encode
from rft.types.experience import Experience, from_completions
from rft.types.ids import GroupId, Version
from rft.types.ports import Engine, GenerateRequest, GroupStats, Lease
from rft.types.task import SamplingArgs

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.helpers import families  # noqa: E402

SEEDS = (0, 1, 2)
REAL_SEEDS = (42, 1, 2)
REAL_TIMEOUT_S = 4 * 3600.0
PAGE = ROOT / "docs" / "measured" / "learning.md"
EXAMPLES = ROOT / "examples"


@dataclass(frozen=True)
class Learnt:
    """A number before the first step and after the last one."""

    before: float
    after: float
    steps: int
    note: str = ""  # told beside what is measured


@dataclass(frozen=True)
class Goal:
    """What `run(folder, seed)` has to reach."""

    name: str
    number: str  # what is measured
    wanted: str
    reached: Callable[[Learnt], bool]
    run: Callable[[Path, int], Learnt]


def of_run(
    example: str,
    folder: Path,
    seed: int,
    steps: int,
    number: str,
    *changes: str,
    family: str = "llama",
) -> Learnt:
    """A run of an example; `number` is one of its metrics."""
    if family in tiny_vision.FAMILIES:
        model = tiny_vision.make(folder / "model", family, seed=seed)
    else:
        sizes = families.TINY.get(family, {})
        model = tiny.make(folder / "model", seed=seed, family=family, **sizes)
    overrides = [
        *(f"model.model_path={model}", f"checkpoint_root_dir={folder / 'runs'}", f"seed={seed}"),
        *(f"trainer.total_steps={steps}", "trainer.save_hf_checkpoint=never", *changes),
    ]
    done = execute(EXAMPLES / example / "config.yaml", overrides, in_process=True)
    values = dict(series(read(done.run_dir / "metrics.jsonl"), number))
    return Learnt(values[0], values[steps], steps)


EVALUATED = ("explorer.eval_interval=1000", "explorer.eval_on_startup=true")
ACCURACY = "eval/copy_eval/mean@1"


def grpo(folder: Path, seed: int) -> Learnt:
    return of_run("tiny", folder, seed, 80, ACCURACY, *EVALUATED)


# Larger groups, and as many rows in a step: a digit that no run of any group writes is never
# learnt.
FAMILY_STEPS = 160
FAMILY_CHANGES = ("buffer.batch_size=32", "algorithm.repeat_times=16")


def hybrid(folder: Path, seed: int) -> Learnt:
    """Linear attention and attention by turns."""
    return of_run(
        "tiny",
        folder,
        seed,
        FAMILY_STEPS,
        ACCURACY,
        *EVALUATED,
        *FAMILY_CHANGES,
        family="qwen3_5_text",
    )


def moe(folder: Path, seed: int) -> Learnt:
    """With vLLM, whose experts the trainer goes through: a run of its own processes."""
    model = tiny.make(folder / "model", seed=seed, family="qwen3_moe", **families.TINY["qwen3_moe"])
    engine = ("engine_type=vllm", "router_replay=on", "max_num_seqs=128")
    changes = [
        f"model.model_path={model}",
        *(f"explorer.rollout_model.{e}" for e in engine),
        *FAMILY_CHANGES,
    ]
    (found,) = of_command("tiny", folder, seed, FAMILY_STEPS, [ACCURACY], *changes)
    return found


def of_command(
    example: str,
    folder: Path,
    seed: int,
    steps: int,
    numbers: Sequence[str],
    *changes: str,
    **environment: str,
) -> list[Learnt]:
    """The metrics `numbers` of `rft run`, with Ray, as users call it.  Raises RuntimeError with the
    end of its output where it fails.
    """
    arguments = [
        f"checkpoint_root_dir={folder}",
        f"seed={seed}",
        f"name=seed{seed}",
        f"trainer.total_steps={steps}",
    ]
    arguments += ["trainer.save_hf_checkpoint=never", *EVALUATED, *changes]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "rft.cli.main",
            "run",
            "--config",
            str(Path("examples") / example / "config.yaml"),
            *arguments,
        ],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=REAL_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(
            f"{example}, seed {seed}, ended with {done.returncode}:\n{done.stdout[-3000:]}"
        )
    told = read(folder / "rft" / "examples" / f"seed{seed}" / "metrics.jsonl")
    found = [dict(series(told, metric)) for metric in numbers]
    return [Learnt(values[0], values[steps], steps) for values in found]


def colour(folder: Path, seed: int) -> Learnt:
    """The colours of generated pictures."""
    number = "eval/colours_eval/mean@1"
    return of_run("colour", folder, seed, 60, number, *EVALUATED, family="qwen2_5_vl")


def ppo(folder: Path, seed: int) -> Learnt:
    more = (
        "algorithm.algorithm_type=ppo",
        "trainer.ppo_epochs=4",
        "trainer.critic.optimizer.lr=1e-3",
    )
    return of_run("tiny", folder, seed, 36, ACCURACY, *EVALUATED, *more)


def sft(folder: Path, seed: int) -> Learnt:
    return of_run(
        "sft_tiny", folder, seed, 40, "eval/sft_tiny_eval/loss", "trainer.eval_interval=1000"
    )


def dpo(folder: Path, seed: int) -> Learnt:
    return of_run(
        "dpo_tiny",
        folder,
        seed,
        40,
        "eval/dpo_tiny_eval/accuracy_mean",
        "trainer.eval_interval=1000",
    )


# ---------------------------------------------------------------- algorithms by name

NAMED: dict[str, tuple[str, ...]] = {  # beside algorithm_type, where it is another
    **dict.fromkeys(("dppo_tv", "dppo_kl", "maxrl", "vespo", "luspo", "dro"), ()),
    "icepop": (
        "algorithm.algorithm_type=grpo",
        "algorithm.rollout_correction={rollout_is: token, rollout_is_threshold: 0.5_5.0}",
    ),
    "deepseek_v3_2": (
        "algorithm.algorithm_type=grpo",
        "algorithm.policy_loss_fn_args={enable_sequence_masking: true}",
        "algorithm.kl_loss_fn=unbiased_k3",
        "algorithm.kl_loss_fn_args={kl_coef: 0.001}",
    ),
    "forking_tokens": (),
    **dict.fromkeys(("gspo", "sapo", "cispo"), ()),
    "gdpo": (
        "algorithm.algorithm_type=gdpo",
        "buffer.explorer_input.taskset.default_reward_fn_type=scripts/plugins/copy_parts.py:copy_parts",
    ),
    "prompt_mean": ("algorithm.algorithm_type=grpo", "algorithm.loss_agg_mode=prompt-mean"),
    "adaptive_entropy": (
        "algorithm.algorithm_type=grpo",
        "algorithm.entropy_loss_fn=default",
        "algorithm.entropy_loss_fn_args={adaptive: true, target_entropy: 0.5}",
    ),
    "reward_variance": (
        "algorithm.algorithm_type=grpo",
        "algorithm.sample_strategy=reward_variance",
        "algorithm.sample_strategy_args={share: 0.5}",
    ),
}
OF_PAIRS = ("ipo", "simpo", "orpo")
LABELS = "buffer.trainer_input.experience_buffer.path=rft.testing.tiny:copy_labels"


HALF = 42  # steps of supervised fine-tuning before a model learns in runtimes
TERMINAL_STEPS = 10


def terminal(folder: Path, seed: int) -> Learnt:
    """Digits, each copied by an agent in a runtime of its own, and judged in another."""
    from tests.extras.sandbox import copy_folders

    start = _teacher(folder / "start", seed, f"trainer.total_steps={HALF}")
    train = copy_folders.write(folder / "tasks", "train", tiny.copy_tasks(n=480, seed=seed))
    held_out = copy_folders.write(
        folder / "tasks", "eval", tiny.copy_tasks("eval", n=60, seed=seed)
    )
    config = copy_folders.config(folder, EXAMPLES / "tiny" / "config.yaml", train, held_out)
    overrides = [
        *(f"model.model_path={start}", f"checkpoint_root_dir={folder / 'runs'}", f"seed={seed}"),
        *(f"trainer.total_steps={TERMINAL_STEPS}", "buffer.batch_size=8"),
        "trainer.ppo_epochs=4",
        *("explorer.max_timeout=1800", *EVALUATED, *UNSAVED),
    ]
    done = execute(config, overrides, in_process=True)
    values = dict(series(read(done.run_dir / "metrics.jsonl"), ACCURACY))
    return Learnt(values[0], values[TERMINAL_STEPS], TERMINAL_STEPS)


def named(name: str) -> Goal:
    """60 steps of the copy task with an algorithm of `NAMED`."""

    def run(folder: Path, seed: int) -> Learnt:
        changes = NAMED[name] or (f"algorithm.algorithm_type={name}",)
        return of_run("tiny", folder, seed, 60, ACCURACY, *EVALUATED, *changes)

    return Goal(name, "held-out accuracy", "+0.3", _gain(0.3), run)


def of_pairs(name: str) -> Goal:
    """The same for pairs of the right digit and another."""

    def run(folder: Path, seed: int) -> Learnt:
        changes = ("trainer.eval_interval=1000", f"algorithm.algorithm_type={name}")
        return of_run("dpo_tiny", folder, seed, 60, "eval/dpo_tiny_eval/accuracy_mean", *changes)

    return Goal(name, "held-out accuracy of pairs", "≥ 0.9", _reaches(0.9), run)


def kto(folder: Path, seed: int) -> Learnt:
    """The same for answers with labels, half of them wrong digits; 0.5 is chance."""
    changes = (
        "trainer.eval_interval=1000",
        "algorithm.algorithm_type=kto",
        LABELS,
        *("buffer.train_batch_size=64", "buffer.total_epochs=2"),  # as many answers as pairs have
    )
    return of_run("dpo_tiny", folder, seed, 60, "eval/dpo_tiny_eval/accuracy_mean", *changes)


# ---------------------------------------------------------------- with a real engine


@dataclass(frozen=True)
class Real:
    """An example as a user runs it: Ray, vLLM, the pretrained model.  `numbers`: what is measured,
    the metric, and how much it has to gain; None: it is told only.
    """

    name: str
    example: str
    steps: int
    numbers: tuple[tuple[str, str, float | None], ...]

    def run(self, folder: Path, seed: int, model: Path) -> list[Learnt]:
        """Raises RuntimeError where it fails."""
        metrics = [metric for _, metric, _ in self.numbers]
        return of_command(self.example, folder, seed, self.steps, metrics, MODEL_PATH=str(model))


def pretrained() -> Path:
    """The folder of SmolLM2-135M-Instruct.  Exits with what to do where there is none."""
    folder = Path(
        os.environ.get("MODEL_PATH")
        or Path.home() / ".cache" / "rft" / "models" / "SmolLM2-135M-Instruct"
    )
    if not (folder / "config.json").is_file():
        sys.exit(
            f"{folder} is no model; run python scripts/fetch_model.py, or set MODEL_PATH to a "
            f"folder with SmolLM2-135M-Instruct"
        )
    return folder


# ---------------------------------------------------------------- a student and its teacher

STUDENT_STEPS = 60
STUDENT_TASKS = 128  # of a step, each played once by each of two runs


def distilled(name: str) -> Callable[[Path, int], Learnt]:
    """The reverse KL of a random student against a teacher that was fine-tuned from other random
    weights, exact over the vocabulary.
    """

    def run(folder: Path, seed: int) -> Learnt:
        return asyncio.run(_distil(name, folder, seed, _teacher(folder / "teacher", seed + 1000)))

    return run


async def _distil(name: str, folder: Path, seed: int, teacher_folder: Path) -> Learnt:
    """Samples with an engine, as a run does; the teacher's log-probs of these rows are what the
    algorithm learns from.
    """
    from rft.trainer.loop.learner import Learner

    student_folder = tiny.make(folder / "student", seed=seed)
    _, plan = load_plan(
        EXAMPLES / "tiny" / "config.yaml",
        [f"model.model_path={student_folder}", "model.max_response_tokens=2"],
    )
    d = algorithm_defaults(name)
    fields = (
        "advantage_fn",
        "advantage_fn_args",
        "policy_loss_fn",
        "policy_loss_fn_args",
        "loss_agg_mode",
        "entropy_loss_fn",
    )
    parts = AlgorithmSettings(algorithm_type=name, **{field: getattr(d, field) for field in fields})
    student = dataclasses.replace(
        plan.learner, algorithm=parts, seed=seed, total_steps=STUDENT_STEPS
    )
    ranks = Ranks(Learner(student))
    teacher = Ranks(Learner(dataclasses.replace(plan.learner, model_path=str(teacher_folder))))
    engine = await make_engine(dataclasses.replace(plan.engines[0], seed=seed))
    transport = MemoryTransport(folder / "sync")
    tasks = tiny.copy_tasks(seed=seed)
    held_out = tiny.copy_tasks("eval", seed=seed)
    order = np.random.default_rng(seed)
    found = []
    try:
        for step in range(1, STUDENT_STEPS + 2):
            await _serve(engine, await ranks.stage(Version(1, step - 1), transport))
            if step in (1, STUDENT_STEPS + 1):
                rows = await _sampled(engine, held_out, step, seed)
                found.append(
                    _reverse_kl(
                        rows, await _exported(ranks, folder / f"student{step}"), teacher_folder
                    )
                )
            if step > STUDENT_STEPS:
                break
            chosen = [tasks[i] for i in order.integers(len(tasks), size=STUDENT_TASKS)]
            await _learn(ranks, teacher, await _sampled(engine, chosen * 2, step, seed), step)
    finally:
        await engine.close()
        transport.close()
    return Learnt(found[0], found[1], STUDENT_STEPS)


def _teacher(folder: Path, seed: int, *changes: str) -> Path:
    model = tiny.make(folder / "model", seed=seed)
    overrides = [
        f"model.model_path={model}",
        f"checkpoint_root_dir={folder}",
        f"seed={seed}",
        "trainer.eval_interval=1000",
        *changes,
    ]
    done = execute(EXAMPLES / "sft_tiny" / "config.yaml", overrides, in_process=True)
    return exported(done.run_dir)


async def _serve(engine: Engine, manifest: Any) -> None:
    await engine.pause()
    report = await engine.load(manifest)
    assert not (report.missing or report.unexpected or report.bad_hash), report
    await engine.resume()


async def _sampled(
    engine: Engine, tasks: Sequence[dict[str, str]], step: int, seed: int
) -> list[Experience]:
    """The student's answers."""

    async def one(i: int, task: dict[str, str]) -> Experience:
        sampling = SamplingArgs(
            temperature=1.0, max_tokens=2, seed=(seed * 1000 + step) * 100_000 + i
        )
        request = GenerateRequest(
            messages=({"role": "user", "content": task["prompt"]},), sampling=sampling
        )
        done = await engine.generate(request)
        id = GroupId(1, 0, step, i).run(0)
        return from_completions(id, done, taskset="copy", task_index=i, workflow="", reward=0.0)

    return list(await asyncio.gather(*(one(i, task) for i, task in enumerate(tasks))))


async def _learn(ranks: Ranks, teacher: Ranks, rows: list[Experience], step: int) -> None:
    asked = [batch_builder.train_row(row) for row in rows]
    taught = []
    for row, scored in zip(rows, await teacher.compute(asked, ("old",)), strict=True):
        logprobs = np.zeros(len(row.tokens), np.float32)
        logprobs[row.loss_mask] = scored["old"]
        taught.append(msgspec.structs.replace(row, teacher_logprobs=logprobs))
    groups = tuple(
        GroupStats(group=str(row.group), rewards=(0.0,), mean=0.0, std=0.0) for row in taught
    )
    given = batch_builder.decode_lease(Lease(step=step, frame=encode(taught), groups=groups))
    made = batch_builder.build_step(
        given, ranks.algorithm, ranks.budget, world_size=1, computed=await ranks.prepare(given.rows)
    )
    report = await ranks.step(made.shares)
    assert report.finite, f"step {step}: gradient norm {report.grad_norm}"


async def _exported(ranks: Ranks, folder: Path) -> Path:
    await ranks.export(folder)
    return folder


def _reverse_kl(rows: Sequence[Experience], student: Path, teacher: Path) -> float:
    """KL(student || teacher) in nats per token that the student wrote, float64, by transformers
    alone.
    """
    import torch
    from transformers import AutoModelForCausalLM

    models = [
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
        for path in (student, teacher)
    ]
    total = 0.0
    count = 0
    with torch.no_grad():
        for row in rows:
            ids = torch.from_numpy(row.tokens.astype(np.int64))[None]
            at = torch.from_numpy(np.flatnonzero(row.loss_mask) - 1)
            s, t = (model(ids).logits[0, at].log_softmax(-1) for model in models)
            total += float((s.exp() * (s - t)).sum())
            count += len(at)
    return total / count


# ---------------------------------------------------------------- a teacher's signal

RULE = "eval/rule_eval/mean@1"
LEVEL = 0.95  # of the teacher's accuracy
EVERY = 10  # steps between evaluations


def ruled(config: str, *changes: str, steps: int = 40) -> Callable[[Path, int], Learnt]:
    """`examples/opsd`: its first run, then the second as `config` and `changes` say."""

    def run(folder: Path, seed: int) -> Learnt:
        model = tiny.make(folder / "model", seed=seed)
        common = [f"checkpoint_root_dir={folder / 'runs'}", f"seed={seed}"]
        told = [f"model.model_path={model}", "trainer.eval_interval=1000", *common]
        first = execute(EXAMPLES / "opsd" / "told.yaml", told, in_process=True)
        start = f"model.model_path={exported(first.run_dir)}"
        options = [
            start,
            *common,
            *EVALUATED,
            f"explorer.eval_interval={EVERY}",
            *UNSAVED,
            f"trainer.total_steps={steps}",
            *changes,
        ]
        done = execute(EXAMPLES / "opsd" / config, options, in_process=True)
        measured = read(done.run_dir / "metrics.jsonl")
        values = dict(series(measured, RULE))
        rewards = [v for _, v in series(measured, "experience/reward/mean")]
        wholly_zero = sum(r == 0 for r in rewards)
        note = f"every {EVERY} steps: {curve(values)}; steps without a reward: {wholly_zero}"
        return Learnt(values[0], values[steps], steps, note)

    return run


UNSAVED = ("trainer.save_hf_checkpoint=never", "trainer.save_interval=0")
BY_REWARD = (
    "algorithm.algorithm_type=grpo",
    "algorithm.repeat_times=8",
    "buffer.explorer_input.default_workflow_type=simple_workflow",
    "buffer.explorer_input.taskset.workflow_args={}",
    "explorer.auxiliary_models=[]",
)


def exported(run_dir: Path) -> Path:
    """The model of the last checkpoint of a run."""
    found = (run_dir / "checkpoints").glob("global_step_*/huggingface")
    return max(found, key=lambda path: int(path.parent.name.rpartition("_")[2]))


def curve(values: dict[int, float]) -> str:
    return " ".join(f"{values[step]:.2f}" for step in sorted(values))


def to_the_level(*changes: str, taught: bool, most: int) -> Callable[[Path, int], Learnt]:
    """Steps of `examples/tiny` until its held-out accuracy is that of a teacher, which was
    fine-tuned from other random weights; evaluated every ten steps, `most` at most.
    """

    def run(folder: Path, seed: int) -> Learnt:
        longer = ("trainer.total_steps=160", "buffer.total_epochs=3")
        teacher = _teacher(folder / "teacher", seed + 1000, *longer)
        level = LEVEL * accuracy_of(teacher, folder / "level", seed)
        model = tiny.make(folder / "model", seed=seed)
        auxiliary = f"[{{name: teacher, model_path: {teacher}, engine_type: transformers}}]"
        options = [
            *(
                f"model.model_path={model}",
                f"checkpoint_root_dir={folder / 'runs'}",
                f"seed={seed}",
            ),
            *(f"trainer.total_steps={most}", *EVALUATED, f"explorer.eval_interval={EVERY}"),
            *(*UNSAVED, *changes),
            *([f"explorer.auxiliary_models={auxiliary}"] if taught else []),
        ]
        done = execute(EXAMPLES / "tiny" / "config.yaml", options, in_process=True)
        values = dict(series(read(done.run_dir / "metrics.jsonl"), ACCURACY))
        reached = min((s for s, v in values.items() if v >= level), default=most + EVERY)
        note = f"level {level:.2f}, every {EVERY} steps: {curve(values)}"
        return Learnt(values[0], reached, most, note)

    return run


def accuracy_of(model: Path, folder: Path, seed: int) -> float:
    """Held-out accuracy of a model as it is."""
    options = [
        *(f"model.model_path={model}", f"checkpoint_root_dir={folder}", f"seed={seed}"),
        *("trainer.total_steps=1", *EVALUATED, *UNSAVED, "explorer.eval_at_end=false"),
        "algorithm.optimizer.lr=1e-9",
    ]
    done = execute(EXAMPLES / "tiny" / "config.yaml", options, in_process=True)
    return dict(series(read(done.run_dir / "metrics.jsonl"), ACCURACY))[0]


# ---------------------------------------------------------------- goals


def _gain(least: float) -> Callable[[Learnt], bool]:
    return lambda x: x.after >= x.before + least


def _reaches(least: float) -> Callable[[Learnt], bool]:
    return lambda x: x.after >= least


def _learns(x: Learnt) -> bool:
    return x.before <= 0.05 and x.after >= 0.5


def _any(x: Learnt) -> bool:
    return True


def _falls(share: float) -> Callable[[Learnt], bool]:
    return lambda x: x.after <= x.before * (1 - share)


GOALS = {
    goal.name: goal
    for goal in (
        Goal("grpo", "held-out accuracy", "+0.3", _gain(0.3), grpo),
        Goal("ppo", "held-out accuracy", "+0.3", _gain(0.3), ppo),
        Goal("sft", "held-out negative log-likelihood, nats per token", "−30 %", _falls(0.3), sft),
        Goal("dpo", "held-out accuracy of pairs", "≥ 0.9", _reaches(0.9), dpo),
        Goal(
            "on_policy_distill",
            "held-out reverse KL, nats per token",
            "−50 %",
            _falls(0.5),
            distilled("on_policy_distill"),
        ),
        Goal("jsd", "held-out reverse KL, nats per token", "−50 %", _falls(0.5), distilled("jsd")),
    )
}
FAMILIES = {  # of other architectures: measured where they are named
    "moe": Goal("moe", "held-out accuracy", "≥ 0.9", _reaches(0.9), moe),
    "hybrid": Goal("hybrid", "held-out accuracy", "≥ 0.9", _reaches(0.9), hybrid),
    "colour": Goal("colour", "held-out accuracy", "≥ 0.9", _reaches(0.9), colour),
}
OPD = (
    "algorithm.algorithm_type=opd_topk",
    "algorithm.policy_loss_fn_args={divergence: forward}",
    "algorithm.repeat_times=8",
    "buffer.explorer_input.default_workflow_type=on_policy_distill_workflow",
    "buffer.explorer_input.default_eval_workflow_type=simple_workflow",
    "buffer.explorer_input.taskset.workflow_args={teacher: teacher}",
)
_LEVEL = "steps to 95 % of a teacher's held-out accuracy"
TAUGHT = {
    goal.name: goal
    for goal in (
        Goal("opsd", "held-out accuracy", "≤ 0.05 to ≥ 0.5", _learns, ruled("config.yaml")),
        Goal("sdpo", "held-out accuracy", "≤ 0.05 to ≥ 0.5", _learns, ruled("sdpo.yaml", steps=60)),
        Goal("grpo_rule", "held-out accuracy", "told", _any, ruled("config.yaml", *BY_REWARD)),
        Goal("opd_level", _LEVEL, "told", _any, to_the_level(*OPD, taught=True, most=70)),
        Goal("grpo_level", _LEVEL, "told", _any, to_the_level(taught=False, most=120)),
    )
}
BY_NAME = (
    {name: named(name) for name in NAMED}
    | {name: of_pairs(name) for name in OF_PAIRS}
    | {"kto": Goal("kto", "held-out accuracy of labels", "≥ 0.75", _reaches(0.75), kto)}
)
INSIDE = {
    "terminal": Goal("terminal", "held-out accuracy", "≥ 0.9", _reaches(0.9), terminal),
}
REAL = {
    goal.name: goal
    for goal in (
        Real(
            "frozen_lake",
            "frozen_lake",
            20,
            (("held-out success", "eval/lakes_held_out/mean@2", 0.15),),
        ),
        Real(
            "judge",
            "judge_local",
            15,
            (
                ("held-out answers the judge approves", "eval/held_out/mean@2", 0.15),
                (
                    "held-out answers with a word of praise and none of blame",
                    "eval/held_out_words/mean@2",
                    None,
                ),
            ),
        ),
    )
}
HEAD = (
    "| Algorithm | Measured | Goal | Seed | Before | After | Steps | Seconds | Reached "
    "|\n|---|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True)
class Part:
    """A table of the page; its introduction begins with its title."""

    introduction: str
    names: tuple[str, ...]
    measure: Callable[[Sequence[str], Sequence[int]], tuple[list[str], int]]
    seeds: tuple[int, ...] = SEEDS

    @property
    def title(self) -> str:
        return self.introduction.partition("\n")[0]


def _tiny(names: Sequence[str], seeds: Sequence[int]) -> tuple[list[str], int]:
    """Lines of the table, and how many goals were missed."""
    lines = []
    missed = 0
    for name in names:
        goal = {**GOALS, **FAMILIES, **BY_NAME, **TAUGHT, **INSIDE}[name]
        for seed in seeds:
            began = time.monotonic()
            with tempfile.TemporaryDirectory(prefix="rft-learning-") as folder:
                x = goal.run(Path(folder), seed)
            reached = None if goal.wanted == "told" else goal.reached(x)
            missed += reached is False
            number = f"{goal.number}; {x.note}" if x.note else goal.number
            lines.append(
                line(name, number, goal.wanted, seed, x, time.monotonic() - began, reached)
            )
            print(lines[-1], flush=True)
    return lines, missed


def _real(names: Sequence[str], seeds: Sequence[int]) -> tuple[list[str], int]:
    """As `_tiny`."""
    model = pretrained()
    lines = []
    missed = 0
    for name in names:
        goal = REAL[name]
        for seed in seeds:
            began = time.monotonic()
            with tempfile.TemporaryDirectory(prefix="rft-learning-") as folder:
                found = goal.run(Path(folder), seed, model)
            seconds = time.monotonic() - began
            for (number, _, gain), x in zip(goal.numbers, found, strict=True):
                reached = None if gain is None else _gain(gain)(x)
                missed += reached is False
                lines.append(
                    line(
                        name,
                        number,
                        "told" if gain is None else f"+{gain:g}",
                        seed,
                        x,
                        seconds,
                        reached,
                    )
                )
                print(lines[-1], flush=True)
    return lines, missed


def line(
    name: str, number: str, wanted: str, seed: int, x: Learnt, seconds: float, reached: bool | None
) -> str:
    """A row of a table."""
    cells = [
        name,
        number,
        wanted,
        seed,
        f"{x.before:.3f}",
        f"{x.after:.3f}",
        x.steps,
        f"{seconds:.0f}",
        {True: "yes", False: "no", None: ""}[reached],
    ]
    return f"| {' | '.join(map(str, cells))} |"


PARTS = (
    Part(
        """# Does it learn?

Written by `python scripts/learning.py --write`. Models of 0.3 million random parameters and the task of `examples/tiny`, copying the digit
that is shown; each algorithm with its own defaults and the learning rate of its example, 1e-3. PPO makes four updates of each batch. A
teacher is such a model after supervised fine-tuning, from other random weights than the student's. Everything is measured on rows that
were never trained. A seed is that of the weights, the data and the sampling.
""",
        tuple(GOALS),
        _tiny,
    ),
    Part(
        """## Algorithms of 2026 by name

Written by `python scripts/learning.py --only dppo_tv,maxrl,... --write`. The same task and model for 60 steps, each algorithm with its own
defaults and the learning rate 1e-3. `icepop` is GRPO with `rollout_is_threshold: "0.5_5.0"`, `deepseek_v3_2` GRPO with sequence masking and
`unbiased_k3`, `reward_variance` GRPO with that sample strategy and half of the groups.
`gdpo` has two parts, the right digit and any digit; `prompt_mean` is GRPO with that `loss_agg_mode`, `adaptive_entropy` GRPO with a bonus
steered to 0.5 nats. Answers are one token long, so `forking_tokens` trains on a fifth of them and misses the goal in 60 steps.
`ipo`, `simpo` and `orpo` learn from pairs of digits, `kto` from as many answers, half of
which are wrong (chance is 0.5); its setting and goal were chosen after first runs of 32 answers a step (0.85, 0.75, 0.62).
""",
        tuple(BY_NAME),
        _tiny,
    ),
    Part(
        """## A teacher's signal

Written by `python scripts/learning.py --only opsd,sdpo,grpo_rule,opd_level,grpo_level --write`. `opsd` is `examples/opsd`, a rule that no
guess meets: the policy of the start is told the answer; `sdpo` is told the reason for a wrong one. `grpo_rule` is GRPO with 8 runs of
each of the same tasks: all 64 groups of a step have equal rewards, but in one of 120 steps. `opd_level` is `opd_topk` (forward KL) on
`examples/tiny`, from a teacher that was fine-tuned from other random weights, `grpo_level` GRPO with the same 64 tasks and 8 runs of each
in a step: *after* is the step of the first evaluation at that level, ten more than *steps* where there was none.
""",
        tuple(TAUGHT),
        _tiny,
    ),
    Part(
        """## Other architectures

Written by `python scripts/learning.py --only moe,hybrid,colour --write`. The same task and GRPO. `moe` is a tiny `qwen3_moe`, two of
eight experts for each token, trained by `rft run` with vLLM and `router_replay: on`; `hybrid` is a tiny `qwen3_5_text`, linear attention
below attention, with the transformers engine. `colour` is `examples/colour`, a Qwen2.5-VL. Seconds are of a whole run.
""",
        tuple(FAMILIES),
        _tiny,
    ),
    Part(
        """## An agent in a runtime

Written by `python scripts/learning.py --only terminal --write`. The same model after 42 steps of supervised fine-tuning goes on with
GRPO: the tasks are folders for `terminal_workflow`, an agent in a runtime of this machine asks the policy and writes the file that
hidden tests judge in a second runtime. 64 runs a step, four updates of each batch; before and after are those of GRPO.
""",
        tuple(INSIDE),
        _tiny,
    ),
    Part(
        """## With a real engine

Written by `python scripts/learning.py --only frozen_lake,judge --write`. SmolLM2-135M-Instruct, trained by `rft run` with vLLM as
`examples/frozen_lake` and `examples/judge_local` say. In the latter a second, untrained SmolLM2 is the judge, and a short list of words,
which no reward knows, looks at the answers too. Seconds are of a whole run, starts and evaluations included.
""",
        tuple(REAL),
        _real,
        REAL_SEEDS,
    ),
)


def part_of(name: str) -> Part:
    """The table that the goal `name` stands in."""
    return next(part for part in PARTS if name in part.names)


def written(page: str, part: Part, about: str, lines: Sequence[str]) -> str:
    """`page` with one of its tables anew; rows of goals and seeds that were not measured stay as
    they are.
    """
    texts = {text.partition("\n")[0]: text.strip("\n") for text in re.split(r"\n(?=## )", page)}
    names = [*part.names]
    seeds = [*map(str, part.seeds)]

    def key(row: str) -> tuple[str, str] | None:
        found = re.match(r"\| (\w+) \|.*?\|.*?\| (\d+) \|", row)
        return (found[1], found[2]) if found and found[1] in names else None

    def place(row: str) -> tuple[int, int]:
        name, seed = key(row) or ("", "")
        return names.index(name), seeds.index(seed) if seed in seeds else len(seeds)

    measured = {*map(key, lines), None}
    old = texts.get(part.title, "").splitlines()
    rows = sorted([*(r for r in old if key(r) not in measured), *lines], key=place)
    texts[part.title] = "\n".join([part.introduction, about, "", HEAD, *rows])
    return "\n\n".join(texts[p.title] for p in PARTS if p.title in texts) + "\n"


def _seeds(text: str) -> list[int]:
    """Raises ArgumentTypeError, which argparse shows."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be whole numbers, separated by commas, as in 0,1,2"
        ) from None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    tiny_ones = [*GOALS, *BY_NAME, *TAUGHT, *FAMILIES, *INSIDE]
    known = f"{', '.join(tiny_ones)}; with a real engine {', '.join(REAL)}"
    parser.add_argument(
        "--only", default=",".join(GOALS), help=f"goals, separated by commas: {known}"
    )
    seeds = "whole numbers, separated by commas: by default 0,1,2, with a real engine 42,1,2"
    parser.add_argument("--seeds", type=_seeds, help=seeds)
    parser.add_argument(
        "--write", action="store_true", help=f"put the table into {PAGE.relative_to(ROOT)}"
    )
    options = parser.parse_args()
    names = options.only.split(",")
    every = {**GOALS, **BY_NAME, **TAUGHT, **FAMILIES, **INSIDE, **REAL}
    if unknown := [name for name in names if name not in every]:
        parser.error(f"--only {', '.join(unknown)}: not known; {known}")
    part = part_of(names[0])
    if any(part_of(name) is not part for name in names):
        parser.error("--only: the goals of one table at a time")
    lines, missed = part.measure(names, options.seeds or part.seeds)
    about = (
        f"{datetime.date.today()}, Python {platform.python_version()} on {platform.machine()}, "
        f"{os.cpu_count()} cores."
    )
    if options.write:
        PAGE.write_text(
            written(PAGE.read_text(encoding="utf-8"), part, about, lines), encoding="utf-8"
        )
    print("\n".join(["", about, "", HEAD, *lines]))
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
