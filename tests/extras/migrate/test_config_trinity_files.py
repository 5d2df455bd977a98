"""Files in the form that Trinity-RFT's users have: converted, each passes `rft check`, or is refused
with what to write instead.
"""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from rft.cli import check_command as command
from rft.config.load import stage_names
from rft.config.schema.source import undotted
from rft.errors import ConfigError
from rft.extras.migrate.compat.keys.not_offered import INSTEAD
from rft.extras.migrate.compat.keys.trinity_keys import DROPPED, MOVED
from rft.extras.migrate.convert.trinity import convert, convert_file
from rft.extras.migrate.convert_command import trinity
from rft.preflight.check import check
from rft.preflight.check_report import Report

FILES = {p.stem: p for p in sorted((Path(__file__).parent / "trinity_files").glob("*.yaml"))}


OURS: dict[str, Path] = {}


@pytest.fixture(scope="module", autouse=True)
def _converted_files(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("converted")
    for name, path in FILES.items():
        OURS[name] = folder / f"{name}.yaml"
        trinity(path, out=OURS[name])


def checked(name: str, *overrides: str) -> Report:
    return check(OURS[name], overrides, schema_only=True)


@pytest.mark.parametrize("name", [n for n in FILES if n != "stages"])
def test_a_converted_file_passes_the_check(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    report = checked(name)
    assert not report.errors and report.plan is not None
    # also seats every role on the declared cluster
    command.check([], OURS[name], schema_only=True)
    assert "is fine" in capsys.readouterr().out


def test_stages(capsys: pytest.CaptureFixture[str]) -> None:
    command.check([], OURS["stages"], schema_only=True)
    assert "is fine" in capsys.readouterr().out


def test_a_coefficient_alone_switches_the_kl_loss_on() -> None:
    """Without kl_loss_fn there is no KL loss here (docs/decisions/0009); a written coefficient
    means Trinity-RFT's estimator.
    """
    report = checked("async_trainer")
    assert report.plan is not None and report.plan.learner.algorithm.kl_loss_fn == "k2"
    assert report.outcome.startswith("needs ") and any(
        "so k2 is taken" in w for w in report.warnings
    )


def test_a_batch_that_counts_the_experts_rows_is_told() -> None:
    (said,) = [w for w in checked("mix_math").warnings if "counts the policy's rows" in w]
    assert said.startswith("buffer.train_batch_size 512 ") and said.endswith("write 384"), (
        "as 0.25 of 512 are the expert's"
    )
    assert not any(
        "counts the policy's rows" in w
        for w in checked("mix_math", "buffer.train_batch_size=null").warnings
    )


KINDS: tuple[Any, ...] = (
    None,
    True,
    -1,
    1.5,
    "x",
    "${a}",
    [],
    [1],
    {},
    {"x": {"y": [None]}},
    [{"name": 3}],
)


@pytest.mark.e2e
@pytest.mark.parametrize("name", FILES)
def test_mutated_files_end_in_a_report(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values of other kinds, dropped keys, keys of other sections, foreign keys without meaning: no
    traceback, each error with its key.
    """
    for variable in ("TASKSET", "MODEL", "SFT_DATASET", "CRITIC_MODEL"):
        monkeypatch.setenv(f"TRINITY_{variable}_PATH", "org/name")
    draw = random.Random(name)
    given = yaml.safe_load(FILES[name].read_text())
    foreign = [
        *DROPPED,
        *MOVED,
        *INSTEAD,
        "trainer.trainer_config.trainer.x",
        "trainer.trainer_config.actor.megatron.x",
    ]
    for i in range(MUTATIONS):
        tree = copy.deepcopy(given)
        for _ in range(draw.randint(1, 3)):
            places = [(at, k) for at in mappings(tree) for k in at]
            at, k = draw.choice(places)
            match draw.randrange(4):
                case 0:
                    at[k] = copy.deepcopy(draw.choice(KINDS))
                case 1:
                    del at[k]
                case 2:
                    other, name_there = draw.choice(places)
                    at[name_there] = copy.deepcopy(other.get(name_there))
                case 3:
                    put(
                        tree,
                        undotted(draw.choice(foreign).replace("[[]*]", "[0]").replace("*", "x")),
                        draw.choice(KINDS),
                    )
        path = tmp_path / f"{i}.yaml"
        theirs = tmp_path / f"{i}_theirs.yaml"
        theirs.write_text(yaml.safe_dump(tree))
        try:
            trinity(theirs, out=path)
            stages = stage_names(path) or ("",)
        except ConfigError as e:
            assert all(x.message for x in e.errors)
            continue
        for stage in stages:
            report = check(path, schema_only=True, stage=stage)
            assert report.outcome and all(
                e.message and len(str(e)) < 4000 for e in report.errors
            ), (tree, report.errors)


MUTATIONS = 25


def mappings(value: Any) -> list[dict[str, Any]]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [
        *([value] if isinstance(value, dict) else []),
        *(m for item in inner for m in mappings(item)),
    ]


def put(tree: Any, loc: tuple[str | int, ...], value: Any) -> None:
    for step in loc[:-1]:
        if not isinstance(tree, dict) or isinstance(step, int):
            return
        tree = tree.setdefault(step, {})
    if isinstance(tree, dict) and isinstance(loc[-1], str):
        tree[loc[-1]] = copy.deepcopy(value)


# ---------------------------------------------------------------- files of older releases and forks

OLDER = """
model: {model_path: m, max_prompt_tokens: 64, max_response_tokens: 64}
algorithm: {algorithm_type: %s}
buffer:
  batch_size: 4
  total_steps: 2
  max_retry_times: 3
  max_retry_interval: 1
  explorer_input:
    taskset: {name: a, path: a.jsonl}
    eval_tasksets: []
    default_workflow_type: math_workflow
    system_prompt: Be brief.
    reply_prefix: null
  trainer_input:
    experience_buffer:
      name: e
      use_priority_queue: true
      replay_buffer_kwargs: {priority_fn: linear_decay, decay: 0.1}
    sft_warmup_dataset: {name: sft, path: s.jsonl}
    sft_warmup_steps: 0
trainer: {trainer_config_path: examples/a/train.yaml, actor_grad_clip: 0.5}
"""
VERL_HALF = """
data: {train_batch_size: 1024}
actor_rollout_ref:
  actor: {ppo_mini_batch_size: 128, use_dynamic_bsz: true, optim: {lr: 5e-7}}
  ref: {log_prob_use_dynamic_bsz: "${actor_rollout_ref.actor.use_dynamic_bsz}"}
custom_reward_function: {path: null, name: compute_score}
trainer: {balance_batch: true}
"""


def older(tmp_path: Path, algorithm: str = "grpo") -> Path:
    """A file of an older release, where its trainer's half lies below the same folder."""
    path = tmp_path / "examples" / "a" / "a.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(OLDER % algorithm)
    return path


def test_a_file_with_its_trainers_half_is_converted(tmp_path: Path) -> None:
    path = older(tmp_path)
    path.with_name("train.yaml").write_text(VERL_HALF)
    ours = tmp_path / "ours.yaml"
    trinity(path, out=ours)
    assert not check(ours, schema_only=True).errors
    made = yaml.safe_load(ours.read_text())
    assert made["algorithm"]["optimizer"]["lr"] == 5e-7
    assert made["trainer"]["ref"]["use_dynamic_bsz"] is True
    assert made["trainer"]["use_dynamic_bsz"] is True and made["trainer"]["grad_clip"] == 0.5
    replay = made["buffer"]["trainer_input"]["experience_buffer"]["replay_buffer"]
    assert replay == {
        "enable": True,
        "priority_fn": "linear_decay",
        "priority_fn_args": {"decay": 0.1},
    }
    assert made["buffer"]["explorer_input"]["taskset"]["format"]["system_prompt"] == "Be brief."


@pytest.mark.parametrize(
    ("freeze", "lora", "trains"),
    [(None, False, True), (False, False, True), (True, False, False), (None, True, None)],
)
def test_the_vision_tower_is_trained_where_trinity_trains_it(
    freeze: bool | None, lora: bool, trains: bool | None
) -> None:
    values = yaml.safe_load(FILES["grpo_vlm"].read_text())
    if freeze is not None:
        actor = {"actor": {"freeze_vision_tower": freeze}}
        values["trainer"]["trainer_config"] = {"actor_rollout_ref": actor}
    if lora:
        values["model"]["lora_configs"] = [{"name": "a", "lora_rank": 8}]
    file = convert(values, {})
    assert file.values["trainer"].get("train_vision") is trains
    said = [c.text for c in file.added]
    assert said == ["true: Trinity-RFT trains the vision tower too"] * (freeze is None and not lora)


def test_texts_alone_train_no_tower() -> None:
    file = convert_file(FILES["grpo_gsm8k"])
    assert "train_vision" not in file.values["trainer"] and not file.added


def test_a_missing_trainers_half_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer_config_path: given examples/a/train.yaml"):
        trinity(older(tmp_path))


@pytest.mark.parametrize(("algorithm", "expert"), [("mix", True), ("grpo", False)])
def test_warm_up_rows_are_the_experts_of_a_mix(
    tmp_path: Path, algorithm: str, expert: bool
) -> None:
    path = older(tmp_path, algorithm)
    path.with_name("train.yaml").write_text(VERL_HALF)
    trainer_input = convert_file(path).values["buffer"]["trainer_input"]
    assert ("auxiliary_buffers" in trainer_input) is expert


def test_a_warm_up_of_older_releases_is_refused_with_its_stage(tmp_path: Path) -> None:
    path = older(tmp_path)
    path.with_name("train.yaml").write_text(VERL_HALF)
    path.write_text(path.read_text().replace("sft_warmup_steps: 0", "sft_warmup_steps: 5"))
    ours = tmp_path / "ours.yaml"
    trinity(path, out=ours)
    assert any("the first of `stages`" in str(e) for e in check(ours, schema_only=True).errors)
