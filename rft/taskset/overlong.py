"""Rows whose prompt is too long, found before anything is explored: the row's own chat through the template, its tokens counted.

Knows tokenizer and template files, not engines.  What a workflow adds to the chat is not counted.
Invariant: the same files and rows leave out the same rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import xxhash

from rft.errors import ConfigError
from rft.taskset.chatfiles import open_chat
from rft.taskset.settings import TasksetSettings
from rft.types.task import Task

_AT_ONCE = 512
_NAMED = 5


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """The rows that are left out, in order, of `total`; `limit` and `longest` in tokens."""

    rows: tuple[int, ...]
    total: int
    limit: int
    longest: int

    def __str__(self) -> str:
        named = ", ".join(map(str, self.rows[:_NAMED])) + (", ..." if len(self.rows) > _NAMED else "")
        return (
            f"{len(self.rows)} of {self.total} rows are left out (filter_overlong_prompts): their prompts have more than "
            f"model.max_prompt_tokens {self.limit} tokens, up to {self.longest}.  Rows {named}"
        )


def find(tasks: Iterable[Task], settings: TasksetSettings) -> LeftOut | None:
    """The tasks beyond `settings.prompt_limit`; None if there is none.  Raises ConfigError if nothing is left, or cannot be counted."""
    limit = settings.prompt_limit
    assert limit is not None
    chat = open_chat(limit.model_path)
    rows: list[int] = []
    counts: dict[bytes, int] = {}
    total = 0
    given = iter(tasks)
    while some := list(itertools.islice(given, _AT_ONCE)):
        texts = [
            chat.render(_opening(t, settings), list(t.tools), template=limit.chat_template, **limit.chat_template_args)
            for t in some
        ]
        keys = [xxhash.xxh3_128_digest(text.encode()) for text in texts]
        new = {key: text for key, text in zip(keys, texts, strict=True) if key not in counts}  # data sets repeat their prompts
        counts.update(zip(new, chat.count_each(new.values()), strict=True))
        rows += [task.index for task, key in zip(some, keys, strict=True) if counts[key] > limit.max_tokens]
        total += len(some)
    longest = max(counts.values())
    if len(rows) == total:
        raise ConfigError(
            f"every prompt of {settings.path} has more than model.max_prompt_tokens {limit.max_tokens} tokens (up to {longest}), so "
            "filter_overlong_prompts leaves nothing; raise it",
            key=f"taskset {settings.name}.filter_overlong_prompts",
            given=True,
        )
    return LeftOut(rows=tuple(rows), total=total, limit=limit.max_tokens, longest=longest) if rows else None


def _opening(task: Task, settings: TasksetSettings) -> list[dict[str, object]]:
    try:
        return task.chat()
    except ValueError as e:
        raise ConfigError(str(e), key=f"taskset {settings.name}.filter_overlong_prompts", given=True) from None
