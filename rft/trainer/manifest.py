"""What a checkpoint says about itself, and how to find the newest one that is whole.  Torch-free.

`checkpoints/global_step_N/` holds `trainer/`, perhaps `huggingface/`, and `manifest.json`, which is
renamed into place last: a folder without it does not count.  Invariant: `latest` returns only
checkpoints whose every file has the size and hash of its manifest, and whose manifest has its own.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import xxhash
from msgspec import Struct

from rft.errors import CheckpointInvalid, ConfigError
from rft.files.disk import read_regular, sync_path, write_whole
from rft.files.strict_json import parse_json
from rft.types.ids import Version
from rft.types.ports import MANIFEST_FORMAT, Consumption

log = logging.getLogger(__name__)

NAME = "manifest.json"
NEWEST = "newest_checkpoint.json"  # in the run's folder
# behind the name of a checkpoint that another of the same step is about to replace
REPLACED = ".old.tmp"
_FOLDER = re.compile(r"global_step_(\d+)")


class FileFact(Struct, frozen=True, omit_defaults=True):
    size: int
    xxh3_128: str


class Manifest(Struct, frozen=True, kw_only=True):
    """One committed checkpoint.  `parent` is the version its lineage started from; None: the base
    model.
    """

    folder: Path  # where it was found
    version: Version
    parent: Version | None
    consumption: Consumption
    files: dict[str, FileFact]  # by path inside `folder`
    time: float  # seconds since the epoch


class _StoredManifest(Struct, kw_only=True):
    """As it is written: a checkpoint's version is a lineage and a step."""

    format: int
    version: tuple[int, int]
    parent: tuple[int, int] | None
    consumption: Consumption
    files: dict[str, FileFact]
    time: float
    sha256: str = ""  # of all the above


def folder_name(step: int) -> str:
    return f"global_step_{step}"


def commit(
    folder: Path,
    *,
    version: Version,
    parent: Version | None,
    consumption: Consumption,
    hashes: Mapping[str, str] | None = None,
) -> Manifest:
    """Rename the manifest into `folder`, durably.  This is the moment a checkpoint begins to count.

    `hashes`: `hash_of` files by path inside it, taken while they were written; those of other files
    are taken now.
    """
    known = hashes or {}
    names = {
        str(p.relative_to(folder)): p
        for p in sorted(folder.rglob("*"))
        if p.is_file() and p.name != NAME
    }
    if lost := sorted(set(known) - set(names)):
        raise CheckpointInvalid(
            f"{folder / lost[0]}: was written and is not there; do all ranks share this folder?"
        )
    files = {
        name: FileFact(p.stat().st_size, xxh3_128=known.get(name) or hash_of(p))
        for name, p in names.items()
    }
    stored = _StoredManifest(
        format=MANIFEST_FORMAT,
        version=(version.lineage, version.step),
        parent=None if parent is None else (parent.lineage, parent.step),
        consumption=consumption,
        files=files,
        time=time.time(),
    )
    stored.sha256 = _own_sha256(stored)
    write_whole(folder / NAME, json.dumps(msgspec.to_builtins(stored), indent=1), mode=0o666)
    sync_path(folder)
    return _manifest(folder, stored)


def read(folder: Path, *, verify: bool = True) -> Manifest:
    """The manifest in `folder`; raises CheckpointInvalid that names the file which is missing, cut
    short or changed.
    """
    path = folder / NAME
    try:
        data = path.read_bytes()
        number = msgspec.json.decode(data, type=dict[str, object]).get("format")
        if number != MANIFEST_FORMAT:
            raise CheckpointInvalid(
                f"{path}: format {number!r}, this version of rft reads {MANIFEST_FORMAT}; use the "
                f"version that wrote it"
            )
        stored = msgspec.json.decode(data, type=_StoredManifest)
        if stored.sha256 != _own_sha256(stored):
            raise CheckpointInvalid(f"{path}: damaged: its sha256 is not the one that it states")
        found = _manifest(folder, stored)
    except FileNotFoundError:
        raise CheckpointInvalid(f"{path}: missing; the checkpoint was never committed") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as e:
        raise CheckpointInvalid(f"{path}: damaged: {e}") from e
    if verify:
        check_files(found)
    return found


def check_files(manifest: Manifest) -> None:
    """Raises CheckpointInvalid for the first file that is not as the manifest says."""
    for name, fact in manifest.files.items():
        path = manifest.folder / name
        if not path.is_file():
            raise CheckpointInvalid(f"{path}: missing")
        if (size := path.stat().st_size) != fact.size:
            raise CheckpointInvalid(f"{path}: {size} bytes, the manifest says {fact.size}")
        if (computed := hash_of(path)) != fact.xxh3_128:
            raise CheckpointInvalid(
                f"{path}: xxh3-128 {computed}, the manifest says {fact.xxh3_128}; the file has "
                f"changed"
            )


def latest(checkpoints: Path, fits: Callable[[int], bool] = lambda step: True) -> Manifest | None:
    """The newest whole checkpoint under `checkpoints` whose step `fits`; damaged ones are named in
    the log and passed over.

    Newest is by lineage first, then step.  None when there is none at all.  Raises
    CheckpointInvalid when there are manifests but none of them is whole, because starting afresh
    would then silently throw a run away.
    """
    candidates = []
    broken = []
    for folder in (f for f in committed(checkpoints) if fits(step_of(f))):
        try:
            candidates.append(read(folder, verify=False))
        except CheckpointInvalid as e:
            broken.append(e)
    for manifest in sorted(candidates, key=lambda m: m.version, reverse=True):
        try:
            check_files(manifest)
        except CheckpointInvalid as e:
            broken.append(e)
            continue
        for problem in broken:
            log.warning("checkpoint passed over: %s", problem)
        if broken:
            log.error("falling back to %s", manifest.folder)
        return manifest
    if broken:
        raise CheckpointInvalid(
            f"no checkpoint in {checkpoints} is whole; the newest problem: {broken[0]}"
        )
    return None


def remember(manifest: Manifest) -> None:
    """Note beside the folder of checkpoints which one was saved last, so that one that vanishes is
    missed.
    """
    about = {
        "step": manifest.version.step,
        "lineage": manifest.version.lineage,
        "folder": manifest.folder.name,
    }
    write_whole(manifest.folder.parent.with_name(NEWEST), json.dumps(about))


def refuse_lost(checkpoints: Path) -> None:
    """Raises ConfigError where a run has saved checkpoints and none is there; a newest one that is
    gone is told.
    """
    note = checkpoints.with_name(NEWEST)
    try:
        name = str(parse_json(read_regular(note, 1 << 16).decode("utf-8"))["folder"])
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise ConfigError(f"{note} is damaged: {e}; remove it") from None
    there = committed(checkpoints)
    if not there:
        raise ConfigError(
            f"the run has saved checkpoints, {name} last, and {checkpoints} holds none; bring them "
            f"back, or write fresh to begin again "
            "from the model",
            key="resume_mode",
            given="auto",
        )
    if name not in {p.name for p in there}:
        log.error(
            "the checkpoint that was saved last, %s, is gone; the run goes on from %s",
            checkpoints / name,
            there[-1].name,
        )


def recover(checkpoints: Path) -> None:
    """Put back checkpoints that were being replaced when the process died and whose successor is
    not there.
    """
    for old in checkpoints.glob(f"*{REPLACED}"):
        final = old.with_name(old.name.removesuffix(REPLACED))
        if (old / NAME).is_file() and not (final / NAME).is_file():
            log.warning("%s was being replaced when the run ended; it is put back", final)
            shutil.rmtree(final, ignore_errors=True)
            old.rename(final)
            sync_path(checkpoints)


def committed(checkpoints: Path) -> list[Path]:
    """Folders with a manifest, by step."""
    found = [
        (int(m[1]), p)
        for p in checkpoints.glob("global_step_*")
        if (m := _FOLDER.fullmatch(p.name)) and (p / NAME).is_file()
    ]
    return [p for _, p in sorted(found)]


def is_name(name: str) -> bool:
    """Whether a folder of this name would be a checkpoint."""
    return _FOLDER.fullmatch(name) is not None


def step_of(folder: Path) -> int:
    """The step in a folder's name."""
    match = _FOLDER.fullmatch(folder.name)
    assert match is not None, folder
    return int(match[1])


def _manifest(folder: Path, s: _StoredManifest) -> Manifest:
    parent = None if s.parent is None else Version(*s.parent)
    return Manifest(
        folder=folder,
        version=Version(*s.version),
        parent=parent,
        consumption=s.consumption,
        files=s.files,
        time=s.time,
    )


def _own_sha256(stored: _StoredManifest) -> str:
    """Of the fields in their order, without the hash itself."""
    return hashlib.sha256(
        msgspec.json.encode(msgspec.structs.replace(stored, sha256=""))
    ).hexdigest()


def hash_of(path: Path) -> str:
    """xxh3-128 of a file, in hex, as `xxh128sum` prints it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
