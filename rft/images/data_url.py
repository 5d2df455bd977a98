"""Images as data URLs, in which requests and rows carry the file itself.

Depends on no model.  Invariant: nothing is downloaded.
"""

from __future__ import annotations

import base64
import binascii
import io
import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote_to_bytes

from rft.images.decode import FORMATS, MAX_FILE_BYTES
from rft.types.images import Image

_HEAD = re.compile(r"data:[\w/+.-]*(?P<params>(;[\w=.-]+)*),", re.ASCII)
_SHOWN_CHARS = 60


def read(url: Any) -> bytes:
    """Return the bytes of a data URL.  Raises ValueError for another address."""
    if not isinstance(url, str) or (head := _HEAD.match(url)) is None:
        raise ValueError(
            f"{short(url)} is no data URL; nothing is downloaded, so write the image itself as "
            f"data:image/png;base64,..."
        )
    if len(url) > 2 * MAX_FILE_BYTES:
        raise ValueError(f"a data URL of {len(url):,} characters is too large")
    body = url[head.end() :]
    return from_base64(body) if head["params"].endswith(";base64") else unquote_to_bytes(body)


def from_base64(text: Any) -> bytes:
    """Return the bytes of a text.  Raises ValueError for one that is not base64."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError, TypeError) as e:
        raise ValueError(f"{short(text)} is not base64: {e}") from None


def write(data: bytes) -> str:
    """Return an image file as a data URL.  Raises ValueError for what is no image."""
    from PIL import Image, UnidentifiedImageError

    try:
        name = str(Image.open(io.BytesIO(data), formats=FORMATS).format)
    except UnidentifiedImageError as e:
        raise ValueError(f"a file of {len(data)} bytes is no image: {e}") from None
    return f"data:image/{name.lower()};base64,{base64.b64encode(data).decode()}"


def as_urls(messages: Sequence[Mapping[str, Any]], images: Sequence[Image]) -> list[dict[str, Any]]:
    """Return messages in OpenAI's form, with data URLs in place of the names of `images`."""
    urls = {image.sha256: write(image.data) for image in images}

    def part(p: Mapping[str, Any]) -> dict[str, Any]:
        if p.get("type") != "image":
            return dict(p)
        return {"type": "image_url", "image_url": {"url": urls[p["image"]]}}

    return [
        {**m, "content": [*map(part, c)]}
        if isinstance(c := m.get("content"), list | tuple)
        else dict(m)
        for m in messages
    ]


def short(value: Any) -> str:
    """Return the beginning of a value, for messages."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
