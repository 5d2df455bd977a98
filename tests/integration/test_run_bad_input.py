"""Wrong input to `rft run`: a message that says what was given and what to do, the right exit code,
and nothing has happened.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rft.launch import leftovers
from tests.helpers import runs
from tests.helpers.command import Done, rft

CONFIG = Path(__file__).parent / "tiny_config.yaml"
TASKSET = "buffer.explorer_input.taskset"
NEWCOMER_S = 10.0  # of computing: nobody waits longer to hear of a typing error


def start(
    root: Path, model: Path | str, *changes: str, config: Path = CONFIG, in_process: bool = True
) -> Done:
    mode = ["--in-process"] if in_process else []
    return rft(
        "run",
        *mode,
        "-c",
        config,
        f"model.model_path={model}",
        f"checkpoint_root_dir={root}/runs",
        *changes,
    )


def assert_refused(done: Done, code: int, *says: str, root: Path) -> None:
    """One message, no traceback of ours, no run folder."""
    for text in says:
        assert text in done.output, done.output
    assert done.code == code, done.output
    assert "Traceback" not in done.output and "bug" not in done.output
    assert done.cpu_s < NEWCOMER_S
    assert not (root / "runs").exists()


WRONG = {
    "key": (
        ("trainer.totl_steps=3",),
        ("trainer.totl_steps: unknown key", "Did you mean trainer.total_steps?"),
    ),
    "section": (("modle.model_path=x",), ("modle: unknown key", "Did you mean model?")),
    "key of another section": (
        ("trainer.batch_size=3",),
        ("trainer.batch_size", "Did you mean buffer.batch_size?"),
    ),
    "type": (
        ("buffer.batch_size=four",),
        ("buffer.batch_size: given 'four'; must be a whole number (tasks)",),
    ),
    "list for a number": (
        ("trainer.total_steps=[1, 2]",),
        ("trainer.total_steps: given", "must be a whole number"),
    ),
    "no value": (("trainer.total_steps",), ("is not of the form key.path=value",)),
    "batch of nothing": (
        ("buffer.batch_size=0",),
        ("buffer.batch_size: given 0; must be at least 1",),
    ),
    "negative lr": (
        ("algorithm.optimizer.lr=-1",),
        ("algorithm.optimizer.lr: given -1; must be greater than 0",),
    ),
    "sync interval": (
        ("synchronizer.sync_interval=0",),
        ("synchronizer.sync_interval: given 0; must be at least 1",),
    ),
    "top_p": (
        ("model.top_p=0.8",),
        ("model.top_p: is 0.8 for a training taskset", "Use 1.0 (off)"),
    ),
    "temperature": (("model.temperature=0",), ("model.temperature", "use e.g. 1.0")),
    "engine": (
        ("explorer.rollout_model.engine_type=transformer",),
        ("given 'transformer'; must be one of", "Did you mean transformers?"),
    ),
    "engine of others": (
        ("explorer.rollout_model.engine_type=sglang",),
        ("is not offered; use vllm",),
    ),
    "vllm in one process": (
        ("explorer.rollout_model.engine_type=vllm",),
        ("vllm needs Ray; leave out --in-process",),
    ),
    "ranks in one process": (
        ("trainer.world_size=2",),
        ("trainer.world_size: several ranks need Ray",),
    ),
    "workflow": (
        (f"{TASKSET}.default_workflow_type=simple_workflw",),
        ("unknown workflow 'simple_workflw'", "Did you mean simple_workflow?"),
    ),
    "reward": (
        (f"{TASKSET}.default_reward_fn_type=exact_answr",),
        ("unknown reward 'exact_answr'", "Did you mean exact_answer?"),
    ),
    "reward argument": (
        (f"{TASKSET}.reward_fn_args={{comparee: text}}",),
        ("reward_fn_args", "Did you mean compare?"),
    ),
    "plugin file": (
        (f"{TASKSET}.default_workflow_type=none.py:Flow",),
        ("none.py does not exist",),
    ),
    "plugin module": (
        (f"{TASKSET}.default_workflow_type=no_such:Flow",),
        ("No module named 'no_such'.  Add its folder to PYTHONPATH",),
    ),
    "tracker": (
        ("monitor.monitor_type=wandbb",),
        ("wandbb", "must be one of", "Did you mean wandb?"),
    ),
    "tracker argument": (
        ("monitor.monitor_type=wandb", "monitor.monitor_args={apikey: x}"),
        ("unknown argument 'apikey' for monitor 'wandb'", "Did you mean api_key?"),
    ),
    "name": (
        ("name=../elsewhere",),
        ("name: given '../elsewhere'; must begin with a letter or digit and hold no slash",),
    ),
    "micro-batches": (
        ("trainer.use_dynamic_bsz=false",),
        ("trainer.micro_batch_size_per_gpu: is required",),
    ),
    "buffer too small": (
        ("buffer.trainer_input.experience_buffer.capacity=3",),
        ("capacity: is 3 groups, too few for a step of buffer.batch_size 4",),
    ),
    "every prompt too long": (
        ("model.max_prompt_tokens=3",),
        ("model.max_prompt_tokens: is 3, but every prompt of", "raise it"),
    ),
    "longer than the model": (
        ("model.max_prompt_tokens=600",),
        ("model.max_model_len: is 602 tokens, but the model knows 512",),
    ),
    "cuda without GPUs": (
        ("trainer.device=cuda",),
        ("trainer.device: is cuda, but no GPU was found", "use cpu"),
    ),
}


@pytest.mark.parametrize("given", WRONG)
def test_wrong_value(
    tiny_model: Path, tmp_path: Path, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # a machine with GPUs takes part as one without
    changes, says = WRONG[given]
    assert_refused(start(tmp_path, tiny_model, *changes), 2, *says, root=tmp_path)


def test_several_errors_are_told_together(tmp_path: Path) -> None:
    done = start(tmp_path, tmp_path / "none", f"{TASKSET}.path=none.jsonl")
    assert_refused(done, 2, "model.model_path: ", f"{TASKSET}.path: ", root=tmp_path)


# ------------------------------------------------------------ the configuration file


@pytest.mark.parametrize(
    ("write", "says"),
    [
        (
            None,
            (
                "cannot read configuration",
                "No such file or directory",
                "--config names the YAML file",
            ),
        ),
        ("", ("is empty; it needs at least model.model_path",)),
        ("- a\n", ("holds a list; the top level must be a mapping",)),
        ("model:\n  model_path: [x\n", ("c.yaml", "line 3")),
        (
            "model: {}\nmodel: {}\n",
            ("model: written twice in c.yaml, on lines 1 and 2; remove one",),
        ),
    ],
)
def test_wrong_file(tmp_path: Path, write: str | None, says: tuple[str, ...]) -> None:
    config = tmp_path / "c.yaml"
    if write is not None:
        config.write_text(write)
    assert_refused(rft("run", "-c", config), 2, *says, root=tmp_path)


def test_a_folder_instead_of_the_file(tmp_path: Path) -> None:
    assert_refused(
        rft("run", "-c", tmp_path),
        2,
        "Is a directory",
        "--config names the YAML file",
        root=tmp_path,
    )


def test_usage() -> None:
    assert rft("run").code == 2 and "--config" in rft("run").output
    assert rft("rnu").code == 2 and "Did you mean 'run'?" in rft("rnu").output


# ------------------------------------------------------------ model and data


def copied(model: Path, to: Path, change: Callable[[Path], Any]) -> Path:
    shutil.copytree(model, to)
    change(to)
    return to


def _pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02")


MODELS: dict[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
    "truncated": (
        lambda f: os.truncate(f / "model.safetensors", 100_000),
        ("model.safetensors is damaged: it has 100,000 bytes", "cut short", "copy it again"),
    ),
    "pickled": (_pickled, ("only as pickles (pytorch_model.bin)", "save_pretrained")),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), ("has no *.safetensors",)),
    "no tokenizer": (
        lambda f: (f / "tokenizer.json").unlink(),
        ("has no tokenizer", "copy it from the original model"),
    ),
    "broken config": (
        lambda f: (f / "config.json").write_text('{"a": '),
        ("config.json cannot be read as JSON",),
    ),
    "no chat template": (
        lambda f: (f / "chat_template.jinja").unlink(),
        ("has no chat template", "model.custom_chat_template"),
    ),
}


@pytest.mark.parametrize("kind", MODELS)
def test_damaged_model(tiny_model: Path, tmp_path: Path, kind: str) -> None:
    change, says = MODELS[kind]
    assert_refused(
        start(tmp_path, copied(tiny_model, tmp_path / "model", change)), 2, *says, root=tmp_path
    )


def test_missing_model(tiny_model: Path, tmp_path: Path) -> None:
    near = tiny_model.with_name(tiny_model.name + "s")
    assert_refused(
        start(tmp_path, near),
        2,
        f"folder {near} does not exist",
        f"Did you mean {tiny_model}?",
        root=tmp_path,
    )
    hub = start(tmp_path, "no-such/model")
    assert_refused(
        hub,
        2,
        "neither a folder nor a model in the local hub cache",
        "hf download no-such/model",
        root=tmp_path,
    )


def test_a_file_as_model(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    assert_refused(
        start(tmp_path, file),
        2,
        f"{file} is a file; it must be a folder",
        "A GGUF cannot be trained",
        root=tmp_path,
    )


DATA = {
    "missing": (None, ("rows.jsonl does not exist",)),
    "empty": ("", ("rows.jsonl has no rows",)),
    "broken line": (
        '{"prompt": "a", "response": "1"}\n{"prompt": "b",\n',
        ("rows.jsonl:2: not JSON", '{"prompt": "b",'),
    ),
    "no object": ("[1]\n", ("rows.jsonl:1: a line must be a JSON object, not list",)),
    "missing key": (
        '{"prompt": "a", "response": "1"}\n{"question": "b"}\n',
        ("rows.jsonl:2: the row has no key 'prompt'; its keys are question", "format.prompt_key"),
    ),
}


@pytest.mark.parametrize("kind", DATA)
def test_wrong_data(tiny_model: Path, tmp_path: Path, kind: str) -> None:
    text, says = DATA[kind]
    if text is not None:
        (tmp_path / "rows.jsonl").write_text(text)
    done = start(tmp_path, tiny_model, f"{TASKSET}.path={tmp_path}/rows.jsonl")
    assert_refused(done, 2, f"{TASKSET}.", *says, root=tmp_path)


def test_relative_data_says_where_it_was_looked_for(tiny_model: Path, tmp_path: Path) -> None:
    done = start(tmp_path, tiny_model, f"{TASKSET}.path=none.jsonl")
    assert_refused(
        done,
        2,
        "none.jsonl does not exist",
        str(Path.cwd()),
        "beside the configuration file",
        root=tmp_path,
    )


# ------------------------------------------------------------ the machine


DROP_OVERRIDE = """
import ctypes, os, sys
for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH leave the bounding set, and so are gone after exec
    assert ctypes.CDLL(None).prctl(24, capability, 0, 0, 0) == 0
os.execv(sys.argv[1], sys.argv[1:])
"""


def limited(*arguments: str, drop_override: bool = False, **environment: str) -> Done:
    """`rft` in a process of its own, on request without root's right to write anywhere."""
    code = "import sys\nfrom rft.cli.main import main\nmain(sys.argv[1:])\n"
    command = [sys.executable, "-c", code, *arguments]
    if drop_override and os.geteuid() == 0:
        command = [sys.executable, "-c", DROP_OVERRIDE, *command]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=os.environ | environment,
    )
    return Done(done.returncode, done.stdout + done.stderr, 0.0)


def test_run_folder_that_cannot_be_written(tiny_model: Path, tmp_path: Path) -> None:
    shut = tmp_path / "shut"
    shut.mkdir(mode=0o555)
    done = limited(
        "run",
        "--in-process",
        "-c",
        str(CONFIG),
        f"model.model_path={tiny_model}",
        f"checkpoint_root_dir={shut}",
        drop_override=True,
    )
    assert_refused(
        done,
        3,
        f"run folder {shut}/project/group/name cannot be written: Permission denied",
        root=tmp_path,
    )
    assert "Choose another checkpoint_root_dir" in done.output and list(shut.iterdir()) == []


def test_data_set_cache_that_cannot_be_written(tiny_model: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "rows.jsonl").write_text('{"prompt": "a", "response": "1"}\n')
    home = tmp_path / "home"
    home.write_text("in the way")
    done = limited(
        "run",
        "--in-process",
        "-c",
        str(CONFIG),
        f"model.model_path={tiny_model}",
        f"checkpoint_root_dir={tmp_path}/runs",
        f"{TASKSET}.path={data}",
        HF_HOME=str(home),
        HF_DATASETS_CACHE=f"{home}/datasets",
    )
    assert_refused(
        done,
        2,
        f"{home}/datasets cannot be written",
        "Set HF_HOME or HF_DATASETS_CACHE",
        root=tmp_path,
    )


def test_a_home_of_hugging_face_that_cannot_be_written_does_not_matter_for_local_files(
    tiny_model: Path, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    home.write_text("in the way")
    done = limited(
        "check",
        "-c",
        str(CONFIG),
        f"model.model_path={tiny_model}",
        f"checkpoint_root_dir={tmp_path}/runs",
        HF_HOME=str(home),
    )
    assert done.code == 0, done.output


def test_gpus_that_are_not_there(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = start(tmp_path, tiny_model, "cluster.gpu_per_node=2")
    assert_refused(
        done, 3, "needs GPUs, and this machine has none", "trainer.device to cpu", root=tmp_path
    )


def test_gpus_that_ray_does_not_find(tiny_model: Path, tmp_path: Path) -> None:
    before = leftovers.snapshot()
    done = limited(
        "run",
        "-c",
        str(CONFIG),
        f"model.model_path={tiny_model}",
        f"checkpoint_root_dir={tmp_path}/runs",
        "cluster.gpu_per_node=2",
        CUDA_VISIBLE_DEVICES="",
    )
    assert done.code == 3, done.output
    assert (
        "engine 0 needs 1 GPU(s) on one node, but the nodes have [0]" in done.output
        and "set device: cpu" in done.output
    )
    assert runs.left(before) == []


def test_tracker_that_is_not_installed(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rft.monitor.trackers.TensorBoard.requires", ("no_such_package",))
    done = start(tmp_path, tiny_model, "monitor.monitor_type=tensorboard")
    says = (
        "monitor 'tensorboard' needs no_such_package, which is not installed: pip install "
        "no_such_package"
    )
    assert_refused(
        done, 2, says, "or take 'tensorboard' out of monitor.monitor_type", root=tmp_path
    )


def test_a_second_run_in_the_same_folder(
    tiny_model: Path, tmp_path: Path, launch: Callable[..., Any]
) -> None:
    """The first is a real run; the second names its process and touches nothing; the first ends
    well when it is asked to.
    """
    arguments = [
        "run",
        "--in-process",
        "-c",
        str(CONFIG),
        f"model.model_path={tiny_model}",
        f"checkpoint_root_dir={tmp_path}",
        "trainer.total_steps=100000",
    ]
    first = launch(*arguments)
    first.wait_for("step 1/")
    second = rft(*arguments)
    assert second.code == 3 and f"is in use by process {first.process.pid}" in second.output
    assert (
        "Wait for it, stop it, or give this run another `name`" in second.output
        and second.cpu_s < NEWCOMER_S
    )
    assert first.process.poll() is None
    first.interrupt()
    assert first.end() == 130, first.output
    assert '"interrupted"' in (tmp_path / "project" / "group" / "name" / "state.json").read_text()
