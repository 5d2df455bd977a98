"""Rows whose prompt is too long, found before anything is explored: the row's own chat through the template, its tokens counted.

Knows tokenizer and template files, not engines.  What a workflow adds to the chat is not counted.
Invariant: the same files and rows leave out the same rows, in however many processes they are counted.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import xxhash

from rft.errors import ConfigError
from rft.taskset import parallel
from rft.taskset.chatfiles import ChatFiles, open_chat
from rft.taskset.settings import PromptLimit, TasksetSettings
from rft.types.task import Task

_NAMED = 5
_opened = lru_cache(maxsize=1)(open_chat)  # in a process that counts one part after the other


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
    """The tasks beyond `settings.prompt_limit`; None if there is none.

    Raises ConfigError if nothing is left, or cannot be counted, or where the limit says that such a row is to be refused.
    """
    limit = settings.prompt_limit
    assert limit is not None
    over: list[int] = []
    total = longest = 0
    for index, tokens in _counted(tasks, settings, limit):
        total += 1
        longest = max(longest, tokens)
        if tokens > limit.max_tokens:
            over.append(index)
            if limit.refuse:
                raise ConfigError(
                    f"the prompt of row {index} of {settings.path} has {tokens} tokens, more than model.max_prompt_tokens "
                    f"{limit.max_tokens} (prompt_truncation_side: error).  Raise that, leave such rows out (filter_overlong_prompts), or "
                    "have prompts cut: prompt_truncation_side left, right or middle",
                    key="model.prompt_truncation_side",
                    given="error",
                )
    if over and len(over) == total:
        raise ConfigError(
            f"every prompt of {settings.path} has more than model.max_prompt_tokens {limit.max_tokens} tokens (up to {longest}), so "
            "filter_overlong_prompts leaves nothing; raise it",
            key=f"taskset {settings.name}.filter_overlong_prompts",
            given=True,
        )
    return LeftOut(rows=tuple(over), total=total, limit=limit.max_tokens, longest=longest) if over else None


def _counted(tasks: Iterable[Task], settings: TasksetSettings, limit: PromptLimit) -> Iterator[tuple[int, int]]:
    """(row, tokens of its chat) of each task that has a chat."""
    files, chats = open_chat(limit.model_path), _chats(tasks, settings, limit)
    parts = iter(lambda: list(itertools.islice(chats, parallel.AT_ONCE)), [])
    first, second = next(parts, []), next(parts, [])
    common = asdict(limit)
    whole = itertools.chain([first], [second] if second else [], parts)
    indexes: list[list[int]] = []

    def questions() -> Iterator[list[Any]]:
        for part in whole:
            indexes.append([index for index, _, _ in part])
            yield [(messages, tools) for _, messages, tools in part]

    several = settings.num_process > 1 and second
    answers = (
        parallel.spread("count", common, questions(), settings.num_process)
        if several
        else (_count(files, common, q) for q in questions())
    )
    for answer in answers:
        yield from zip(indexes.pop(0), answer, strict=True)


def _chats(tasks: Iterable[Task], settings: TasksetSettings, limit: PromptLimit) -> Iterator[tuple[int, list[Any], list[Any]]]:
    for task in tasks:
        try:
            messages = task.chat()
        except ValueError as e:
            if limit.refuse:
                continue  # its workflow makes a prompt of its own
            raise ConfigError(str(e), key=f"taskset {settings.name}.filter_overlong_prompts", given=True) from None
        yield task.index, messages, list(task.tools)


def count(limit: dict[str, Any], chats: list[Any]) -> list[int]:
    """Tokens of each (messages, tools) under the fields of a PromptLimit; what another process does."""
    return _count(_opened(limit["model_path"]), limit, chats)


def _count(files: ChatFiles, limit: dict[str, Any], chats: list[Any]) -> list[int]:
    template, values = limit["chat_template"], limit["chat_template_args"]
    texts = [files.render(messages, tools, template=template, **values) for messages, tools in chats]
    keys = [xxhash.xxh3_128_digest(text.encode()) for text in texts]
    new = dict(zip(keys, texts, strict=True))  # data sets repeat their prompts
    counts = dict(zip(new, files.count_each(new.values()), strict=True))
    return [counts[key] for key in keys]
