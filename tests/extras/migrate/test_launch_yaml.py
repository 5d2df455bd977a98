"""veRL's YAML files as launches: which program, every leaf an argument with its line, references
looked up.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rft.errors import ConfigError
from rft.extras.migrate.convert.launch import Launch, read_launch

RESOLVED = """\
hydra: {run: {dir: x}}
data:
  train_files: [a.parquet, b.parquet]
  train_batch_size: 1024
  custom_cls: {}
actor_rollout_ref:
  actor:
    _target_: verl.workers.config.FSDPActorConfig
    ppo_mini_batch_size: 256
    optim: {lr: 1e-6}
  rollout:
    n: 8
    prompt_length: ${data.max_prompt_length}
trainer:
  logger: ["console", "wandb"]
  default_local_dir: ${oc.env:CKPT}/${trainer.project_name}
  project_name: p${actor_rollout_ref.rollout.n}
"""


def read(tmp_path: Path, text: str, name: str = "config.yaml") -> Launch:
    path = tmp_path / name
    path.write_text(text)
    return read_launch(path)


def test_every_leaf_is_an_argument(tmp_path: Path) -> None:
    launch = read(tmp_path, RESOLVED.replace("  custom_cls: {}", "  max_prompt_length: 512"))
    assert (launch.program, launch.passed_through, launch.options) == ("yaml", False, ())
    assert {a.key: (a.value, a.line) for a in launch.arguments} == {
        "data.train_files": (["a.parquet", "b.parquet"], 3),
        "data.train_batch_size": (1024, 4),
        "data.max_prompt_length": (512, 5),
        "actor_rollout_ref.actor.ppo_mini_batch_size": (256, 9),
        "actor_rollout_ref.actor.optim.lr": (1e-6, 10),
        "actor_rollout_ref.rollout.n": (8, 12),
        "actor_rollout_ref.rollout.prompt_length": (512, 13),
        "trainer.logger": (["console", "wandb"], 15),
        "trainer.default_local_dir": ("${oc.env:CKPT}/p8", 16),
        "trainer.project_name": ("p8", 17),
    }
    assert next(a.variables for a in launch.arguments if a.key == "trainer.default_local_dir") == (
        "CKPT",
    )
    assert "line 1: hydra.run.dir is Hydra's own and not read" in launch.notes


@pytest.mark.parametrize(
    ("text", "program"),
    [
        (
            "async_training: {require_batches: 4}\nactor_rollout_ref: {rollout: {n: 4}}\n",
            "fully_async",
        ),
        ("model: {partial_pretrain: x}\noptim: {lr: 1e-5}\n", "sft"),
        ("data: {path: a.parquet, response_key: responses}\n", "main_eval"),
        (
            "actor_rollout_ref: {value: {rollout: {n: 4}}}\ntrainer: {desc: null, value: {nnodes: "
            "1}}\nwandb_version: 1\n",
            "yaml",
        ),
    ],
)
def test_program(tmp_path: Path, text: str, program: str) -> None:
    launch = read(tmp_path, text)
    assert launch.program == program
    assert not any("value" in a.key for a in launch.arguments)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model:\n  model_path: x\n", "config.yaml, line 1: no veRL configuration: it has model"),
        ("- a\n", "line 1: no veRL configuration"),
        ("", "line 1: no veRL configuration"),
        (
            "data: {a: 1}\nactor_rollout_ref: {a: '${x.y}'}\n",
            "line 2: ${x.y} refers to a key that the file does not have",
        ),
        (
            "actor_rollout_ref:\n  a: ${actor_rollout_ref.b}\n  b: ${actor_rollout_ref.a}\n",
            "refers to itself",
        ),
        ("data: [1\n", "not valid YAML"),
        ("data: 1\ndata: 2\n", "written twice"),
        ("data: !!python/object:os.system {}\n", "tag"),
        ("actor_rollout_ref: {a: 'x'}\n" + "# " + "x" * (1 << 20), "at most 1,048,576"),
    ],
)
def test_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    assert said in str(caught.value)
