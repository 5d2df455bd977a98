"""Many experiences as one frame of bytes: a msgpack header and packed arrays.  No pickle.

    block    magic, size of the head, head, rows' arrays       head: [[fields of a row, bytes of its arrays], ...]
    bundle   magic, size of the head, head, blocks             head: [[bytes of a block, positions, rewards], ...]

Blocks cross processes and are kept by storages; a bundle is rows chosen from many blocks, which it
holds unchanged.  `contents` hashes each row as its block holds it, so the buffer can tell a repeated
append from a conflicting one, and a damaged block from a good one, without decoding it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec
import numpy as np
import xxhash

from rft.types.experience import Experience

MAGIC = b"RFT2"
BUNDLE_MAGIC = b"RFTB"
_ALIGN = 8
Buffer = bytes | memoryview
UNREADABLE = (
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    OverflowError,
    RecursionError,
    msgspec.MsgspecError,
)
_START = len(MAGIC) + 8
_DTYPES = {
    "tokens": np.int32,
    "loss_mask": np.bool_,
    "logprobs": np.float32,
    "token_rewards": np.float32,
    "teacher_logprobs": np.float32,
}
_BY_NAME = {
    np.dtype(t).str: np.dtype(t) for t in (*_DTYPES.values(), np.uint8, np.uint16, np.float16)
}
# not written where they have this value
_RARE: dict[str, Any] = {"credit": "run", "teacher_spans": (), "images": ()}
_RARE_ARRAYS = ("routed_experts", "teacher_top_ids", "teacher_top_logprobs")
_PAD = [b"\0" * (-n % _ALIGN) for n in range(_ALIGN)]


class Content(NamedTuple):
    """One row of a block: xxh3-128 of its fields and arrays, as hex, and their bytes."""

    hash: str
    size: int


class _Chosen(msgspec.Struct, array_like=True):
    """Rows of one block of a bundle, with their current rewards."""

    size: int
    positions: list[int]
    rewards: list[float | None]


class _Checked(Experience, frozen=True, kw_only=True):
    """An experience that was checked when encoded and is not checked again."""

    def __post_init__(self) -> None: ...


class _CutShort(Exception):
    """An array outside its frame; no ValueError, which msgspec would report as a wrong field."""


def encode(rows: Sequence[Experience]) -> bytes:
    """Encode `rows` as one block."""
    heads: list[tuple[msgspec.Raw, int]] = []
    arrays: list[Buffer] = []
    for row in rows:
        head, row_arrays, size = _pack(row)
        heads.append((msgspec.Raw(head), size))
        arrays += row_arrays
    return _frame(MAGIC, _ENCODER.encode(heads), arrays)


def bundle(chosen: Sequence[tuple[bytes, Sequence[int], Sequence[float | None]]]) -> bytes:
    """Encode rows of many blocks as one frame, from (block, positions in it, current rewards)."""
    heads = [
        _Chosen(len(block), list(positions), list(rewards)) for block, positions, rewards in chosen
    ]
    return _frame(
        BUNDLE_MAGIC,
        _ENCODER.encode(heads),
        [x for block, _, _ in chosen for x in (block, _PAD[len(block) % _ALIGN])],
    )


def decode(
    frame: bytes | memoryview, positions: Sequence[int] | None = None, *, checked: bool = False
) -> list[Experience]:
    """Decode the experiences of a block or bundle, or those at `positions` of a block.

    Arrays are read-only views into the frame.  `checked`: skip the checks of values, because these
    very bytes passed them before (the buffer proves it by their hashes).  Raises ValueError for a
    foreign or damaged frame, msgspec.ValidationError (a ValueError) that names a wrong field,
    IndexError for a position outside the block.
    """
    view = memoryview(frame)
    row = _RowDecoder(_Checked if checked else Experience)
    with _as_value_error():
        return (
            _decode_bundle(view, row)
            if view[:4] == BUNDLE_MAGIC
            else _decode_block(view, positions, row)
        )


def decode_with_contents(block: bytes) -> tuple[list[Experience], list[Content]]:
    """Return `decode` and `contents` of a block."""
    with _as_value_error():
        rows = _rows(memoryview(block))
        return _RowDecoder(Experience).all(rows), [_content(head, arrays) for head, arrays in rows]


def contents(block: bytes | memoryview, positions: Sequence[int] | None = None) -> list[Content]:
    """Hash the rows of a block, or those at `positions`, without decoding them.

    Raises ValueError, IndexError as `decode`.
    """
    with _as_value_error():
        rows = _chosen_rows(memoryview(block), positions)
    return [_content(head, arrays) for head, arrays in rows]


# ---------------------------------------------------------------- inside


@contextmanager
def _as_value_error() -> Iterator[None]:
    """Raise errors of a damaged frame as ValueError."""
    try:
        yield
    except msgspec.ValidationError:
        raise
    except msgspec.MsgspecError as e:
        raise ValueError(f"experience frame has a damaged header: {e}") from e
    except _CutShort as e:
        raise ValueError(str(e)) from None


def _content(head: memoryview, arrays: memoryview) -> Content:
    hashed = xxhash.xxh3_128(head)
    hashed.update(arrays)
    return Content(hashed.hexdigest(), len(head) + len(arrays))


def _decode_block(
    view: memoryview, positions: Sequence[int] | None, row: _RowDecoder
) -> list[Experience]:
    return row.all(_chosen_rows(view, positions))


def _pack(row: Experience) -> tuple[bytes, list[Buffer], int]:
    """Return the encoded fields of a row, its padded arrays, and the bytes of these arrays."""
    fields = msgspec.structs.asdict(row)
    arrays: list[Buffer] = []
    size = 0
    # defaults of rare fields are not written
    rare = [(name, value) for name in _RARE_ARRAYS if (value := fields.pop(name)) is not None]
    for name, usual in _RARE.items():
        if fields[name] == usual:
            del fields[name]
    arrays_by_name = [(name, fields.pop(name)) for name in _DTYPES]
    for name, value in (*arrays_by_name, *rare):
        if value is None:
            fields[name] = None
            continue
        # `Experience` has checked the dtype
        fields[name] = (value.dtype.str, len(value) if value.ndim == 1 else value.shape, size)
        pad = _PAD[value.nbytes % _ALIGN]
        arrays += (np.ascontiguousarray(value).reshape(-1).data, pad)
        size += value.nbytes + len(pad)
    return _ENCODER.encode(fields), arrays, size


def _frame(magic: bytes, head: bytes, rest: Sequence[Buffer]) -> bytes:
    return b"".join(
        [magic, len(head).to_bytes(8, "little"), head, _PAD[(_START + len(head)) % _ALIGN], *rest]
    )


def _head(view: memoryview) -> tuple[memoryview, memoryview]:
    """Split a frame into its head and its body."""
    size = int.from_bytes(view[len(MAGIC) : _START], "little")
    if _START + size > len(view):
        raise ValueError(
            f"experience frame is cut short: header of {size} bytes in {len(view)} bytes"
        )
    end = _START + size
    return view[_START:end], view[end + -end % _ALIGN :]


def _rows(view: memoryview) -> list[tuple[memoryview, memoryview]]:
    """Return the encoded fields and the arrays of each row of a block."""
    if view[:4] != MAGIC:
        raise ValueError(
            f"not an experience frame: begins with {bytes(view[:4])!r}, expected {MAGIC!r}"
        )
    head, body = _head(view)
    rows = []
    at = 0
    for fields, size in _HEADS.decode(head):
        if size < 0 or at + size > len(body):
            raise ValueError(
                f"experience frame is cut short: {size} bytes of arrays at byte {at} of {len(body)}"
            )
        rows.append((memoryview(fields), body[at : at + size]))
        at += size
    if at != len(body):
        raise ValueError(f"experience frame has {len(body) - at} bytes that belong to no row")
    return rows


def _chosen_rows(
    view: memoryview, positions: Sequence[int] | None
) -> list[tuple[memoryview, memoryview]]:
    rows = _rows(view)
    if positions is None:
        return rows
    return [rows[i] for i in positions]


def _decode_bundle(view: memoryview, row: _RowDecoder) -> list[Experience]:
    head, body = _head(view)
    experiences = []
    at = 0
    for chosen in _BUNDLE.decode(head):
        if (
            chosen.size < 0
            or at + chosen.size > len(body)
            or len(chosen.positions) != len(chosen.rewards)
        ):
            raise ValueError(
                f"experience frame is cut short: block of {chosen.size} bytes at byte {at} of "
                f"{len(body)}"
            )
        block = body[at : at + chosen.size]
        if block[:4] == BUNDLE_MAGIC:
            raise ValueError("experience frame is a bundle in a bundle")
        rows = _decode_block(block, chosen.positions, row)
        experiences += [
            x if x.reward == r else _edited(x, r) for x, r in zip(rows, chosen.rewards, strict=True)
        ]
        at += chosen.size + -chosen.size % _ALIGN
    return experiences


def _edited(row: Experience, reward: float | None) -> Experience:
    """Replace the reward; of token rewards, the last trained token takes the difference."""
    token_rewards = row.token_rewards
    if token_rewards is not None:
        token_rewards = token_rewards.copy()
        last = np.flatnonzero(row.loss_mask)[-1:]
        token_rewards[last] += (reward or 0.0) - (row.reward or 0.0)
    return msgspec.structs.replace(row, reward=reward, token_rewards=token_rewards)


class _RowDecoder:
    """Decodes a row's fields; its arrays are views into `arrays`."""

    def __init__(self, kind: type[Experience]) -> None:
        self.arrays = memoryview(b"")
        self.decode = msgspec.msgpack.Decoder(kind, strict=False, dec_hook=self._array).decode

    def all(self, rows: Sequence[tuple[memoryview, memoryview]]) -> list[Experience]:
        """Decode rows from their fields and arrays."""
        experiences = []
        for head, self.arrays in rows:
            experiences.append(self.decode(head))
        return experiences

    def _array(self, kind: Any, spec: Any) -> np.ndarray:
        if kind is not np.ndarray or type(spec) is not list or len(spec) != 3:
            raise TypeError(f"cannot make {kind.__name__} from {spec!r}")
        name, length, offset = spec
        dtype = _BY_NAME.get(name)
        shape = length if type(length) is list else [length]
        if dtype is None or type(offset) is not int or not all(type(n) is int for n in shape):
            raise TypeError(f"not an array of a frame: {spec!r}")
        count = math.prod(shape)
        if (
            min(shape, default=0) < 0
            or offset < 0
            or offset + count * dtype.itemsize > len(self.arrays)
        ):
            raise _CutShort(
                f"experience frame is cut short: an array of {length} {name} at byte {offset} of "
                f"{len(self.arrays)}"
            )
        array = np.frombuffer(self.arrays, dtype, count, offset)
        if type(length) is int:
            return array
        return array.reshape(shape)


def json_value(value: Any) -> Any:
    """Convert a NumPy number to a Python number.

    Raises TypeError for any other type.
    """
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be stored in an experience; use JSON values")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=json_value)
_HEADS = msgspec.msgpack.Decoder(list[tuple[msgspec.Raw, int]])
_BUNDLE = msgspec.msgpack.Decoder(list[_Chosen])
