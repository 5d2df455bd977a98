"""`rft convert verl` as a person calls it, over real script texts."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rft.cli.main import main
from rft.config import yamlfile
from rft.errors import ConfigError
from rft.extras.migrate.convert import report
from rft.extras.migrate.convert.launch import Argument, Launch, read_launch
from rft.extras.migrate.convert.rules import KNOWN
from rft.extras.migrate.convert.verl import convert
from rft.preflight.check import check

SCRIPT = """set -x
data_dir=$HOME/data/gsm8k
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files=$data_dir/train.parquet \\
    data.val_files="['$data_dir/test.parquet']" \\
    data.train_batch_size=1024 \\
    data.max_prompt_length=512 \\
    data.filter_overlong_prompts=True \\
    actor_rollout_ref.model.path=Qwen/Qwen2.5-1.5B \\
    actor_rollout_ref.actor.use_dynamic_bsz=True \\
    actor_rollout_ref.rollout.n=8 \\
    +actor_rollout_ref.actor.optim.betas=[0.9,0.95] \\
    trainer.logger='["console","wandb"]' \\
    trainer.total_epochs=3 {more} "$@"
"""
SCRIPTS = sorted(
    p for p in (Path(__file__).parent / "scripts").iterdir() if p.suffix in (".sh", ".yaml")
)


def rft(*arguments: object) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(["convert", "verl", *map(str, arguments)])
    return int(stopped.value.code or 0)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "run.sh"
    path.write_text(SCRIPT.format(more=""), encoding="utf-8")
    return path


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    path = tmp_path / "odd.sh"
    path.write_text(
        SCRIPT.format(more="actor_rollout_ref.rollout.nn=3 actor_rollout_ref.rollout.name=sglang"),
        encoding="utf-8",
    )
    return path


@pytest.mark.parametrize("profile", ["exact", "guide"])
def test_a_script_becomes_a_configuration_that_passes_check(
    script: Path, tmp_path: Path, profile: str, capsys: Any
) -> None:
    out = tmp_path / "out.yaml"
    told = tmp_path / "r.json"
    assert rft(script, "-o", out, "--report", told, "--profile", profile) == 0
    assert not check(out, schema_only=True).errors
    found = json.loads(told.read_text())
    assert {"program", "profile", "arguments", "written", "notes", "warnings", "gpu"} <= set(found)
    assert [a["key"] for a in found["arguments"]] == [a.key for a in read_launch(script).arguments]
    assert found["gpu"]["total"] == 8 and found["profile"] == profile
    assert all(w["why"] for w in found["written"])
    text = capsys.readouterr().out
    assert "rft check --config" in text and "mapped" in text
    assert str(tmp_path) not in out.read_text()


def test_without_out_the_yaml_alone_goes_to_stdout(script: Path, capsys: Any) -> None:
    assert rft(script) == 0
    said = capsys.readouterr()
    values = yamlfile.parse(said.out, "stdout")[0]
    assert values["buffer"]["train_batch_size"] == 2048 and values["algorithm"]["optimizer"][
        "betas"
    ] == [0.9, 0.95]
    assert "mapped" in said.err


def test_refused_arguments_stop_it(odd: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out.yaml"
    told = tmp_path / "r.md"
    assert rft(odd, "-o", out, "--report", told) == 2
    assert not out.exists() and "## Refused" in told.read_text()
    said = capsys.readouterr().out
    assert "did you mean actor_rollout_ref.rollout.n?" in said and "--allow" in said
    assert rft(odd, "-o", out, "--allow") == 0
    text = out.read_text()
    assert "line 15: actor_rollout_ref.rollout.nn=3: unknown argument" in text and "sglang" in text
    assert not check(out, schema_only=True).errors


def test_a_draft_has_what_is_open_as_comments_in_its_section(
    odd: Path, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "out.yaml"
    assert rft(odd, "-o", out, "--draft", "--engine-num", 8) == 2
    assert "is written" in capsys.readouterr().out
    sections = dict(part.split(":\n", 1) for part in out.read_text().split("\n\n") if ":\n" in part)
    assert (
        "  # to decide: line 15: actor_rollout_ref.rollout.nn=3: unknown argument"
        in (sections["explorer"])
    )
    assert "# rft check: " in out.read_text()


def test_a_draft_leaves_out_sizes_that_do_not_fit(script: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.yaml"
    script.write_text(SCRIPT.format(more="actor_rollout_ref.actor.ppo_mini_batch_size=300"))
    assert rft(script, "-o", out) == 2 and not out.exists()
    assert rft(script, "-o", out, "--draft") == 2
    assert "ppo_mini_batch_size=300: data.train_batch_size 1024" in out.read_text()


def test_a_draft_without_anything_open_is_the_file(script: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain.yaml"
    drafted = tmp_path / "draft.yaml"
    assert (rft(script, "-o", plain), rft(script, "-o", drafted, "--draft")) == (0, 0)
    assert plain.read_text() == drafted.read_text()


@pytest.mark.parametrize(
    "start",
    [
        "python3 -m search_agent.train",
        "python train_agent.py",
        "torchrun --nproc_per_node=8 -m mine.main_mix",
        'ray job submit -- bash -c "python -m mine.main_mix',
    ],
)
def test_a_module_of_a_fork_is_read_as_verls_trainer(
    start: str, script: Path, tmp_path: Path, capsys: Any
) -> None:
    end = '"' if "bash -c" in start else ""
    text = SCRIPT.format(more="").replace("python3 -m verl.trainer.main_ppo", start)
    script.write_text(text.replace('"$@"', end).replace('\'["console","wandb"]\'', "console"))
    script.write_text(script.read_text().replace("\"['$data_dir/test.parquet']\"", "v.parquet"))
    out = tmp_path / "out.yaml"
    assert rft(script, "-o", out) == 2 and not out.exists()
    capsys.readouterr()
    assert rft(script, "-o", out, "--as", "main_ppo") == 0
    assert "may differ from veRL's" in capsys.readouterr().out
    assert yamlfile.parse(out.read_text(), "out")[0]["buffer"]["batch_size"] == 256


def test_options(script: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out.yaml"
    assert (
        rft(
            script,
            "-o",
            out,
            "--engine-num",
            3,
            "--set",
            "algorithm.optimizer.lr=2e-6",
            "--set",
            "seed=7",
        )
        == 0
    )
    values = yamlfile.parse(out.read_text(), "out")[0]
    assert (
        values["explorer"]["rollout_model"]["engine_num"],
        values["algorithm"]["optimizer"]["lr"],
        values["seed"],
    ) == (
        3,
        2e-6,
        7,
    )
    assert rft(script, "-o", out, "--set", "algorithm.optimzer.lr=1") == 2
    assert "algorithm.optimzer" in capsys.readouterr().err
    assert rft(script, "--report", tmp_path / "r.txt") == 2
    assert ".md or .json" in capsys.readouterr().err


def test_only_what_a_conversion_wrote_is_replaced(
    script: Path, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "out.yaml"
    told = tmp_path / "r.json"
    out.touch()
    for _ in range(2):
        assert rft(script, "-o", out, "--report", told) == 0
    capsys.readouterr()
    mine = tmp_path / "mine.md"
    mine.write_text("# Notes\n", encoding="utf-8")
    for arguments in (("-o", script), ("-o", mine), ("--report", mine)):
        assert rft(script, *arguments) == 2
        assert "was not written by a conversion" in capsys.readouterr().err
    assert script.read_text() == SCRIPT.format(more="") and mine.read_text() == "# Notes\n"
    same = tmp_path / "same.md"
    assert rft(script, "-o", same, "--report", same) == 2
    assert "needs its own file" in capsys.readouterr().err


def test_a_result_that_check_refuses_is_not_written(
    script: Path, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "out.yaml"
    assert rft(script, "-o", out, "--set", "buffer.batch_size=-1") == 2
    said = capsys.readouterr()
    assert "buffer.batch_size" in said.out + said.err and not out.exists()
    assert rft(script, "-o", out, "--engine-num", 8) == 2
    assert "Nothing was written" in capsys.readouterr().out and not out.exists()
    assert rft(script, "-o", out, "--engine-num", 8, "--allow") == 0 and out.exists()


@pytest.mark.parametrize(
    ("launcher", "gpus"),
    [
        ("torchrun --standalone --nnodes=1 --nproc_per_node=4", (1, 4)),
        ("torchrun --nnodes 2 --nproc-per-node 8 --node_rank 0", (2, 8)),
        ("python3 -m torch.distributed.run --nproc_per_node=2", (1, 2)),
        ("accelerate launch --num_processes 16 --num_machines 2", (2, 8)),
    ],
)
def test_the_launcher_of_sft_decides_the_gpus(
    launcher: str, gpus: tuple[int, int], tmp_path: Path
) -> None:
    path = tmp_path / "sft.sh"
    path.write_text(
        f"{launcher} -m verl.trainer.fsdp_sft_trainer data.train_files=/d/t.parquet "
        f"data.val_files=/d/v.parquet "
        "data.prompt_key=question data.response_key=answer model.partial_pretrain=/m "
        "optim.lr=1e-4\n",
        encoding="utf-8",
    )
    cluster = convert(read_launch(path)).values["cluster"]
    assert (cluster["node_num"], cluster["gpu_per_node"]) == gpus


def test_recent_keys(tmp_path: Path) -> None:
    """A reader class, template values, and the old name of truncated importance sampling."""
    path = tmp_path / "run.sh"
    more = (
        "data.custom_cls.path=my.py data.custom_cls.name=Mine "
        "+data.apply_chat_template_kwargs.enable_thinking=False"
    )
    path.write_text(
        SCRIPT.format(more=f"{more} actor_rollout_ref.actor.tis_imp_ratio_cap=2"), encoding="utf-8"
    )
    done = convert(read_launch(path))
    taskset = done.values["buffer"]["explorer_input"]["tasksets"][0]
    assert taskset["storage_type"] == "my.py:Mine"
    assert taskset["format"]["chat_template_args"] == {"enable_thinking": False}
    (refused,) = done.refused
    assert (
        refused.argument.key.endswith("tis_imp_ratio_cap")
        and "rollout_correction" in refused.outcome.reason
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("python train.py --lr 1e-5\n", "bad.sh"),
        ("python3 -m verl.trainer.main_ppo a.b='x\n", "line 1"),
        ("echo hello\n", "bad.sh"),
    ],
)
def test_bad_scripts_are_told(text: str, says: str, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "bad.sh"
    path.write_text(text, encoding="utf-8")
    assert rft(path, "-o", tmp_path / "o.yaml") == 2
    said = capsys.readouterr().err
    assert says in said and "Traceback" not in said


def test_several_turns_with_images_on_sglang_are_taken_for_another_engine(
    tmp_path: Path, capsys: Any
) -> None:
    script = Path(__file__).parent / "scripts" / "geo3k_multiturn.sh"
    out = tmp_path / "o.yaml"
    assert rft(script, "-o", out) == 2 and not out.exists()
    shown = " ".join(capsys.readouterr().out.split())
    assert "the sglang engine is not offered; --set explorer.rollout_model" in shown
    assert "geo3k_multiturn_grpo is a file that is not read here" in shown
    assert rft(script, "-o", out, "--set", "explorer.rollout_model.engine_type=vllm") == 0
    assert not check(out, schema_only=True).errors
    values = yamlfile.parse(out.read_text(), out.name)[0]
    (taskset,) = values["buffer"]["explorer_input"]["tasksets"]
    assert taskset["format"] == {"image_key": "images", "preset": "verl"}
    assert taskset["workflow_args"]["tool_config_path"].endswith("/geo3k_tool_config.yaml")
    assert values["buffer"]["explorer_input"]["default_workflow_type"] == "tool_workflow"
    assert values["trainer"]["train_vision"] is True


def test_evaluation_writes_no_yaml(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "eval.sh"
    out = tmp_path / "o.yaml"
    path.write_text(
        "python3 -m verl.trainer.main_eval data.path=/d/x.parquet "
        "custom_reward_function.path=r.py\n",
        encoding="utf-8",
    )
    assert rft(path, "-o", out) == 0
    said = capsys.readouterr().out
    assert (
        "rft bench --input /d/x.parquet" in said and "was not written" in said and not out.exists()
    )


def _launch(path: Path) -> Launch:
    """The launch of a script, with a mini batch that fits where the script states a batch alone
    (veRL would not start).
    """
    launch = read_launch(path)
    given = {a.key: a.value for a in launch.arguments}
    batch = given.get("data.train_batch_size", 1024)
    mini = "actor_rollout_ref.actor.ppo_mini_batch_size"
    if (
        isinstance(batch, int)
        and 0 < batch < 256
        and mini not in given
        and launch.program == "main_ppo"
    ):
        with pytest.raises(ConfigError, match=r"larger than the batch .* is veRL's default"):
            convert(launch)
        return dataclasses.replace(
            launch, arguments=(*launch.arguments, Argument(mini, batch, str(batch), 0))
        )
    return launch


@pytest.mark.e2e
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.name)
@pytest.mark.parametrize("profile", ["exact", "guide"])
def test_every_token_of_every_script_is_accounted_for(path: Path, profile: Any) -> None:
    launch = _launch(path)
    done = convert(launch, profile=profile)
    told = report.to_json(done)["arguments"]
    expected = [(a.key, a.line, a.text) for a in (*launch.options, *launch.arguments)]
    assert sorted((t["key"], t["line"], t["text"]) for t in told) == sorted(expected)
    assert all(t["outcome"] for t in told)
    text = report.markdown(done)
    assert sum(
        line.startswith(f"| {e[1]} |")
        for e in {e[1]: e for e in expected}.values()
        for line in text.splitlines()
    ) >= len({e[1] for e in expected})


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.name)
def test_scripts_convert_to_what_check_accepts(path: Path) -> None:
    done = convert(_launch(path))
    if not done.refused:
        assert not done.errors


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3000),
    st.floats(allow_nan=False, allow_infinity=False, width=32),
    st.text("ab/._-${}0", max_size=8),
    st.lists(st.sampled_from(["console", "wandb", 1]), max_size=3),
    st.sampled_from(
        ["grpo", "gae", "vllm", "fsdp", "${oc.env:HOME}/x", "low_var_kl", "error", "auto", "cosine"]
    ),
    st.dictionaries(st.sampled_from(["lr", "enable", "x"]), st.integers(0, 3), max_size=2),
)
KEYS = st.one_of(
    st.sampled_from(KNOWN),
    st.sampled_from(["nonsense", "trainer.nothing", "data.train_batchsize", "a.b.c"]),
)


@pytest.mark.e2e
@settings(max_examples=150)
@given(
    st.lists(st.tuples(KEYS, VALUES), max_size=12),
    st.sampled_from(["main_ppo", "fully_async", "sft", "main_eval", "yaml"]),
    st.sampled_from(["exact", "guide"]),
)
def test_any_arguments_are_told_once_or_named_in_an_error(
    pairs: list[tuple[str, Any]], program: Any, profile: Any
) -> None:
    arguments = tuple(Argument(k, v, str(v), i) for i, (k, v) in enumerate(pairs, 1))
    try:
        done = convert(
            Launch(program, arguments, passed_through=False, path="x.sh"), profile=profile
        )
    except ConfigError as e:
        assert str(e)
        return
    assert [r.argument for r in done.rows] == list(arguments)
    assert sum(done.counts.values()) == len(arguments)
    json.dumps(report.to_json(done))
    assert report.markdown(done)
