"""Tasks stored as folders in Harbor's layout: path `rft.taskset.task_folders:task_folders`, args
`{folder: ...}`.

    TASK/instruction.md          the agent's prompt
    TASK/environment/            project files that the agent sees and changes; a Dockerfile builds the image
    TASK/tests/                  hidden: copied into the project for judging, never shown
    TASK/task.toml               optional: [environment] docker_image; [metadata] split (default: train)

Invariant: nothing under tests/ is in a prompt, and a task has no files from outside its folder:
links are refused.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from rft.files.disk import read_regular

MOST_BYTES = 1 << 20  # of all files of one subfolder
MOST_FILES = 1000


def task_folders(*, split: str, folder: str) -> list[dict[str, Any]]:
    """Rows {prompt, name, files, tests, image, dockerfile}, sorted by folder name; `files` and
    `tests` map paths to texts.

    Raises ValueError for a folder that is no task, OSError if it cannot be read.
    """
    rows = []
    for task in sorted(p for p in Path(folder).iterdir() if p.is_dir()):
        paths = [
            task,
            *(task / name for name in ("instruction.md", "task.toml", "environment", "tests")),
        ]
        if link := next(
            (p for p in (*paths, *paths[-2].rglob("*"), *paths[-1].rglob("*")) if p.is_symlink()),
            None,
        ):
            raise ValueError(f"{link} is a link; a task has its files in its own folder")
        parts, image = _split_and_image(task / "task.toml")
        if parts != split:
            continue
        files = _texts(task / "environment")
        tests = _texts(task / "tests")
        dockerfile = files.pop("Dockerfile", "")
        if not (task / "instruction.md").is_file() or not files or not tests:
            raise ValueError(
                f"{task} is no task: it needs instruction.md, and files under environment/ and "
                f"tests/"
            )
        row = {
            "prompt": _text(task / "instruction.md").strip(),
            "name": task.name,
            "files": files,
            "tests": tests,
        }
        rows.append({**row, "image": image, "dockerfile": dockerfile})
    if not rows:
        raise ValueError(f"{folder} has no task of split {split!r}")
    return rows


def _split_and_image(file: Path) -> tuple[str, str]:
    """Return (split, image) from task.toml."""
    if not file.exists():
        return "train", ""
    try:
        config = tomllib.loads(_text(file))
        fields = (
            config.get("metadata", {}).get("split", "train"),
            config.get("environment", {}).get("docker_image", ""),
        )
    except (tomllib.TOMLDecodeError, AttributeError, RecursionError) as e:
        raise ValueError(f"{file} cannot be read: {e}") from None
    if not all(isinstance(x, str) for x in fields):
        raise ValueError(
            f"{file}: metadata.split and environment.docker_image are texts; given {fields!r}"
        )
    return fields


def _texts(folder: Path) -> dict[str, str]:
    texts = {}
    size = 0
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if not path.is_file() or "__pycache__" in name.parts:
            continue
        texts[str(name)] = _text(path)
        size += len(texts[str(name)])
        if size > MOST_BYTES or len(texts) > MOST_FILES:
            raise ValueError(
                f"{folder} is too large; at most {MOST_BYTES} bytes in {MOST_FILES} files are taken"
            )
    return texts


def _text(file: Path) -> str:
    try:
        return read_regular(file, MOST_BYTES).decode("utf-8")
    except UnicodeDecodeError as e:
        raise ValueError(f"{file} is no UTF-8: {e.reason} at byte {e.start}") from None
