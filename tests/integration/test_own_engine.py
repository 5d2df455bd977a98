"""An engine of one's own, named in the configuration: its arguments are checked, it passes the
contract, a run trains with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rft.engine.built_in import make
from rft.preflight.check import check, load_plan
from rft.testing.engine_contract import EngineContract, Subject
from rft.types.ids import Version
from tests.helpers.command import rft

ENGINE = """
from dataclasses import replace

from pydantic import BaseModel, ConfigDict

from rft.engine.transformers import TransformersEngine


class Mine(TransformersEngine):
    class Args(BaseModel):
        model_config = ConfigDict(extra="forbid")
        greeting: str = "hello"

    @classmethod
    async def start(cls, settings):
        engine = await super().start(replace(settings, extra_engine_args={}))
        engine.greeting = settings.extra_engine_args["greeting"]
        return engine


class Other:
    pass
"""
CONFIG = """
name: own
checkpoint_root_dir: {root}
model: {{model_path: {model}, max_prompt_tokens: 120, max_response_tokens: 2, max_model_len: 501}}
algorithm: {{repeat_times: 2}}
buffer:
  batch_size: 2
  total_steps: 1
  explorer_input:
    taskset:
      path: rft.testing.tiny:copy_tasks
      default_workflow_type: simple_workflow
      default_reward_fn_type: exact_answer
explorer: {{rollout_model: {{engine_type: mine.py:Mine, extra_engine_args: {{greeting: hi}}}}}}
"""


@pytest.fixture
def config(tmp_path: Path, tiny_model: Path) -> Path:
    (tmp_path / "mine.py").write_text(ENGINE)
    path = tmp_path / "own.yaml"
    path.write_text(CONFIG.format(root=tmp_path / "runs", model=tiny_model))
    return path


class TestOwnEngine(EngineContract):
    @pytest.fixture
    async def subject(
        self, config: Path, tiny_model: Path, tmp_path: Path
    ) -> AsyncIterator[Subject]:
        from safetensors.numpy import load_file

        _, plan = await asyncio.to_thread(
            load_plan, config, ["model.max_prompt_tokens=500", "model.max_response_tokens=1"]
        )
        engine = await make(plan.engines[0])
        assert type(engine).__name__ == "Mine" and vars(engine)["greeting"] == "hi"
        aliases = {"lm_head.weight": "model.embed_tokens.weight"}
        subject = Subject(engine, load_file(tiny_model / "model.safetensors"), aliases, tmp_path)
        await subject.publish(version=Version(1, 0))
        yield subject
        await engine.close()


@pytest.mark.parametrize(
    "override,said",
    [
        ("engine_type=mine.py:Nobody", "has no 'Nobody'"),
        ("engine_type=mine.py:Other", "derive it from rft.engine.base.BaseEngine"),
        ("engine_type=nobody", "unknown engine 'nobody'"),
        ("engine_type=vlm", "Did you mean vllm?"),
        ("engine_type=sglang", "is not offered; use vllm"),
        ("extra_engine_args.greting=hi", "Did you mean greeting?"),
        ("extra_engine_args.greeting=[1]", "greeting"),
    ],
)
def test_what_is_wrong_is_named(config: Path, override: str, said: str) -> None:
    key = f"explorer.rollout_model.{override.partition('=')[0].partition('.')[0]}"
    (error,) = check(config, [f"explorer.rollout_model.{override}"]).errors
    assert said in str(error) and error.key == key


def test_a_run_trains_with_it(config: Path) -> None:
    done = rft("run", "--in-process", "-c", config)
    assert done.code == 0, done.output
    assert "step 1/1" in done.output
