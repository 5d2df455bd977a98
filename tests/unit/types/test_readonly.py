"""What is read-only refuses every way of writing, and its copies do not (finding R1)."""

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from rft.types.readonly import read_only

VALUE = {"a": [1, {"b": 2}], "c": ({"d": 3},)}
WRITES: list[Callable[[Any], Any]] = [
    lambda v: v.update(a=1),
    lambda v: v.setdefault("z", 1),
    lambda v: v.pop("a"),
    lambda v: v.popitem(),
    lambda v: v.clear(),
    lambda v: v.__setitem__("a", 1),
    lambda v: v.__delitem__("a"),
    lambda v: v.__ior__({"a": 1}),
    lambda v: v["a"].append(1),
    lambda v: v["a"].extend([1]),
    lambda v: v["a"].insert(0, 1),
    lambda v: v["a"].pop(),
    lambda v: v["a"].remove(1),
    lambda v: v["a"].clear(),
    lambda v: v["a"].sort(key=str),
    lambda v: v["a"].reverse(),
    lambda v: v["a"].__setitem__(0, 2),
    lambda v: v["a"].__delitem__(0),
    lambda v: v["a"].__iadd__([1]),
    lambda v: v["a"].__imul__(2),
    lambda v: v["a"][1].update(b=3),
    lambda v: v["c"][0].update(d=4),
]


@pytest.mark.parametrize("write", WRITES)
def test_writing_is_refused(write: Callable[[Any], Any]) -> None:
    value = read_only(copy.deepcopy(VALUE))
    with pytest.raises(TypeError, match="read-only; return what you want to change"):
        write(value)
    assert value == VALUE


def sent(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))  # noqa: S301


@pytest.mark.parametrize("made", [copy.copy, copy.deepcopy, sent, lambda v: v | {}, dict])
def test_a_copy_is_an_ordinary_dict(made: Callable[[Any], Any]) -> None:
    changed = made(read_only(VALUE))
    changed["e"] = 1
    assert type(changed) is dict and changed == {**VALUE, "e": 1}


def test_it_is_encoded_as_before() -> None:
    plain = {"a": [1, {"b": 2}]}
    value = read_only(plain)
    assert json.loads(json.dumps(value)) == msgspec.json.decode(msgspec.json.encode(value)) == plain
    assert type(sent(value)["a"][1]) is dict


@pytest.mark.parametrize("shape", [(6,), (0,), (2, 3)])
def test_an_array_cannot_be_made_writable_again(shape: tuple[int, ...]) -> None:
    given = np.ones(shape, np.float32)
    array = read_only(given)
    with pytest.raises(ValueError, match="cannot set WRITEABLE flag"):
        array.setflags(write=True)
    given[:] = 0
    assert array.shape == shape and array.dtype is np.dtype(np.float32) and array.all()
    assert read_only(array) is array


def test_a_subclass_of_an_array_is_read_only(tmp_path: Path) -> None:
    np.arange(3).tofile(tmp_path / "a")
    value = read_only(np.memmap(tmp_path / "a", np.int64, "r+"))
    assert not value.flags.writeable and value.tolist() == [0, 1, 2]
