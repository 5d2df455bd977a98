"""What `rft check` warns of and prints beside the errors: idle GPUs, open schedules, evaluation;
its JSON; `--dry-run`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rft.config.plan import Facts
from rft.preflight.check import check
from rft.preflight.check_report import Report

DATA = Path(__file__).parent / "data"
EVAL = "buffer.explorer_input.eval_tasksets=[{path: rows.jsonl, name: held_out%s}]"
EIGHT = """\
model: {model_path: "${oc.env:HOME}/models/some-7b", max_prompt_tokens: 1024, max_response_tokens: 3072}
cluster: {gpu_per_node: 8}
explorer: {rollout_model: {engine_num: 2, tensor_parallel_size: 2}}
algorithm: {algorithm_type: grpo, optimizer: {lr_warmup_steps_ratio: 0.1}}
buffer:
  batch_size: 128
  total_epochs: 2
  explorer_input:
    default_workflow_type: math_workflow
    taskset: {path: "${oc.env:HOME}/data/train.parquet"}
"""


def run(*overrides: str, facts: Facts | None = None) -> Report:
    report = check(
        DATA / "good" / "short.yaml",
        overrides,
        facts=facts or Facts(cpus=2, gpus=0),
        schema_only=True,
    )
    assert report.ok, report.errors
    return report


def about(texts: tuple[str, ...], word: str) -> list[str]:
    return [t for t in texts if word in t]


def test_idle_gpus() -> None:
    gpus = Facts(cpus=8, gpus=4)
    assert about(run(facts=gpus).warnings, "GPUs") == []
    (text,) = about(run("trainer.world_size=2", facts=gpus).warnings, "GPUs")
    assert "1 of 4 GPUs are used by no role (engines 1 x 1, trainer 2)" in text
    (text,) = about(run("trainer.device=cpu", facts=gpus).warnings, "GPUs")
    assert "3 of 4 GPUs" in text


def test_a_best_checkpoint_by_an_evaluation_that_is_none_of_the_run() -> None:
    metric = "trainer.checkpoint.best_metric=eval/%s/mean@1"
    assert not about(run(EVAL % "", metric % "held_out").warnings, "best_metric")
    (text,) = about(run(EVAL % "", metric % "heldout").warnings, "best_metric")
    assert (
        "eval/heldout/mean@1 is of no evaluation of this run" in text
        and "there are: eval/held_out/..." in text
    )
    (text,) = about(run(metric % "held_out").warnings, "best_metric")
    assert text.endswith("there are: none") and not about(
        run("trainer.checkpoint.best_metric=reward/mean").warnings, "best_metric"
    )


def test_engines_of_several_processes_on_a_cpu() -> None:
    two = ("explorer.rollout_model.engine_num=2", "explorer.rollout_model.tensor_parallel_size=2")
    threads = "explorer.rollout_model.cpu_threads"

    def cores(*overrides: str, cpus: int = 8) -> list[tuple[int, int]]:
        plan = run(*overrides, facts=Facts(cpus=cpus, gpus=0)).plan
        assert plan is not None
        return [
            (e.first_core, e.cpu_threads)
            for e in (*plan.engines, *(e for m in plan.auxiliary for e in m.engines))
        ]

    judge = "explorer.auxiliary_models=[{model_path: J, tensor_parallel_size: 2, cpu_threads: 2}]"
    assert (
        cores(*two) == [(0, 4), (4, 4)]
        and about(run(*two, facts=Facts(cpus=8, gpus=0)).warnings, "cpu_threads") == []
    )
    assert cores(*two, f"{threads}=2", judge) == [(0, 2), (2, 2), (4, 2)]
    assert cores(two[0]) == [(0, 8), (0, 8)], (
        "one process is not bound: engines take turns on all cores"
    )
    assert cores(*two, cpus=7) == [(0, 2), (2, 2)]
    (text,) = about(run(*two, f"{threads}=8", facts=Facts(cpus=8, gpus=0)).warnings, threads)
    assert "2 x 8 for engines of 2 processes, and 8 cores are there" in text
    (text,) = about(run(*two, f"{threads}=3", facts=Facts(cpus=8, gpus=0)).warnings, threads)
    assert "2 x 3 for engines of 2 processes" in text and "write a multiple of 2, at most 8" in text
    report = check(
        DATA / "good" / "short.yaml",
        ["explorer.rollout_model.tensor_parallel_size=4"],
        facts=Facts(cpus=2, gpus=0),
    )
    assert any(
        "each process on CPU needs a core, and there are 2" in e.message for e in report.errors
    )


def test_schedules_without_an_end() -> None:
    epochs = ("buffer.total_steps=null", "buffer.total_epochs=1")
    ratio = "algorithm.optimizer.lr_warmup_steps_ratio=0.1"
    cosine = "algorithm.optimizer.lr_scheduler_type=cosine"
    assert about(run(ratio, cosine).warnings, "algorithm.optimizer") == []
    assert about(run(*epochs).warnings, "algorithm.optimizer") == []
    (text,) = about(run(*epochs, ratio, cosine).warnings, "algorithm.optimizer")
    assert (
        "lr_warmup_steps_ratio 0.1 and lr_scheduler_type cosine" in text
        and "trainer.total_steps" in text
    )
    assert (
        about(
            run(*epochs, ratio, "algorithm.optimizer.lr_warmup_steps=3").warnings, "known only once"
        )
        == []
    )


@pytest.mark.parametrize(
    ("given", "lost"),
    [
        ((), "up to 51 train steps"),
        (("trainer.save_interval=50",), ""),
        (("trainer.save_after=3600",), ""),
        (("trainer.total_steps=50", "buffer.total_steps=50"), ""),
        (
            ("trainer.total_steps=500", "buffer.total_steps=500", "trainer.save_interval=200"),
            "up to 200 train steps",
        ),
    ],
)
def test_steps_that_a_crash_would_lose_are_a_warning(given: tuple[str, ...], lost: str) -> None:
    """N25: it was a note, of runs of more than 100 steps without any interval."""
    found = about(
        run("trainer.total_steps=51", "buffer.total_steps=51", *given).warnings,
        "a crash would lose",
    )
    assert len(found) == (lost != "")
    assert not lost or (lost in found[0] and "write trainer.save_interval: 25" in found[0]), found


def test_a_step_with_more_places_than_rows_is_a_warning(tiny_model: Path) -> None:
    """N19: batch_size 400 with 200 rows was "fine, 0 warning(s)"."""
    rows = DATA / "rows.jsonl"  # 20 of them
    given = [f"model.model_path={tiny_model}", f"buffer.explorer_input.taskset.path={rows}"]

    def warned(size: int) -> list[str]:
        report = check(
            DATA / "good" / "short.yaml",
            [*given, f"buffer.batch_size={size}"],
            facts=Facts(cpus=2, gpus=0),
        )
        assert report.ok, report.errors
        return about(report.warnings, "buffer.batch_size")

    assert warned(20) == []
    (text,) = warned(40)
    assert text.startswith(
        "buffer.batch_size 40 is more than the 20 rows that the training tasksets have: "
    )
    assert "takes every row about 2 times; write at most 20, or add rows" in text


SERVICE = """
mode: serve
model: {model_path: M, max_prompt_tokens: 8, max_response_tokens: 8}
algorithm: {algorithm_type: grpo, repeat_times: 2}
"""


@pytest.mark.extra
def test_a_service_saves_by_age_and_keeps_its_rows(tmp_path: Path) -> None:
    """N25: rewards that were acknowledged cannot be asked for again."""
    (tmp_path / "s.yaml").write_text(SERVICE)

    def service(*overrides: str) -> Report:
        return check(
            tmp_path / "s.yaml", list(overrides), facts=Facts(cpus=2, gpus=0), schema_only=True
        )

    def plan(*overrides: str) -> tuple[float, str]:
        made = service(*overrides).plan
        assert made is not None
        return made.trainer.save_after_s, made.buffer.resume_rows

    assert plan() == (600.0, "keep") and about(service().warnings, "a crash would lose") == []
    assert (
        len(about(service().notes, "steps of the last 600 s are repeated (trainer.save_after)"))
        == 1
    )
    assert plan("trainer.save_after=60") == (60.0, "keep") and plan("trainer.save_interval=5") == (
        0.0,
        "keep",
    )
    assert plan("mode=train", "explorer.serve.trainer_apart=true") == (600.0, "keep")
    (text,) = about(service("trainer.save_after=0").warnings, "a crash would lose")
    assert "all its train steps" in text
    (error,) = service("buffer.resume_rows=orphan").errors
    assert (
        error.key == "buffer.resume_rows"
        and "must be keep where a service samples" in error.message
    )


@pytest.mark.parametrize(
    "runs",
    ["repeat_times: 4, rollout_args: {temperature: 0}"],
)
def test_greedy_evaluation_repeated(runs: str) -> None:
    warnings = run(EVAL % f", {runs}").warnings
    assert len(about(warnings, "gives the same answer 4 times")) == 1


def test_evaluation_temperature() -> None:
    greedy = run(EVAL % ", rollout_args: {temperature: 0}")
    assert (
        greedy.warnings == ()
        and about(greedy.notes, "held_out") == about(greedy.notes, "temperature") == []
    )
    assert about(run(EVAL % "").notes, "one answer per task at temperature 1 is a noisy measure")
    other = run(EVAL % ", repeat_times: 8, rollout_args: {temperature: 0.6}")
    assert about(other.notes, "evaluated at temperature 0.6, trained at 1") and not about(
        other.notes, "noisy"
    )


def test_truncated_sampling_in_training_is_refused_and_groups_of_one_are_warned_about() -> None:
    report = check(
        DATA / "good" / "short.yaml",
        ["model.top_p=0.9"],
        facts=Facts(cpus=2, gpus=0),
        schema_only=True,
    )
    assert [e.key for e in report.errors] == ["model.top_p"] and "gradient would be wrong" in str(
        report.errors[0]
    )
    assert about(run("algorithm.repeat_times=1").warnings, "a group of one has no advantage")


def test_eight_gpus_that_are_not_here(tmp_path: Path) -> None:
    (tmp_path / "eight.yaml").write_text(EIGHT)
    report = check(tmp_path / "eight.yaml", facts=Facts(cpus=2, gpus=0), schema_only=True)
    assert report.ok and report.plan is not None and report.plan.learner.world_size == 4
    assert str(Path.home() / "models" / "some-7b") == report.plan.learner.model_path
    found = json.loads(json.dumps(report.to_json()))
    assert found["step"]["train_steps"] is None and found["step"]["experiences"] == 128 * 8
    assert {
        "key": "trainer.world_size",
        "value": "4",
        "from": "derived: 8 GPUs less 4 of the engines",
    } in found["values"]


# ---------------------------------------------------------------- the command


def rft(*arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "rft.cli.main", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.e2e
def test_dry_run_is_check(tiny_model: Path, tmp_path: Path) -> None:
    given = [
        "-c",
        str(DATA / "good" / "short.yaml"),
        f"model.model_path={tiny_model}",
        f"checkpoint_root_dir={tmp_path}",
    ]
    given.append(f"buffer.explorer_input.taskset.path={DATA / 'rows.jsonl'}")
    code, plain = rft("check", *given)
    assert code == 0, plain
    for text in (
        "0.4 epochs in 2 explore steps",
        "memory and disk at the peak",
        "checkpoints",
        "trainer-0",
    ):
        assert text in plain
    terms = rft("check", "--all", *given)[1]
    assert "AdamW moments" in terms and "published weights" in terms
    assert rft("run", "--dry-run", *given) == (code, plain)
    assert rft("check", "--dry-run", *given) == (code, plain)
    assert list(tmp_path.iterdir()) == []
    assert rft("run", "--dry-run", *given, "buffer.batch_sise=3")[0] == 2


@pytest.mark.e2e
def test_the_check_of_a_service_ends_with_its_command(tmp_path: Path) -> None:
    """N21: it said to start it with rft run."""
    (tmp_path / "s.yaml").write_text(SERVICE)
    code, out = rft(
        "check", "-c", str(tmp_path / "s.yaml"), "--schema-only", "explorer.proxy_port=0"
    )
    assert code == 0 and out.rstrip().endswith(
        f"Start it with: rft serve --config {tmp_path / 's.yaml'} explorer.proxy_port=0"
    ), out


@pytest.mark.e2e
def test_json_has_the_promised_keys(tiny_model: Path) -> None:
    rows = f"buffer.explorer_input.taskset.path={DATA / 'rows.jsonl'}"
    code, out = rft(
        "check",
        "--json",
        "-c",
        str(DATA / "good" / "short.yaml"),
        f"model.model_path={tiny_model}",
        rows,
    )
    found = json.loads(out)
    assert code == 0 and list(found)[:3] == ["ok", "outcome", "errors"]
    assert set(found) == {
        "ok",
        "outcome",
        "errors",
        "warnings",
        "notes",
        "needs",
        "plan",
        "tasksets",
        "model",
        "values",
        "step",
        "memory",
        "placement",
    }
    assert found["placement"] == [
        {"role": "engine 0", "place": "node 0, CPU"},
        {"role": "trainer 0", "place": "node 0, CPU"},
    ]
    assert (
        found["step"]["epochs"] == 0.4
        and found["step"]["staleness_bound"] == 0
        and "explore step 2 waits" in found["step"]["sync"]
    )


@pytest.mark.e2e
def test_gpu_memory_is_judged(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    sizes = {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "intermediate_size": 11008,
        "vocab_size": 32000,
    }
    (tmp_path / "model" / "config.json").write_text(json.dumps(sizes))
    (tmp_path / "eight.yaml").write_text(EIGHT)
    given = (
        "check",
        "--schema-only",
        "-c",
        str(tmp_path / "eight.yaml"),
        f"model.model_path={tmp_path / 'model'}",
    )
    code, out = rft(*given, "--gpu-memory", "16")
    assert code == 2 and "memory: trainer-0 needs about" in out and "16.0 GiB" in out
    code, out = rft(*given, "--gpu-memory", "640")
    assert code == 0 and "memory:" not in out and "trainer-0 ... trainer-3, each" in out
