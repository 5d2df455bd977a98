"""Whole runs that several test files look at, each made once: on Ray with every plugin door,
planted secrets, two trackers and busy ports; and one on Ray that fails.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rft.launch import leftovers
from tests.helpers import runs

ROOT = Path(__file__).parents[2]
CONFIG = Path(__file__).parent / "tiny_config.yaml"
PORTS = (6379, 8265, 10001)  # where a Ray that nobody configured would listen


ENVIRONMENT = {  # planted secrets; nothing may print or store them
    "WANDB_API_KEY": "c4a7enva" * 5,
    "OPENAI_API_KEY": "sk-c4a7envb-proj-0123456789",
    "HF_TOKEN": "c4a7envc-no-known-form",
}
WRITTEN = {
    "wandb": "c4a7cfga" * 5,
    "workflow": "c4a7cfgb-token",
    "database": "c4a7cfgc-password",
    "override": "c4a7cfgd-token",
}
CANARIES = (*ENVIRONMENT.values(), *WRITTEN.values())


@pytest.fixture(scope="module")
def environment() -> Iterator[pytest.MonkeyPatch]:
    """Variables are inherited by vLLM's processes and given back afterwards, also those that vLLM
    sets itself.
    """
    before = dict(os.environ)
    with pytest.MonkeyPatch.context() as patch:
        yield patch
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture
def launch() -> Iterator[Callable[..., Any]]:
    """Starts `rft` in a process of its own: `launch("run", ...)` gives a `runs.Run`; one that a
    failed test forgot is killed.
    """
    started: list[Any] = []

    def start(*arguments: str, **environment: str) -> Any:
        started.append(runs.Run(*arguments, env=environment))
        return started[-1]

    yield start
    for run in started:
        if run.process.poll() is None:
            run.process.kill()
            run.end()


@pytest.fixture(scope="session")
def canaries() -> tuple[str, ...]:
    return CANARIES


@dataclasses.dataclass(frozen=True)
class Finished:
    """A run that has ended, and what it left on the machine."""

    code: int
    output: str
    folder: Path
    left: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Doors:
    """A workflow and a reward behind each door; `tasksets` name them, `path` goes on sys.path,
    `plugins` is a plugin folder.
    """

    tasksets: list[dict[str, Any]]
    path: Path
    plugins: Path
    rewards: dict[str, float]  # of each taskset


def plugin(door: str, value: float, *, marked: bool) -> str:
    """Source of a workflow and a reward.  The workflow is as careless with its token as people are."""
    return textwrap.dedent(f"""
        import logging
        import sys
        from rft.reward.base import reward
        from rft.workflow.base import Workflow, workflow

        {f'@workflow("{door}_flow")' if marked else ""}
        class Flow(Workflow):
            def __init__(self, api_token="", database="", fail=False):
                self.words = f"{door} uses {{api_token}} at {{database}}"
                self.fail = fail

            async def run(self, task, ctx):
                print(self.words)
                print(self.words, file=sys.stderr)
                logging.getLogger("{door}").warning("%s", self.words)
                if self.fail:
                    raise PermissionError(self.words)
                await ctx.chat(task.chat())
                return ctx.transcript(info={{"door": "{door}"}})

        {f'@reward("{door}_reward")' if marked else ""}
        def grade(task, transcript):
            assert transcript.info == {{"door": "{door}"}}
            return {value}
    """)


@pytest.fixture(scope="session")
def doors(tmp_path_factory: pytest.TempPathFactory) -> Doors:
    root = tmp_path_factory.mktemp("doors")
    rows = root / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps({"prompt": f"{i}", "response": f"{i}"}) + "\n" for i in range(8))
    )
    secrets = {
        "api_token": WRITTEN["workflow"],
        "database": f"postgresql://me:{WRITTEN['database']}@db.example/prod",
    }

    plugins = root / "plugins"
    plugins.mkdir()
    (plugins / "folder_door.py").write_text(plugin("folder", 1.5, marked=True))
    path = root / "path"
    (path / "module_door").mkdir(parents=True)
    (path / "module_door" / "__init__.py").write_text("")
    (path / "module_door" / "inner.py").write_text(plugin("module", 2.5, marked=False))
    (root / "file_door.py").write_text(plugin("file", 3.5, marked=False))
    info = path / "entry_door-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: entry_door\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[rft.plugins]\nentry_door = entry_door\n")
    (path / "entry_door.py").write_text(plugin("entry", 4.5, marked=True))
    (plugins / "advantage.py").write_text(
        "import numpy as np\nfrom rft.plugins import kind\n\n"
        "@kind('advantage_fn')('folder_advantage')\n"
        "def advantage(x, args):\n    return np.full(len(x.rows), 0.25, np.float32)\n"
    )
    (root / "shipped_door.py").write_text("def grade(task, transcript):\n    return 5.5\n")

    def taskset(name: str, workflow: str, reward: str, **more: Any) -> dict[str, Any]:
        return {
            "name": name,
            "path": str(rows),
            "default_workflow_type": workflow,
            "default_reward_fn_type": reward,
            **more,
        }

    return Doors(
        [
            taskset("folder", "folder_flow", "folder_reward", workflow_args=secrets),
            taskset(
                "module", "module_door.inner:Flow", "module_door.inner:grade", workflow_args=secrets
            ),
            taskset(
                "file",
                f"{root}/file_door.py:Flow",
                f"{root}/file_door.py:grade",
                workflow_args=secrets,
            ),
            taskset("entry", "entry_flow", "entry_reward", workflow_args=secrets),
            taskset("shipped", "math_workflow", f"{root}/shipped_door.py:grade"),
        ],
        path,
        plugins,
        {"folder": 1.5, "module": 2.5, "file": 3.5, "entry": 4.5, "shipped": 5.5},
    )


@pytest.fixture(scope="session")
def door_config(doors: Doors, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration that goes through every door, with two trackers and secrets in plain text."""
    values = yaml.safe_load(CONFIG.read_text())
    given = values["buffer"]["explorer_input"]
    del given["taskset"]
    given["tasksets"] = doors.tasksets
    given["eval_tasksets"] = [
        {"name": "copy_eval", "path": "rft.testing.tiny:copy_tasks", "split": "eval", "max_rows": 3}
    ]
    values["buffer"]["batch_size"] = 10
    values["model"]["max_prompt_tokens"] = 400  # the shipped workflow explains itself at length
    values["algorithm"]["advantage_fn"] = "folder_advantage"
    values["monitor"] = {
        "monitor_type": ["tensorboard", "wandb"],
        "monitor_args": {"wandb": {"mode": "offline", "api_key": WRITTEN["wandb"]}},
    }
    file = tmp_path_factory.mktemp("door_config") / "config.yaml"
    file.write_text(yaml.safe_dump(values, sort_keys=False))
    return file


def arguments(config: Path, doors: Doors, model: Path, root: Path, *more: str) -> list[str]:
    return [
        "run",
        "-c",
        str(config),
        f"model.model_path={model}",
        f"checkpoint_root_dir={root}",
        "--plugin-dir",
        str(doors.plugins),
        f"buffer.explorer_input.tasksets.1.workflow_args.api_token={WRITTEN['override']}",
        *more,
    ]


@pytest.fixture(scope="session")
def ray_run(
    doors: Doors, door_config: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Finished:
    """A run on Ray through every door, while the ports that Ray likes are taken."""
    root = tmp_path_factory.mktemp("ray_run")
    before = leftovers.snapshot()
    with taken(PORTS):
        run = runs.Run(
            *arguments(door_config, doors, tiny_model, root),
            env={**ENVIRONMENT, "PYTHONPATH": str(doors.path)},
        )
        code = run.end()
    return Finished(code, run.output, root / "project" / "group" / "name", tuple(runs.left(before)))


@pytest.fixture(scope="session")
def failed_ray_run(
    doors: Doors, door_config: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Finished:
    """A run on Ray whose first workflow raises every time, with its secrets in the message."""
    root = tmp_path_factory.mktemp("failed_ray_run")
    before = leftovers.snapshot()
    fail = [f"buffer.explorer_input.tasksets.{i}.workflow_args.fail=true" for i in range(4)]
    run = runs.Run(
        *arguments(
            door_config,
            doors,
            tiny_model,
            root,
            *fail,
            "buffer.explorer_input.tasksets.4.max_rows=1",
        ),
        env={**ENVIRONMENT, "PYTHONPATH": str(doors.path)},
    )
    code = run.end()
    return Finished(code, run.output, root / "project" / "group" / "name", tuple(runs.left(before)))


@contextlib.contextmanager
def taken(ports: tuple[int, ...]) -> Iterator[None]:
    """Somebody listens on these ports of every address; one that is taken already is as good."""
    with contextlib.ExitStack() as held:
        for port in ports:
            listener = held.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                listener.bind(("0.0.0.0", port))
                listener.listen()
        yield


@pytest.fixture(scope="module")
def python_path(doors: Doors) -> Iterator[None]:
    """The module and the distribution can be imported in this process too."""
    sys.path.insert(0, str(doors.path))
    yield
    sys.path.remove(str(doors.path))
