"""An algorithm that reads what its workflow does not write is refused before anything starts, where
that can be known.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rft.config.context import Problems
from rft.plugins import load_all
from rft.preflight import teacher_checks
from rft.preflight.check import check, load_plan
from rft.taskset.settings import FormatSettings
from tests.helpers import other_tokenizer

TINY = Path(__file__).parents[3] / "examples" / "tiny" / "config.yaml"
TASKSET = "buffer.explorer_input.taskset"
TEACHER = (
    "explorer.auxiliary_models=[{name: teacher, model_path: MODEL, engine_type: transformers}]"
)
WARM = "model.temperature=0.7"
MINE = """
from rft.workflow.base import Workflow


class Mine(Workflow):
    async def run(self, task, ctx):
        await ctx.chat(task.chat())
        ctx.score_step(1.0, env_state_hash="x")
        return ctx.transcript(layout="steps")


class Told(Mine):
    gives = ("info.env_state_hash",)
"""


def errors(tiny_model: Path, *more: str) -> list[str]:
    # those score themselves
    reward = (
        "null" if any(w in o for o in more for w in ("frozen_lake", "taxi")) else "exact_answer"
    )
    options = (
        f"model.model_path={tiny_model}",
        f"buffer.explorer_input.default_reward_fn_type={reward}",
        *(["buffer.explorer_input.eval_tasksets=[]"] if reward == "null" else []),
        *more,
    )
    return [
        str(e)
        for e in check(TINY, tuple(o.replace("MODEL", str(tiny_model)) for o in options)).errors
    ]


@pytest.mark.e2e
@pytest.mark.extra
@pytest.mark.parametrize(
    ("algorithm", "more", "says"),
    [
        (
            "on_policy_distill",
            (),
            "on_policy_distill reads teacher_logprobs of every experience, but nothing declares it",
        ),
        (
            "jsd",
            (f"{TASKSET}.default_workflow_type=frozen_lake_workflow",),
            "a workflow that calls ctx.teach(name)",
        ),
        (
            "jsd",
            (f"{TASKSET}.default_workflow_type=on_policy_distill_workflow",),
            "asks a teacher; name one",
        ),
        (
            "jsd",
            (
                f"{TASKSET}.default_workflow_type=on_policy_distill_workflow",
                f"{TASKSET}.workflow_args.teacher=master",
                TEACHER,
            ),
            "no model has the name of workflow_args.teacher; the models are teacher",
        ),
        ("jsd", (f"{TASKSET}.default_workflow_type=on_policy_distill_workflow", TEACHER), ""),
        ("jsd", (f"{TASKSET}.default_workflow_type=on_policy_distill_workflow", TEACHER, WARM), ""),
        (
            "jsd",
            (
                f"{TASKSET}.default_workflow_type=on_policy_distill_workflow",
                TEACHER.replace("transformers", "vllm"),
                "model.temperature=0.7",
            ),
            "model.temperature: is 0.7 for copy, and a teacher of engine_type vllm has log-probs "
            "at temperature 1 only",
        ),
        ("gigpo", (), 'gigpo reads info["env_state_hash"] of every experience'),
        ("gigpo", ("algorithm.advantage_fn_args.omega=0",), ""),
        ("gigpo", (f"{TASKSET}.default_workflow_type=taxi_workflow",), "layout: steps"),
        (
            "gigpo",
            (
                f"{TASKSET}.default_workflow_type=taxi_workflow",
                f"{TASKSET}.workflow_args={{layout: steps}}",
            ),
            "",
        ),
        ("gigpo", (f"{TASKSET}.default_workflow_type=mine.py:Mine",), "mine.py:Mine"),
        ("gigpo", (f"{TASKSET}.default_workflow_type=mine.py:Told",), ""),
        ("multi_step_grpo", (), ""),
        ("grpo", (), ""),
    ],
)
def test_what_a_workflow_has_to_give(
    algorithm: str,
    more: tuple[str, ...],
    says: str,
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    found: list[Any] = errors(tiny_model, f"algorithm.algorithm_type={algorithm}", *more)
    assert (len(found), says.lower() in str(found).lower()) == (bool(says), True), found


@pytest.mark.extra("migrate")
def test_names_that_are_not_offered_are_told_what_to_do(tiny_model: Path) -> None:
    (error,) = errors(tiny_model, f"{TASKSET}.default_workflow_type=webshop_workflow")
    assert "derive from EnvWorkflow" in error and TASKSET in error


WEIGHTED = (
    f"{TASKSET}.default_reward_fn_type=weighted_reward",
    f"{TASKSET}.reward_fn_args={{rewards: {{exact: {{reward: exact_answer}}}}}}",
)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ((), "algorithm.advantage_fn: reads reward parts, and the reward exact_answer"),
        (WEIGHTED, ""),
        ((*WEIGHTED, "algorithm.advantage_fn_args.weights={exact: 2.0}"), ""),
        (
            (*WEIGHTED, "algorithm.advantage_fn_args.weights={format: 1.0}"),
            "algorithm.advantage_fn_args: format is no part of the reward weighted_reward of "
            "taskset copy, which has exact",
        ),
        (("algorithm.advantage_fn=grpo",), ""),
    ],
)
def test_reward_parts_come_with_the_reward(
    more: tuple[str, ...], message: str, tiny_model: Path
) -> None:
    found = errors(tiny_model, "algorithm.algorithm_type=gdpo", *more)
    assert (len(found), message in str(found)) == (bool(message), True), found


@pytest.mark.extra
@pytest.mark.parametrize(
    ("algorithm", "says"),
    [
        ("remax", "a greedy run of every task, which no client plays"),
        ("on_policy_distill", "reads teacher_logprobs"),
        ("grpo", ""),
    ],
)
def test_a_service_has_what_clients_post(algorithm: str, says: str, tiny_model: Path) -> None:
    found = errors(
        tiny_model,
        "mode=serve",
        f"algorithm.algorithm_type={algorithm}",
        "algorithm.repeat_times=2",
    )
    assert len(found) == bool(says) and all(says in e for e in found), found


DISTILLS = f"{TASKSET}.default_workflow_type=on_policy_distill_workflow"


@pytest.mark.parametrize("same", [True, False])
def test_a_teacher_with_another_tokenizer_is_refused(
    tiny_model: Path, tmp_path: Path, same: bool
) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_model, other)
    if not same:
        file = other / "tokenizer.json"
        tokenizer = json.loads(file.read_text())
        vocab = tokenizer["model"]["vocab"]
        vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
        file.write_text(json.dumps(tokenizer))
    teacher = TEACHER.replace("MODEL", str(other))
    found = errors(tiny_model, "algorithm.algorithm_type=jsd", DISTILLS, teacher)
    assert bool(found) != same and all(
        "auxiliary model teacher has another tokenizer than the policy (token" in text
        and "use a teacher of the policy's family" in text
        for text in found
    ), found


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("algorithm.algorithm_type=jsd",), ""),
        (("algorithm.algorithm_type=on_policy_distill",), ""),
        (("algorithm.algorithm_type=opd_topk",), "distill_top reads the most likely tokens"),
    ],
)
def test_a_teacher_aligned_by_text(
    tiny_model: Path, tmp_path: Path, more: tuple[str, ...], says: str
) -> None:
    other = other_tokenizer.model(tmp_path / "other")
    teacher = TEACHER.replace("MODEL", str(other)).replace("}]", ", alignment: text}]")
    found = errors(tiny_model, DISTILLS, teacher, *more)
    assert bool(found) == bool(says) and (not says or says in str(found)), found


def test_a_teacher_aligned_by_text_reads_no_images(tiny_model: Path) -> None:
    load_all()
    options = [f"model.model_path={tiny_model}", "algorithm.algorithm_type=jsd", DISTILLS]
    teacher = TEACHER.replace("MODEL", str(tiny_model)).replace("}]", ", alignment: text}]")
    _, plan = load_plan(TINY, [*options, teacher])
    (taskset,) = plan.explorer.tasksets
    for column, errors in (("", 0), ("images", 1)):
        problems = Problems()
        shown = replace(taskset, format=FormatSettings(image_key=column))
        teacher_checks.can_score(plan, taskset.workflow, shown, problems)
        assert len(problems.errors) == errors
    assert "reads no images, which" in str(problems.errors[0])


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("engine_type: scripted", "is offered by engine_type vllm or transformers"),
        ("engine_type: transformers, task: score", "with task: generate"),
        ("engine_type: transformers, moving_average: 0.9", "a moving_average of the policy has"),
    ],
)
def test_what_has_no_alignment(tiny_model: Path, entry: str, says: str) -> None:
    model = f"{{name: t, model_path: MODEL, alignment: text, {entry}}}"
    found = errors(tiny_model, f"explorer.auxiliary_models=[{model}]")
    assert "auxiliary_models[0].alignment" in str(found) and says in str(found), found


@pytest.mark.e2e
@pytest.mark.parametrize("name", ["opsd", "sdft", "sdpo"])
@pytest.mark.parametrize(
    ("more", "says"),
    [
        ((), ""),
        (("model.temperature=0.7",), ""),
        (("explorer.rollout_model.engine_type=vllm",), ""),
        (
            ("model.temperature=0.7", "explorer.rollout_model.engine_type=vllm"),
            "vllm scores given tokens at temperature 1 only",
        ),
        ((f"{TASKSET}.workflow_args.teacher=start",), "{name: start, model_path: ...}"),
        ((f"{TASKSET}.workflow_args.teacher=start", TEACHER), "the models are teacher"),
        (
            (f"{TASKSET}.workflow_args.teacher=ema", TEACHER),
            "A moving average of the policy is one",
        ),
        ((f"{TASKSET}.workflow_args.teacher=teacher", TEACHER), ""),
        ((f"{TASKSET}.workflow_args.told=nothing",), "must have"),
        (("algorithm.policy_loss_fn_args.k=259",), ""),
        (
            ("algorithm.policy_loss_fn_args.k=260",),
            "algorithm.policy_loss_fn_args.k: is 260, and the model's vocabulary has 259 tokens",
        ),
        (("algorithm.policy_loss_fn_args.k=0",), "greater than or equal to 1"),
    ],
)
def test_who_teaches_a_policy_that_is_told_more(
    tiny_model: Path, name: str, more: tuple[str, ...], says: str
) -> None:
    workflow = f"{TASKSET}.default_workflow_type={name}_workflow"
    options = (workflow, "model.max_model_len=300", *more)
    found = errors(tiny_model, f"algorithm.algorithm_type={name}", *options)
    assert bool(found) == bool(says) and says in str(found), found


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("explorer.auxiliary_models=[{name: self, model_path: MODEL}]",), "self is the policy's"),
        ((f"{TASKSET}.workflow_args.teacher=self",), "its prompt is the student's"),
    ],
)
def test_the_policy_has_one_name_as_a_teacher(
    tiny_model: Path, more: tuple[str, ...], says: str
) -> None:
    found = errors(tiny_model, "algorithm.algorithm_type=jsd", DISTILLS, TEACHER, *more)
    assert says in str(found), found


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ((), ""),
        (("model.max_prompt_tokens=20",), "model.max_model_len: is 21 for the teacher of"),
        (("model.max_prompt_tokens=20", "model.max_model_len=90"), ""),
        (
            (
                f"{TASKSET}.workflow_args.teacher=teacher",
                TEACHER.replace("engine_type", "max_model_len: 30, engine_type"),
            ),
            "explorer.auxiliary_models: is 30 for the teacher",
        ),
    ],
)
def test_the_teachers_longer_prompt_has_to_fit(
    tiny_model: Path, more: tuple[str, ...], says: str
) -> None:
    told = f"{TASKSET}.workflow_args.told='{{prompt}}, and the answer is known: {{truth}}'"
    workflow = f"{TASKSET}.default_workflow_type=opsd_workflow"
    found = errors(tiny_model, "algorithm.algorithm_type=opsd", workflow, told, *more)
    assert bool(found) == bool(says) and says in str(found), found
