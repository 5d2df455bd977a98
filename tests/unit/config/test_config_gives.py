"""An algorithm that reads what its workflow does not write is refused before anything starts, where
that can be known.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rft.config.verify import check

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
        *more,
    )
    return [
        str(e)
        for e in check(TINY, tuple(o.replace("MODEL", str(tiny_model)) for o in options)).errors
    ]


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


def test_names_that_are_not_offered_are_told_what_to_do(tiny_model: Path) -> None:
    (error,) = errors(tiny_model, f"{TASKSET}.default_workflow_type=webshop_workflow")
    assert "derive from EnvWorkflow" in error and TASKSET in error


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
