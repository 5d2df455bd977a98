"""`rft check` compares prompts: of training and evaluation where there are both, and of different
tasks after the chat template.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rft.config.context import Problems
from rft.preflight.compared_prompts import TaskText, near, overlap, shared_prompts
from rft.types.images import Image
from rft.types.task import Task
from tests.helpers.asked_ledger import said
from tests.helpers.runs import TINY


class Rows:
    """A set of tasks that counts what is read of it."""

    def __init__(self, name: str, *, is_eval: bool) -> None:
        self.settings = SimpleNamespace(name=name, is_eval=is_eval)
        self.read = 0

    def __len__(self) -> int:
        return 3

    def task(self, index: int) -> Task:
        self.read += 1
        row: dict[str, Any] = {"prompt": f"What is {index} + 1?"}
        return Task(
            taskset=self.settings.name, index=index, prompt=row["prompt"], workflow="math", row=row
        )


@pytest.mark.parametrize(
    "kinds", [(False, False), (True,), (False, True)], ids=["training", "evaluation", "both"]
)
def test_tasks_are_read_where_training_and_evaluation_can_be_compared(
    kinds: tuple[bool, ...],
) -> None:
    rows = [Rows(f"set{i}", is_eval=kind) for i, kind in enumerate(kinds)]
    problems = Problems()
    overlap(rows, problems)  # type: ignore[arg-type]
    both = len(set(kinds)) == 2
    assert [r.read for r in rows] == [3 if both else 0] * len(rows)
    assert len(problems.warnings) == both


def test_equal_questions_about_different_images_are_different_tasks() -> None:
    question = {"type": "text", "text": "which of these colours is it?"}
    images = [Image.of(data) for data in (b"red", b"blue", b"red")]
    chats = [({"role": "user", "content": [x.part, question]},) for x in images]
    red, blue, again = (
        TaskText.of(Task(taskset="t", index=i, messages=chat, images=(x,), workflow="math"))
        for i, (chat, x) in enumerate(zip(chats, images, strict=True))
    )
    assert shared_prompts([red, blue], [again]) == ([(again, red)], [])
    assert shared_prompts([blue], [red]) == ([], []) and near([red, blue]) == []


@pytest.mark.parametrize("name", ["content", "contant"])
def test_a_template_that_shows_no_task_is_refused(
    name: str, tmp_path: Path, tiny_model: Path
) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text(
        "{% for m in messages %}{{ m['role'] + (m['" + name + "'] or '') }}{% endfor %}assistant"
    )
    out, _, code = said(
        "check",
        "-c",
        str(TINY),
        f"model.model_path={tiny_model}",
        f"model.custom_chat_template={template}",
    )
    assert (code, "row 0: the chat template does not write message 0" in " ".join(out.split())) == (
        (0, False) if name == "content" else (2, True)
    )


def test_a_template_that_cuts_tasks_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text(
        "{% for m in messages %}{{ m['role'] + m['content'][:40] }}{% endfor %}assistant"
    )
    out, _, code = said(
        "check",
        "-c",
        str(TINY),
        f"model.model_path={tiny_model}",
        f"model.custom_chat_template={template}",
    )
    assert code == 2 and "row 0: the chat template does not write message 0" in " ".join(
        out.split()
    )
