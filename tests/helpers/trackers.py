"""Reads what trackers have written, in their own formats."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Values = dict[tuple[str, str, int], float]  # (role, name, step) -> value


def tensorboard(folder: Path) -> tuple[Values, str]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    values: Values = {}
    text = ""
    for path in (folder / "tensorboard").iterdir():
        found = EventAccumulator(str(path))
        found.Reload()
        for name in found.Tags()["scalars"]:
            values |= {(path.name, name, e.step): e.value for e in found.Scalars(name)}
        for name in found.Tags()["tensors"]:
            assert found.SummaryMetadata(name).plugin_data.plugin_name == "text"
            text += found.Tensors(name)[0].tensor_proto.string_val[0].decode()
    return values, text


def wandb_values(folder: Path) -> tuple[Values, Any]:
    """The numbers in the one offline file below `folder`, and its record of the run."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = (folder / "wandb").glob("offline-run-*/*.wandb")
    records = [Record.FromString(r) for r in leveldb_records(path.read_bytes())]
    axes = {m.name: m.step_metric for r in records if (m := r.metric).name and m.step_metric}
    values: Values = {}
    for record in records:
        row = {
            "/".join(i.nested_key) if i.nested_key else i.key: json.loads(i.value_json)
            for i in record.history.item
        }
        for name, value in row.items():
            if name in axes and isinstance(value, int | float):
                axis = axes[name]
                values[(axis.removesuffix("_step"), name, row[axis])] = value
    (run,) = [r.run for r in records if r.run.run_id]
    return values, run


def leveldb_records(data: bytes) -> Iterator[bytes]:
    """The records of a LevelDB log: blocks of 32 KiB of chunks: crc (4), length (2), type (1 whole,
    2-4 first, middle, last).
    """
    at = 7  # after wandb's own header
    whole = b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield whole
            whole = b""
