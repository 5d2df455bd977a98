"""Every style with the tiny model, in one process: it learns, no row is older than the bound, and
staleness 0 is the synchronous run.
"""

from __future__ import annotations

import hashlib
import shutil
import sqlite3
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from rft.launch.execute import execute
from rft.monitor.read import read, series
from rft.testing import tiny
from tests.helpers import runs

TINY = Path(__file__).parents[2] / "examples" / "tiny" / "config.yaml"
STYLES = {
    "fixed": ("sync_interval=2", "sync_offset=1"),
    "explorer_driven": ("sync_interval=2", "max_staleness=2"),
    "trainer_driven": ("sync_interval=2", "max_staleness=2"),
    "fully_async": ("sync_interval=2", "staleness_threshold=0.5", "require_batches=2"),
    "fully_async, bounded": (
        "sync_interval=2",
        "staleness_threshold=1.0",
        "max_staleness=1",
        "partial_rollout=false",
    ),
}
VERL_NAMES = (
    "trainer/idle_ratio",
    "rollouter/idle_ratio",
    "fully_async/count/stale_samples_processed",
    "fully_async/count/stale_trajectory_processed",
    "fully_async/partial/total_partial_num",
    "fully_async/partial/partial_ratio",
    "fully_async/partial/max_partial_span",
)
SYNC_NAMES = (
    "stage_s",
    "wait_s",
    "pause_s",
    "load_s",
    "load/verify_s",
    "load/probe_s",
    "resume_s",
    "canary_s",
    "requests_paused",
    "recomputed_tokens",
    "lost_tokens",
)
ON_POLICY = {
    "fixed": (),
    "explorer_driven": ("max_staleness=0",),
    "trainer_driven": ("max_staleness=0",),
    "fully_async": ("staleness_threshold=0.5", "max_staleness=0"),
}
SMALL = (
    "buffer.batch_size=4",
    "algorithm.repeat_times=4",
    "trainer.total_steps=8",
    "explorer.eval_interval=4",
)


def play(model: Path, root: Path, style: str, keys: tuple[str, ...], *changes: str) -> Path:
    sync = [f"synchronizer.{x}" for x in (f"sync_style={style.partition(',')[0]}", *keys)]
    where = (f"model.model_path={model}", f"checkpoint_root_dir={root}")
    return execute(TINY, [*where, *sync, *changes], in_process=True).run_dir


def ages(folder: Path) -> dict[int, int]:
    """Staleness -> tokens, as the ledger has them: by the version that wrote each token and the
    step that trained it.
    """
    with sqlite3.connect(
        f"file:{folder / 'buffer' / 'experience_buffer.db'}?mode=ro", uri=True
    ) as db:
        query = (
            "SELECT u.step - 1 - t.version_step, sum(t.num_tokens) FROM v_tokens t JOIN uses u "
            "ON u.experience = t.id GROUP BY 1"
        )
        return dict(db.execute(query).fetchall())


def bound(folder: Path) -> int:
    return int(series(read(folder / "metrics.jsonl"), "sync/staleness_bound")[0][1])


@pytest.mark.parametrize("style", STYLES)
def test_a_short_run_keeps_its_bound(style: str, tiny_model: Path, tmp_path: Path) -> None:
    folder = play(
        tiny_model, tmp_path, style, STYLES[style], *SMALL, "explorer.eval_in_background=true"
    )
    found = ages(folder)
    assert min(found) == 0 and max(found) <= bound(folder), found
    values = read(folder / "metrics.jsonl")
    assert [step for step, _ in series(values, "eval/copy_eval/mean@1")][-1] == 8
    for name in VERL_NAMES:
        found_values = [v for _, v in series(values, name)]
        assert found_values and all(v >= 0 for v in found_values), name
    for name in SYNC_NAMES:
        assert series(values, f"sync/{name}"), name
    assert all(v == 0 for _, v in series(values, "sync/requests_aborted"))


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_it_learns(style: str, seed: int, tmp_path: Path) -> None:
    model = tiny.make(tmp_path / "model", seed=seed)
    # stale rows cost some steps, the same in every style
    more = ("trainer.total_steps=140", "buffer.total_epochs=20")
    changes = (
        f"seed={seed}",
        "explorer.eval_interval=1000",
        "explorer.eval_on_startup=false",
        *more,
    )
    folder = play(model, tmp_path / "runs", style, STYLES[style], *changes)
    accuracy = dict(series(read(folder / "metrics.jsonl"), "eval/copy_eval/mean@1"))
    assert accuracy[140] >= 0.9, accuracy
    # where rows are trained: not while all answers of a group are wrong
    for name in ("actor/ppo_kl", "actor/pg_clipfrac"):
        assert series(read(folder / "metrics.jsonl"), name), name
    assert max(ages(folder)) <= bound(folder)


def test_no_staleness_is_the_synchronous_run_bit_for_bit(tiny_model: Path, tmp_path: Path) -> None:
    weights = {}
    rewards = {}
    for style, keys in ON_POLICY.items():
        changes = (
            *SMALL,
            "deterministic=true",
            "explorer.eval_interval=1000",
            runs.parity(tmp_path),
        )
        folder = play(tiny_model, tmp_path / style, style, keys, *changes)
        exported = folder / "checkpoints" / "global_step_8" / "huggingface" / "model.safetensors"
        weights[style] = hashlib.sha256(exported.read_bytes()).hexdigest()
        rewards[style] = [
            v for _, v in series(read(folder / "metrics.jsonl"), "experience/reward/mean")
        ]
        assert set(ages(folder)) == {0}
    assert len(set(weights.values())) == 1, weights
    assert all(r == rewards["fixed"] for r in rewards.values())
    before = load_file(tiny_model / "model.safetensors")
    after = load_file(exported)
    assert any((before[name] != after[name]).any() for name in before), (
        "nothing was learnt, so equal weights prove nothing"
    )


@pytest.mark.parametrize("style", [s for s in STYLES if s != "fixed"])
def test_the_bound_holds_after_a_resume(style: str, tiny_model: Path, tmp_path: Path) -> None:
    """The first part ends between two versions: its last weights begin the second one."""
    short = (
        *SMALL,
        "explorer.eval_interval=1000",
        "explorer.eval_at_end=false",
        "explorer.eval_on_startup=false",
    )
    play(tiny_model, tmp_path, style, STYLES[style], *short, "trainer.total_steps=3")
    folder = play(tiny_model, tmp_path, style, STYLES[style], *short)
    assert max(ages(folder)) <= bound(folder)
    steps = [step for step, _ in series(read(folder / "metrics.jsonl"), "experience/staleness/max")]
    assert steps == list(range(1, 9))


def test_a_checkpoint_between_steps_that_were_leased_together(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Step 3 is saved while the rows of step 4 are leased already: they are trained again after
    going back to it.
    """
    short = (
        *SMALL,
        "explorer.eval_interval=1000",
        "explorer.eval_at_end=false",
        "explorer.eval_on_startup=false",
    )
    keys = (*STYLES["fully_async"], "require_batches=2")
    folder = play(
        tiny_model,
        tmp_path,
        "fully_async",
        keys,
        *short,
        "trainer.save_interval=3",
        "trainer.max_checkpoints_to_keep=9",
    )
    for step in (6, 8):
        shutil.rmtree(folder / "checkpoints" / f"global_step_{step}")
    play(
        tiny_model,
        tmp_path,
        "fully_async",
        keys,
        *short,
        "trainer.save_interval=3",
        "trainer.max_checkpoints_to_keep=9",
    )
    assert (folder / "checkpoints" / "global_step_8").is_dir()
    with sqlite3.connect(
        f"file:{folder / 'buffer' / 'experience_buffer.db'}?mode=ro", uri=True
    ) as db:
        rows = db.execute(
            "SELECT train_step, count(*) FROM v_lineage WHERE counts = 1 GROUP BY 1 ORDER BY 1"
        ).fetchall()
    assert rows == [(step, 16) for step in range(1, 9)]
    assert max(ages(folder)) <= bound(folder)


@pytest.mark.parametrize("style", ["explorer_driven", "fully_async"])
def test_old_log_probs_of_the_windows_first_weights(
    style: str, tiny_model: Path, tmp_path: Path
) -> None:
    changes = (
        *SMALL,
        "algorithm.compute_prox_logprobs=true",
        "explorer.eval_interval=1000",
        "explorer.eval_on_startup=false",
    )
    folder = play(tiny_model, tmp_path, style, STYLES[style], *changes)
    values = read(folder / "metrics.jsonl")
    assert len(series(values, "experience/staleness/max")) == 8 and max(ages(folder)) <= bound(
        folder
    )
    assert series(values, "mismatch/abs_diff_max") or series(values, "actor/ppo_kl")
