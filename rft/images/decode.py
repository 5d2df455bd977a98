"""Decode image files within limits, always to the same RGB pixels.

Depends on no model.  Invariant: a file that `check` accepts can be decoded again, and nothing about
it depends on the machine: a file that decoders read in different ways (several frames, CMYK, more
than 8 bits) is refused.  What is shown follows the usual viewers: turned as EXIF says, and
transparent parts over white.
"""

from __future__ import annotations

import contextlib
import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

MAX_FILE_BYTES = 32 << 20
MAX_PIXELS = 64_000_000
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
_MODES = {"1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "La", "RGBa"}


def check(data: bytes) -> tuple[int, int]:
    """Decode a file once and return its width and height.  Raises ValueError with the reason for one that cannot be used."""
    return decode(data).size


def decode(data: bytes) -> Picture:
    """Return the image as RGB.  Raises ValueError as `check`."""
    from PIL import Image, ImageOps

    if len(data) > MAX_FILE_BYTES:
        raise ValueError(f"an image of {len(data):,} bytes; at most {MAX_FILE_BYTES:,} are allowed")
    try:
        picture: Picture = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError as e:
        raise ValueError(f"not a usable image: {e}") from None
    except (OSError, SyntaxError, ValueError) as e:
        begins = f"its {len(data)} bytes begin with {data[:8]!r}" if data else "it has no bytes"
        raise ValueError(f"not a readable image ({begins}); use one of {', '.join(FORMATS)}") from e
    _check_head(picture)
    try:
        picture.load()
        turned = ImageOps.exif_transpose(picture)
    except (OSError, SyntaxError, ValueError, EOFError, IndexError, TypeError) as e:
        raise ValueError(f"a damaged {picture.format} image: {e}") from None
    if turned.mode in ("P", "PA", "LA", "La", "RGBa") or "transparency" in turned.info:
        turned = turned.convert("RGBA")
    if turned.mode == "RGBA":
        white = Image.new("RGBA", turned.size, (255, 255, 255, 255))
        turned = Image.alpha_composite(white, turned)
    return turned.convert("RGB")


def _check_head(picture: Picture) -> None:
    width, height = picture.size
    if not width or not height:
        raise ValueError(f"an image of {width} x {height} pixels, which shows nothing")
    if width * height > MAX_PIXELS:
        raise ValueError(
            f"an image of {width} x {height} pixels; at most {MAX_PIXELS:,} in all are decoded"
        )
    if picture.mode not in _MODES:
        raise ValueError(
            f"an image in mode {picture.mode}, which decoders turn into different colours; save it "
            f"with 8 bits each of red, green and blue"
        )
    with contextlib.suppress(EOFError):
        picture.seek(1)
        if picture.format != "MPO":  # photographs with a map of depth behind
            raise ValueError("an animated image; save the frame that is to be shown")
    picture.seek(0)
