"""A checkpoint counts only when every file is as its manifest says."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from rft.errors import CheckpointInvalid
from rft.trainer.checkpoint import manifest as manifests
from rft.trainer.checkpoint.checkpoints import Checkpoints
from rft.types.ids import Version
from rft.types.ports import Consumption

USED = Consumption(num_uses=32, digest="ab" * 16, cursor=4)


async def save(
    folder: Path,
    step: int,
    *,
    lineage: int = 1,
    keep: int = 0,
    more: Mapping[str, bytes] | None = None,
) -> manifests.Manifest:
    async def fill(aside: Path) -> dict[str, str]:
        assert aside.name.endswith(".tmp")
        (aside / "trainer").mkdir()
        (aside / "trainer" / "model.safetensors").write_bytes(b"weights of %d" % step)
        for name, data in (more or {}).items():
            (aside / name).write_bytes(data)
        return {}

    parent = Version(1, 0) if lineage > 1 else None
    return await Checkpoints(folder, keep=keep).save(Version(lineage, step), parent, USED, fill)


async def test_what_is_committed_is_found_and_readable_as_json(tmp_path: Path) -> None:
    made = await save(tmp_path, 3, lineage=2)
    found = manifests.latest(tmp_path)
    assert found == made
    stored = json.loads((tmp_path / "global_step_3" / "manifest.json").read_text())
    assert (
        stored["format"] == 5 and stored["version"] == [2, 3, 0] and stored["parent"] == [1, 0, 0]
    )
    assert stored["consumption"] == {"num_uses": 32, "digest": "ab" * 16, "cursor": 4, "mixed": {}}
    assert stored["files"]["trainer/model.safetensors"]["size"] == 12
    assert manifests.latest(tmp_path / "nothing") is None


def _rewrite(path: Path, old: str, new: str, *, last: bool = False) -> None:
    text = path.read_text()
    assert old in text
    at = text.rindex(old) if last else text.index(old)
    path.write_text(text[:at] + new + text[at + len(old) :])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: f.write_bytes(b"weights of 9"), "trainer/model.safetensors: xxh3-128"),
        (
            lambda f: f.write_bytes(b"short"),
            "trainer/model.safetensors: 5 bytes, the manifest says 12",
        ),
        (lambda f: f.unlink(), "trainer/model.safetensors: missing"),
        (lambda f: (f.parent.parent / "manifest.json").write_text("{"), "manifest.json: damaged"),
        (lambda f: (f.parent.parent / "manifest.json").write_text(""), "manifest.json: damaged"),
        (
            lambda f: _rewrite(f.parent.parent / "manifest.json", '"cursor": 4', '"cursor": 5'),
            "manifest.json: damaged: its sha256",
        ),
        (
            lambda f: _rewrite(
                f.parent.parent / "manifest.json", '"sha256": "', '"shb256": "', last=True
            ),
            "manifest.json: damaged",
        ),
        (
            lambda f: (f.parent.parent / "manifest.json").write_text('{"format": 9}'),
            "manifest.json: format 9, this version of rft reads 5",
        ),
    ],
)
async def test_damage_names_the_file_and_falls_back(
    damage, message, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:  # type: ignore[no-untyped-def]
    await save(tmp_path, 1)
    newest = await save(tmp_path, 2)
    damage(newest.folder / "trainer" / "model.safetensors")
    with pytest.raises(CheckpointInvalid, match=message):
        manifests.read(newest.folder)
    with caplog.at_level(logging.WARNING):
        found = manifests.latest(tmp_path)
    assert found is not None and found.version == Version(1, 1)
    assert message in caplog.text and "falling back to" in caplog.text


@pytest.mark.parametrize(
    "part", ["manifest.json", "trainer/model.safetensors", "trainer/state.json"]
)
async def test_one_changed_byte_anywhere_is_seen(part: str, tmp_path: Path) -> None:
    """At fifty places of each file; one that changes nothing of what a manifest says may pass."""
    made = await save(
        tmp_path,
        1,
        more={"trainer/state.json": json.dumps({"step": 1, "updates": 1, "seed": 4}).encode() * 3},
    )
    whole = (made.folder / part).read_bytes()
    rng = np.random.default_rng(0)
    for at in rng.choice(len(whole), min(50, len(whole)), replace=False):
        changed = bytearray(whole)
        changed[at] ^= 1 << int(rng.integers(8))
        (made.folder / part).write_bytes(changed)
        try:
            found = manifests.read(made.folder)
        except CheckpointInvalid as e:
            assert part in str(e)
        else:
            assert part == "manifest.json" and found == made
    (made.folder / part).write_bytes(whole)
    assert manifests.read(made.folder) == made


async def test_nothing_whole_is_an_error_not_a_fresh_start(tmp_path: Path) -> None:
    made = await save(tmp_path, 1)
    (made.folder / "trainer" / "model.safetensors").unlink()
    with pytest.raises(CheckpointInvalid, match=r"no checkpoint in .* is whole"):
        manifests.latest(tmp_path)


async def test_half_written_does_not_count(tmp_path: Path) -> None:
    await save(tmp_path, 1)
    (tmp_path / "global_step_2.tmp" / "trainer").mkdir(parents=True)
    # renamed, but killed before its manifest
    (tmp_path / "global_step_3" / "trainer").mkdir(parents=True)
    found = manifests.latest(tmp_path)
    assert found is not None and found.version.step == 1
    await save(tmp_path, 3)
    found = manifests.latest(tmp_path)
    assert found is not None and found.version.step == 3


async def test_what_a_save_that_died_left_behind_is_removed_by_the_next(tmp_path: Path) -> None:
    """Of whatever step; but not a checkpoint that was being replaced, nor what is not a
    checkpoint's.
    """
    await save(tmp_path, 1)
    (tmp_path / "global_step_1").rename(tmp_path / "global_step_1.old.tmp")
    for name in ("global_step_2.tmp/trainer", "notes.tmp"):
        (tmp_path / name).mkdir(parents=True)
    await save(tmp_path, 3)
    assert sorted(os.listdir(tmp_path)) == ["global_step_1", "global_step_3", "notes.tmp"]


async def test_a_newer_lineage_wins_over_a_higher_step_and_is_kept(tmp_path: Path) -> None:
    await save(tmp_path, 1)
    await save(tmp_path, 10)
    await save(tmp_path, 2, lineage=2, keep=1)
    assert [p.name for p in manifests.committed(tmp_path)] == ["global_step_2"]
    found = manifests.latest(tmp_path)
    assert found is not None and found.version == Version(2, 2)


async def test_the_same_step_of_an_earlier_lineage_is_replaced(tmp_path: Path) -> None:
    await save(tmp_path, 2)
    await save(tmp_path, 2, lineage=2)
    assert os.listdir(tmp_path) == ["global_step_2"]
    found = manifests.latest(tmp_path)
    assert found is not None and found.version == Version(2, 2)


def test_reading_a_manifest_loads_no_torch() -> None:
    code = (
        "import sys, rft.trainer.checkpoint.manifest, rft.trainer.settings, rft.trainer.rows.pack; assert "
        "'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


SAVE_AGAIN = """
import asyncio, sys
from pathlib import Path
from rft.trainer.checkpoint.checkpoints import Checkpoints
from rft.types.ids import Version
from rft.types.ports import Consumption

async def fill(aside):
    (aside / "model.safetensors").write_bytes(b"again")
    return {}

used = Consumption(num_uses=32, digest="ab" * 16, cursor=4)
asyncio.run(Checkpoints(Path(sys.argv[1]), keep=1).save(Version(2, 3), None, used, fill))
"""


def _in_a_child(folder: Path, point: str) -> int:
    environment = {**os.environ, "RFT_FAULT": point}
    return subprocess.run(
        [sys.executable, "-c", SAVE_AGAIN, str(folder)], env=environment, timeout=60
    ).returncode


@pytest.mark.parametrize("point", ["checkpoint.replacing", "checkpoint.committed", ""])
async def test_a_step_that_is_saved_again_is_there_whenever_the_process_dies(
    tmp_path: Path, point: str
) -> None:
    await save(tmp_path, 3)
    assert (_in_a_child(tmp_path, point) != 0) == bool(point)
    manifests.recover(tmp_path)
    found = manifests.latest(tmp_path)
    assert found is not None and found.version == Version(
        1 if point == "checkpoint.replacing" else 2, 3
    )
    await save(tmp_path, 3, lineage=3)
    assert os.listdir(tmp_path) == ["global_step_3"]
