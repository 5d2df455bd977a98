"""Read tasks that are folders of Harbor's form: path `rft.extras.sandbox.harbor_tasks:harbor_tasks`,
args `{folder: ...}`.

    TASK/instruction.md            the prompt
    TASK/task.toml                 limits, users, variables; [metadata] split (default: train)
    TASK/environment/Dockerfile    of the image in which the agent works, or [environment] docker_image
    TASK/tests/test.sh             judges what the agent left; writes /logs/verifier/reward.txt or .json
    TASK/solution/solve.sh         optional: a solution

Source: the models of the package harbor 0.26 (schema_version 1.4).
Invariant: a field has the effect that it has there, or the task is refused by the field's name.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, ValidationError, model_validator

from rft.files.disk import read_regular
from rft.types.completion import Score

_LARGEST_TEXT = 1 << 20
_MB = {"K": 1 / 1024, "M": 1, "G": 1024}
_OTHER_FILES = {
    "trajectory.json": "a conversation before the task",
    "steps": "tasks of several steps",
    "environment/docker-compose.yaml": "several containers",
    "environment/docker-compose.yml": "several containers",
    "tests/Dockerfile": "an image of the tests",
    "tests/docker-compose.yaml": "an image of the tests",
}
_CANARY = re.compile(r"<!--.*canary.*-->|#.*canary.*", re.IGNORECASE)


def _literal(env: dict[str, str]) -> dict[str, str]:
    if name := next((n for n, text in env.items() if "${" in text), None):
        raise ValueError(
            f"{name} takes a variable of the machine that plays the task, which is not done; "
            f"write its value"
        )
    return env


def _no(reason: str) -> AfterValidator:
    def refuse(value: Any) -> Any:
        if value:
            raise ValueError(f"is not offered: {reason}")
        return value

    return AfterValidator(refuse)


Env = Annotated[dict[str, str], AfterValidator(_literal)]
User = str | int | None


class _Network(BaseModel):
    network_mode: Literal["no-network", "public", "allowlist"] | None = None
    allowed_hosts: list[str] | None = None


class _AgentTable(_Network):
    timeout_sec: float | None = Field(default=None, gt=0)
    user: User = None


class _EnvironmentTable(_Network):
    build_timeout_sec: float = 600.0
    docker_image: str | None = None
    os: str = "linux"
    cpus: float | None = Field(default=None, gt=0)
    memory_mb: int | None = Field(default=None, gt=0)
    storage_mb: int | None = Field(default=None, gt=0)
    gpus: Annotated[int | None, _no("runtimes have no GPU")] = None
    gpu_types: Annotated[list[str] | None, _no("runtimes have no GPU")] = None
    tpu: Annotated[dict[str, Any] | None, _no("runtimes have no TPU")] = None
    mcp_servers: Annotated[list[Any], _no("agents get no servers from a task")] = []
    env: Env = {}
    skills_dir: Annotated[str | None, _no("agents get no skills from a task")] = None
    healthcheck: Annotated[dict[str, Any] | None, _no("runtimes start no service")] = None
    workdir: str | None = None
    allow_internet: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _sizes(cls, table: Any) -> Any:
        """Read the older `memory` and `storage`, such as "2G"."""
        if not isinstance(table, dict):
            return table
        table = dict(table)
        for name in ("memory", "storage"):
            if isinstance(text := table.pop(name, None), str):
                size = re.fullmatch(r"([\d.]+)([KMG])", text.strip().upper())
                if not size:
                    raise ValueError(f"{name} {text!r} is no size such as 2G or 512M")
                megabytes = int(float(size[1]) * _MB[size[2]])
                if table.setdefault(f"{name}_mb", megabytes) != megabytes:
                    raise ValueError(f"{name} and {name}_mb differ")
        return table

    @model_validator(mode="after")
    def _linux(self) -> _EnvironmentTable:
        if self.os.lower() != "linux":
            raise ValueError(f"os {self.os!r} is not offered: runtimes are Linux")
        return self


class _VerifierTable(_Network):
    timeout_sec: float = Field(default=600.0, gt=0)
    env: Env = {}
    user: User = None
    environment_mode: Literal["shared", "separate"] | None = None
    environment: Annotated[
        dict[str, Any] | None, _no("tests run in the image of the agent; leave it out")
    ] = None
    collect: Annotated[list[Any], _no("tasks have one container")] = []


class _SolutionTable(BaseModel):
    env: Env = {}


class _Artifact(BaseModel):
    source: str
    exclude: Annotated[list[str], _no("artifacts are taken whole")] = []
    service: Literal["main"] | None = None


class TaskTable(BaseModel):
    """task.toml; unknown keys have no effect, as in the reference."""

    metadata: dict[str, Any] = {}
    agent: _AgentTable = _AgentTable()
    environment: _EnvironmentTable = _EnvironmentTable()
    verifier: _VerifierTable = _VerifierTable()
    solution: _SolutionTable = _SolutionTable()
    steps: Annotated[list[Any] | None, _no("tasks have one step")] = None
    artifacts: list[str | _Artifact] = []

    def asks_for_network(self) -> str:
        """Return the key that asks for a network, or ""; a key that is left out does not ask."""
        tables = {"environment": self.environment, "agent": self.agent, "verifier": self.verifier}
        for name, table in tables.items():
            if table.network_mode not in (None, "no-network") or table.allowed_hosts:
                return f"{name}.network_mode"
        return "environment.allow_internet" if self.environment.allow_internet else ""

    def carried(self) -> list[str]:
        """Return the paths that the tests get beside the work folder."""
        return [a if isinstance(a, str) else a.source for a in self.artifacts]


@dataclass(frozen=True)
class HarborTask:
    folder: Path
    instruction: str
    table: TaskTable

    @property
    def dockerfile(self) -> Path:
        return self.folder / "environment" / "Dockerfile"


def harbor_tasks(
    *, split: str, folder: str, network: Literal["as_stated", "none"] = "as_stated"
) -> list[dict[str, Any]]:
    """Return rows {prompt, name, folder} of the tasks of a split, sorted by folder name.

    `network`: none: tasks that ask for a network are played without one; they are refused else.
    Raises ValueError for a folder that is no task, OSError if it cannot be read.
    """
    rows = []
    for path in sorted(p for p in Path(folder).resolve().iterdir() if p.is_dir()):
        task = read_task(path)
        if task.table.metadata.get("split", "train") != split:
            continue
        if network == "as_stated" and (key := task.table.asks_for_network()):
            raise ValueError(
                f"{path}/task.toml: {key}: runtimes reach the model and nothing else; `network: "
                f"none` in the taskset's args plays such tasks without a network"
            )
        rows.append({"prompt": task.instruction, "name": path.name, "folder": str(path)})
    if not rows:
        raise ValueError(f"{folder} has no task of split {split!r}")
    return rows


def read_task(folder: Path) -> HarborTask:
    """Read one task.  Raises ValueError naming what is missing or refused."""
    if link := next((p for p in (folder, *folder.rglob("*")) if p.is_symlink()), None):
        raise ValueError(f"{link} is a link; a task has its files in its own folder")
    for name, what in _OTHER_FILES.items():
        if (folder / name).exists():
            raise ValueError(f"{folder}/{name}: {what} are not offered")
    if ignore := next(folder.rglob(".harborignore"), None):
        raise ValueError(f"{ignore} is not offered: remove the files that it names")
    for name in ("instruction.md", "task.toml", "tests/test.sh"):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} is no task: it has no {name}")
    try:
        table = TaskTable.model_validate(tomllib.loads(_text(folder / "task.toml")))
    except ValidationError as e:
        first = e.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{folder}/task.toml: {key}: {first['msg']}") from None
    except (tomllib.TOMLDecodeError, RecursionError) as e:
        raise ValueError(f"{folder}/task.toml cannot be read: {e}") from None
    task = HarborTask(folder, _without_canary(_text(folder / "instruction.md")), table)
    if not table.environment.docker_image and not task.dockerfile.is_file():
        raise ValueError(
            f"{folder} is no task: it has neither environment/Dockerfile nor docker_image"
        )
    return task


def read_reward(name: str, data: bytes) -> Score:
    """Return the score in a reward file.  Raises ValueError.

    reward.txt has one number; reward.json has numbers by name, whose `reward`, or only one, is the
    value.
    """
    text = data.decode(errors="replace").strip()
    try:
        rewards = json.loads(text) if name.endswith(".json") else {"reward": float(text)}
    except ValueError as e:
        raise ValueError(f"{name} is no reward: {e}; given {text[:80]!r}") from None
    if not isinstance(rewards, dict) or not rewards:
        raise ValueError(f"{name} must be an object of numbers; given {text[:80]!r}")
    for key, value in rewards.items():
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{name}: {key} is {value!r}, which is no finite number")
    if "reward" not in rewards and len(rewards) > 1:
        raise ValueError(f"{name} has {', '.join(rewards)}, and no `reward` to train on")
    value = rewards.get("reward", next(iter(rewards.values())))
    return Score(value=float(value), parts={key: float(v) for key, v in rewards.items()})


def _without_canary(text: str) -> str:
    """Drop leading lines that mark the text for searches in training data."""
    lines = text.split("\n")
    start = 0
    while start < len(lines) and _CANARY.fullmatch(lines[start].strip()):
        start += 1
    return "\n".join(lines[start:]).strip()


def _text(file: Path) -> str:
    try:
        return read_regular(file, _LARGEST_TEXT).decode("utf-8")
    except UnicodeDecodeError as e:
        raise ValueError(f"{file} is no UTF-8: {e.reason} at byte {e.start}") from None
