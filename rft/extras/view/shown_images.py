"""Image files of a run's rows, as answers: only what browsers show as pictures, never as pages."""

from __future__ import annotations

import re

from rft.buffer.image_files import file_of
from rft.buffer.query import Questions
from rft.errors import BufferFailed, ConfigError

_KINDS = (  # beginning of the file -> content type
    (b"\x89PNG", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF8", "image/gif"),
    (b"BM", "image/bmp"),
    (b"RIFF", "image/webp"),
)


def image_answer(questions: Questions, name: str) -> tuple[bytes, str]:
    """Return an image's file and its content type.  Raises ConfigError."""
    if re.fullmatch("[0-9a-f]{64}", name) is None:
        raise ConfigError("an image is named by its sha256", key="image", given=name[:80])
    with questions.errors("RUN"), questions.reading() as tx:
        try:
            data = file_of(tx, questions.storage, name)
        except BufferFailed as e:
            raise ConfigError(str(e), key="image", given=name) from e
    kind = next((kind for begin, kind in _KINDS if data is not None and data.startswith(begin)), "")
    if data is None or not kind:
        raise ConfigError("no picture of this run", key="image", given=name)
    return data, kind
