"""Write and check the manifest of a checkpoint, and find the newest complete one.  Torch-free.

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
from msgspec.structs import asdict, replace

from rft.errors import CheckpointInvalid, ConfigError
from rft.files.disk import read_regular, sync_path, write_whole
from rft.files.strict_json import parse_json
from rft.types.ids import Version
from rft.types.ports import MANIFEST_FORMAT, Consumption

log = logging.getLogger(__name__)

NAME = "manifest.json"
NEWEST = "newest_checkpoint.json"  # file in the run's folder
# suffix of a checkpoint that a new one of the same step is about to replace
REPLACED = ".old.tmp"
_FOLDER = re.compile(r"global_step_\d+")


class FileFact(Struct, frozen=True, omit_defaults=True):
    size: int
    xxh3_128: str


class ManifestPage(Struct, frozen=True, kw_only=True):
    """Content of manifest.json."""

    format: int
    version: Version
    parent: Version | None  # the version its lineage started from; None: the base model
    consumption: Consumption
    files: dict[str, FileFact]  # by path inside the folder
    time: float  # seconds since the epoch
    sha256: str = ""  # over all other fields


class Manifest(ManifestPage, frozen=True, kw_only=True):
    """One committed checkpoint."""

    folder: Path


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
    """Rename the manifest into `folder`, durably.  From this moment the checkpoint counts.

    `hashes`: `hash_of` files by path inside the folder, computed while they were written; other
    files are hashed now.
    """
    hash_by_name = hashes or {}
    names = {
        str(p.relative_to(folder)): p
        for p in sorted(folder.rglob("*"))
        if p.is_file() and p.name != NAME
    }
    if lost := sorted(set(hash_by_name) - set(names)):
        raise CheckpointInvalid(
            f"{folder / lost[0]}: was written and is not there; do all ranks share this folder?"
        )
    files = {
        name: FileFact(p.stat().st_size, xxh3_128=hash_by_name.get(name) or hash_of(p))
        for name, p in names.items()
    }
    page = ManifestPage(
        format=MANIFEST_FORMAT,
        version=version,
        parent=parent,
        consumption=consumption,
        files=files,
        time=time.time(),
    )
    page = replace(page, sha256=_content_sha256(page))
    write_whole(folder / NAME, json.dumps(msgspec.to_builtins(page), indent=1), mode=0o666)
    sync_path(folder)
    return Manifest(folder=folder, **asdict(page))


def read(folder: Path, *, verify: bool = True) -> Manifest:
    """Return the manifest in `folder`.

    Raises CheckpointInvalid naming the file that is missing, cut short or changed.
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
        page = msgspec.json.decode(data, type=ManifestPage)
        if page.sha256 != _content_sha256(page):
            raise CheckpointInvalid(f"{path}: damaged: its sha256 is not the one that it states")
        manifest = Manifest(folder=folder, **asdict(page))
    except FileNotFoundError:
        raise CheckpointInvalid(f"{path}: missing; the checkpoint was never committed") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as e:
        raise CheckpointInvalid(f"{path}: damaged: {e}") from e
    if verify:
        check_files(manifest)
    return manifest


def check_files(manifest: Manifest) -> None:
    """Raise CheckpointInvalid for the first file that differs from the manifest."""
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
    """Return the newest intact checkpoint under `checkpoints` whose step `fits`; log damaged ones.

    Order is lineage first, then step.  Returns None if there is no manifest at all.  Raises
    CheckpointInvalid if manifests exist but no checkpoint is intact, because starting afresh would
    silently throw a run away.
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
    """Note the last saved checkpoint beside the folder of checkpoints, so that its loss is noticed."""
    about = {
        "step": manifest.version.step,
        "lineage": manifest.version.lineage,
        "folder": manifest.folder.name,
    }
    write_whole(manifest.folder.parent.with_name(NEWEST), json.dumps(about))


def refuse_lost(checkpoints: Path) -> None:
    """Raise ConfigError if a run has saved checkpoints but has none now; log an error if only the
    newest is missing.
    """
    note = checkpoints.with_name(NEWEST)
    try:
        name = str(parse_json(read_regular(note, 1 << 16).decode("utf-8"))["folder"])
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise ConfigError(f"{note} is damaged: {e}; remove it") from None
    folders = committed(checkpoints)
    if not folders:
        raise ConfigError(
            f"the run has saved checkpoints, {name} last, and {checkpoints} holds none; bring them "
            f"back, or write fresh to begin again "
            "from the model",
            key="resume_mode",
            given="auto",
        )
    if name not in {p.name for p in folders}:
        log.error(
            "the checkpoint that was saved last, %s, is gone; the run goes on from %s",
            checkpoints / name,
            folders[-1].name,
        )


def recover(checkpoints: Path) -> None:
    """Put back checkpoints that a dead process was replacing, if the replacement is not committed."""
    for old in checkpoints.glob(f"*{REPLACED}"):
        final = old.with_name(old.name.removesuffix(REPLACED))
        if (old / NAME).is_file() and not (final / NAME).is_file():
            log.warning("%s was being replaced when the run ended; it is put back", final)
            shutil.rmtree(final, ignore_errors=True)
            old.rename(final)
            sync_path(checkpoints)


def committed(checkpoints: Path) -> list[Path]:
    """Return the folders with a manifest, by step."""
    folders = checkpoints.glob("global_step_*")
    return sorted((p for p in folders if is_name(p.name) and (p / NAME).is_file()), key=step_of)


def is_name(name: str) -> bool:
    """Return whether `name` is that of a checkpoint folder."""
    return _FOLDER.fullmatch(name) is not None


def step_of(folder: Path) -> int:
    """Return the step in a folder's name."""
    return int(folder.name.removeprefix("global_step_"))


def _content_sha256(page: ManifestPage) -> str:
    """Hash the fields in their order, without `sha256`."""
    return hashlib.sha256(msgspec.json.encode(replace(page, sha256=""))).hexdigest()


def hash_of(path: Path) -> str:
    """Return the xxh3-128 of a file, in hex, as `xxh128sum` prints it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
