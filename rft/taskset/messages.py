"""Columns of rows, and the messages in them as chat templates take them.

Independent of settings.
"""

from __future__ import annotations

from typing import Any

from rft.files.strict_json import parse_json
from rft.taskset.sharegpt import of_sharegpt
from rft.types.task import plain_text

ABSENT = object()


def lookup(row: dict[str, Any], name: str) -> Any:
    """Return the column `name`, or what lies there by dots (reward_model.style), or ABSENT."""
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, dict) or part not in value:
            return ABSENT
        value = value[part]
    return value


def as_chat(value: Any, *, parts: bool = False) -> tuple[dict[str, Any], ...]:
    """Return a column's messages (or JSON text) as templates take them; `parts`: contents other
    than text stay.  Raises ValueError.
    """
    messages = of_sharegpt(from_json(value))
    if (
        not isinstance(messages, list)
        or not messages
        or not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages)
    ):
        raise ValueError("a list of messages such as {role: user, content: ...}")
    return tuple(_message(message, parts=parts) for message in messages)


def _message(message: dict[str, Any], *, parts: bool) -> dict[str, Any]:
    # templates test whether a key exists
    cleaned = {k: v for k, v in message.items() if v is not None or k == "content"}
    content = message.get("content")
    if isinstance(content, list):
        cleaned["content"] = text = plain_text(content)
        if text is None and parts:
            return {**cleaned, "content": content}
        if text is None:
            raise ValueError(
                "messages whose content is text; parts of images need format.image_key, sound and "
                "videos are not offered"
            )
    return cleaned


def from_json(value: Any) -> Any:
    """Parse a column of JSON text; None for other texts."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value)
    except ValueError:
        return None
