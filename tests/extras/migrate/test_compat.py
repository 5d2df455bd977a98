"""Classes of Trinity-RFT's shape are workflows, rewards and operators of ours."""

from __future__ import annotations

import asyncio
import gc
import importlib
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import rft.extras.migrate.compat
from rft.buffer.operators.experience_pipeline import ExperiencePipeline
from rft.buffer.settings import OperatorSettings, PipelineSettings
from rft.engine.scripted import ScriptedEngine
from rft.errors import ConfigError, PluginError
from rft.extras.migrate.compat import (
    ADVANTAGE_FN,
    EXPERIENCE_OPERATORS,
    POLICY_LOSS_FN,
    PRIORITY_FUNC,
    REWARD_FUNCTIONS,
    SELECTORS,
    WORKFLOWS,
    AccuracyReward,
    AsyncRewardPropagationWorkflow,
    AsyncSimpleWorkflow,
    Experience,
    ExperienceOperator,
    ExperienceOperatorV1,
    FormatReward,
    MathWorkflow,
    MultiTurnWorkflow,
    RewardFn,
    SimpleWorkflow,
    StepWiseRewardWorkflow,
    Workflow,
)
from rft.plugins import REGISTRY, load_all
from rft.types.block import encode
from rft.types.ids import GroupId
from rft.types.task import SamplingArgs, Task
from rft.worker import job_pool
from rft.workflow.group import judge, run_group
from rft.workflow.play_run import RunLimits
from rft.workflow.recipes import Recipes

ID = GroupId(1, 0, 3, 5)


@pytest.fixture(scope="module", autouse=True)
def plugins():
    load_all()
    yield
    job_pool.close_all()


def task(**changes):
    return Task(
        **{"taskset": "t", "index": 0, "prompt": "2+2?", "truth": "4", "workflow": "w", **changes}
    )


async def play(engine, cls, *, models=None, **of_task):
    name = cls if isinstance(cls, str) else f"test_{cls.__name__}"
    if not isinstance(cls, str):
        WORKFLOWS.register_module(name)(cls)
    recipes = Recipes()
    of = task(workflow=name, **of_task)
    try:
        return await run_group(
            of,
            await recipes.get(of),
            engine,
            ID,
            limits=RunLimits(max_timeout_s=20),
            models=models or {},
        )
    finally:
        await recipes.close()


@REWARD_FUNCTIONS.register_module("test_compat_reward")
class Right(RewardFn):
    def __init__(self, bonus: float = 0.0) -> None:
        self.bonus = bonus

    def __call__(self, response, truth, **kwargs):
        return {"right": float(response == truth), "bonus": self.bonus}


async def test_a_repeatable_workflow_asks_once_for_all_runs():
    engine = ScriptedEngine("4", "5", "4")
    args = {"reward": "test_compat_reward", "reward_args": {"bonus": 0.5}, "num_runs": 3}
    group = await play(engine, SimpleWorkflow, **args)
    assert (
        group.accepted
        and group.rewards == [1.5, 0.5, 1.5]
        and len(engine.calls) == 1
        and engine.calls[0].n == 3
    )
    assert group.rows[0].metrics == {"right": 1.0, "bonus": 0.5} and [
        r.id.run for r in group.rows
    ] == [0, 1, 2]
    assert group.rows[0].info["model_version"] == 0
    engine = ScriptedEngine("4", "5", "4")
    group = await play(engine, AsyncSimpleWorkflow, **args)
    assert sorted(group.rewards) == [0.5, 1.5, 1.5] and [c.n for c in engine.calls] == [1, 1, 1]


async def test_a_reward_of_their_shape_is_one_of_ours():
    group = await play(ScriptedEngine("4"), "simple_workflow", reward="test_compat_reward")
    assert group.rows[0].reward_parts == {"right": 1.0, "bonus": 0.0}
    with pytest.raises(ConfigError, match="bonos"):
        await play(
            ScriptedEngine("4"),
            "simple_workflow",
            reward="test_compat_reward",
            reward_args={"bonos": 1},
        )


async def test_our_rewards_are_theirs():
    group = await play(
        ScriptedEngine("<think>a</think><answer>4</answer>", "5"), MathWorkflow, num_runs=2
    )
    assert group.rewards == [pytest.approx(1.1), pytest.approx(-0.1)]
    assert "<answer>" in group.rows[0].messages[0]["content"], (
        "the instruction comes with the reward"
    )
    group = await play(ScriptedEngine("4"), SimpleWorkflow, reward="exact_answer")
    assert group.rewards == [1.0]


class Steps(StepWiseRewardWorkflow):
    max_step_num = 3

    def step(self, step_num):
        self.said = self.client.chat.completions.create(
            model=self.client.model_path, messages=[{"role": "user", "content": f"step {step_num}"}]
        )
        return self.said.choices[0].message.content != "stop"

    def reward(self, exps, step_num):
        assert len(exps) == 1 and exps[0].response_text == self.said.choices[0].message.content
        return float(step_num)


class Spread(AsyncRewardPropagationWorkflow):
    max_step_num = 2

    def __init__(self, *, task, model, auxiliary_models=None):
        super().__init__(
            task=task, model=model, auxiliary_models=auxiliary_models, use_openai_client=False
        )
        self.aclient = model.get_openai_async_client()

    async def step_async(self, step_num):
        await self.aclient.chat.completions.create(
            model="m", messages=[{"role": "user", "content": f"step {step_num}"}]
        )
        return True

    async def reward_async(self, exps):
        return 0.75


async def test_steps_have_rewards_of_their_own_or_one_for_all():
    group = await play(ScriptedEngine("go", "stop"), Steps)
    assert [r.reward for r in group.rows] == [0.0, 1.0] and [r.id.step for r in group.rows] == [
        0,
        1,
    ]
    group = await play(ScriptedEngine("a", "b"), Spread)
    assert [r.reward for r in group.rows] == [0.75, 0.75] and group.rows[0].metrics == {
        "actual_env_steps": 2.0
    }


class Guess(MultiTurnWorkflow):
    is_async = True

    async def run_async(self):
        messages = [{"role": "user", "content": self.task.task_desc}]
        for hint in ("lower", "higher"):
            (answer,) = await self.model.chat_async(messages, temperature=0.5)
            messages += [
                {"role": "assistant", "content": answer.response_text},
                {"role": "user", "content": hint},
            ]
        if self.task.workflow_args.get("edit"):
            messages[1]["content"] = "something else"
        return [await self.process_messages_to_experience_async(messages, 0.5, info={"turns": 2})]


async def test_a_conversation_is_one_sequence_of_the_tokens_that_were_sampled():
    engine = ScriptedEngine("seven", "three")
    (row,) = (await play(engine, Guess)).rows
    assert row.reward == 0.5 and row.num_response_tokens == 12 and row.metrics == {"turns": 2.0}
    assert row.sampling[0].sampling.temperature == 0.5 and engine.calls[1].prefix_messages == 2
    assert np.count_nonzero(row.logprobs) == 12 and row.messages[-1]["content"] == "three"
    (row,) = (
        await play(ScriptedEngine("seven", "three"), "test_Guess", workflow_args={"edit": True})
    ).rows
    assert row.status == "failed" and "is an answer of this run's model" in row.reason


def returns(make, **flags):
    """A workflow that chats once, and returns what `make` makes of it."""

    class Made(Workflow):
        def run(self):
            (answer,) = self.model.chat(
                [{"role": "user", "content": "?"}], n=1, logprobs=0, min_p=None
            )
            return make(self, answer)

    Made.__name__ = make.__name__
    for name, value in flags.items():
        setattr(Made, name, value)
    return Made


async def test_what_comes_back_must_be_what_the_policy_wrote():
    def remade(self, x):
        return [
            Experience(
                tokens=x.tokens, prompt_length=x.prompt_length, reward=1.0, logprobs=x.logprobs
            )
        ]

    def masked(self, x):
        x.action_mask = torch.zeros_like(x.action_mask, dtype=torch.bool)
        x.reward = 1.0
        return [x]

    def partly(self, x):
        x.action_mask[0] = False
        x.reward = 1.0
        return [x]

    def invented(self, x):
        return [Experience(tokens=[1, 2, 3], prompt_length=2, reward=1.0)]

    def nothing(self, x):
        return []

    def text(self, x):
        return "done"

    def exits(self, x):
        raise SystemExit(3)

    assert (await play(ScriptedEngine("abc"), returns(remade))).rewards == [1.0]
    (row,) = (await play(ScriptedEngine("abc"), returns(masked))).rows
    assert row.reward == 1.0 and row.num_response_tokens == 0 and not row.logprobs.any()
    (row,) = (await play(ScriptedEngine("abc"), returns(partly))).rows
    assert row.num_response_tokens == 3
    for make, why in (
        (invented, "no call of this"),
        (nothing, "no experience"),
        (text, "returned str"),
        (exits, "called sys.exit(3)"),
    ):
        (row,) = (await play(ScriptedEngine("abc"), returns(make))).rows
        assert row.status == "failed" and why in row.reason, make


async def test_a_run_with_nothing_to_train_is_kept():
    def nothing(self, x):
        return [
            Experience(
                tokens=[0],
                prompt_length=0,
                action_mask=[False],
                info={"why": "lost"},
                metrics={"success": 0.0},
            )
        ]

    class Silent(Workflow):
        def run(self):
            return nothing(self, None)

    group = await play(ScriptedEngine("4"), returns(nothing))
    (row,) = group.rows
    assert (row.status, row.reward, row.num_response_tokens) == ("complete", 0.0, 0) and row.info[
        "why"
    ] == "lost"
    assert group.reason == "too_few" and not group.accepted and row.metrics["success"] == 0.0
    assert (
        "made no call, and returned nothing to train"
        in (await play(ScriptedEngine(), Silent)).rows[0].reason
    )


async def test_rows_of_two_tasks_are_not_compared():
    def two(self, x):
        (again,) = self.model.chat([{"role": "user", "content": "judge"}])
        x.reward = 1.0
        again.reward = 1.0
        again.eid.task = f"{x.eid.task}-ruler"
        return [x, again]

    (row,) = (await play(ScriptedEngine("4", "5"), returns(two))).rows
    assert "experiences of 2 tasks" in row.reason and "-ruler" in row.reason


def test_rewards_made_of_rewards():
    assert AccuracyReward(str.strip)("\\boxed{4}", "2+2?", "4") == {"accuracy": 1.0}
    assert FormatReward(r"so .*")("so be it") == {"format_score": 0.1} and FormatReward(r"so .*")(
        "no"
    ) == {"format_score": -0.1}
    assert FormatReward()("<think>a</think><answer>b</answer>") == {"format": 0.1}


async def test_a_short_answer_that_begins_a_longer_one_is_another_call():
    def longer(self, x):
        (again,) = self.model.chat([{"role": "user", "content": "?"}], max_tokens=99)
        again.reward = 1.0
        return [again]

    cls = returns(longer)
    engine = ScriptedEngine("abcdef", "abcdef")
    (row,) = (await play(engine, cls, sampling=SamplingArgs(max_tokens=3))).rows
    assert row.reason == "" and row.num_response_tokens == 7


async def test_the_models_other_methods():
    seen = {}

    def looks(self, x):
        m = self.model
        seen["logprobs"] = m.logprobs(x.tokens.tolist())[x.prompt_length - 1 :]
        seen["same"] = x.logprobs
        seen["version"], seen["name"] = m.model_version, m.model_name
        seen["plain"] = m.generate(["raw"], n=2)
        seen["history"] = len(m.extract_experience_from_history()), len(m.history)
        m.set_workflow_state({"a": 1})
        seen["state"] = m.get_workflow_state()
        seen["judge"] = (
            self.auxiliary_model_wrappers[0]
            .chat([{"role": "user", "content": "good?"}])[0]
            .response_text
        )
        for name in ("sync_model_weights", "get_lora_request"):
            with pytest.raises(AttributeError, match="is not kept"):
                getattr(m, name)
        with pytest.raises(TypeError, match="unknown sampling argument 'best_of'"):
            m.chat([{"role": "user", "content": "?"}], best_of=2)
        x.reward = 1.0
        return [x]

    engine = ScriptedEngine(answer=lambda m: "ok")
    group = await play(engine, returns(looks), models={"judge": ScriptedEngine("yes")})
    assert group.rewards == [1.0] and len(group.rows) == 1, group.rows[0].reason
    assert (
        torch.equal(seen["logprobs"], seen["same"])
        and seen["version"] == 0
        and seen["name"] == "policy"
    )
    assert (
        len(seen["plain"]) == 2
        and seen["history"] == (3, 0)
        and seen["state"] == {"a": 1}
        and seen["judge"] == "yes"
    )


async def test_flags_and_what_a_task_holds():
    def looks(self, x):
        assert (self.resettable, self.repeatable, self.asynchronous) == (False, False, False)
        t = self.task
        assert t.raw_task == {"q": "2+2?", "a": "4", "level": 3} and t.format_args.prompt_key == "q"
        assert (t.task_desc, t.truth, t.format_args.response_key) == (
            "2+2?",
            "4",
            "a",
        ) and t.to_dict() is t.raw_task
        assert t.rollout_args.temperature == 1.0 and t.index == {"index": 0, "taskset_id": "t"}
        x.reward = 1.0
        return [x]

    group = await play(ScriptedEngine("a"), returns(looks), row={"q": "2+2?", "a": "4", "level": 3})
    assert group.rewards == [1.0], group.rows[0].reason


async def test_a_workflow_may_have_rollout_args_of_its_own():
    def keeps(self, x):
        # of the bases only those that ask once have such a property
        self.rollout_args = {"temperature": 0.5}
        x.reward = self.rollout_args["temperature"]
        return [x]

    group = await play(ScriptedEngine("a"), returns(keeps))
    assert group.rewards == [0.5], group.reason


async def test_arrays_and_tensors_in_info_become_numbers_and_lists():
    def measures(self, x):
        x.reward = torch.tensor(0.5)
        x.info |= {
            "scalar": torch.tensor(0.5),
            "number": np.float32(1.5),
            "several": np.array([1, 2]),
        }
        return [x]

    group = await play(ScriptedEngine("a"), returns(measures))
    assert group.rewards == [0.5], group.reason
    assert {k: group.rows[0].info[k] for k in ("scalar", "number", "several")} == {
        "scalar": 0.5,
        "number": 1.5,
        "several": [1, 2],
    }


class LoopOfItsOwn(Workflow):
    def run(self):
        client = self.model.get_openai_async_client()
        asyncio.run(
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
        )
        (x,) = self.model.extract_experience_from_history()
        x.reward = 1.0
        return [x]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_a_workflow_that_is_not_async_may_ask_in_an_event_loop_of_its_own():
    group = await play(ScriptedEngine("4"), LoopOfItsOwn)
    gc.collect()
    assert group.rewards == [1.0], group.reason


async def pipeline(name, rows, of_task):
    made = ExperiencePipeline(
        PipelineSettings(operators=(OperatorSettings(name=name, args={}, key="k"),)), judge, 20.0
    )
    await made.prepare({})
    try:
        return await made.process(of_task, rows)
    finally:
        await made.close()


async def test_operators():
    class Half(ExperienceOperator):
        stage = "reward"

        def process(self, exps):
            for x in exps:
                x.info["before"], x.reward = x.reward, x.reward / 2
            return exps, {"halved": len(exps)}

    class Best(ExperienceOperatorV1):
        async def process(self, exps):
            return [x for x in exps if x.reward > 0.5], {}

    class Wrong(ExperienceOperator):
        def process(self, exps):
            exps[0].reward = 9.0
            return exps, {}

    for cls in (Half, Best, Wrong):
        EXPERIENCE_OPERATORS.register_module(f"test_compat_{cls.__name__}")(cls)
    group = await play(
        ScriptedEngine("4", "5"), SimpleWorkflow, reward="test_compat_reward", num_runs=2
    )
    done = await pipeline("test_compat_Half", group.rows, group.task)
    assert [(r.reward, r.info["before"]) for r in done.rows] == [(0.5, 1.0), (0.0, 0.0)]
    assert ("halved", 2.0) in [(m.name, m.value) for m in done.metrics]
    done = await pipeline("test_compat_Best", group.rows, group.task)
    assert [r.reason for r in done.rows] == ["", "test_compat_Best"]
    with pytest.raises(Exception, match='write `stage = "reward"`'):
        await pipeline("test_compat_Wrong", group.rows, group.task)


async def test_an_operator_may_mask_a_part_of_an_answer():
    class Cut(ExperienceOperator):
        def process(self, exps):
            exps[0].action_mask[-1] = False
            exps[1].action_mask = torch.zeros_like(exps[1].action_mask)
            return exps, {}

    EXPERIENCE_OPERATORS.register_module("test_compat_Cut")(Cut)
    group = await play(
        ScriptedEngine("444", "555"), SimpleWorkflow, reward="test_compat_reward", num_runs=2
    )
    done = await pipeline("test_compat_Cut", group.rows, group.task)
    before = group.rows[0]
    after = done.rows[0]
    assert (
        after.loss_mask.tolist() == [*before.loss_mask[:-1].tolist(), False]
        and after.num_response_tokens > 0
    )
    assert [r.reason for r in done.rows] == ["", "test_compat_Cut"]


async def test_an_operator_may_write_tensors_into_info():
    class Measured(ExperienceOperator):
        stage = "statistics"

        def process(self, exps):
            for x in exps:
                x.info["score"] = torch.tensor(0.5)
            return exps, {}

    EXPERIENCE_OPERATORS.register_module("test_compat_Measured")(Measured)
    group = await play(
        ScriptedEngine("4", "5"), SimpleWorkflow, reward="test_compat_reward", num_runs=2
    )
    done = await pipeline("test_compat_Measured", group.rows, group.task)
    assert [r.info["score"] for r in done.rows] == [0.5, 0.5] and encode(done.rows)


def test_what_is_not_kept_says_what_to_do():
    for name, why in rft.extras.migrate.compat.REFUSED.items():
        with pytest.raises(AttributeError, match=re.escape(why)):
            getattr(rft.extras.migrate.compat, name)
        for page in re.findall(r"docs/\S+\.md", why):
            assert (Path(__file__).parents[3] / page).is_file(), page
    with pytest.raises(AttributeError, match=r"compat has no Wrokflow"):
        rft.extras.migrate.compat.Wrokflow  # noqa: B018
    for module, names in rft.extras.migrate.compat.NAMES.items():
        for name in names:
            assert getattr(rft.extras.migrate.compat, name) is getattr(
                importlib.import_module(f"rft.extras.migrate.compat.{module}"),
                rft.extras.migrate.compat.CLASSES.get(name, name),
            )
    for field in (
        "token_level_reward",
        "advantages",
        "chosen",
        "multi_modal_inputs",
        "routed_experts",
        "custom_fields",
    ):
        with pytest.raises(ValueError, match=f"{field} of an Experience is not kept"):
            Experience(tokens=[1, 2], prompt_length=1, **{field: [1]})


def test_an_isolated_class_is_refused():
    with pytest.raises(ConfigError, match="isolated"):
        returns(lambda self, x: [x], isolated=True).__rft_adapt__()


def test_registries_take_our_shapes_and_refuse_theirs():
    class Theirs:
        def __call__(self, exps):
            return exps, {}

        def get_indices(self, n): ...

    for registry in (ADVANTAGE_FN, POLICY_LOSS_FN, SELECTORS, PRIORITY_FUNC):
        with pytest.raises(PluginError, match=r"has Trinity-RFT's shape.*Write "):
            registry.register_module("test_theirs")(Theirs)

    @ADVANTAGE_FN.register_module("test_compat_zero")
    def zero(x, args):
        return np.zeros(len(x.rows), np.float32)

    assert REGISTRY.get("advantage_fn", "test_compat_zero").obj is zero
    WORKFLOWS.register_module("test_compat_simple")(SimpleWorkflow)
    assert (
        WORKFLOWS.get("test_compat_simple") is SimpleWorkflow
        and REWARD_FUNCTIONS.get("test_compat_reward") is Right
    )
    with pytest.raises(PluginError, match="force"):
        REWARD_FUNCTIONS.register_module("math_reward", force=True)
    with pytest.raises(PluginError, match="defined twice"):
        REWARD_FUNCTIONS.register_module("math_reward")(Right)
