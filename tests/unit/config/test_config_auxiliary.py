"""explorer.auxiliary_models in the plan: names, what is shared, what is inherited, and what is
refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rft.config.load import from_dict
from rft.config.plan import Facts, Plan
from rft.config.resolve import resolve
from rft.errors import ConfigError
from rft.launch.cluster import placement
from rft.preflight.check import check
from rft.testing import tiny


def config(*models: dict[str, Any], model: str = "m", **more: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "name": "run",
        "seed": 5,
        "model": {"model_path": model, "max_prompt_tokens": 60, "max_response_tokens": 30},
        "algorithm": {"repeat_times": 2},
        "buffer": {
            "batch_size": 4,
            "total_steps": 2,
            "explorer_input": {
                "default_workflow_type": "simple_workflow",
                "default_reward_fn_type": "exact_answer",
                "taskset": {"path": "rft.testing.tiny:copy_tasks"},
            },
        },
        "explorer": {
            "auxiliary_models": list(models),
            "rollout_model": {"engine_type": "transformers"},
        },
    }
    return {**base, **more}


def plan(*models: dict[str, Any], gpus: int = 0) -> Plan:
    return resolve(from_dict(config(*models)), Facts(cpus=4, gpus=gpus))


def test_names_order_and_settings() -> None:
    judge = {
        "model_path": "J",
        "max_model_len": 400,
        "chat_template": "{{ messages }}",
        "enable_thinking": False,
        "seed": 9,
    }
    made = plan(
        judge,
        {"name": "rm", "model_path": "R", "task": "score", "engine_num": 2, "max_concurrent": 7},
    ).auxiliary
    assert [m.names for m in made] == [("auxiliary_model_0",), ("rm",)], (
        "N20: its engine was aux-auxiliary_model_0-0"
    )
    (j,), r = made[0].engines, made[1].engines
    assert (j.name, j.max_model_len, j.chat_template, j.chat_template_kwargs, j.seed) == (
        "auxiliary_model_0-0",
        400,
        "{{ messages }}",
        {"enable_thinking": False},
        9,
    )
    assert j.fixed_weights and j.max_prompt_tokens is None and j.task == "generate"
    assert [e.name for e in r] == ["aux-rm-0", "aux-rm-1"] and [e.seed for e in r] == [5, 6]
    assert r[0].task == "score" and r[0].max_model_len == 90 and made[1].max_concurrent == 7


def test_equal_models_are_started_once() -> None:
    made = plan(
        {"name": "a", "model_path": "J"},
        {"name": "b", "model_path": "J"},
        {"model_path": "K"},
        {"name": "a", "model_path": "J"},
    )
    assert [m.names for m in made.auxiliary] == [("a", "b"), ("auxiliary_model_2",)]
    on_gpus = plan({"name": "a", "model_path": "J"}, {"name": "b", "model_path": "J"}, gpus=8)
    assert on_gpus.cluster.auxiliary == (1,) and on_gpus.learner.world_size == 6
    with pytest.raises(
        ConfigError,
        match=r"auxiliary_models\[1\].name: is the name of explorer.auxiliary_models\[0\] too",
    ):
        plan({"name": "a", "model_path": "J"}, {"name": "a", "model_path": "K"})


EMA = {"name": "ema", "model_path": "m", "moving_average": 0.99}


def test_a_moving_average_of_the_policy() -> None:
    made = plan({"model_path": "J"}, EMA, {**EMA, "name": "same"})
    assert [m.decay for m in made.auxiliary] == [None, 0.99]
    assert made.auxiliary[1].names == ("ema", "same") and made.averaged == 1
    assert not made.auxiliary[1].engines[0].fixed_weights
    assert made.learner.average_decay == 0.99
    other = plan({"model_path": "J"})
    assert other.averaged is None and other.learner.average_decay is None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_path": "J"}, "is of the policy's weights; write model_path: ${model.model_path}"),
        ({"engine_type": "scripted"}, "is served by engine_type vllm or transformers"),
        ({"task": "score"}, "is served by engine_type vllm or transformers with task: generate"),
        ({"moving_average": 1.0}, "less than 1"),
    ],
)
def test_what_no_moving_average_can_be(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as e:
        plan({**EMA, **changes})
    assert says in str(e.value)


def test_the_trainer_keeps_one_moving_average() -> None:
    with pytest.raises(ConfigError, match=r"serve moving averages of 0.9, 0.99; .* keeps one"):
        plan(EMA, {**EMA, "name": "fast", "moving_average": 0.9})


def test_their_seats() -> None:
    made = plan(
        {"model_path": "J", "tensor_parallel_size": 2, "data_parallel_size": 2},
        {"model_path": "K", "device": "cpu"},
        gpus=8,
    )
    assert made.cluster.auxiliary == (2, 2) and made.learner.world_size == 3
    seats = placement(
        made.engines,
        made.learner,
        [8],
        [e.gpus for m in made.auxiliary for e in m.engines if e.gpus],
    )
    assert [(s.role, s.gpus) for s in seats[:3]] == [
        ("engine", 1),
        ("auxiliary", 2),
        ("auxiliary", 2),
    ]


def test_servers() -> None:
    made = plan(
        {
            "name": "api",
            "model_path": "gpt",
            "engine_type": "external",
            "request_timeout": 9,
            "external_model_config": {
                "base_url": "http://localhost/v1",
                "header_envs": {"x": "Y"},
                "requests_per_minute": 60,
            },
        },
        {
            "name": "same",
            "model_path": "gpt",
            "external_model_config": {"enable": True, "model_name": "other"},
        },
        gpus=8,
    )
    first, second = (m.engines[0] for m in made.auxiliary)
    assert first.external is not None and second.external is not None
    assert (first.external.model_name, second.external.model_name) == ("gpt", "other")
    assert (
        first.request_timeout_s == 9
        and first.external.requests_per_minute == 60
        and made.cluster.auxiliary == ()
    )
    told = plan(
        {"model_path": "gpt", "engine_type": "external", "tensor_parallel_size": 4}
    ).warnings
    assert any("tensor_parallel_size 4: no effect; the server decides this" in w for w in told)


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ({"model_path": "J", "task": "score", "engine_type": "external"}, "gives no scores"),
        ({"model_path": "J", "task": "score", "engine_type": "scripted"}, "writes texts"),
        (
            {"model_path": "J", "task": "score", "reasoning_parser": "qwen3"},
            "has no answer to parse",
        ),
        (
            {"model_path": "J", "tool_call_parser": "openai"},
            "openai reads no texts in vLLM",
        ),
        (
            {"model_path": "J", "reasoning_parser": "openai_gptoss"},
            "openai_gptoss reads no texts in vLLM",
        ),
        (
            {"model_path": "J", "engine_type": "transformers", "pipeline_parallel_size": 2},
            "knows 1 only",
        ),
        (
            {
                "model_path": "J",
                "engine_type": "external",
                "external_model_config": {"headers": {"a": "1"}, "header_envs": {"a": "A"}},
            },
            "also stand in header_envs",
        ),
    ],
)
def test_what_is_refused(model: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        plan(model)


def test_a_server_is_not_a_policy() -> None:
    values = config()
    values["explorer"]["rollout_model"]["engine_type"] = "external"
    with pytest.raises(
        ConfigError, match=r"rollout_model.engine_type: a server returns no token ids"
    ):
        resolve(from_dict(values), Facts(cpus=2, gpus=0))


def test_check_looks_at_their_files(tmp_path: Path, tiny_model: Path) -> None:
    import yaml

    rm = tiny.make(tmp_path / "rm", labels=1)

    def report(*models: dict[str, Any], reward: str = "exact_answer") -> Any:
        path = tmp_path / "run.yaml"
        values = config(*models, model=str(tiny_model), checkpoint_root_dir=str(tmp_path / "runs"))
        values["buffer"]["explorer_input"]["default_reward_fn_type"] = reward
        path.write_text(yaml.safe_dump(values))
        return check(path, facts=Facts(cpus=2, gpus=0))

    good = report(
        {"model_path": str(rm), "task": "score", "engine_type": "transformers"},
        {"name": "t", "model_path": str(tiny_model)},
    )
    assert good.ok, good.errors
    sizes = {r.role: r.nbytes for r in good.memory}
    assert sizes["auxiliary_model_0-0"] > 600 << 20 and sizes["aux-t-0"] > 1 << 30
    for model, text in (
        ({"model_path": str(rm)}, "is generate, but the model is a LlamaForSequenceClassification"),
        (
            {"model_path": str(tiny_model), "task": "score"},
            "is score, but the model is a LlamaForCausalLM",
        ),
        ({"model_path": str(tiny_model), "max_model_len": 4000}, "the model knows 512 positions"),
        ({"model_path": str(tmp_path / "none")}, "auxiliary model auxiliary_model_0"),
    ):
        assert any(text in str(e) for e in report(model).errors), (text, report(model).errors)
    scores = {"model_path": str(rm), "task": "score", "engine_type": "transformers"}
    writes = {"model_path": str(tiny_model), "engine_type": "transformers"}
    assert report(scores, reward="reward_model").ok
    for model, reward, text in (
        (
            writes,
            "reward_model",
            "asks auxiliary model auxiliary_model_0, which is of task: generate; write task: score",
        ),
        (
            scores,
            "rubric_judge",
            "asks auxiliary model auxiliary_model_0, which is of task: score; write task: generate",
        ),
    ):
        (error,) = report(model, reward=reward).errors
        assert text in error.message and error.key.endswith(
            ("reward_fn_args.model", "reward_fn_args.judge")
        ), error


def roomy(folder: Path) -> dict[str, Any]:
    """A judge with room for its own question."""
    path = folder / "judge"
    if not path.exists():
        tiny.make(path, max_position_embeddings=4096)
    return {"model_path": str(path), "engine_type": "transformers", "max_model_len": 4000}


ASKS = "{delimit('answer', case.answer)} {delimit.ask(score=self.scale)}"
_JUDGE = """
from rft import Judge
class Mine(Judge):
    def prompt(self, case, delimit):
        return f"How good? {QUESTION}"
"""


@pytest.mark.parametrize(
    ("question", "error", "warning"),
    [
        (ASKS, "", ""),
        (
            "{case.answer} {delimit.ask(score=self.scale)}",
            "shows an answer outside of the delimiters",
            "",
        ),
        ("{delimit('answer', case.answer)}", "asks for no verdict; end it with delimit.ask", ""),
        (
            "{delimit('answer', case.awnser)}",
            "",
            "raised AttributeError: 'JudgeCase' object has no attribute 'awnser'",
        ),
    ],
)
def test_a_judge_whose_question_cannot_be_asked(
    tmp_path: Path, tiny_model: Path, question: str, error: str, warning: str
) -> None:
    import yaml

    (tmp_path / "mine.py").write_text(_JUDGE.replace("{QUESTION}", question))
    judge = roomy(tmp_path)
    values = config(judge, model=str(tiny_model), checkpoint_root_dir=str(tmp_path / "runs"))
    values["buffer"]["explorer_input"]["default_reward_fn_type"] = f"{tmp_path}/mine.py:Mine"
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    found = check(tmp_path / "run.yaml", facts=Facts(cpus=2, gpus=0))
    assert [error in e.message for e in found.errors] == [True] * bool(error), found.errors
    assert (
        any(warning in w for w in found.warnings)
        if warning
        else not any("mine.py" in w for w in found.warnings)
    )


@pytest.mark.parametrize(("room", "fits"), [(None, False), (90, False), (4000, True)])
def test_a_question_that_its_judge_has_no_room_for_is_refused(
    tmp_path: Path, tiny_model: Path, room: int | None, fits: bool
) -> None:
    """The frame of a judge alone has 260 tokens, the policy's context 152."""
    import yaml

    judge = roomy(tmp_path) | {"max_model_len": room}
    values = config(judge, model=str(tiny_model), checkpoint_root_dir=str(tmp_path / "runs"))
    (tmp_path / "mine.py").write_text(_JUDGE.replace("{QUESTION}", ASKS))
    part = {"reward": f"{tmp_path}/mine.py:Mine"}
    tasksets = values["buffer"]["explorer_input"]
    tasksets["default_reward_fn_type"] = "weighted_reward"
    tasksets["taskset"]["reward_fn_args"] = {"rewards": {"judge": part}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    found = check(tmp_path / "run.yaml", facts=Facts(cpus=2, gpus=0))
    rooms = [e for e in found.errors if "write max_model_len of this model" in e.message]
    assert bool(rooms) is not fits, found.errors


def test_judges_of_one_model_have_the_same_limits(tmp_path: Path, tiny_model: Path) -> None:
    import yaml

    def report(**limits: Any) -> Any:
        judge = roomy(tmp_path)
        values = config(judge, model=str(tiny_model), checkpoint_root_dir=str(tmp_path / "runs"))
        tasksets = values["buffer"]["explorer_input"]
        tasksets |= {
            "default_reward_fn_type": "rubric_judge",
            "taskset": {**tasksets["taskset"], "reward_fn_args": limits},
        }
        tasksets["eval_tasksets"] = [
            {"name": "e", "path": "rft.testing.tiny:copy_tasks", "split": "eval"}
        ]
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump(values))
        return check(path, facts=Facts(cpus=2, gpus=0))

    assert report().ok
    (error,) = report(max_concurrent=3).errors
    assert (
        error.key == "buffer.explorer_input.eval_tasksets[0].reward_fn_args"
        and "max_concurrent (3 and 32)" in error.message
    )
