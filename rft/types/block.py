"""Many experiences as one frame of bytes: a msgpack header and packed arrays.  No pickle.

The frame is what crosses processes and what storages keep.  `content_hash` of one experience is the same wherever it is
computed, so the buffer can tell a repeated append from a conflicting one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import xxhash

from rft.types.experience import Experience

MAGIC = b"RFT1"
_ALIGN = 8


class _Array(msgspec.Struct, frozen=True, array_like=True):
    dtype: str
    length: int
    offset: int


_ARRAYS = ("tokens", "loss_mask", "logprobs", "token_rewards", "teacher_logprobs")
_DTYPES = {
    "tokens": np.int32,
    "loss_mask": np.bool_,
    "logprobs": np.float32,
    "token_rewards": np.float32,
    "teacher_logprobs": np.float32,
}


def encode(rows: Sequence[Experience]) -> bytes:
    """One frame for `rows`; `decode` gives equal rows back."""
    body = bytearray()
    headers: list[dict[str, Any]] = []
    for row in rows:
        header = {f: getattr(row, f) for f in row.__struct_fields__ if f not in _ARRAYS}
        for name in _ARRAYS:
            value = getattr(row, name)
            if value is None:
                header[name] = None
                continue
            header[name] = _Array(value.dtype.str, len(value), len(body))
            body += np.ascontiguousarray(value).tobytes()
            body += b"\0" * (-len(body) % _ALIGN)
        headers.append(header)
    head = msgspec.msgpack.encode(headers, enc_hook=_plain)
    pad = b"\0" * (-(len(MAGIC) + 8 + len(head)) % _ALIGN)
    return b"".join([MAGIC, (len(head) + len(pad)).to_bytes(8, "little"), head, pad, bytes(body)])


def decode(frame: bytes | memoryview) -> list[Experience]:
    """The experiences of a frame; arrays are read-only views into it.  Raises ValueError on a foreign or damaged frame."""
    view = memoryview(frame)
    if bytes(view[:4]) != MAGIC:
        raise ValueError(f"not an experience frame: begins with {bytes(view[:4])!r}, expected {MAGIC!r}")
    size = int.from_bytes(view[4:12], "little")
    if 12 + size > len(view):
        raise ValueError(f"experience frame is cut short: header of {size} bytes in {len(view)} bytes")
    try:
        headers = msgspec.msgpack.Decoder(list[dict[str, Any]]).decode(bytes(view[12 : 12 + size]).rstrip(b"\0"))
    except msgspec.MsgspecError as e:
        raise ValueError(f"experience frame has a damaged header: {e}") from e
    body = view[12 + size :]
    return [_row(h, body) for h in headers]


def content_hash(row: Experience) -> str:
    """xxh3-128 of the row's encoding, as hex."""
    return xxhash.xxh3_128_hexdigest(encode([row]))


def _row(header: dict[str, Any], body: memoryview) -> Experience:
    arrays: dict[str, np.ndarray | None] = {}
    for name in _ARRAYS:
        spec = header.pop(name)
        if spec is None:
            arrays[name] = None
            continue
        dtype, length, offset = spec
        if np.dtype(dtype) != np.dtype(_DTYPES[name]):
            raise ValueError(f"{name}: dtype {dtype} in the frame, expected {np.dtype(_DTYPES[name]).str}")
        if offset + length * np.dtype(dtype).itemsize > len(body):
            raise ValueError(f"experience frame is cut short in {name}")
        arrays[name] = np.frombuffer(body, dtype=dtype, count=length, offset=offset)
    return msgspec.convert({**header, **arrays}, Experience, strict=False, dec_hook=_array)


def _array(kind: Any, value: Any) -> Any:
    if kind is np.ndarray and isinstance(value, np.ndarray):
        return value
    raise TypeError(f"cannot make {kind} from {type(value).__name__}")


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be stored in an experience; use JSON values")
