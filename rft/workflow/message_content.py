"""Check what messages of clients hold: texts and images, in any dialect.

Depends on no dialect.  Invariant: content that shows no image is a text, and texts that follow each
other are one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from rft.types.images import Image
from rft.types.task import plain_text


def wrong(text: str, kind: str = "wrong") -> PydanticCustomError:
    return PydanticCustomError(kind, text)  # type: ignore[arg-type]  # pydantic wants literals, to translate them


def text_of(content: Any) -> str:
    if (text := plain_text(content)) is not None:
        return text
    raise wrong("it must be a text or a list of text parts")


FileOf = Callable[[Any], bytes]  # of a part that shows an image


def shows(kind: str, file_of: FileOf) -> BeforeValidator:
    """Take a text, or parts of type text and `kind`; return the text, or `merged` parts."""

    def check(content: Any) -> Any:
        if plain_text(content) is not None or not isinstance(content, list):
            return text_of(content)
        parts: list[dict[str, Any]] = []
        for part in content:
            type_of = part.get("type") if isinstance(part, dict) else None
            if type_of == "text" and isinstance(part.get("text"), str):
                parts.append({"type": "text", "text": part["text"]})
            elif type_of == kind:
                parts.append({"type": "image", "image": image_of(part, file_of)})
            else:
                raise wrong(
                    f"it must be a text, or a list of parts of type text and {kind}; sound, videos "
                    f"and files are not served"
                )
        return merged(parts)

    return BeforeValidator(check)


def image_of(part: Any, file_of: FileOf) -> Image:
    try:
        return Image.of(file_of(part))
    except ValueError as e:
        raise wrong(str(e)) from None


def merged(parts: Iterable[dict[str, Any]]) -> Any:
    """Return parts with texts that follow each other as one; a text where there is no image."""
    done: list[dict[str, Any]] = []
    for part in parts:
        if part["type"] == "text" and done and done[-1]["type"] == "text":
            done[-1] = {"type": "text", "text": done[-1]["text"] + part["text"]}
        elif part.get("text") != "":
            done.append(part)
    return (
        done if any(part["type"] == "image" for part in done) else "".join(p["text"] for p in done)
    )


def taken(messages: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return messages, and their images by name, as fields of ApiRequest."""
    images: dict[str, Image] = {}

    def named(part: dict[str, Any]) -> dict[str, Any]:
        if part["type"] == "text":
            return part
        image: Image = part["image"]
        images[image.sha256] = image
        return image.part

    shown = tuple(
        {**m, "content": [*map(named, m["content"])]} if isinstance(m["content"], list) else m
        for m in messages
    )
    return {"messages": shown, "images": tuple(images.values())}


def check_shown(role: str, content: Any) -> None:
    """Raises where an image stands in another message than the user's or a result of a tool."""
    if isinstance(content, list) and role not in ("user", "tool"):
        raise wrong(
            f"a message of the {role} is a text: images are for the user and results of tools"
        )
