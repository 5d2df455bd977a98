"""Training on a data set, end to end in one process: what is learnt, what the losses are, and that
a resumed run is the same run.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.numpy import load_file

from rft.errors import ConfigError, ConfigErrors
from rft.launch.execute import execute
from rft.monitor.read import read, series
from rft.preflight.check import check
from rft.taskset.offline_data import open_offline_data, sides
from rft.testing import tiny, tiny_vision

INPUT = "buffer.trainer_input.experience_buffer"


@pytest.fixture
def config(tmp_path: Path, tiny_model: Path) -> Callable[..., Path]:
    def write(kind: str, path: str = "rft.testing.tiny:copy_tasks", **more: Any) -> Path:
        source = {
            "storage_type": "file",
            "path": path,
            "data_selector": {"selector_type": "shuffle"},
            **more.pop("source", {}),
        }
        values = {
            "mode": "train",
            "name": "given",
            "checkpoint_root_dir": str(tmp_path / "runs"),
            "model": {"model_path": str(more.pop("model", tiny_model)), "max_model_len": 64},
            "algorithm": {"algorithm_type": kind, "optimizer": {"lr": 1e-3}},
            "buffer": {"train_batch_size": 8, "trainer_input": {"experience_buffer": source}},
            "trainer": {"total_steps": 2, "cpu_threads": 1, **more.pop("trainer", {})},
            "seed": more.pop("seed", 1),
        }
        assert not more, more
        file = tmp_path / "given.yaml"
        file.write_text(yaml.safe_dump(values, sort_keys=False))
        return file

    return write


def metric(run: Path, name: str) -> dict[int, float]:
    return dict(series(read(run / "metrics.jsonl"), name))


def exported(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"global_step_{step}" / "huggingface"


def logprobs(model: Path, tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """float64 log-probs of the masked tokens, by transformers alone."""
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    with torch.no_grad():
        logits = lm(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0].log_softmax(-1)
    at = np.flatnonzero(mask)
    return np.asarray(logits[at - 1, tokens[at]])


def learn(config: Callable[..., Path], kind: str, seed: int, path: str, tmp_path: Path) -> Path:
    model = tiny.make(tmp_path / "model", seed=seed)
    more = {
        "source": {"eval_split": "eval"},
        "trainer": {"total_steps": 40, "eval_interval": 20},
        "model": model,
        "seed": seed,
    }
    return execute(
        config(kind, path, **more), ["buffer.train_batch_size=32"], in_process=True
    ).run_dir


@pytest.mark.parametrize(
    "seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]
)
def test_sft_lowers_the_held_out_loss(
    config: Callable[..., Path], tmp_path: Path, seed: int
) -> None:
    run = learn(config, "sft", seed, "rft.testing.tiny:copy_tasks", tmp_path)
    loss = metric(run, "eval/given_eval/loss")
    assert list(loss) == [0, 20, 40] and loss[40] < 0.7 * loss[0], loss


@pytest.mark.parametrize(
    "seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]
)
def test_dpo_tells_pairs_apart(config: Callable[..., Path], tmp_path: Path, seed: int) -> None:
    run = learn(config, "dpo", seed, "rft.testing.tiny:copy_pairs", tmp_path)
    accuracy = metric(run, "eval/given_eval/accuracy_mean")
    assert accuracy[0] == 0 and accuracy[40] >= 0.7, accuracy
    assert metric(run, "actor/accuracy_mean")[40] >= 0.7
    assert metric(run, "eval/given_eval/reward_margin")[40] > 0


@pytest.mark.parametrize("kind", ["sft", "cpt"])
def test_the_first_loss_is_the_formula_on_the_rows_of_the_step(
    config: Callable[..., Path], tiny_model: Path, kind: str
) -> None:
    file = config(kind)
    run = execute(file, [], in_process=True).run_dir
    plan = check(file).plan
    assert plan is not None and plan.trainer.offline_data is not None
    data = open_offline_data(plan.trainer.offline_data)
    rows = [sides(data.records[at])[0] for at in data.batch(1, 8, plan.seed)]
    each = np.concatenate([logprobs(tiny_model, *row) for row in rows])
    assert (
        len(each)
        == metric(run, "experience/response_tokens")[1]
        == (16 if kind == "sft" else 8 * 3)
    )
    assert metric(run, "actor/loss")[1] == pytest.approx(-each.mean(), rel=1e-5)
    assert exported(run, 2).is_dir() and not (run / "buffer").exists(), (
        "nothing was explored or stored"
    )


def test_the_loss_of_pairs_is_the_formula(
    config: Callable[..., Path], tmp_path: Path, tiny_model: Path
) -> None:
    folder = tmp_path / "pairs"
    folder.mkdir()
    for split, count in (("train", 64), ("eval", 10)):
        lines = [json.dumps(row) + "\n" for row in tiny.copy_pairs(split, n=count)]
        (folder / f"{split}.jsonl").write_text("".join(lines))
    file = config("dpo", str(folder), source={"eval_split": "eval"})
    run = execute(file, [], in_process=True).run_dir
    assert metric(run, "actor/pg_loss")[1] == pytest.approx(math.log(2)), (
        "policy and reference are the same"
    )
    plan = check(file).plan
    assert plan is not None and plan.trainer.held_out is not None
    margins = []
    chosen = []
    for record in open_offline_data(plan.trainer.held_out).records:
        now, base = (
            [logprobs(m, *side).sum() for side in sides(record)]
            for m in (exported(run, 2), tiny_model)
        )
        margins.append(0.1 * ((now[0] - base[0]) - (now[1] - base[1])))
        chosen.append(now[0])
    found = {
        name: metric(run, f"eval/given_eval/{name}")[2]
        for name in ("loss", "reward_margin", "accuracy_mean", "chosen_logps")
    }
    assert found["loss"] == pytest.approx(np.mean(np.log1p(np.exp(-np.array(margins)))), rel=1e-5)
    assert found["reward_margin"] == pytest.approx(np.mean(margins), rel=1e-3)
    assert found["chosen_logps"] == pytest.approx(np.mean(chosen), rel=1e-5)
    assert found["accuracy_mean"] == pytest.approx(np.mean(np.array(margins) > 0))


def test_the_loss_of_labels_is_the_formula(
    config: Callable[..., Path], tmp_path: Path, tiny_model: Path
) -> None:
    """After two steps, over ten held-out rows; the reference point from each prompt with the answer of
    the next row.
    """
    folder = tmp_path / "labels"
    folder.mkdir()
    for split, count in (("train", 64), ("eval", 10)):
        lines = [json.dumps(row) + "\n" for row in tiny.copy_labels(split, n=count)]
        (folder / f"{split}.jsonl").write_text("".join(lines))
    file = config("kto", str(folder), source={"eval_split": "eval"})
    run = execute(file, [], in_process=True).run_dir
    assert metric(run, "actor/pg_loss")[1] == pytest.approx(0.5), (
        "policy and reference are the same"
    )
    assert metric(run, "experience/response_tokens")[1] == 16, "8 answers of two tokens"
    plan = check(file).plan
    assert plan is not None and plan.trainer.held_out is not None
    records: Any = open_offline_data(plan.trainer.held_out).records
    trained = exported(run, 2)

    def ratio(tokens: np.ndarray, mask: np.ndarray) -> float:
        now, base = (logprobs(m, tokens, mask).sum() for m in (trained, tiny_model))
        return float(now - base)

    others = []
    for record, other in zip(records, [*records[1:], records[0]], strict=True):
        prompt = record.tokens[~record.loss_mask]
        answer = other.tokens[other.loss_mask]
        tokens = np.concatenate([prompt, answer])
        others.append(ratio(tokens, np.arange(len(tokens)) >= len(prompt)))
    point = max(0.0, float(np.mean(others)))
    ratios = np.array([ratio(r.tokens, r.loss_mask) for r in records])
    good = np.array([r.label for r in records])
    sides_of = np.where(good, ratios - point, point - ratios)
    expected = {
        "loss": float(np.mean(1 / (1 + np.exp(0.1 * sides_of)))),
        "kto_point": point,
        "chosen_reward": 0.1 * ratios[good].mean(),
        "rejected_reward": 0.1 * ratios[~good].mean(),
        "accuracy_mean": float(np.mean(sides_of > 0)),
    }
    found = {name: metric(run, f"eval/given_eval/{name}")[2] for name in expected}
    assert found == pytest.approx(expected, rel=1e-3, abs=1e-6)


def test_kto_tells_good_answers_from_bad_ones(config: Callable[..., Path], tmp_path: Path) -> None:
    run = learn(config, "kto", 0, "rft.testing.tiny:copy_labels", tmp_path)
    accuracy = metric(run, "eval/given_eval/accuracy_mean")
    assert accuracy[0] == 0 and accuracy[40] >= 0.6, accuracy
    assert metric(run, "eval/given_eval/reward_margin")[40] > 0.3


def test_answers_about_pictures_are_learnt(config: Callable[..., Path], tmp_path: Path) -> None:
    file = config(
        "sft",
        "rft.testing.tiny_vision:colour_tasks",
        model=tiny_vision.make(tmp_path / "model"),
        source={"eval_split": "eval", "format": {"image_key": "images"}},
        trainer={"total_steps": 20, "eval_interval": 10, "save_interval": 10},
    )
    more = ["algorithm.optimizer.lr=6e-3", "buffer.train_batch_size=16"]
    report = check(file, more)
    assert report.ok, report.errors
    for row in report.tasksets[0].rows:
        assert re.fullmatch(r"\d+ x \d+ pixels, \d+ tokens", row.images[0])
        assert row.prompt.count("<|image_pad|>") == 1 and row.prompt.endswith("<|im_end|>»")
    run = execute(file, more, in_process=True).run_dir
    loss = metric(run, "eval/given_eval/loss")
    # half of the tokens are end tokens; four colours without the picture: ln(4) / 2
    assert list(loss) == [0, 10, 20] and loss[20] < 0.5 * math.log(4) < loss[0], loss
    last = (run / "checkpoints" / "global_step_20", run.parent / "again")
    shutil.move(*last)
    again = execute(file, more, in_process=True)
    assert again.resumed_from is not None and again.resumed_from.step == 10
    folders = (exported(run, 20), last[1] / "huggingface")
    then, now = (load_file(f / "model.safetensors") for f in folders)
    assert all(np.array_equal(then[name], now[name]) for name in then)


LABELS = {"prompt": "ab1", "response": "1"}


@pytest.mark.parametrize(
    ("rows", "overrides", "key", "says"),
    [
        ([LABELS], [], f"{INPUT}.format.label_key", "has no column 'label'; its columns are"),
        (
            [{**LABELS, "label": 1}],
            [],
            f"{INPUT}.format.label_key",
            "column 'label' holds 1; a label is true or false",
        ),
        (
            [{**LABELS, "label": True}] * 3,
            [],
            f"{INPUT}.format.label_key",
            "'label' is true in all 3 rows; answers of both labels are compared",
        ),
        (
            [{**LABELS, "label": n > 0} for n in range(3)],
            ["buffer.train_batch_size=1"],
            "buffer.train_batch_size",
            "must be at least 2",
        ),
        (
            [{**LABELS, "label": n > 0} for n in range(3)],
            ["algorithm.policy_loss_fn=dpo"],
            "algorithm.policy_loss_fn",
            "dpo does not read labels as algorithm kto gives them; use kto",
        ),
    ],
    ids=["none", "number", "one_class", "batch_of_one", "loss_of_pairs"],
)
def test_labels_that_say_nothing_are_refused(
    config: Callable[..., Path],
    tmp_path: Path,
    rows: list[dict[str, Any]],
    overrides: list[str],
    key: str,
    says: str,
) -> None:
    data = tmp_path / "labels.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = check(config("kto", str(data)), overrides)
    assert any(e.key == key and says in e.message for e in report.errors), report.errors


@pytest.mark.parametrize("kind", ["sft", "dpo", "kto"])
def test_a_resumed_run_is_the_same_run(config: Callable[..., Path], kind: str) -> None:
    """Across an epoch's end: 20 rows, 8 of them in a step."""
    makers = {"sft": tiny.copy_tasks, "dpo": tiny.copy_pairs, "kto": tiny.copy_labels}
    make: Callable[..., Any] = makers[kind]
    path = f"rft.testing.tiny:{make.__name__}"
    file = config(kind, path)
    data = config(kind, path).parent / "rows.jsonl"
    data.write_text("".join(json.dumps(r) + "\n" for r in make("train", n=20)))
    at = f"{INPUT}.path={data}"
    whole = execute(file, [at, "name=whole", "trainer.total_steps=5"], in_process=True)
    execute(file, [at, "name=halves", "trainer.total_steps=2"], in_process=True)
    halves = execute(file, [at, "name=halves", "trainer.total_steps=5"], in_process=True)
    assert (
        halves.resumed_from is not None
        and halves.resumed_from.step == 2
        and halves.version.lineage == 2
    )
    one, two = (load_file(exported(o.run_dir, 5) / "model.safetensors") for o in (whole, halves))
    assert all(one[name].tobytes() == two[name].tobytes() for name in one)
    for name in ("actor/loss", "actor/grad_norm"):
        assert metric(whole.run_dir, name) == metric(halves.run_dir, name)

    with data.open("a") as more:
        more.write(json.dumps(make("train", n=21)[20]) + "\n")
    with pytest.raises(ConfigError, match="are not what the checkpoint of step 5 was trained with"):
        execute(file, [at, "name=halves", "trainer.total_steps=6"], in_process=True)


def test_other_rows_that_are_held_out_are_told_where_a_run_goes_on(
    config: Callable[..., Path], tmp_path: Path
) -> None:
    rows = [{"prompt": f"ab{i}", "response": str(i)} for i in range(8)]

    def notes(steps: int, held_out: list[dict[str, str]]) -> list[str]:
        for split, written in (("train", rows), ("test", held_out)):
            (tmp_path / f"{split}.jsonl").write_text(
                "".join(json.dumps(row) + "\n" for row in written)
            )
        given = config("sft", str(tmp_path), source={"eval_split": "test"})
        run = execute(given, [f"trainer.total_steps={steps}"], in_process=True).run_dir
        return [note for r in read(run / "metrics.jsonl") if r.role == "eval" for note in r.notes]

    assert notes(1, rows[:3]) == notes(2, rows[:3]) == []
    (told,) = notes(3, rows[1:4])
    assert "_test are not those of earlier evaluations" in told
    assert notes(4, rows[1:4]) == [told], "once"


def test_it_begins_with_the_checkpoint_of_another_run(config: Callable[..., Path]) -> None:
    file = config("sft")
    first = execute(file, ["name=first"], in_process=True)
    second = execute(
        file,
        ["name=second", f"resume_from_path={first.run_dir}", "trainer.total_steps=3"],
        in_process=True,
    )
    assert second.version.step == 3 and list(metric(second.run_dir, "actor/loss")) == [3]
    shutil.rmtree(first.run_dir)  # it has a checkpoint of its own now
    longer = execute(
        file,
        ["name=second", f"resume_from_path={first.run_dir}", "trainer.total_steps=4"],
        in_process=True,
    )
    assert longer.version.step == 4 and longer.resumed_from == second.version


def test_pairs_that_begin_with_another_run_are_told_what_they_are_compared_with(
    config: Callable[..., Path], tmp_path: Path
) -> None:
    file = config("dpo", "rft.testing.tiny:copy_pairs")
    found = [check(file, given).warnings for given in ([f"resume_from_path={tmp_path}"], [])]
    assert [
        sum("the reference model is still model.model_path" in w for w in warnings)
        for warnings in found
    ] == [1, 0], found


def test_sft_then_grpo_in_one_file(tmp_path: Path, tiny_model: Path) -> None:
    tasks = {
        "name": "copy",
        "path": "rft.testing.tiny:copy_tasks",
        "default_reward_fn_type": "exact_answer",
    }
    source = {
        "storage_type": "file",
        "path": "rft.testing.tiny:copy_tasks",
        "data_selector": {"selector_type": "shuffle"},
    }
    stages = [
        {
            "stage_name": "sft",
            "mode": "train",
            "algorithm": {"algorithm_type": "sft", "optimizer": {"lr": 1e-3}},
            "buffer": {"train_batch_size": 32, "trainer_input": {"experience_buffer": source}},
            "trainer": {"total_steps": 40, "cpu_threads": 1},
        },
        {
            "stage_name": "rl",
            "algorithm": {"algorithm_type": "grpo", "repeat_times": 4, "optimizer": {"lr": 1e-4}},
            "buffer": {
                "batch_size": 8,
                "explorer_input": {
                    "taskset": {**tasks, "default_workflow_type": "simple_workflow"}
                },
            },
            "trainer": {"total_steps": 2, "cpu_threads": 1},
            "explorer": {"rollout_model": {"engine_type": "transformers", "cpu_threads": 1}},
        },
    ]
    values = {
        "name": "both",
        "checkpoint_root_dir": str(tmp_path / "runs"),
        "model": {"model_path": str(tiny_model), "max_prompt_tokens": 63, "max_response_tokens": 1},
        "stages": stages,
    }
    file = tmp_path / "stages.yaml"
    file.write_text(yaml.safe_dump(values))
    run = execute(file, [], in_process=True).run_dir
    assert run.name == "rl" and exported(run.parent / "sft", 40).is_dir()
    assert metric(run, "experience/reward/mean")[1] > 0.5, (
        "it begins with what was imitated; untrained it is 0.004"
    )


def test_raft_imitates_the_best_of_its_own_answers(tmp_path: Path, tiny_model: Path) -> None:
    values = {
        "name": "raft",
        "checkpoint_root_dir": str(tmp_path / "runs"),
        "model": {"model_path": str(tiny_model), "max_prompt_tokens": 63, "max_response_tokens": 1},
        "algorithm": {"algorithm_type": "raft", "repeat_times": 4, "optimizer": {"lr": 1e-3}},
        "buffer": {
            "batch_size": 4,
            "explorer_input": {
                "taskset": {
                    "path": "rft.testing.tiny:copy_tasks",
                    "default_workflow_type": "simple_workflow",
                    "default_reward_fn_type": "exact_answer",
                }
            },
        },
        "explorer": {"rollout_model": {"engine_type": "transformers", "cpu_threads": 1}},
        "trainer": {"total_steps": 2, "cpu_threads": 1},
    }
    file = tmp_path / "raft.yaml"
    file.write_text(yaml.safe_dump(values))
    run = execute(file, [], in_process=True).run_dir
    assert metric(run, "experience/rows") == {1: 16.0, 2: 16.0}, "what was leased"
    assert metric(run, "experience/response_tokens") == {1: 4.0, 2: 4.0}, (
        "the best of each group of four, of one token"
    )
    shutil.rmtree(run)


@pytest.mark.parametrize(
    ("kind", "overrides", "key"),
    [
        ("sft", ["mode=both"], "mode"),
        ("sft", [f"{INPUT}.path=null"], f"{INPUT}.path"),
        ("sft", [f"{INPUT}.path=nowhere.jsonl"], f"{INPUT}.path"),
        ("sft", [f"{INPUT}.path=sqlite:///rows.db"], f"{INPUT}.path"),
        ("sft", [f"{INPUT}.storage_type=queue"], f"{INPUT}.storage_type"),
        ("sft", [f"{INPUT}.eval_split=train"], f"{INPUT}.eval_split"),
        ("sft", [f"{INPUT}.eval_split=eval", f"{INPUT}.path=rows.jsonl"], f"{INPUT}.eval_split"),
        ("sft", ["trainer.eval_interval=2"], "trainer.eval_interval"),
        ("sft", [f"{INPUT}.format.prompt_key=question"], f"{INPUT}.format.prompt_key"),
        ("sft", [f"{INPUT}.format.response_key=answer"], f"{INPUT}.format.response_key"),
        ("sft", ["model.max_model_len=6"], INPUT),
        ("dpo", [], f"{INPUT}.format.chosen_key"),
        ("dpo", ["algorithm.sample_strategy=pf_ppo"], "algorithm.sample_strategy"),
        ("sft", ["algorithm.advantage_fn=grpo"], "algorithm.advantage_fn"),
        ("sft", ["algorithm.kl_penalty_fn=k1"], "algorithm.kl_penalty_fn"),
        ("sft", ["algorithm.policy_loss_fn=ppo"], "algorithm.policy_loss_fn"),
        ("sft", ["algorithm.policy_loss_fn=dpo"], "algorithm.policy_loss_fn"),
        ("dpo", ["algorithm.policy_loss_fn=sft"], "algorithm.policy_loss_fn"),
        ("grpo", ["mode=both", "algorithm.policy_loss_fn=dpo"], "algorithm.policy_loss_fn"),
        ("grpo", ["mode=both", "algorithm.policy_loss_fn=kto"], "algorithm.policy_loss_fn"),
        ("kto", ["mode=both"], "mode"),
        ("sft", ["buffer.train_batch_size=5000", "trainer.total_steps=null"], "buffer.batch_size"),
    ],
)
def test_check_refuses(
    config: Callable[..., Path], kind: str, overrides: list[str], key: str
) -> None:
    report = check(config(kind), overrides)
    assert key in [e.key for e in report.errors], [str(e) for e in report.errors]


def test_keys_of_a_data_set_are_refused_where_none_is_read(config: Callable[..., Path]) -> None:
    with pytest.raises(ConfigErrors, match="only mode: train with sft, cpt or dpo reads one"):
        execute(config("grpo"), ["mode=both", f"{INPUT}.eval_split=eval"], in_process=True)


def test_check_says_what_a_step_is(config: Callable[..., Path]) -> None:
    file = config("sft", source={"eval_split": "eval"})
    report = check(file, ["trainer.total_steps=null", "buffer.total_epochs=2"])
    assert report.ok, report.errors
    said = report.to_json()["step"]
    assert (said["train_steps"], said["epochs"], said["rows"]) == (512, 2.0, 8)
    assert (said["tokens"], said["trained_tokens"]) == (80, 16)
    assert [(t.num_rows, t.is_eval) for t in report.tasksets] == [(2048, False), (100, True)]
    assert report.tasksets[0].rows[0].prompt.endswith("<|im_end|>»"), "what is trained is marked"


def test_check_warns_of_answers_after_which_an_engine_goes_on(
    config: Callable[..., Path], tmp_path: Path, tiny_model: Path
) -> None:
    """As with ChatML on a base model, whose end token is another one."""
    model = shutil.copytree(tiny_model, tmp_path / "model")
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role + m.content + '!' }}{% endfor %}"
    )
    found = [check(config("sft", model=folder)).warnings for folder in (model, tiny_model)]
    assert [sum("end without an end token" in w for w in warnings) for warnings in found] == [
        1,
        0,
    ], found
