"""Decode image files.  Knows Pillow; not models."""

from __future__ import annotations

import io
from typing import Any


def decoded(data: bytes) -> Any:
    """Return the image in RGB, turned as its EXIF entry says."""
    from PIL import Image, ImageOps

    with Image.open(io.BytesIO(data)) as image:
        return ImageOps.exif_transpose(image).convert("RGB")
