"""Image files are decoded within limits, always to the same pixels; others are refused."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from rft.images import decode
from rft.testing.tiny_vision import picture

RED = (220, 30, 30)


def saved(picture: Image.Image, format: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    picture.save(file, format, **options)
    return file.getvalue()


def png_of(width: int, height: int) -> bytes:
    """A PNG whose head claims a size, with hardly any data."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        )

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(b"\0" * 64)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def animated(format: str) -> bytes:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    return saved(frames[0], format, save_all=True, append_images=frames[1:])


BAD = {
    "empty": (b"", "it has no bytes"),
    "text": (b"<svg></svg>", "begin with b'<svg></s'"),
    "truncated": (picture(RED)[:-200], "a damaged PNG image"),
    "truncated jpeg": (
        saved(Image.effect_noise((64, 64), 90), "JPEG")[:1500],
        "a damaged JPEG image",
    ),
    "bomb": (png_of(60_000, 60_000), "pixels"),
    "large": (png_of(8_001, 8_000), "at most 64,000,000 in all"),
    "zero": (png_of(0, 8), "not a readable image"),
    "cmyk": (saved(Image.new("CMYK", (8, 8)), "JPEG"), "in mode CMYK"),
    "16 bits": (saved(Image.new("I;16", (8, 8))), "in mode I;16"),
    "gif": (animated("GIF"), "an animated image"),
    "apng": (animated("PNG"), "an animated image"),
    "webp": (animated("WEBP"), "an animated image"),
    "tiff": (saved(Image.new("RGB", (8, 8)), "TIFF"), "use one of PNG, JPEG"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_cannot_be_used_is_refused_with_the_reason(name):
    data, reason = BAD[name]
    with pytest.raises(ValueError, match=reason.replace("(", r"\(")):
        decode.check(data)


def test_a_file_over_the_limit_is_not_decoded(monkeypatch):
    monkeypatch.setattr(decode, "MAX_FILE_BYTES", 100)
    with pytest.raises(ValueError, match="at most 100 are allowed"):
        decode.check(picture(RED))


def test_every_format_and_mode_gives_rgb():
    plain = Image.new("RGB", (8, 4), RED)
    for format in decode.FORMATS:
        assert decode.check(saved(plain, format)) == (8, 4), format
    for mode in ("1", "L", "LA", "P", "RGBA"):
        assert decode.decode(saved(plain.convert(mode))).mode == "RGB", mode


def test_an_image_is_turned_as_exif_says():
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned to the right
    turned = decode.decode(saved(Image.new("RGB", (8, 4)), "JPEG", exif=exif))
    assert turned.size == (4, 8)


def test_transparent_parts_stand_over_white():
    shown = decode.decode(saved(Image.new("RGBA", (2, 2), (0, 0, 0, 0))))
    assert np.asarray(shown).min() == 255
    palette = Image.new("P", (2, 2), 0)
    assert np.asarray(decode.decode(saved(palette, transparency=0))).min() == 255
