"""Chats in ShareGPT's form, {from, value}, as messages with a role and a content."""

from __future__ import annotations

from typing import Any

_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
}


def of_sharegpt(messages: Any) -> Any:
    """The chat with roles; anything else as it is.  Raises ValueError for another speaker."""
    if not isinstance(messages, list) or not messages:
        return messages
    if not all(isinstance(m, dict) and {"from", "value"} <= m.keys() for m in messages):
        return messages
    if strange := next((m["from"] for m in messages if m["from"] not in _ROLES), None):
        raise ValueError(f"messages of {', '.join(_ROLES)}, not of {strange!r}")
    return [{"role": _ROLES[m["from"]], "content": m["value"]} for m in messages]
