"""Images of tasks and of experiences: their bytes by name, and their places among the tokens.

An image is its file as the task gave it, named by the sha256 of these bytes.  A message refers to
it by a part {"type": "image", "image": NAME}; a task, a request and a batch carry the files beside
the messages.  Depends on no decoder and no model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

from msgspec import Struct

Observation = str | Sequence[str | bytes]
"""A text, or texts and image files, in their order."""


class Image(Struct, frozen=True, gc=False):
    """An image file and its name."""

    sha256: str
    data: bytes

    @classmethod
    def of(cls, data: bytes) -> Self:
        return cls(hashlib.sha256(data).hexdigest(), data)

    @property
    def part(self) -> dict[str, str]:
        """The part of a message that shows this image."""
        return {"type": "image", "image": self.sha256}


class ImagePlace(Struct, frozen=True, array_like=True, gc=False):
    """The image at tokens [start, start + length) of a sequence.

    All of them are placeholders, or some are separators of the family's format.  `grid`: patches
    (time, height, width) where the family has a grid, else ().  `pixels`: hash of the values that
    the engine's vision tower read, see `rft.images.processor`.
    """

    sha256: str
    start: int
    length: int
    grid: tuple[int, ...] = ()
    pixels: str = ""


def content_of(observation: Observation) -> str | list[dict[str, str | bytes]]:
    """Return the content of a message that shows an observation, with files in place of names."""
    if isinstance(observation, str):
        return observation
    kinds = (("image" if isinstance(piece, bytes) else "text", piece) for piece in observation)
    return [{"type": kind, kind: piece} for kind, piece in kinds]


def as_parts(content: Any) -> list[dict[str, str]] | None:
    """Return a message's content as text and image parts, without what else clients write into
    them; None for other parts, and for images that have no name yet.
    """
    if not isinstance(content, list):
        return None
    parts: list[dict[str, str]] = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in ("text", "image") or not isinstance(value := part.get(kind), str):
            return None
        parts.append({"type": kind, kind: value})
    return parts


def names_in(messages: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the names of the images that messages show, in order."""
    for message in messages:
        content = message.get("content")
        if isinstance(content, list | tuple):
            for part in content:
                if isinstance(part, Mapping) and part.get("type") == "image":
                    yield part.get("image", "")


def described(content: Any) -> str:
    """Return a message's content as a text, with "[image 1]" where it shows its first image."""
    if not isinstance(content, list | tuple):
        return str(content or "")
    numbers: dict[Any, int] = {}
    return "".join(
        f"[image {numbers.setdefault(part.get('image'), len(numbers) + 1)}]"
        if part.get("type") == "image"
        else str(part.get("text", ""))
        for part in content
    )
