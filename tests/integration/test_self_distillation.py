"""The example of self-distillation as it stands, a few steps of each of its runs, with all parts in
one process.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from rft.buffer.experience_export import export
from rft.buffer.query import open_run
from rft.launch.execute import execute
from rft.monitor.read import read, series
from rft.trainer.checkpoint import shards
from rft.types.experience import Experience
from rft.types.ids import Version
from tests.helpers import other_tokenizer

EXAMPLE = Path(__file__).parents[2] / "examples" / "opsd"
DECAY = 0.9
SMALL = ("buffer.batch_size=8", "explorer.eval_interval=1000", "explorer.eval_on_startup=false")


@pytest.fixture(scope="module")
def told(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model after a few steps of the first run."""
    root = tmp_path_factory.mktemp("told")
    options = [f"model.model_path={tiny_model}", f"checkpoint_root_dir={root}"]
    done = execute(EXAMPLE / "told.yaml", [*options, "trainer.total_steps=3"], in_process=True)
    return done.run_dir / "checkpoints" / "global_step_3" / "huggingface"


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("config", "teacher"),
    [("config.yaml", "start"), ("config.yaml", "self"), ("sdpo.yaml", "self")],
)
def test_two_steps_of_each_run(told: Path, tmp_path: Path, config: str, teacher: str) -> None:
    options = [
        *(f"model.model_path={told}", f"checkpoint_root_dir={tmp_path}", *SMALL),
        *("trainer.total_steps=2", "explorer.eval_at_end=false"),
        f"buffer.explorer_input.taskset.workflow_args.teacher={teacher}",
    ]
    done = execute(EXAMPLE / config, options, in_process=True)
    measured = read(done.run_dir / "metrics.jsonl")
    divergence = dict(series(measured, "actor/distill_divergence"))
    assert set(divergence) == {1, 2} and all(v > 0 for v in divergence.values())
    rows = stored(done.run_dir)
    assert len(rows) == 2 * 8 * 2
    for x in rows:
        assert x.teacher_top_ids is not None
        assert x.teacher_top_ids.shape == (x.num_response_tokens, 20)
        versions = {s.version for s in x.teacher_spans}
        wrote = {s.version for s in x.version_spans}
        assert versions == (wrote if teacher == "self" else {Version(1, 0)})
        assert x.teacher_logprobs is not None
        apart = np.abs(x.teacher_logprobs - x.logprobs)[x.loss_mask]
        assert apart.max() > 1e-4, "behind another prompt"
    exported = tmp_path / "rows.parquet"
    with open_run(done.run_dir) as questions:
        assert export(questions, exported, tokens=True) == len(rows)
    for row, x in zip(pq.read_table(exported).to_pylist(), rows, strict=True):
        assert x.teacher_top_logprobs is not None and x.teacher_top_ids is not None
        assert row["teacher_top_ids"] == x.teacher_top_ids.tolist()
        assert np.array_equal(np.float16(row["teacher_top_logprobs"]), x.teacher_top_logprobs)
        spans = [(s["version"], s["start"], s["end"]) for s in row["teacher_spans"]]
        assert spans == [(str(s.version), s.start, s.end) for s in x.teacher_spans]
    bytes_read = dict(series(measured, "experience/teacher_top_bytes"))
    tokens = sum(x.num_response_tokens for x in rows)
    assert sum(bytes_read.values()) == tokens * (20 * 4 + 21 * 2)


@pytest.mark.e2e
def test_a_moving_average_teaches_and_goes_on_after_a_stop(told: Path, tmp_path: Path) -> None:
    """Two steps, the run ends, and the same run goes on to four: as its checkpoints say."""
    options = [
        *(f"model.model_path={told}", f"checkpoint_root_dir={tmp_path}", *SMALL),
        *("explorer.eval_at_end=false", "trainer.save_interval=1"),
        "trainer.max_checkpoints_to_keep=0",
    ]
    for steps in (2, 4):
        more = [*options, f"trainer.total_steps={steps}"]
        done = execute(EXAMPLE / "ema.yaml", more, in_process=True)
    folders = [done.run_dir / "checkpoints" / f"global_step_{i}" / "trainer" for i in range(1, 5)]
    begun = load_file(told / "model.safetensors")
    weights = [{n: begun[n] for n in tensors(folders[0], "model")}]
    weights += [tensors(folder, "model") for folder in folders]
    expected = {n: t.double() for n, t in weights[0].items()}
    for folder, trained in zip(folders, weights[1:], strict=True):
        expected = {n: DECAY * t + (1 - DECAY) * trained[n].double() for n, t in expected.items()}
        average = tensors(folder, "average")
        assert max(float((average[n] - expected[n]).abs().max()) for n in expected) < 1e-6
    moved = max(float((t - weights[-1][n]).abs().max()) for n, t in average.items())
    assert moved > 1e-4, "it is not the policy"
    rows = stored(done.run_dir)
    assert len(rows) == 4 * 8 * 2
    for x in rows:
        assert {s.version for s in x.teacher_spans} == {s.version for s in x.version_spans}
    assert len({s.version for x in rows for s in x.teacher_spans}) == 4
    measured = read(done.run_dir / "metrics.jsonl")
    versions = series(measured, "sync/average/version")
    assert [step for step, _ in versions] == [0, 1, 2, 3, 4]
    for (_, error), (_, limit) in zip(
        series(measured, "sync/average/canary_max_abs"),
        series(measured, "sync/average/canary_limit"),
        strict=True,
    ):
        assert error <= limit


@pytest.mark.e2e
def test_gkd_trains_answers_of_the_policy_and_of_its_teacher(told: Path, tmp_path: Path) -> None:
    options = [
        *(f"model.model_path={told}", f"checkpoint_root_dir={tmp_path}", *SMALL),
        *("trainer.total_steps=2", "explorer.eval_at_end=false", "algorithm.algorithm_type=gkd"),
        "buffer.explorer_input.default_workflow_type=gkd_workflow",
        "buffer.explorer_input.taskset.workflow_args={teacher: start, on_policy: 0.5}",
    ]
    done = execute(EXAMPLE / "config.yaml", options, in_process=True)
    rows = stored(done.run_dir)
    theirs = sum(x.is_expert for x in rows)
    assert 0 < theirs < len(rows) == 2 * 8 * 2
    for x in rows:
        assert x.teacher_top_ids is not None and x.teacher_logprobs is not None
        # the teacher's prompt is the policy's, and its weights are the policy's of the start
        assert len(x.teacher_top_ids) == x.num_response_tokens
    measured = read(done.run_dir / "metrics.jsonl")
    shares = [v for _, v in series(measured, "rollout/written_by_teacher/mean")]
    assert sum(shares) * 16 == pytest.approx(theirs)
    assert [s for s, _ in series(measured, "actor/distill_divergence")] == [1, 2]


def tensors(folder: Path, kind: str) -> dict[str, torch.Tensor]:
    files = shards.find(folder, kind)
    return {name: files.read(name) for name in files}


def stored(run_dir: Path) -> list[Experience]:
    with open_run(run_dir) as questions:
        ids = [row["id"] for row in questions.page("", "", 1000)]
        return list(questions.payload(ids).values())


@pytest.mark.e2e
def test_a_teacher_with_another_tokenizer(tiny_model: Path, tmp_path: Path) -> None:
    """It reads the answers as text, in its own template and tokens."""
    teacher = other_tokenizer.model(tmp_path / "teacher")
    entry = f"{{name: t, model_path: {teacher}, engine_type: transformers, alignment: text}}"
    options = [
        *(f"model.model_path={tiny_model}", f"checkpoint_root_dir={tmp_path}", *SMALL),
        *("trainer.total_steps=2", "explorer.eval_at_end=false", "model.max_response_tokens=4"),
        *("algorithm.algorithm_type=on_policy_distill", f"explorer.auxiliary_models=[{entry}]"),
        "buffer.explorer_input.default_workflow_type=on_policy_distill_workflow",
        "buffer.explorer_input.eval_tasksets=[]",
    ]
    done = execute(EXAMPLE.parent / "tiny" / "config.yaml", options, in_process=True)
    rows = stored(done.run_dir)
    assert len(rows) >= 2 * 8
    for x in rows:
        assert x.teacher_logprobs is not None and (x.teacher_logprobs <= 0).all()
        assert x.teacher_logprobs[x.loss_mask].all(), "every token has a part"
