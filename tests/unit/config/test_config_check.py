"""The second stage: plugins, data and model files; and the command."""

from __future__ import annotations

import json
import re
import resource
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rft.config.plan import Facts
from rft.errors import ConfigError, ConfigErrors
from rft.preflight.check import check, load_plan
from rft.preflight.check_report import Report
from rft.preflight.model_folder import look, read_header

GOOD = Path(__file__).parent / "data" / "good"
CPU = Facts(cpus=2, gpus=0)
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TASKSET = "buffer.explorer_input.taskset"


def make_model(folder: Path, *, tied: bool = True) -> Path:
    """A small folder that looks like a Llama: three tensors, a tokenizer of words, a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder.mkdir()
    tensors = {
        "model.embed_tokens.weight": np.zeros((8, 4), np.float32),
        "model.norm.weight": np.ones(4, np.float32),
    }
    if not tied:
        tensors["lm_head.weight"] = np.zeros((8, 4), np.float32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "model_type": "llama",
        "vocab_size": 8,
        "hidden_size": 4,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 512,
    }
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "1": 1, "2": 2, "?": 3}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": TEMPLATE, "eos_token": "</s>"})
    )
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "tiny-model")


def run(model: Path | str, *overrides: str, **more: object) -> Report:
    rows = GOOD.parent / "rows.jsonl"
    given = [f"model.model_path={model}", f"{TASKSET}.path={rows}", *overrides]
    return check(GOOD / "short.yaml", given, facts=CPU, **more)  # type: ignore[arg-type]


def errors(report: Report) -> str:
    return "\n".join(str(e) for e in report.errors)


def test_good_file(model: Path) -> None:
    report = run(model)
    assert report.ok, errors(report)
    assert report.warnings == ()
    (rows,) = report.tasksets
    assert (rows.name, rows.num_rows, rows.is_eval) == ("sums", 20, False)
    assert [r.prompt for r in rows.rows] == [
        "<|user|>0+0?\n<|assistant|>",
        "<|user|>0+1?\n<|assistant|>",
    ]
    assert [r.gold_reward for r in rows.rows] == [1.0, 1.0]
    assert rows.rows[0].tokens is not None and rows.max_prompt_tokens == rows.rows[0].tokens
    assert report.model["parameters"] == 36 and report.model["stored"] == "F32"
    assert json.loads(json.dumps(report.to_json()))["plan"]["trainer"]["total_steps"] == 2


def test_load_plan_has_the_steps_of_the_epochs(model: Path) -> None:
    rows = GOOD.parent / "rows.jsonl"
    given = [
        f"model.model_path={model}",
        f"{TASKSET}.path={rows}",
        "buffer.total_steps=null",
        "buffer.total_epochs=2",
    ]
    config, plan = load_plan(GOOD / "short.yaml", given, facts=CPU)
    assert (
        plan.total_steps
        == plan.trainer.total_steps
        == plan.learner.total_steps
        == plan.explorer.total_batches
        == 10
    )
    assert config.buffer.total_epochs == 2
    with pytest.raises(ConfigErrors, match="do not fill one batch"):
        load_plan(GOOD / "short.yaml", [*given, "buffer.batch_size=50"], facts=CPU)


def test_wrong_column(model: Path) -> None:
    report = run(model, f"{TASKSET}.format.response_key=anwser")
    assert f"{TASKSET}.format.response_key" in errors(report) and "anwser" in errors(report)


def test_missing_and_broken_data(model: Path, tmp_path: Path) -> None:
    assert f"{TASKSET}.path" in errors(run(model, f"{TASKSET}.path={tmp_path}/none.jsonl"))
    (tmp_path / "broken.jsonl").write_text('{"question": "1", "answer": "1"}\n{"question": \n')
    report = run(model, f"{TASKSET}.path={tmp_path}/broken.jsonl")
    assert "broken.jsonl" in errors(report) and "2" in errors(report)


def test_gold_answer_that_does_not_score(model: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1?", "answer": "2", "other": "x"}\n')
    plugin = tmp_path / "plugins"
    plugin.mkdir()
    (plugin / "mine.py").write_text(
        "from rft.reward.base import reward\n\n@reward('never_config_test')\ndef never(task, "
        "transcript):\n    return 0.0\n\n"
        "@reward('raises_config_test')\ndef raises(task, transcript):\n    raise RuntimeError('no "
        "judge')\n"
    )
    more = [f"{TASKSET}.path={tmp_path}/rows.jsonl", "buffer.batch_size=1"]
    report = run(
        model,
        *more,
        f"{TASKSET}.default_reward_fn_type=never_config_test",
        plugin_dirs=[str(plugin)],
    )
    assert report.ok and any("scores 0 with never_config_test" in w for w in report.warnings)
    report = run(
        model,
        *more,
        f"{TASKSET}.default_reward_fn_type=raises_config_test",
        plugin_dirs=[str(plugin)],
    )
    assert any(
        "raised on the gold answer of row 0: RuntimeError: no judge" in w for w in report.warnings
    )


@pytest.mark.extra("migrate")
def test_a_reward_may_know_another_gold_answer_than_the_truth(model: Path, tmp_path: Path) -> None:
    """Tests of a program are no answer; functions of lists are asked for one."""
    (tmp_path / "rows.jsonl").write_text(
        '{"question": "1+1?", "answer": "tests", "solution": "2"}\n'
    )
    plugin = tmp_path / "plugins"
    plugin.mkdir()
    (plugin / "mine.py").write_text(
        "from rft.reward.base import reward\n\n@reward('solved_config_test')\nclass Solved:\n"
        "    def gold_answer(self, task): return task.row.get('solution')\n"
        "    def __call__(self, task, transcript): return float(transcript.answer == '2')\n\n"
        "@reward('unknown_config_test')\nclass Unknown(Solved):\n    def gold_answer(self, task): "
        "return None\n\n"
        "@reward('listed_config_test')\ndef listed(completions): return [float(c == 'tests') for c "
        "in completions]\n"
    )
    more = [f"{TASKSET}.path={tmp_path}/rows.jsonl", "buffer.batch_size=1"]
    for name in ("solved", "unknown", "listed"):
        report = run(
            model,
            *more,
            f"{TASKSET}.default_reward_fn_type={name}_config_test",
            plugin_dirs=[str(plugin)],
        )
        assert report.ok and not any("gold answer" in w for w in report.warnings), report.warnings


def test_unknown_names_and_arguments(model: Path) -> None:
    assert "unknown reward 'exact_anwser'" in errors(
        run(model, f"{TASKSET}.default_reward_fn_type=exact_anwser")
    )
    assert "Did you mean exact_answer" in errors(
        run(model, f"{TASKSET}.default_reward_fn_type=exact_anwser")
    )
    report = run(model, f"{TASKSET}.reward_fn_args.comparee=text")
    assert f"{TASKSET}.reward_fn_args" in errors(report) and "Did you mean compare" in errors(
        report
    )
    assert "unknown workflow" in errors(run(model, f"{TASKSET}.default_workflow_type=nothing"))


def test_plugin_that_fails_to_import_is_an_error(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / "bad.py").write_text("raise RuntimeError('planted')\n")
    report = run(model, plugin_dirs=[str(folder)])
    assert "planted" in errors(report) and "Traceback" in errors(report)


def test_overlap_of_training_and_evaluation(model: Path) -> None:
    rows = GOOD.parent / "rows.jsonl"
    report = run(
        model,
        f"buffer.explorer_input.eval_tasksets=[{{path: {rows}, format: {{prompt_key: question, "
        f"response_key: answer}}}}]",
    )
    assert any("20 of 20 prompts of rows_eval are also in sums" in w for w in report.warnings)


def test_prompts_that_are_too_long(model: Path, tmp_path: Path) -> None:
    assert "model.max_prompt_tokens: is 3, but every prompt of" in errors(
        run(model, "model.max_prompt_tokens=3")
    )
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(f'{{"question": "{"what is " * n} 1 + 1 ?", "answer": "2"}}\n' for n in range(1, 9))
    )
    limit = (run(model, f"{TASKSET}.path={rows}").tasksets[0].max_prompt_tokens or 0) - 1
    report = run(model, f"{TASKSET}.path={rows}", f"model.max_prompt_tokens={limit}")
    assert report.ok and any(
        f"more than model.max_prompt_tokens {limit}" in w for w in report.warnings
    )


def test_two_stages_report_data_and_model_together(tmp_path: Path) -> None:
    report = run(tmp_path / "nothing", f"{TASKSET}.path={tmp_path}/none.jsonl")
    assert {e.key for e in report.errors} == {"model.model_path", f"{TASKSET}.path"}


# ---------------------------------------------------------------- model folders


def wrong(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        look(str(folder))
    return str(caught.value)


def test_missing_model_names_the_nearest(model: Path) -> None:
    assert f"Did you mean {model}?" in wrong(model.with_name("tiny-modle"))
    assert "nor a model in the local hub cache" in wrong(Path("someone/some-model"))
    (model.parent / "file").write_text("")
    assert "is a file" in wrong(model.parent / "file")


def test_damaged_model_folders(model: Path) -> None:
    weights = model / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-7])
    assert "cut short" in wrong(model)
    weights.write_bytes(struct.pack("<Q", 1 << 63) + whole[8:])
    assert "header too large" in wrong(model)
    weights.write_bytes(b"abc")
    assert "it has 3 bytes" in wrong(model)
    weights.write_bytes(struct.pack("<Q", 4) + b"{{{{")
    assert "invalid JSON in header" in wrong(model)
    weights.write_bytes(whole)
    (model / "config.json").write_text("{")
    assert "config.json cannot be read as JSON" in wrong(model)
    (model / "config.json").unlink()
    assert "config.json does not exist" in wrong(model)


def test_tokenizer_is_needed(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    assert "has no tokenizer" in wrong(model)


def test_pickled_weights_are_refused(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    assert "only as pickles (pytorch_model.bin)" in wrong(model)


def test_weights_of_another_model(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": 9}))
    assert "says vocab_size 9, but the weights have 8" in wrong(model)
    (model / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    assert "no lm_head.weight" in wrong(model)


@pytest.mark.parametrize(
    ("sizes", "names", "told"),
    [
        (
            {"num_hidden_layers": 1},
            ["layers.1.up"],
            "says num_hidden_layers 1, but the weights have 2 layers",
        ),
        (
            {"num_hidden_layers": 3},
            ["layers.1.up"],
            "says num_hidden_layers 3, but the weights have 2 layers",
        ),
        ({"num_hidden_layers": 2, "num_nextn_predict_layers": 1}, ["layers.2.up"], ""),
        ({"num_hidden_layers": 1}, ["visual.blocks.5.up", "layers.0.up"], ""),
        (
            {"num_experts": 3},
            ["layers.0.experts.0.up", "layers.0.experts.1.up"],
            "says 3 experts, but the weights have 2 in",
        ),
        (
            {"num_experts": 2},
            ["layers.0.experts.0.up", "layers.0.experts.2.up"],
            "model.layers.0.experts (number 1 is missing)",
        ),
        (
            {"num_local_experts": 2},
            ["layers.0.mlp.experts.gate_up_proj"],
            "says 2 experts, but the weights have 4 in",
        ),
        (
            {"n_routed_experts": 4},
            ["layers.0.mlp.experts.down_proj", "layers.0.mlp.shared_experts.up"],
            "",
        ),
    ],
)
def test_a_configuration_that_lies_about_layers_or_experts(
    model: Path, sizes: dict[str, int], names: list[str], told: str
) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "num_experts_per_tok": 1, **sizes}))
    weights = load_file(model / "model.safetensors") | {
        f"model.{name}": np.zeros((4, 4), np.float32) for name in names
    }
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    assert told in wrong(model) if told else look(str(model)).warnings == ()


def test_sharded_weights(model: Path) -> None:
    (model / "model.safetensors").rename(model / "model-00001-of-00002.safetensors")
    index = model / "model.safetensors.index.json"
    names = {
        "model.embed_tokens.weight": "model-00001-of-00002.safetensors",
        "lm_head.weight": "model-00002-of-00002.safetensors",
    }
    index.write_text(json.dumps({"weight_map": names}))
    assert (
        "model-00002-of-00002.safetensors does not exist, but model.safetensors.index.json names it"
        in wrong(model)
    )
    names["lm_head.weight"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps({"weight_map": names}))
    assert "names 1 tensor(s) that no file holds, e.g. lm_head.weight" in wrong(model)


def test_own_and_tied_head_is_warned_about(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "untied", tied=False)
    assert look(str(folder)).warnings == ()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    assert any("own lm_head.weight" in w for w in look(str(folder)).warnings)
    tensors = load_file(folder / "model.safetensors")
    save_file(
        tensors | {"head.weight": tensors.pop("lm_head.weight")}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps(config))
    assert look(str(folder)).warnings == (), "DeepSeek-V4 has it under this name"


def test_a_reward_model_has_no_output_layer(model: Path) -> None:
    """As a judge or the beginning of a critic it is whole; it is no policy."""
    config = json.loads((model / "config.json").read_text())
    kind = {"architectures": ["LlamaForSequenceClassification"], "tie_word_embeddings": False}
    (model / "config.json").write_text(json.dumps(config | kind))
    assert look(str(model)).warnings == ()
    assert "is a reward model" in errors(run(model))


def test_a_hub_id_is_the_folder_in_the_cache(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    repo = tmp_path / "hub" / "models--Some--Model"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("abc")
    (repo / "snapshots").mkdir()
    folder = str(model.rename(repo / "snapshots" / "abc"))
    report = run(
        "Some/Model", "model.tokenizer_path=Some/Model", "model.critic_model_path=Some/Model"
    )
    assert report.plan is not None, errors(report)
    learner = report.plan.learner
    engine = report.plan.engines[0]
    named = {
        learner.model_path,
        learner.tokenizer_path,
        learner.critic.model_path,
        engine.model_path,
        engine.tokenizer_path,
    }
    assert named == {folder}
    assert "neither a folder nor a model in the local hub cache" in errors(run("Some/Other"))


def test_header(model: Path) -> None:
    assert read_header(model / "model.safetensors")["model.norm.weight"] == ("F32", (4,))


def test_no_chat_template(model: Path) -> None:
    (model / "tokenizer_config.json").write_text("{}")
    assert "has no chat template" in errors(run(model))
    report = run(model, "model.custom_chat_template='{{ messages[0].content }}!'")
    assert report.tasksets[0].rows[0].prompt == "0+0?!"
    assert (
        report.plan is not None
        and report.plan.learner.chat_template == "{{ messages[0].content }}!"
    ), "exports have it"
    assert "the chat template does not work" in errors(
        run(model, "model.custom_chat_template='{{ messages[0'")
    )


def test_chat_templates_cannot_reach_python(model: Path) -> None:
    report = run(
        model, "model.custom_chat_template=\"{{ ''.__class__.__mro__[1].__subclasses__() }}\""
    )
    assert "the chat template does not work" in errors(report) and "SecurityError" in errors(report)


def test_too_long_for_the_model(model: Path) -> None:
    assert "the model knows 512 positions; lower it, or max_prompt_tokens" in errors(
        run(model, "model.max_prompt_tokens=600")
    )


# ---------------------------------------------------------------- the command

COMMAND = [sys.executable, "-X", "importtime", "-m", "rft", "check", "--config"]


def command(*arguments: str) -> tuple[int, str, str, float]:
    """The last is processor seconds: what a person waits for on an idle machine, and the same on a
    busy one.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return done.returncode, done.stdout, done.stderr, seconds


@pytest.mark.e2e
def test_command_on_a_wrong_file_is_quick_and_light() -> None:
    runs = [command(str(GOOD.parent / "bad" / "unknown_key.yaml")) for _ in range(3)]
    code, out, err, _ = runs[0]
    assert code == 2
    assert "buffer.batch_sise: unknown key.  Did you mean buffer.batch_size?" in out
    assert "error(s); plugins, data and model were not checked yet" in out
    for heavy in ("numpy", "torch", "transformers", "ray", "datasets"):
        assert f" {heavy}\n" not in err, f"{heavy} was imported"
    assert min(r[3] for r in runs) < 1.5


@pytest.mark.e2e
def test_command_on_a_good_file(model: Path) -> None:
    given = [
        str(GOOD / "short.yaml"),
        f"model.model_path={model}",
        f"{TASKSET}.path={GOOD.parent / 'rows.jsonl'}",
    ]
    code, out, err, seconds = command(*given)
    assert code == 0, out + err
    for text in (
        "4 tasks, 32 answers",
        "on-policy",
        "gold answer '0', reward 1",
        "is fine",
        "--all",
    ):
        assert text in out
    assert len(out.splitlines()) <= 40
    for heavy in ("torch", "transformers", "ray"):
        assert f" {heavy}\n" not in err, f"{heavy} was imported"
    assert seconds < 6
    code, out, _, _ = command(*given, "--all")
    assert code == 0 and all(text in out for text in ("trainer 0", "override", "line 1"))
    code, out, _, _ = command(*given, "--json")
    assert code == 0 and set(json.loads(out)) >= {"ok", "errors", "warnings", "plan"}


def test_command_gives_errors_as_json() -> None:
    code, out, _, _ = command(
        str(GOOD.parent / "bad" / "negative_lr.yaml"), "--json", "--schema-only"
    )
    found = json.loads(out)
    assert code == 2 and found["ok"] is False and found["plan"] is None
    assert found["errors"] == [
        {
            "key": "algorithm.optimizer.lr",
            "given": -1e-06,
            "message": "given -1e-06; must be greater than 0  (line 10)",
        }
    ]


@pytest.mark.e2e
def test_command_with_declared_gpus_on_a_machine_without(model: Path) -> None:
    given = [
        str(GOOD / "short.yaml"),
        "cluster.gpu_per_node=8",
        "cluster.node_num=1",
        "explorer.rollout_model.engine_num=2",
        "--schema-only",
    ]
    code, out, _, _ = command(*given, "--all")
    assert code == 0 and "engine 1" in out and "trainer 5" in out and "node 0, 1 GPU(s)" in out


WRITES = """
class Greedy:
    gives = ("info.baseline_reward", "info.room")

    async def run(self, task, ctx):
        await ctx.chat(task.chat())
        return ctx.transcript(info={"baseline_reward": 0.5, "room": 1})
"""


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ("algorithm_type=gigpo",),
            r'gigpo reads info\["env_state_hash"\] of every experience.*math_workflow.*`gives = '
            r'\("info',
        ),
        (
            ("algorithm_type=gigpo", "advantage_fn_args.env_state_hash_key=place"),
            r'info\["place"\]',
        ),
        (
            ("algorithm_type=on_policy_distill",),
            "on_policy_distill reads teacher_logprobs of every experience, but nothing declares it",
        ),
        (
            ("advantage_fn=jsd",),
            r'jsd reads teacher_logprobs of every experience.*`gives = \("teacher_logprobs",\)`',
        ),
    ],
)
def test_what_nobody_provides_is_refused(
    model: Path, overrides: tuple[str, ...], says: str
) -> None:
    (error,) = run(model, *(f"algorithm.{o}" for o in overrides)).errors
    assert error.key == "algorithm.advantage_fn" and re.search(says, error.message), error.message


@pytest.mark.parametrize(
    "ranks",
    [
        "class Ranks:\n    whole_group = True\n\n    def __call__(self, task, transcripts):\n      "
        "  return [1.0] * len(transcripts)\n",
        "def Ranks(task, transcripts):\n    return [1.0] * len(transcripts)\n\nRanks.whole_group = "
        "True\n",
    ],
    ids=["class", "function"],
)
def test_a_greedy_baseline_needs_rewards_of_single_runs(
    model: Path, tmp_path: Path, ranks: str
) -> None:
    file = tmp_path / "ranks.py"
    file.write_text(ranks)
    given = (f"buffer.explorer_input.default_reward_fn_type={file}:Ranks",)
    assert "this algorithm takes the reward of a greedy run" in errors(
        run(model, "algorithm.algorithm_type=remax", *given)
    )
    assert run(model, "algorithm.algorithm_type=rloo", *given).ok


def test_a_greedy_baseline_is_of_whole_runs(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "steps.py"
    code = "class Steps(StepWiseWorkflow):\n    def react(self, answer):\n        return None\n"
    file.write_text(f"from rft.workflow.turns import StepWiseWorkflow\n\n\n{code}")
    given = (
        "algorithm.algorithm_type=remax",
        f"buffer.explorer_input.default_workflow_type={file}:Steps",
    )
    assert "rows of " in errors(run(model, *given)) and "write credit: run" in errors(
        run(model, *given)
    )
    whole = ("buffer.explorer_input.taskset.workflow_args={credit: run}",)
    assert "write credit: run" not in errors(run(model, *given, *whole))


def test_a_workflow_says_what_it_provides(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "flows.py"
    file.write_text(WRITES)
    flow = f"buffer.explorer_input.default_workflow_type={file}:Greedy"
    assert run(model, "algorithm.algorithm_type=remax").ok, "the explorer plays the greedy run"
    gigpo = (
        "algorithm.algorithm_type=gigpo",
        "algorithm.advantage_fn_args.env_state_hash_key=room",
    )
    assert run(model, flow, *gigpo).ok
    assert run(model, "algorithm.algorithm_type=gigpo", "algorithm.advantage_fn_args.omega=0.0").ok
    assert not run(model, *gigpo).ok


def test_what_the_file_gets_wrong_does_not_hide_what_is_missing(tmp_path: Path) -> None:
    """One round: a contradiction in the file, a model that is not there and a taskset that is not
    there.
    """
    gone = tmp_path / "gone"
    report = run(gone, "trainer.param_dtype=bfloat16", f"{TASKSET}.path={tmp_path / 'no.jsonl'}")
    assert {"trainer.param_dtype", "model.model_path", f"{TASKSET}.path"} <= {
        e.key for e in report.errors
    }
    alone = run(
        gone,
        "trainer.param_dtype=bfloat16",
        f"{TASKSET}.path={tmp_path / 'no.jsonl'}",
        schema_only=True,
    )
    assert [e.key for e in alone.errors] == ["trainer.param_dtype"]


def test_what_is_wrong_in_the_file_is_not_complained_of_twice(model: Path) -> None:
    report = run(model, "model.max_prompt_tokens=4000", "model.max_model_len=100")
    assert {e.key for e in report.errors} == {"model.max_prompt_tokens"}


def test_a_reward_that_is_never_used_is_refused(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "flows.py"
    file.write_text(
        "from rft import EnvWorkflow\n\nclass Game(EnvWorkflow):\n    scores_itself = True\n"
    )
    flow = f"buffer.explorer_input.default_workflow_type={file}:Game"
    reward = "buffer.explorer_input.default_reward_fn_type=exact_answer"
    (error,) = run(model, flow, reward).errors
    assert (
        "scores its runs itself, so this reward would never be used" in error.message
        and "default_reward_fn_type" in error.key
    )


SIMPLE = "buffer.explorer_input.default_workflow_type=simple_workflow"
REWARD = "buffer.explorer_input.default_reward_fn_type"


def test_a_taskset_that_nothing_scores_is_refused(model: Path, tmp_path: Path) -> None:
    (error,) = run(model, SIMPLE, f"{REWARD}=null").errors
    assert error.key == f"{TASKSET}.default_reward_fn_type" and "every run would fail" in str(error)
    assert run(model, SIMPLE, f"{REWARD}=exact_answer").ok
    scoring = tmp_path / "own.py"
    scoring.write_text(
        "from workflows.chat import SimpleWorkflow\n\nclass Own(SimpleWorkflow):\n"
        "    async def run(self, task, ctx):\n        return ctx.transcript()\n"
    )
    own = f"buffer.explorer_input.default_workflow_type={scoring}:Own"
    assert run(model, own, f"{REWARD}=null").ok, "its own run may score"


def test_golds_that_cannot_be_scored_are_refused(model: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "copy 1", "answer": null}\n' * 8)
    report = run(model, SIMPLE, f"{REWARD}=exact_answer", f"{TASKSET}.path={rows}")
    assert any("has no truth" in str(e) for e in report.errors)


@pytest.mark.parametrize(("given", "warns"), [("2 and 3", True), ("", False)])
def test_a_column_of_alpaca_that_nobody_reads_is_told(
    model: Path, tmp_path: Path, given: str, warns: bool
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"instruction": "Add.", "input": given, "output": "5"}) + "\n")
    form = f"{TASKSET}.format={{prompt_key: instruction, response_key: output}}"
    report = run(model, f"{TASKSET}.path={rows}", form)
    assert any("as Alpaca's have" in w for w in report.warnings) is warns


def test_a_named_column_of_tools_that_no_row_has_is_refused(model: Path) -> None:
    (error,) = run(model, f"{TASKSET}.format.tools_key=functions").errors
    assert error.key == f"{TASKSET}.format.tools_key" and "no row has it" in str(error)
    assert run(model, f"{TASKSET}.format.tools_key=tools").ok


def test_an_overlong_penalty_that_ends_a_run_is_refused(model: Path) -> None:
    """Its own default is longer than the answers of a small model."""
    args = f"{TASKSET}.reward_fn_args"
    (error,) = run(model, f"{args}={{enable_overlong_penalty: true}}").errors
    assert (
        error.key == f"{args}.cache_length" and "longer than the longest answer (" in error.message
    )
    assert run(model, f"{args}={{enable_overlong_penalty: true, cache_length: 1}}").ok
    part = "{reward: exact_answer, args: {enable_overlong_penalty: true, cache_length: CACHE}}"
    parts = [
        f"{args}={{rewards: {{a: {{reward: exact_answer}}, b: {part.replace('CACHE', n)}}}}}"
        for n in ("4096", "1")
    ]
    whole = f"{TASKSET}.default_reward_fn_type=weighted_reward"
    (error,) = run(model, whole, parts[0]).errors
    assert (
        error.key == f"{args}.rewards.b.args.cache_length"
        and "longer than the longest answer (" in error.message
    )
    assert run(model, whole, parts[1]).ok


@pytest.mark.parametrize(
    ("answer", "reward", "why"),
    [
        (
            "1 or 2",
            "exact_answer",
            "row 0: the truth of task sums[0] is '1 or 2'; it must be one number",
        ),
        (
            None,
            "exact_answer",
            "row 0: task sums[0] has no truth; name its column in format.response_key",
        ),
        (
            "",
            "exact_answer, reward_fn_args: {compare: text}",
            "row 0: the truth of task sums[0] is ''; it must be a text",
        ),
    ],
)
def test_a_truth_that_cannot_be_read_is_an_error(
    model: Path, tmp_path: Path, answer: str | None, reward: str, why: str
) -> None:
    """G1: a run of such rows would end after its first groups."""
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "1+1?", "answer": answer}) + "\n")
    name, _, args = reward.partition(", reward_fn_args: ")
    more = [f"{TASKSET}.reward_fn_args={args}"] if args else []
    report = run(
        model,
        f"{TASKSET}.path={tmp_path}/rows.jsonl",
        "buffer.batch_size=1",
        f"{TASKSET}.default_reward_fn_type={name}",
        *more,
    )
    assert (
        not report.ok
        and why in errors(report)
        and "Correct the row, or leave it out" in errors(report)
    )


def test_a_date_of_a_table_is_compared_as_text(model: Path, tmp_path: Path) -> None:
    import datetime

    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({"question": ["1?"], "answer": [datetime.datetime(2020, 1, 2)]})
    pq.write_table(table, tmp_path / "dates.parquet")
    text = [
        f"{TASKSET}.default_reward_fn_type=exact_answer",
        f"{TASKSET}.reward_fn_args={{compare: text}}",
    ]
    report = run(model, f"{TASKSET}.path={tmp_path}/dates.parquet", "buffer.batch_size=1", *text)
    assert report.ok and "gold answer" not in "".join(report.warnings)


def test_prompts_that_are_cut_do_not_fail(model: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"question": "1 " * 200, "answer": "2"}) + "\n")
    given = [
        f"{TASKSET}.path={rows}",
        "buffer.batch_size=1",
        "model.enable_prompt_truncation=false",
    ]
    report = run(model, *given, "model.prompt_truncation_side=left")
    assert report.ok, errors(report)
    assert any(
        "1 of 1 rows inspected" in w and "they are cut (prompt_truncation_side: left)" in w
        for w in report.warnings
    )


def test_keys_of_other_sources_do_nothing_to_a_file(model: Path) -> None:
    report = run(
        model, f"{TASKSET}.split=test", f"{TASKSET}.args={{size: 3}}", f"{TASKSET}.subset_name=main"
    )
    for name in ("split", "subset_name", "args"):
        assert any(w.startswith(f"{TASKSET}.{name} has no effect: ") for w in report.warnings), (
            report.warnings
        )
    assert not any("has no effect" in w for w in run(model, f"{TASKSET}.split=train").warnings)


def test_a_buffer_that_cannot_be_called_so_is_told_by_its_key(model: Path) -> None:
    buffer = "buffer.trainer_input.experience_buffer"
    (error,) = run(model, f"{buffer}.name=my-buffer").errors
    assert error.key == f"{buffer}.name" and "is no name for a buffer" in error.message


def test_a_seed_makes_the_runs_of_a_task_the_same(model: Path) -> None:
    seed = f"{TASKSET}.rollout_args.seed=7"
    assert f"{TASKSET}.rollout_args.seed: gives all 4 runs of a task the same answer" in errors(
        run(model, seed, f"{TASKSET}.repeat_times=4")
    )
    assert run(model, seed, f"{TASKSET}.repeat_times=1").ok
    held_out = (
        f"{{name: h, path: {GOOD.parent / 'rows.jsonl'}, repeat_times: 4, rollout_args: "
        f"{{seed: 7}}, format: "
    )
    held_out += "{prompt_key: question, response_key: answer}}"
    report = run(model, f"buffer.explorer_input.eval_tasksets=[{held_out}]")
    assert any("rollout_args.seed gives the same answer 4 times" in w for w in report.warnings), (
        report.warnings,
        errors(report),
    )


def test_a_reward_that_is_made_ready_by_the_run_is_neither_tried_nor_closed(
    model: Path, tmp_path: Path
) -> None:
    plugin = tmp_path / "client.py"
    plugin.write_text(
        "class Client:\n"
        "    async def prepare(self, models): self.client = {'open': True}\n"
        "    async def close(self): self.client.clear()\n"
        "    def __call__(self, task, transcript): return float(self.client['open'])\n"
    )
    report = run(model, f"{TASKSET}.default_reward_fn_type={plugin}:Client")
    assert report.ok and report.warnings == (), (errors(report), report.warnings)


def test_a_reward_that_cannot_be_made_is_told_by_its_key(model: Path, tmp_path: Path) -> None:
    plugin = tmp_path / "table.py"
    plugin.write_text(
        "class Table:\n    def __init__(self): {}['x']\n    def __call__(self, task, transcript): "
        "return 1.0\n"
    )
    (error,) = run(model, f"{TASKSET}.default_reward_fn_type={plugin}:Table").errors
    assert error.key == f"{TASKSET}.reward_fn_args" and f'File "{plugin}", line 2' in error.message


def test_tools_that_the_chat_template_does_not_show_are_a_warning(
    model: Path, tmp_path: Path
) -> None:
    (tmp_path / "shop.py").write_text("def price(item: str): return 19\n")
    given = (
        f"{TASKSET}.default_workflow_type=tool_workflow",
        f"{TASKSET}.workflow_args.tools=[{tmp_path}/shop.py:price]",
    )

    def warned(*more: str) -> bool:
        report = run(model, *given, *more)
        assert report.ok, errors(report)
        return any(
            "does not show tools, so the model is not told of them" in w for w in report.warnings
        )

    assert warned() and not warned(f"{TASKSET}.workflow_args.tools_in=system")
    (tmp_path / "tools.jinja").write_text("{% if tools %}{{ tools }}{% endif %}" + TEMPLATE)
    assert not warned(f"model.custom_chat_template={tmp_path}/tools.jinja")


TEMPLATES = Path(__file__).parents[2] / "data" / "chat_templates"
PARSER = ("explorer.rollout_model.tool_call_parser=hermes",)
AS_USER = (f"{TASKSET}.workflow_args.result_role=user",)


@pytest.mark.parametrize(
    ("template", "more", "why"),
    [
        ("phi3", (), "does not write message 2 .role tool: 'A reply.'.*result_role: user"),
        ("phi3", AS_USER, ""),
        ("gemma4", (), "does not write message 2 .*tool_call_parser"),
        ("gemma4", PARSER, ""),
        ("gpt_oss", (), "no previous assistant message with a tool call.*tool_call_parser"),
        ("gpt_oss", PARSER, ""),
        ("gemma3", (), "roles must alternate.*result_role: user"),
        ("gemma3", AS_USER, ""),
        ("qwen3", (), ""),
        (
            "mistral",
            (*AS_USER, f"{TASKSET}.format.system_prompt='Be short.'"),
            "writes message 0 .* again",
        ),
        ("gemma2", (f"{TASKSET}.format.system_prompt='Be short.'",), "System role not supported"),
        ("smollm3", (), ""),
    ],
)
def test_a_template_that_leaves_out_messages_is_refused(
    model: Path, tmp_path: Path, template: str, more: tuple[str, ...], why: str
) -> None:
    """Finding M2: with the way out, before the run."""
    (tmp_path / "shop.py").write_text("def price(item: str): return 19\n")
    path = f"model.custom_chat_template={TEMPLATES / template}.jinja"
    tools = (
        f"{TASKSET}.default_workflow_type=tool_workflow",
        f"{TASKSET}.workflow_args.tools=[{tmp_path}/shop.py:price]",
    )
    report = run(model, path, *tools, *more)
    assert report.ok is not bool(why), errors(report)
    assert re.search(why, errors(report), re.DOTALL)


def test_a_row_that_the_template_leaves_out_is_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "users.jinja").write_text(
        TEMPLATE.replace("in messages", "in messages if m.role == 'user'")
    )
    report = run(
        model,
        f"model.custom_chat_template={tmp_path}/users.jinja",
        f"{TASKSET}.format.system_prompt='Be short.'",
    )
    assert re.search(
        "row 0: the chat template does not write message 0 .role system: 'Be short.'",
        errors(report),
    )


def test_a_tracker_that_is_not_installed_is_told_with_all_else(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rft.monitor.trackers.Mlflow.requires", ("no_such_package",))
    report = run(model, "monitor.monitor_type=mlflow", f"{TASKSET}.path=none.jsonl")
    assert "monitor.monitor_type: monitor 'mlflow' needs no_such_package" in errors(
        report
    ) and "none.jsonl" in errors(report)
    assert "unknown argument 'nope' for monitor 'wandb'" in errors(
        run(model, "monitor.monitor_type=wandb", "monitor.monitor_args.nope=1")
    )
    (need,) = [
        n
        for n in run(model, "monitor.monitor_type=mlflow", schema_only=True).needs
        if n.kind == "package"
    ]
    assert "pip install no_such_package" in need.message


WORKFLOWS = """
from rft import Workflow, register

@register.workflow("lacks_a_library")
class Lacks(Workflow):
    needs = {"no_such_library": "agent"}
    async def run(self, task, ctx): ...

@register.workflow("takes_nothing")
class TakesNothing:
    async def run(self): ...

@register.workflow("takes_all")
class TakesAll:
    @staticmethod
    async def run(task, ctx, *more): ...
"""


def test_workflows_that_cannot_be_played_are_told_beside_other_errors(
    model: Path, tmp_path: Path
) -> None:
    (tmp_path / "flows.py").write_text(WORKFLOWS)

    def told(name: str) -> str:
        flow = f"{TASKSET}.default_workflow_type={tmp_path}/flows.py:{name}"
        return errors(run(model, flow, "buffer.explorer_input.eval_tasksets=[{path: none.jsonl}]"))

    assert "needs no_such_library: pip install 'rft-platform[agent]'" in told(
        "Lacks"
    ) and "none.jsonl" in told("Lacks")
    assert "run(self) must take (self, task, ctx)" in told("TakesNothing")
    assert "must take" not in told("TakesAll")


def test_a_program_may_be_on_the_machines_of_the_explorers(model: Path) -> None:
    agent = [
        f"{TASKSET}.default_workflow_type=agent_command_workflow",
        f"{TASKSET}.workflow_args.command=[no-such-agent]",
    ]
    (error,) = run(model, *agent).errors
    assert "agent_command_workflow': 'no-such-agent' is no program here" in error.message
    report = run(model, *agent, "cluster.ray_address=192.0.2.1:6379")
    assert report.ok, errors(report)
    (warning,) = [w for w in report.warnings if "no-such-agent" in w]
    assert warning.endswith("Explorers that run on other machines need it there")


def test_tools_whose_calls_nobody_reads(model: Path, tmp_path: Path) -> None:
    tool = {
        "type": "function",
        "function": {
            "name": "f",
            "description": "",
            "parameters": {"type": "object", "properties": {}},
        },
    }
    rows = [{"question": f"{i}", "answer": f"{i}", "tools": [tool]} for i in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))

    def warned(*changes: str) -> bool:
        report = run(model, f"{TASKSET}.path={tmp_path}/rows.jsonl", *changes)
        return any("calls of them stay text in the answers" in w for w in report.warnings)

    assert warned() and not warned("explorer.rollout_model.tool_call_parser=hermes")
    assert not warned(f"{TASKSET}.default_workflow_type=tool_workflow")


def test_model_files_that_nothing_could_be_built_of(model: Path) -> None:
    (model / "tokenizer.json").write_text('{"model": 7}')
    assert "tokenizer.json is no tokenizer" in errors(run(model))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(
        json.dumps({k: v for k, v in config.items() if k != "model_type"})
    )
    assert "has model_type None, which the installed transformers does not know" in errors(
        run(model)
    )


def test_a_file_in_place_of_the_runs_folder(model: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    assert f"{tmp_path}/taken is no folder" in errors(
        run(model, f"checkpoint_root_dir={tmp_path}/taken/runs")
    )
    (error,) = run(model, f"monitor.eval_dump_dir={tmp_path}/taken").errors
    assert error.key == "monitor.eval_dump_dir"


def test_names_that_lead_nowhere_are_told_by_their_keys(model: Path) -> None:
    assert [e.key for e in run(model, "algorithm.advantage_fn=nosuch").errors] == [
        "algorithm.advantage_fn"
    ]
    assert [e.key for e in run(model, "model.tokenizer_path=/nosuch").errors] == [
        "model.tokenizer_path"
    ]
    (error,) = run(model, f"{TASKSET}.path=https://127.0.0.1/rows.jsonl").errors
    assert "https://127.0.0.1/rows.jsonl is an address; download it" in error.message
