"""Many experiences as one frame of bytes: a msgpack header and packed arrays.  No pickle.

The frame is what crosses processes and what storages keep.  `content_hash` of one experience is the same wherever it is
computed, so the buffer can tell a repeated append from a conflicting one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
import xxhash

from rft.types.experience import Experience

MAGIC = b"RFT1"
_ALIGN = 8
R = TypeVar("R")


_DTYPES = {
    "tokens": np.int32,
    "loss_mask": np.bool_,
    "logprobs": np.float32,
    "token_rewards": np.float32,
    "teacher_logprobs": np.float32,
}
_SIZES = {np.dtype(t).str: np.dtype(t).itemsize for t in _DTYPES.values()}
_FIELDS = [(name, np.dtype(t).str) for name, t in _DTYPES.items()]
_PAD = [b"\0" * (-n % _ALIGN) for n in range(_ALIGN)]


class _CutShort(Exception):
    """An array outside its frame; no ValueError, because msgspec would call that a wrong value of the field."""


def encode(rows: Sequence[Experience]) -> bytes:
    """One frame for `rows`; `decode` gives equal rows back."""
    parts: list[bytes] = []
    size = 0
    headers = []
    for row in rows:
        header = msgspec.structs.asdict(row)
        for name, dtype in _FIELDS:
            value: np.ndarray | None = header.pop(name)
            if value is None:
                header[name] = None
                continue
            header[name] = (dtype, len(value), size)  # `Experience` has checked the dtype
            data = value.tobytes()
            pad = _PAD[len(data) % _ALIGN]
            parts += (data, pad)
            size += len(data) + len(pad)
        headers.append(header)
    head = _ENCODER.encode(headers)
    pad = _PAD[(len(MAGIC) + 8 + len(head)) % _ALIGN]
    return b"".join([MAGIC, (len(head) + len(pad)).to_bytes(8, "little"), head, pad, *parts])


def decode(frame: bytes | memoryview, positions: Sequence[int] | None = None) -> list[Experience]:
    """The experiences of a frame, or those at `positions`; arrays are read-only views into it.

    Raises ValueError on a foreign or damaged frame, msgspec.ValidationError (a ValueError too) that names the field on a value that
    `Experience` refuses, IndexError for a position that the frame has not.
    """
    view = memoryview(frame)
    if bytes(view[:4]) != MAGIC:
        raise ValueError(f"not an experience frame: begins with {bytes(view[:4])!r}, expected {MAGIC!r}")
    size = int.from_bytes(view[4:12], "little")
    if 12 + size > len(view):
        raise ValueError(f"experience frame is cut short: header of {size} bytes in {len(view)} bytes")
    body = view[12 + size :]

    def array(kind: Any, spec: Any) -> np.ndarray:
        return _array(kind, spec, body)

    try:
        if positions is None:
            return _unpadded(view[12 : 12 + size], msgspec.msgpack.Decoder(list[Experience], strict=False, dec_hook=array))
        headers = _unpadded(view[12 : 12 + size], _RAW)
        decoder = msgspec.msgpack.Decoder(Experience, strict=False, dec_hook=array)
        return [decoder.decode(headers[i]) for i in positions]
    except msgspec.ValidationError:
        raise
    except msgspec.MsgspecError as e:
        raise ValueError(f"experience frame has a damaged header: {e}") from e
    except _CutShort as e:
        raise ValueError(str(e)) from None


def content_hash(row: Experience) -> str:
    """xxh3-128 of the row's encoding, as hex."""
    return xxhash.xxh3_128_hexdigest(encode([row]))


def _unpadded(head: memoryview, decoder: msgspec.msgpack.Decoder[R]) -> R:
    """What `head` holds before its padding of fewer than 8 zeros.  A header may itself end with zeros: those are tried in turn."""
    data = bytes(head)
    shortest = max(len(data.rstrip(b"\0")), len(data) - _ALIGN + 1)
    for end in range(shortest, len(data)):
        try:
            return decoder.decode(head[:end])
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError:  # cut off one byte too early, or damaged: the whole header tells
            continue
    return decoder.decode(head)


def _array(kind: Any, spec: Any, body: memoryview) -> np.ndarray:
    if kind is not np.ndarray or not isinstance(spec, list) or len(spec) != 3:
        raise TypeError(f"cannot make {kind.__name__} from {spec!r}")
    dtype, length, offset = spec
    if dtype not in _SIZES or type(length) is not int or type(offset) is not int:
        raise TypeError(f"not an array of a frame: {spec!r}")
    if length < 0 or offset < 0 or offset + length * _SIZES[dtype] > len(body):
        raise _CutShort(f"experience frame is cut short: an array of {length} {dtype} at byte {offset} of {len(body)}")
    return np.frombuffer(body, dtype, length, offset)


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be stored in an experience; use JSON values")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)
_RAW = msgspec.msgpack.Decoder(list[msgspec.Raw])
