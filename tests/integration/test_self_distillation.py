"""The example of self-distillation as it stands, a few steps of each of its runs, with all parts in
one process.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rft.buffer.query import open_run
from rft.launch.execute import execute
from rft.monitor.read import read, series
from rft.types.experience import Experience
from rft.types.ids import Version

EXAMPLE = Path(__file__).parents[2] / "examples" / "opsd"
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
    bytes_read = dict(series(measured, "experience/teacher_top_bytes"))
    tokens = sum(x.num_response_tokens for x in rows)
    assert sum(bytes_read.values()) == tokens * (20 * 4 + 21 * 2)


def stored(run_dir: Path) -> list[Experience]:
    with open_run(run_dir) as questions:
        ids = [row["id"] for row in questions.page("", "", 1000)]
        return list(questions.payload(ids).values())
