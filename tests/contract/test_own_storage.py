"""A storage in a user's file, named in the configuration alone: the shipped suite, a run that
trains on it, resume, and the audit.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rft.buffer.audit import audit_run
from rft.buffer.buffer import Buffer
from rft.buffer.query import open_run
from rft.buffer.settings import BufferSettings
from rft.buffer.storage_choice import make_storage
from rft.preflight.check import check
from rft.testing.storage_contract import StorageContract, fill, ids, take

ROOT = Path(__file__).parents[2]
BUFFER = "buffer.trainer_input.experience_buffer"
STORAGE = '''
import hashlib

from pydantic import BaseModel

from rft.buffer.storage.base import Storage, storage
from rft.buffer.priority import PriorityFn
from rft.errors import PayloadDamaged


class Shelf(Storage):
    """One file for each block, named by its content."""

    class Args(BaseModel, extra="forbid"):
        suffix: str

    def __init__(self, settings, suffix):
        self.folder, self.suffix = settings.folder / "shelf", suffix

    def open(self):
        self.folder.mkdir(parents=True, exist_ok=True)

    def put(self, blocks, connection):
        names = [hashlib.sha256(block).hexdigest() + self.suffix for block in blocks]
        for name, block in zip(names, blocks):
            (self.folder / name).write_bytes(block)
        return names

    def get(self, locators, connection):
        try:
            return [(self.folder / name).read_bytes() for name in locators]
        except FileNotFoundError as e:
            raise PayloadDamaged(f"payload {e.filename} is missing") from None


@storage("marked_shelf")
class Marked(Shelf):
    pass


def no_class(settings): ...


class Newest(PriorityFn):
    class Args(BaseModel, extra="forbid"):
        weight: float

    def __init__(self, args, seed):
        self.weight = args.weight

    def __call__(self, x):
        return self.weight * x.batch
'''
CONFIG = """
project: own
group: storage
name: run
seed: 42
checkpoint_root_dir: {root}
model: {{model_path: {model}, max_prompt_tokens: 63, max_response_tokens: 1}}
algorithm: {{algorithm_type: grpo, repeat_times: 2, kl_loss_fn: none, optimizer: {{lr: 1.0e-3}}}}
buffer:
  batch_size: 2
  total_epochs: 10
  explorer_input:
    default_workflow_type: simple_workflow
    default_reward_fn_type: exact_answer
    taskset: {{name: copy, path: "rft.testing.tiny:copy_tasks", split: train}}
  trainer_input:
    experience_buffer: {{storage_type: "{root}/shelf.py:Shelf", storage_args: {{suffix: .block}}}}
explorer: {{rollout_model: {{engine_type: transformers}}}}
trainer: {{total_steps: 2, save_interval: 1}}
synchronizer: {{sync_method: memory, sync_interval: 1}}
"""


@pytest.fixture(scope="session")
def config(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("own")
    (root / "shelf.py").write_text(STORAGE)
    path = root / "config.yaml"
    path.write_text(CONFIG.format(root=root, model=tiny_model))
    return path


def planned(config: Path, *overrides: str) -> BufferSettings:
    report = check(config, list(overrides))
    assert report.plan is not None and not report.errors, report.errors
    return report.plan.buffer


class TestShelf(StorageContract):
    @pytest.fixture(autouse=True)
    def _plan(self, config: Path) -> None:
        self.planned = planned(config)

    def settings(self, folder: Path) -> BufferSettings:
        return replace(self.planned, folder=folder, run="")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("storage_args={}", "arguments of storage .*shelf.py:Shelf': suffix: Field required"),
        ("storage_args={suffix: 3}", "suffix: Input should be a valid string"),
        ("storage_args={suffix: .x, colour: red}", "unknown argument 'colour' .* Known: suffix"),
        ("storage_type={root}/shelf.py:Shelve", "shelf.py has no 'Shelve'; it defines .*Shelf"),
        (
            "storage_type={root}/shelf.py:no_class",
            r"must be a class X\(Storage\) of rft.buffer.storage.base",
        ),
        ("storage_type=no.such.module:Shelf", "No module named 'no'"),
        ("storage_type=fille", "unknown storage 'fille'.  Did you mean file.*Known: "),
    ],
)
def test_check_says_what_is_wrong(config: Path, change: str, said: str) -> None:
    report = check(config, [f"{BUFFER}.{change.replace('{root}', str(config.parent))}"])
    text = "\n".join(str(e) for e in report.errors)
    assert re.search(said, text), text


def test_a_marked_storage_is_found_again_without_the_plugin_folder(config: Path) -> None:
    settings = planned(
        config, f"{BUFFER}.storage_type=marked_shelf", f"plugin_dirs=[{config.parent}]"
    )
    assert type(make_storage(settings)).__name__ == "Marked"
    code = (
        "import sys, rft.buffer.storage_choice as b; s, = sys.argv[1:]; print(b.REGISTRY.get('storage', "
        "s).obj.__name__)"
    )
    from rft.buffer.storage_choice import storage_reference

    done = subprocess.run(
        [sys.executable, "-c", code, storage_reference("marked_shelf")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "Marked"


@pytest.mark.parametrize(
    ("weight", "said"), [("2.0", ""), ("two", "weight"), ("2.0, colour: red", "colour")]
)
async def test_a_priority_function_in_the_same_file(
    config: Path, tmp_path: Path, weight: str, said: str
) -> None:
    replay = f"{BUFFER}.replay_buffer"
    changes = [f"{replay}.enable=true", f"{replay}.priority_fn={config.parent}/shelf.py:Newest"]
    report = await asyncio.to_thread(
        check, config, [*changes, f"{replay}.priority_fn_args={{weight: {weight}}}"]
    )
    assert [e.key for e in report.errors if said in str(e)] == [
        e.key for e in report.errors
    ] and bool(report.errors) == bool(said)
    if said or report.plan is None:
        return
    buffer = Buffer(replace(report.plan.buffer, folder=tmp_path, run=""))
    await buffer.open()
    await buffer.start_lineage(None, None)
    for batch in (0, 1):
        await fill(buffer, 1, batch)
    assert {batch for batch, _, _ in ids(await take(buffer, 1, 1))} == {1}
    await buffer.close()


@pytest.mark.slow
def test_a_run_trains_on_it_and_goes_on(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = config.parent
    # readers run only code that they are told is theirs
    monkeypatch.setenv("RFT_STORAGE_CODE", f"{root}/shelf.py:Shelf")
    for steps in (2, 3):
        command = [
            sys.executable,
            "-m",
            "rft.cli.main",
            "run",
            "--in-process",
            "-c",
            str(config),
            f"trainer.total_steps={steps}",
        ]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            cwd=root,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert done.returncode == 0 and f"done  step {steps}" in done.stdout, (
            done.stdout + done.stderr
        )
    run = root / "own/storage/run"
    audit = audit_run(run)
    assert (audit.ok, audit.used, audit.used_twice) == (True, 12, 0), audit
    assert len({*(run / "buffer/shelf").glob("*.block")}) == 6
    with open_run(run) as questions, questions.ask("SELECT id FROM v_experiences") as answer:
        ids = [str(name) for (name,) in answer.rows]
    with open_run(run) as questions:
        assert len(questions.payload(ids)) == 12
    # from another folder
    command = [sys.executable, "-m", "rft.cli.main", "buffer", "audit", str(run), "--json"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0 and json.loads(done.stdout)["ok"], done.stdout + done.stderr
