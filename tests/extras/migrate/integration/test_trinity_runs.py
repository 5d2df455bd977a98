"""Two files in the form of Trinity-RFT's examples, each with a Python workflow of its own, as they
are: Ray, vLLM, three steps.

The workflows have nothing changed but their imports; the YAMLs are the form that people bring
along, made small by overrides.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rft.extras.migrate.convert_command import trinity
from rft.monitor.read import read, series
from tests.helpers import runs

pytestmark = pytest.mark.vllm

GRADED = '''
import json
from dataclasses import asdict
from typing import List

from examples.graded.rewards import DigitReward
from rft.extras.migrate.compat import Experience
from rft.extras.migrate.compat import MathBoxedWorkflow, Task


class GradedWorkflow(MathBoxedWorkflow):
    """The prompt is a chat already; a reward of the file's own."""

    def reset(self, task: Task):
        super().reset(task)
        self.reward_fn = DigitReward(**self.reward_fn_args)
        self.task_desc = self.raw_task["prompt"]
        self.truth = self.raw_task["reward_model"]["ground_truth"]

    def format_messages(self):
        return self.task_desc

    def run(self) -> List[Experience]:
        responses = super().run()
        assert len(responses) == self.task.repeat_times and asdict(self.task.rollout_args)["temperature"] == 1.0
        return responses
'''
REWARDS = """
from rft.extras.migrate.compat import math_equal as verl_math_equal
from rft.extras.migrate.compat import match_answer
from rft.extras.migrate.compat import RewardFn


class DigitReward(RewardFn):
    def __init__(self, **kwargs) -> None:
        pass

    def __call__(self, response, truth=None, with_think=False, format_score_coef=0.1, **kwargs):
        _, answer = match_answer(response)
        return {"accuracy": float(verl_math_equal(answer, truth)), "digits": 0.1 * sum(c.isdigit() for c in response)}
"""
ASKING = '''
from typing import List, Optional

from rft.extras.migrate.compat import Experience
from rft.extras.migrate.compat import ModelWrapper
from rft.extras.migrate.compat import RewardPropagationWorkflow
from rft.extras.migrate.compat import Task
from rft.extras.migrate.compat import get_logger

logger = get_logger(__name__)


class AskingWorkflow(RewardPropagationWorkflow):
    """Two steps; an auxiliary model is asked about the last answer through its OpenAI client."""

    def __init__(self, *, task: Task, model: ModelWrapper, auxiliary_models: Optional[List[ModelWrapper]] = None):
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        assert auxiliary_models is not None and len(auxiliary_models) == 1
        self.said: List[str] = []

    def step(self, step_num: int) -> bool:
        answers = self.client.chat.completions.create(
            model=self.client.model_path, messages=[{"role": "user", "content": f"{self.task.task_desc} {step_num}"}]
        )
        self.said.append(answers.choices[0].message.content)
        return step_num < 1

    def reward(self, exps: list[Experience]) -> float:
        judge = self.auxiliary_models[0]
        asked = judge.chat.completions.create(
            model=judge.model_path, messages=[{"role": "user", "content": self.said[-1]}], max_tokens=4, stream=False
        )
        logger.info(f"{len(exps)} steps: {asked.choices[0].message.content}")
        return float(len(self.said[-1]) % 2) + float(asked.choices[0].message.content is not None)

    @property
    def max_step_num(self):
        return 5
'''
YAML = """
mode: both
project: "examples"
name: "{name}"
checkpoint_root_dir: ${{oc.env:TRINITY_CHECKPOINT_ROOT_DIR,./checkpoints}}
data_processor:
  experience_pipeline:
    operators:
      - name: pass_rate_calculator
algorithm:
  algorithm_type: {algorithm}
  repeat_times: 16
  optimizer:
    lr: 1e-6
  kl_loss_fn_args:
    kl_coef: 0.0
model:
  model_path: ${{oc.env:TRINITY_MODEL_PATH,Qwen/Qwen2.5-1.5B-Instruct}}
  max_response_tokens: 8
  max_model_len: 256
cluster:
  node_num: 1
  gpu_per_node: 8
buffer:
  total_epochs: 1
  batch_size: 32
  explorer_input:
    taskset:
      name: mine
      storage_type: file
      path: ${{oc.env:TRINITY_TASKSET_PATH}}
      split: 'train'
      format:
        prompt_key: 'prompt'
        response_key: 'reward_model.ground_truth'
      rollout_args:
        temperature: 1.0
        logprobs: 0
      task_selector:
        selector_type: shuffle
    eval_tasksets:
    - name: mine
      path: ${{oc.env:TRINITY_TASKSET_PATH}}
      format: {{prompt_key: 'prompt', response_key: 'reward_model.ground_truth'}}
    default_workflow_type: 'examples.{name}.flow.{workflow}'
  trainer_input:
    experience_buffer:
      name: exp_buffer
      storage_type: queue
      schema_type: experience
explorer:
  eval_interval: 40
  runner_per_model: 8
  max_repeat_times_per_runner: 1
  rollout_model:
    engine_type: vllm
    engine_num: 4
    enable_prefix_caching: false
    enforce_eager: true
    enable_openai_api: true
    enable_history: true
    use_v1: true
    dtype: bfloat16
    seed: 42
{auxiliary}synchronizer:
  sync_method: 'nccl'
  sync_interval: 1
  sync_timeout: 1200
trainer:
  trainer_type: 'verl'
  save_interval: 800
  grad_clip: 1.0
  use_dynamic_bsz: true
  max_token_len_per_gpu: 200
  ulysses_sequence_parallel_size: 1
  trainer_config:
    actor_rollout_ref: {{hybrid_engine: true, actor: {{megatron: {{tensor_model_parallel_size: 2}}}}}}
    trainer: {{balance_batch: false, max_actor_ckpt_to_keep: 5, max_critic_ckpt_to_keep: 5}}
monitor:
  monitor_type: tensorboard
"""
JUDGE = """  auxiliary_models:
    - model_path: ${oc.env:TRINITY_MODEL_PATH}
      engine_num: 1
      enable_thinking: false
      max_prompt_tokens: 128
      max_response_tokens: 64
"""
SMALL = (
    *(
        "cluster.gpu_per_node=0",
        "algorithm.repeat_times=2",
        "buffer.batch_size=2",
        "trainer.total_steps=3",
    ),
    *(
        "explorer.rollout_model.engine_num=1",
        "explorer.rollout_model.dtype=float32",
        "explorer.eval_on_startup=false",
    ),
)


@pytest.mark.parametrize(
    ("name", "workflow", "algorithm", "files", "steps"),
    [
        ("graded", "GradedWorkflow", "grpo", {"flow": GRADED, "rewards": REWARDS}, 1),
        ("asking", "AskingWorkflow", "multi_step_grpo", {"flow": ASKING}, 2),
    ],
)
def test_a_file_with_its_own_workflow_trains(
    name: str,
    workflow: str,
    algorithm: str,
    files: dict[str, str],
    steps: int,
    tmp_path: Path,
    tiny_model: Path,
) -> None:
    home = tmp_path / "examples" / name
    home.mkdir(parents=True)
    for file, text in files.items():
        (home / f"{file}.py").write_text(text)
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{i}+1?"}] if name == "graded" else f"{i}+1?",
            "reward_model": {"ground_truth": str(i + 1)},
        }
        for i in range(8)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    auxiliary = JUDGE if name == "asking" else ""
    (tmp_path / "file.yaml").write_text(
        YAML.format(name=name, workflow=workflow, algorithm=algorithm, auxiliary=auxiliary)
    )
    trinity(tmp_path / "file.yaml", out=tmp_path / "run.yaml")
    places = {
        "CHECKPOINT_ROOT_DIR": tmp_path / "runs",
        "MODEL_PATH": tiny_model,
        "TASKSET_PATH": tmp_path / "rows.jsonl",
    }
    env = {f"TRINITY_{key}": str(value) for key, value in places.items()}
    dtype = ("explorer.auxiliary_models[0].dtype=float32",) if auxiliary else ()
    run = runs.Run(
        *("run", "--config", str(tmp_path / "run.yaml"), *SMALL, *dtype),
        env={**env, "PYTHONPATH": f"{runs.ROOT}:{tmp_path}"},
    )
    assert run.end() == 0, run.output
    folder = tmp_path / "runs" / "examples" / name
    metrics = read(folder / "metrics.jsonl")
    assert [step for step, _ in series(metrics, "actor/loss")] == [1, 2, 3]
    assert {count for _, count in series(metrics, "experience/rows")} == {2.0 * 2 * steps}
    ok, found = runs.audit(folder)
    assert ok and found["used"] == 3 * 2 * 2 * steps, found
