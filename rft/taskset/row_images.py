"""Read the images of rows, and put them into the messages of their tasks.

An image of a row is a path (relative to the file of the taskset), a data URL, bytes, {"bytes": ...,
"path": ...} as Arrow keeps it, or a picture as `datasets` decodes it.  Nothing is downloaded.
Independent of the model.  Invariant: every image is decoded once before its task exists, and each
marker or part that stands for an image gets one, in order.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rft.images import data_url
from rft.images.data_url import short
from rft.images.decode import MAX_FILE_BYTES, check
from rft.taskset.messages import ABSENT, as_chat, lookup
from rft.taskset.settings import TasksetSettings
from rft.types.images import Image, names_in
from rft.types.task import Task

MARKER = "<image>"
_NONE: Mapping[str, Image] = {}
_PART_KEYS = ("image", "image_url", "url", "path")


def read(value: Any, folder: Path, by_sha256: Mapping[str, Image] = _NONE) -> list[Image]:
    """Return the images of a column: one, a list, or none; a name means one in `by_sha256`.
    Raises ValueError with the reason.
    """
    if value in (ABSENT, None, ""):
        return []
    values = value if isinstance(value, list | tuple) else [value]
    images = []
    for number, item in enumerate(values):
        if isinstance(item, str) and item in by_sha256:
            images.append(by_sha256[item])
            continue
        try:
            image = Image.of(_bytes(item, folder))
            check(image.data)
        except (ValueError, OSError) as e:
            raise ValueError(f"image {number + 1} of {len(values)}: {e}") from e
        images.append(image)
    return images


def folder_of(path: str) -> Path:
    """Return the folder that the paths of a taskset's images are relative to."""
    place = Path(path).expanduser()
    return place if place.is_dir() else place.parent if place.is_file() else Path()


def with_images(
    settings: TasksetSettings,
    row: dict[str, Any],
    prompt: str | None,
    messages: tuple[dict[str, Any], ...],
) -> tuple[dict[str, Any], str | None, tuple[dict[str, Any], ...], tuple[Image, ...]]:
    """Return the row with names in place of its images, its prompt, or messages that show the
    images, and these.  Raises ValueError with the reason.
    """
    fmt = settings.format
    folder = folder_of(settings.path)
    value = lookup(row, fmt.image_key)
    files = read(value, folder)
    chat = messages or ({"role": "user", "content": prompt},)
    chat, images = placed(chat, files, folder, marked=value is not ABSENT)
    if not images:
        return row, prompt, messages, ()
    if fmt.image_key in row:
        row = {**row, fmt.image_key: [image.sha256 for image in files]}
    if fmt.prompt_type == "messages" and fmt.messages_key in row:
        row = {**row, fmt.messages_key: list(chat)}
    return row, None, chat, images


def chat_in(settings: TasksetSettings, task: Task, value: Any) -> tuple[dict[str, Any], ...]:
    """Return the chat in another column of a task's row, with the names of its images.  Raises
    ValueError with the reason.
    """
    chat = as_chat(value, parts=bool(task.images))
    if not task.images or all(message["role"] == "assistant" for message in chat):
        return chat
    by_sha256 = {image.sha256: image for image in task.images}
    folder = folder_of(settings.path)
    files = read(lookup(task.row, settings.format.image_key), folder, by_sha256)
    return placed(chat, files, folder, by_sha256)[0]


def _bytes(value: Any, folder: Path) -> bytes:
    from PIL import ImageOps
    from PIL.Image import Image as Picture

    if isinstance(value, bytes):
        return value
    if isinstance(value, Mapping):
        inner = next(filter(None, map(value.get, ("bytes", "image", "url", "path"))), None)
        if inner is not None:
            return _bytes(inner, folder)
    if isinstance(value, str) and value.startswith("data:"):
        return data_url.read(value)
    if isinstance(value, str) and value:
        return _file(value, folder)
    if isinstance(value, Picture):  # as `datasets` decodes it
        file = io.BytesIO()
        ImageOps.exif_transpose(value).save(file, "PNG")
        return file.getvalue()
    raise ValueError(
        f"{short(value)} ({type(value).__name__}) is no image; give a path, a data URL or bytes"
    )


def _file(value: str, folder: Path) -> bytes:
    if "://" in value and not value.startswith("file://"):
        raise ValueError(f"{short(value)} is an address; download it and name the file")
    path = folder / Path(value.removeprefix("file://")).expanduser()
    if not os.path.isfile(path):  # noqa: PTH113 - False also for a name that is too long
        raise ValueError(
            f"{path!s:.300} does not exist, or is no file; a text is a path, or a data URL "
            f"(data:image/png;base64,...)"
        )
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ValueError(f"{path} has more than {MAX_FILE_BYTES:,} bytes")
    return path.read_bytes()


def placed(
    messages: Sequence[Mapping[str, Any]],
    images: Sequence[Image],
    folder: Path,
    by_sha256: Mapping[str, Image] = _NONE,
    *,
    marked: bool = False,
) -> tuple[tuple[dict[str, Any], ...], tuple[Image, ...]]:
    """Return messages whose content names its images, and these images, each once.

    Parts with an image of their own, or the sha256 of one in `by_sha256` or `images`, keep it.
    The other `images`, those of a column, go to the parts without one and to the markers <image> in
    texts, in order; without either they stand before the text of the last message of the user.
    Without `images`, <image> is such a marker only if `marked`.  Raises ValueError unless there are
    as many as places for them.
    """
    by_sha256 = {**by_sha256, **{image.sha256: image for image in images}}
    named = {name for name in names_in(messages) if isinstance(name, str)}
    images = [image for image in images if image.sha256 not in named]
    rest = iter(images)
    by_name: dict[str, Image] = {}
    count = 0

    def image_part(image: Image | None) -> dict[str, str]:
        nonlocal count
        if image is None:
            count += 1
            image = next(rest, None)
        if image is None:
            return {}
        by_name[image.sha256] = image
        return image.part

    done = [
        _message(
            m, image_part, marked or bool(images), lambda value: read([value], folder, by_sha256)[0]
        )
        for m in messages
    ]
    if images and not count:
        at = max((i for i, m in enumerate(done) if m.get("role") == "user"), default=len(done) - 1)
        count = len(images)
        done[at] = {**done[at], "content": [*map(image_part, images), *_texts(done[at]["content"])]}
    if count != len(images):
        raise ValueError(
            f"{count} places for images ({MARKER} in texts, or parts of type image without one), "
            f"and {len(images)} images"
        )
    return tuple(done), tuple(by_name.values())


def _message(
    message: Mapping[str, Any], image_part: Any, split: bool, open_image: Callable[[Any], Image]
) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, str) and split and MARKER in content:
        return {**message, "content": [*_marked(content, image_part)]}
    if not isinstance(content, list):
        return dict(message)
    parts: list[dict[str, Any]] = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in ("image", "image_url"):
            value = next((part[k] for k in _PART_KEYS if part.get(k)), None)
            # without a value: the next one of the row's column
            parts.append(image_part(None if value is None else open_image(value)))
        elif kind == "text" and isinstance(text := part.get("text"), str):
            parts += _marked(text, image_part) if split else [{"type": "text", "text": text}]
        else:
            raise ValueError(
                f"a part of type {kind!r}; a message's content is text and images, sound and "
                f"videos are not offered"
            )
    return {**message, "content": parts}


def _marked(text: str, image_part: Any) -> Iterator[dict[str, str]]:
    """Yield the parts of a text with markers."""
    first, *later = text.split(MARKER)
    if first:
        yield {"type": "text", "text": first}
    for piece in later:
        yield image_part(None)
        if piece:
            yield {"type": "text", "text": piece}


def _texts(content: Any) -> list[dict[str, Any]]:
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": content}] if content else []
