"""Many experiences as one frame of bytes: a msgpack header and packed arrays.  No pickle.

    block    magic, size of the head, head, rows' arrays       head: [[fields of a row, bytes of its arrays], ...]
    bundle   magic, size of the head, head, blocks             head: [[bytes of a block, positions, rewards], ...]

A block is what crosses processes and what storages keep; a bundle is rows chosen from many blocks,
which are passed on as they are. `contents` hashes each row as its block holds it, so the buffer can
tell a repeated append from a conflicting one, and a damaged block from a good one, without taking
it apart.
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
from rft.types.ids import Version

MAGIC = b"RFT2"
# as MAGIC, but one head for all rows, with offsets from the first row's arrays on
OLD_MAGIC = b"RFT1"
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
_BY_NAME = {np.dtype(t).str: np.dtype(t) for t in (*_DTYPES.values(), np.uint8, np.uint16)}
_PAD = [b"\0" * (-n % _ALIGN) for n in range(_ALIGN)]


class Content(NamedTuple):
    """What a block holds of one row: xxh3-128 of its fields and arrays, as hex, and how many bytes
    these are.
    """

    hash: str
    size: int


class _Chosen(msgspec.Struct, array_like=True):
    """Rows of one block of a bundle; `rewards` are those that hold."""

    size: int
    positions: list[int]
    rewards: list[float | None]


class _Checked(Experience, frozen=True, kw_only=True):
    """An experience that was checked when it was written."""

    def __post_init__(self) -> None:
        """Nothing is checked again."""


class _CutShort(Exception):
    """An array outside its frame; no ValueError, because msgspec would call that a wrong value of
    the field.
    """


def encode(rows: Sequence[Experience]) -> bytes:
    """One block for `rows`; `decode` gives equal rows back."""
    heads: list[tuple[msgspec.Raw, int]] = []
    arrays: list[Buffer] = []
    for row in rows:
        head, mine, size = _pack(row)
        heads.append((msgspec.Raw(head), size))
        arrays += mine
    return _frame(MAGIC, _ENCODER.encode(heads), arrays)


def bundle(chosen: Sequence[tuple[bytes, Sequence[int], Sequence[float | None]]]) -> bytes:
    """One frame for rows of many blocks: each block, the rows' positions in it, and their rewards
    where they stand now.
    """
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
    """The experiences of a block or bundle, or those at `positions` of a block; arrays are
    read-only views into it.

    `checked`: these very bytes were decoded before, as the buffer does with every append and shows
    with its hashes at every lease; so values are not looked at again.  Raises ValueError on a
    foreign or damaged frame, msgspec.ValidationError (a ValueError too) that names the field on a
    value that `Experience` refuses, IndexError for a position that the block has not.
    """
    view = memoryview(frame)
    row = _RowDecoder(_Checked if checked else Experience)
    with _as_value_error():
        return (
            _decode_bundle(view, row)
            if view[:4] == BUNDLE_MAGIC
            else _decode_block(view, positions, row)
        )


def read(block: bytes) -> tuple[list[Experience], list[Content]]:
    """`decode` and `contents` of a whole block, which is taken apart once."""
    view = memoryview(block)
    if view[:4] == OLD_MAGIC:
        return decode(block), contents(block)
    with _as_value_error():
        rows = _rows(view)
        return _RowDecoder(Experience).all(rows), [_content(head, arrays) for head, arrays in rows]


def contents(block: bytes | memoryview, positions: Sequence[int] | None = None) -> list[Content]:
    """Hash and size of the rows of a block, or of those at `positions`, without decoding them.

    Rows of an old block have the hash that they had then.  Raises ValueError, IndexError as
    `decode`.
    """
    view = memoryview(block)
    if view[:4] == OLD_MAGIC:
        return [_old_content(x) for x in decode(view, positions)]
    try:
        rows = _rows(view)
    except msgspec.MsgspecError as e:
        raise ValueError(f"experience frame has a damaged header: {e}") from e
    return [
        _content(head, arrays)
        for head, arrays in (rows if positions is None else [rows[i] for i in positions])
    ]


# ---------------------------------------------------------------- inside


@contextmanager
def _as_value_error() -> Iterator[None]:
    """Raise what is wrong with a frame as ValueError."""
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
    if view[:4] == OLD_MAGIC:
        heads, arrays = _old_heads(view)
        rows = [(memoryview(head), arrays) for head in heads]
    else:
        rows = _rows(view)
    return row.all(rows if positions is None else [rows[i] for i in positions])


def _pack(row: Experience) -> tuple[bytes, list[Buffer], int]:
    """The row's fields, its arrays with their padding, and how many bytes these are."""
    fields = msgspec.structs.asdict(row)
    fields["version_spans"] = [(_short(s.version), s.start, s.end) for s in row.version_spans]
    arrays: list[Buffer] = []
    size = 0
    # these are not written where they say nothing: a row's hash stays what it was
    experts: np.ndarray | None = fields.pop("routed_experts")
    if row.credit == "run":
        del fields["credit"]
    given = [(name, fields.pop(name)) for name in _DTYPES]
    for name, value in (*given, *([("routed_experts", experts)] if experts is not None else [])):
        if value is None:
            fields[name] = None
            continue
        # `Experience` has checked the dtype
        fields[name] = (value.dtype.str, len(value) if value.ndim == 1 else value.shape, size)
        pad = _PAD[value.nbytes % _ALIGN]
        arrays += (np.ascontiguousarray(value).reshape(-1).data, pad)
        size += value.nbytes + len(pad)
    return _ENCODER.encode(fields), arrays, size


def _short(version: Version) -> Version | tuple[int, int]:
    """A first attempt is written as before there were attempts, so that a row's hash stays what it
    was.
    """
    return version if version.attempt else (version.lineage, version.step)


def _frame(magic: bytes, head: bytes, rest: Sequence[Buffer]) -> bytes:
    return b"".join(
        [magic, len(head).to_bytes(8, "little"), head, _PAD[(_START + len(head)) % _ALIGN], *rest]
    )


def _head(view: memoryview) -> tuple[memoryview, memoryview]:
    """Head and what follows it, of a frame of any kind."""
    size = int.from_bytes(view[len(MAGIC) : _START], "little")
    if _START + size > len(view):
        raise ValueError(
            f"experience frame is cut short: header of {size} bytes in {len(view)} bytes"
        )
    end = _START + size
    return view[_START:end], view[end + -end % _ALIGN :]


def _rows(view: memoryview) -> list[tuple[memoryview, memoryview]]:
    """Fields and arrays of each row of a block."""
    if view[:4] != MAGIC:
        raise ValueError(
            f"not an experience frame: begins with {bytes(view[:4])!r}, expected {MAGIC!r}"
        )
    head, body = _head(view)
    found = []
    at = 0
    for fields, size in _HEADS.decode(head):
        if size < 0 or at + size > len(body):
            raise ValueError(
                f"experience frame is cut short: {size} bytes of arrays at byte {at} of {len(body)}"
            )
        found.append((memoryview(fields), body[at : at + size]))
        at += size
    if at != len(body):
        raise ValueError(f"experience frame has {len(body) - at} bytes that belong to no row")
    return found


def _decode_bundle(view: memoryview, row: _RowDecoder) -> list[Experience]:
    head, body = _head(view)
    found = []
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
        found += [
            x if x.reward == r else _edited(x, r) for x, r in zip(rows, chosen.rewards, strict=True)
        ]
        at += chosen.size + -chosen.size % _ALIGN
    return found


def _edited(row: Experience, reward: float | None) -> Experience:
    """The row with another reward; where its tokens have their own, the last trained one takes the
    difference.
    """
    if (earned := row.token_rewards) is not None:
        earned = earned.copy()
        earned[np.flatnonzero(row.loss_mask)[-1:]] += (reward or 0.0) - (row.reward or 0.0)
    return msgspec.structs.replace(row, reward=reward, token_rewards=earned)


class _RowDecoder:
    """Decodes a row's fields; its arrays are views into `arrays`."""

    def __init__(self, kind: type[Experience]) -> None:
        self.arrays = memoryview(b"")
        self.decode = msgspec.msgpack.Decoder(kind, strict=False, dec_hook=self._array).decode

    def all(self, rows: Sequence[tuple[memoryview, memoryview]]) -> list[Experience]:
        """The experiences of these fields and arrays."""
        found = []
        for head, self.arrays in rows:
            found.append(self.decode(head))
        return found

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
        found = np.frombuffer(self.arrays, dtype, count, offset)
        return found if type(length) is int else found.reshape(shape)


def _old_heads(view: memoryview) -> tuple[list[msgspec.Raw], memoryview]:
    """Fields of the rows, and the arrays of all.  The head's size includes its padding; it may
    itself end with zeros.
    """
    head, body = _head(view)
    shortest = max(len(bytes(head).rstrip(b"\0")), len(head) - _ALIGN + 1)
    for end in range(shortest, len(head)):
        try:
            return _OLD_HEADS.decode(head[:end]), body
        except msgspec.DecodeError:  # cut off one byte too early, or damaged: the whole head tells
            continue
    return _OLD_HEADS.decode(head), body


def _old_content(row: Experience) -> Content:
    """Of the old block that held the row alone."""
    fields, arrays, _ = _pack(row)
    head = b"\x91" + fields  # a list of one
    head += _PAD[(_START + len(head)) % _ALIGN]
    block = b"".join([OLD_MAGIC, len(head).to_bytes(8, "little"), head, *arrays])
    return Content(xxhash.xxh3_128_hexdigest(block), len(block))


def plain(value: Any) -> Any:
    """A number of NumPy's as one of Python's.  Raises TypeError for what is no JSON value either."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be stored in an experience; use JSON values")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=plain)
_HEADS = msgspec.msgpack.Decoder(list[tuple[msgspec.Raw, int]])
_OLD_HEADS = msgspec.msgpack.Decoder(list[msgspec.Raw])
_BUNDLE = msgspec.msgpack.Decoder(list[_Chosen])
