"""What a run has stored is enough to do it again: its steps from its rows, one step with the loss
of every row, its rewards.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

import rft
from rft.buffer.replay_reader import ReplayReader
from rft.cli import debug_command
from rft.cli.options import planned, tasksets
from rft.errors import ConfigError, ConfigErrors, PayloadDamaged
from rft.extras.view.report_facts import collect
from rft.launch.execute import execute
from rft.launch.step_again import again
from rft.monitor.read import read, series
from rft.taskset.open_source import open_taskset
from rft.trainer.checkpoint import manifest as manifests
from rft.types.ports import EndOfData
from tests.helpers.asked_ledger import said
from tests.helpers.runs import TINY, audit

STEPS = (
    "trainer.total_steps=4",
    "trainer.save_interval=2",
    "trainer.max_checkpoints_to_keep=0",
    "buffer.batch_size=8",
)
QUIET = ("explorer.eval_on_startup=false", "explorer.eval_interval=1000")


def given(model: Path, root: Path, name: str, *more: str) -> list[str]:
    return [
        f"model.model_path={model}",
        f"checkpoint_root_dir={root}",
        f"name={name}",
        *STEPS,
        *QUIET,
        *more,
    ]


def hashes(run: Path) -> dict[str, str]:
    """Of weights and optimizer state of every checkpoint."""
    files = sorted(run.glob("checkpoints/*/trainer/*.safetensors"))
    assert len(files) == 4
    return {str(f.relative_to(run)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def weights(run: Path) -> list[str]:
    """Of every checkpoint, by step."""
    files = sorted(run.glob("checkpoints/*/trainer/model*.safetensors"))
    assert len(files) == 4
    return [hashlib.sha256(f.read_bytes()).hexdigest() for f in files]


@pytest.fixture(scope="module")
def original(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    return execute(
        TINY, given(tiny_model, root, "original", "algorithm.kl_loss_fn=k2"), in_process=True
    ).run_dir


def replayed(original: Path, model: Path, name: str, *more: str) -> Path:
    key = f"buffer.trainer_input.replay_run={original}"
    return execute(
        TINY,
        given(
            model, original.parents[2], name, "algorithm.kl_loss_fn=k2", "mode=train", key, *more
        ),
        in_process=True,
    ).run_dir


def test_the_same_rows_give_the_same_weights(
    original: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, weights and optimizer; also where the run is stopped and goes on."""
    assert hashes(replayed(original, tiny_model, "again")) == hashes(original)
    replayed(
        original,
        tiny_model,
        "resumed",
        "trainer.total_steps=2",
        "algorithm.optimizer.lr_scheduler_type=constant",
    )
    hashed = []
    check = manifests.check_files
    monkeypatch.setattr(
        manifests, "check_files", lambda m: (hashed.append(m.version.step), check(m))
    )
    resumed = replayed(
        original, tiny_model, "resumed", "algorithm.optimizer.lr_scheduler_type=constant"
    )
    assert hashes(resumed) == hashes(original)
    assert hashed == [2, 4], "the one that it goes on from once, and its last one"
    rewards = [
        rft.open_run(run).metrics().query("role == 'trainer'")["experience/reward/mean"].tolist()
        for run in (original, resumed)
    ]
    assert rewards[0] == rewards[1]


@pytest.mark.parametrize(
    "windows",
    [
        ("synchronizer.sync_interval=2",),
        ("synchronizer.sync_style=explorer_driven", "synchronizer.max_staleness=2"),
    ],
    ids=["fixed", "explorer_driven"],
)
def test_one_that_was_stopped_inside_a_window_goes_on_from_where_the_window_began(
    tiny_model: Path, tmp_path: Path, windows: tuple[str, ...]
) -> None:
    """The loss reads the weights of the window's start, which the checkpoint of a step inside it
    does not hold.

    Where the explorer asked for weights, windows begin where the run served them.
    """
    (tmp_path / "r.py").write_text(
        "def noisy(task, transcript):\n    return float(sum(map(ord, transcript.answer)) % 7)\n"
    )
    more = (
        *windows,
        "algorithm.compute_prox_logprobs=true",
        "trainer.save_interval=1",
        "buffer.batch_size=2",
        "algorithm.optimizer.lr_scheduler_type=constant",
        f"buffer.explorer_input.default_reward_fn_type={tmp_path}/r.py:noisy",
    )
    first = execute(TINY, given(tiny_model, tmp_path, "first", *more), in_process=True).run_dir
    served = [step for step, _ in series(read(first / "metrics.jsonl"), "sync/version")]
    more = (*more, "mode=train", f"buffer.trainer_input.replay_run={first}")
    execute(
        TINY, given(tiny_model, tmp_path, "again", *more, "trainer.total_steps=3"), in_process=True
    )
    assert (
        execute(
            TINY,
            given(tiny_model, tmp_path, "again", *more, "trainer.total_steps=3"),
            in_process=True,
        ).seconds
        == 0.0
    )
    resumed = execute(TINY, given(tiny_model, tmp_path, "again", *more), in_process=True)
    assert resumed.resumed_from is not None and resumed.resumed_from.step == max(
        step for step in served if step <= 3
    )
    assert weights(resumed.run_dir) == weights(first)
    now, then = again(first, 4).numbers["actor/loss"]
    assert now == then


def test_it_ends_where_the_rows_end(original: Path, tiny_model: Path) -> None:
    longer = replayed(
        original,
        tiny_model,
        "longer",
        "trainer.total_steps=9",
        "algorithm.optimizer.lr_scheduler_type=constant",
    )
    assert rft.open_run(longer).version is not None and rft.open_run(longer).version.step == 4  # type: ignore[union-attr]


def test_one_step_again(original: Path) -> None:
    found = again(original, 4)
    assert found.begun_from == "global_step_2" and len(found.rows) == 64
    rows = rft.open_run(original).rollouts(step=4)
    assert {r.id: r.reward for r in found.rows} == dict(
        zip(rows["id"], rows["reward"], strict=True)
    )
    for name in ("actor/loss", "actor/grad_norm", "experience/rows"):
        now, then = found.numbers[name]
        assert now == then, name
    assert sum(r.loss for r in found.rows) == pytest.approx(
        found.numbers["actor/loss"][0], abs=1e-6
    )
    assert max(abs(r.apart) for r in found.rows) < 1e-4
    before = hashes(original)
    out, _, code = said("debug", "step", str(original), "1", "--json")
    assert (
        code == 0
        and json.loads(out)["begun_from"] == "the model that the run began with"
        and hashes(original) == before
    )
    with pytest.raises(ConfigError, match="the run trained steps 1 to 4"):
        again(original, 5)


def test_rewards_again(original: Path, tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text(
        "def digit(task, transcript):\n    size = len(transcript.turns[-1].completion.tokens)\n"
        "    return {'digit': float(transcript.answer[:1].isdigit()), 'tokens': float(size)}\n"
    )
    to = tmp_path / "answers.jsonl"
    out, err, code = said(
        "replay",
        str(original),
        "--reward",
        f"{tmp_path}/r.py:digit",
        "--step",
        "2",
        "--to",
        str(to),
        "--json",
    )
    assert code == 0, err
    told = json.loads(out)["tasksets"]["copy"]
    rows = [json.loads(line) for line in to.read_text().splitlines()]
    stored = rft.open_run(original).rollouts(step=2)
    assert told["answers"] == 64 == len(rows) and {r["id"]: r["old"] for r in rows} == dict(
        zip(stored["id"], stored["reward"], strict=True)
    )
    assert all(r["parts"]["tokens"] == 1.0 and r["new"] == r["parts"]["digit"] + 1 for r in rows)
    out, _, code = said("replay", str(original), "--reward", "exact_answer", "-n", "3")
    assert code == 0 and " 24 " in out and "furthest apart" not in out, (
        "the run's own reward says the same again"
    )
    assert said("replay", str(original), "--reward", "exact_answer", "--to", str(to))[2] == 2
    assert (
        said("replay", str(original), "--reward", "exact_answer", "--where", "reward > 7")[2] == 2
    )
    assert said("replay", str(original), "--reward", "no_such_reward")[2] == 2


async def test_the_reader_alone(original: Path, tmp_path: Path) -> None:
    with ReplayReader(original) as reader:
        assert reader.last == 4
        lease = await reader.lease(3, groups=None, rows=None, deadline_s=0, max_staleness=None)
        assert (
            lease.step == 3
            and len(lease.groups) == 8
            and all(len(g.rewards) == 8 for g in lease.groups)
        )
        with pytest.raises(EndOfData, match="trained 4 steps"):
            await reader.lease(5, groups=None, rows=None, deadline_s=0, max_staleness=None)
    with (
        pytest.raises(ConfigError, match=r"replay_run: .*must hold one buffer"),
        ReplayReader(tmp_path),
    ):
        pass


async def test_damaged_rows_are_not_trained_on(original: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(original, tmp_path / "run"))
    with closing(sqlite3.connect(run / "buffer/experience_buffer.db")) as raw, raw:
        for number, block in raw.execute("SELECT id, block FROM payloads").fetchall():
            changed = block[:-9] + bytes([block[-9] ^ 4]) + block[-8:]
            raw.execute("UPDATE payloads SET block = ? WHERE id = ?", (changed, number))
    with (
        ReplayReader(run) as reader,
        pytest.raises(PayloadDamaged, match=r"payload \d+ does not hold .* as it was stored"),
    ):
        await reader.lease(3, groups=None, rows=None, deadline_s=0, max_staleness=None)


async def test_rows_that_the_ledger_does_not_hold_are_told(original: Path, tmp_path: Path) -> None:
    """Those of an expert that were mixed into the steps."""
    run = Path(shutil.copytree(original, tmp_path / "run"))
    with closing(sqlite3.connect(run / "buffer/experience_buffer.db")) as raw, raw:
        raw.execute(
            "INSERT INTO mixed_uses (source, experience, lineage, step) VALUES ('sft_dataset', "
            "'x', 1, 1)"
        )
    with (
        pytest.raises(ConfigError, match="its steps had rows of sft_dataset too"),
        ReplayReader(run),
    ):
        pass


@pytest.fixture(scope="module")
def windows(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Windows of two steps, whose first weights the loss reads; rows are drawn anew, their tokens
    from a part of the distribution.
    """
    root = tmp_path_factory.mktemp("windows")
    (root / "r.py").write_text(
        "def odd(task, transcript):\n    return float(transcript.turns[-1].completion.tokens[0] % "
        "2)\n"
    )
    rejects = "{rollout_rs: token_k1, rollout_rs_threshold: 100}"
    more = (
        "trainer.total_steps=4",
        "trainer.save_interval=1",
        "trainer.max_checkpoints_to_keep=0",
        "synchronizer.sync_interval=2",
    )
    drawn = (
        "algorithm.sample_strategy=pf_ppo",
        f"algorithm.rollout_correction={rejects}",
        "model.top_p=0.9",
    )
    reward = f"buffer.explorer_input.default_reward_fn_type={root}/r.py:odd"
    given = [
        f"model.model_path={tiny_model}",
        f"checkpoint_root_dir={root}",
        "name=windows",
        reward,
        *more,
        *drawn,
    ]
    return execute(SMALL, given, in_process=True).run_dir


@pytest.mark.parametrize("step", [3, 4])
def test_a_step_inside_of_a_window(windows: Path, step: int) -> None:
    found = again(windows, step)
    assert found.begun_from == "global_step_2", "where its window begins"
    for name in ("actor/loss", "actor/grad_norm"):
        now, then = found.numbers[name]
        assert now == then, name
    assert sum(r.loss for r in found.rows) == pytest.approx(
        found.numbers["actor/loss"][0], abs=1e-6
    )


def test_what_contradicts_it_is_refused(original: Path, tiny_model: Path) -> None:
    root = original.parents[2]
    key = f"buffer.trainer_input.replay_run={original}"
    cases = {
        "is for mode: train, and mode is both": ("refused", key),
        "trainer.total_steps: is required with": (
            "refused",
            key,
            "mode=train",
            "trainer.total_steps=null",
        ),
        "is the folder of this run itself": ("original", key, "mode=train"),
        "monitor.keep_trainer_logprobs: is kept in the ledger": (
            "refused",
            key,
            "mode=train",
            "monitor.keep_trainer_logprobs=true",
        ),
    }
    for text, (name, *more) in cases.items():
        with pytest.raises(ConfigErrors, match=text):
            execute(TINY, given(tiny_model, root, name, *more), in_process=True)


@pytest.fixture(scope="module")
def filtered(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose first row is too long and left out, with a reward of a plugin folder: the row's
    own gold answer, as a number.
    """
    root = tmp_path_factory.mktemp("filtered")
    (root / "plugins").mkdir()
    (root / "plugins" / "gold.py").write_text(
        "import rft\n\n@rft.register.reward('its_gold')\ndef its_gold(task, transcript):\n    "
        "return float(task.truth)\n"
    )
    rows = [
        {"prompt": "x" * 300, "response": "99"},
        *({"prompt": f"ab{i % 10}", "response": str(i)} for i in range(1, 13)),
    ]
    (root / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return execute(
        SMALL, few(tiny_model, root, "first"), plugin_dirs=[str(root / "plugins")], in_process=True
    ).run_dir


SMALL = Path(__file__).with_name("tiny_config.yaml")


def few(model: Path, root: Path, name: str, *more: str) -> list[str]:
    given = f"taskset={{name: few, path: {root}/tasks.jsonl, filter_overlong_prompts: true}}"
    into = [f"buffer.explorer_input.{x}" for x in (given, "default_reward_fn_type=its_gold")]
    return [
        f"model.model_path={model}",
        f"checkpoint_root_dir={root}",
        f"name={name}",
        "trainer.save_interval=1",
        *into,
        *more,
    ]


@pytest.mark.extra("judge_lab")
def test_an_answer_keeps_its_task_where_rows_are_left_out(filtered: Path) -> None:
    """The plugins are found again, too."""
    from rft.extras.judge_lab import judge_command

    out, err, code = said("replay", str(filtered), "--reward", "its_gold", "--json")
    assert code == 0, err
    told = json.loads(out)["tasksets"]["few"]
    assert told["old"] == told["new"] and told["changed"] == 0 and "note" not in err
    plan = planned(filtered / "config.resolved.yaml")
    opened = open_taskset(tasksets(plan)["few"])
    assert all(
        float(str(task.truth)) == old
        for task, _, _, old, _ in judge_command._of_run(filtered, opened, None)
    )
    assert debug_command._task(plan, None, 3, counts=True).index == 3
    with pytest.raises(ConfigError, match="has no row 0, or leaves it out"):
        debug_command._task(plan, None, 0, counts=True)
    assert (
        f"--plugin-dir {filtered.parents[2]}/plugins" in collect(rft.open_run(filtered)).repeat[1]
    )
    for args in ("null", "[1]", "{"):
        assert said("replay", str(filtered), "--reward", "its_gold", "--reward-args", args)[2] == 2


def test_a_step_of_a_run_that_began_with_another_one(filtered: Path, tiny_model: Path) -> None:
    root = filtered.parents[2]
    more = (
        f"resume_from_path={filtered}",
        "trainer.total_steps=4",
        "trainer.save_interval=9",
        f"plugin_dirs=[{root}/plugins]",
    )
    second = execute(SMALL, few(tiny_model, root, "second", *more), in_process=True).run_dir
    assert audit(second)[0], "the account balances"
    found = again(second, 4)
    assert (
        found.begun_from == "global_step_2"
        and found.numbers["actor/loss"][0] == found.numbers["actor/loss"][1]
    )
    with pytest.raises(ConfigError, match="began with step 2 of another one"):
        again(second, 2)


@pytest.mark.extra("judge_lab")
def test_changed_tasks_are_told(filtered: Path) -> None:
    file = filtered.parents[2] / "tasks.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([*lines[:2], *lines[3:]]))
    try:
        out, err, code = said(
            "replay", str(filtered), "--reward", "its_gold", "--where", "task_index < 12"
        )
        assert code == 0 and out and "note: taskset few has changed since the run" in err
        if "12" in rft.open_run(filtered).rollouts().to_pandas()["task_index"].astype(str).tolist():
            assert said("replay", str(filtered), "--reward", "its_gold")[2] == 2
    finally:
        file.write_text("".join(lines))
