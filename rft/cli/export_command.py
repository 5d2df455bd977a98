"""`rft export`: the Hugging Face model of a checkpoint, verified, in its own folder."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rft.cli.options import RunDir
from rft.errors import CheckpointInvalid, ConfigError, SetupError

if TYPE_CHECKING:
    from rft.trainer.checkpoint.manifest import Manifest


def export(
    run_dir: RunDir,
    folder: Annotated[
        Path | None,
        typer.Argument(help="new folder for the model; default: RUN-model", show_default=False),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="the same as FOLDER", show_default=False)
    ] = None,
    step: Annotated[
        int | None, typer.Option(help="train step; default: the newest", show_default=False)
    ] = None,
    best: Annotated[
        str | None,
        typer.Option(
            help="metric of metrics.jsonl: the checkpoint where it was highest", show_default=False
        ),
    ] = None,
    lowest: Annotated[
        bool, typer.Option("--lowest", help="with --best: where it was lowest")
    ] = False,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="only the LoRA adapter, as peft reads it")
    ] = False,
) -> None:
    """Write the verified Hugging Face model of a checkpoint; with LoRA the adapter is added to the
    weights.
    """
    if folder is not None and out is not None:
        raise ConfigError(f"FOLDER is given too, {folder}; name one", key="--out", given=str(out))
    out = folder or out or run_dir.absolute().with_name(f"{run_dir.absolute().name}-model")
    print(
        copy_model(run_dir, out, step, best=best, mode="min" if lowest else "max", adapter=adapter)
    )


def copy_model(
    run_dir: Path,
    out: Path,
    step: int | None,
    *,
    best: str | None = None,
    mode: Literal["max", "min"] = "max",
    adapter: bool = False,
) -> Path:
    """Write the model atomically to the new folder `out`.

    Copies the checkpoint's Hugging Face folder, or assembles it one tensor at a time.  `adapter`: the
    trained adapter alone.  A program's folder means its last finished stage.  Raises ConfigError for
    a wrong folder or step, CheckpointInvalid naming a file that does not match the manifest.
    """
    from rft.monitor.monitor import FILE as METRICS
    from rft.trainer.checkpoint import manifest as manifests
    from rft.trainer.checkpoint.checkpoints import BestSteps, age

    run_dir, folders = _with_model(run_dir, adapter)
    if best is not None:
        if step is not None:
            raise ConfigError("--best is given too; name one of them", key="--step", given=step)
        if (step := BestSteps(run_dir / METRICS, best, mode).best(folders)) is None:
            steps = ", ".join(map(str, folders))
            raise ConfigError(
                f"{best} has no value at the steps of the checkpoints ({steps})",
                key="--best",
                given=best,
            )
    if step is not None and step not in folders:
        raise ConfigError(
            f"{step} has no model in {run_dir}; there are {', '.join(map(str, folders))}",
            key="--step",
            given=step,
        )
    if out.exists():
        raise ConfigError(f"{out} exists; name a folder that does not", key="--out")
    chosen = max(folders.values(), key=age) if step is None else folders[step]
    size = sum(f.size for f in manifests.read(chosen, verify=False).files.values())
    _say(f"checking the hashes of {chosen.name}, {size / 1e9:.2f} GB ...", size)
    manifest = manifests.read(chosen)
    _say(f"writing {out} ...", size)
    aside = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        aside.mkdir(parents=True)
        _fill(manifest, aside, adapter=adapter)
        aside.rename(out)
    except OSError as e:
        message = f"{out} cannot be written: {e.strerror}"
        if not chosen.is_dir():
            message = (
                f"{chosen} was removed meanwhile (trainer.max_checkpoints_to_keep); export again"
            )
        raise SetupError(message) from e
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return out


def _say(text: str, size: int) -> None:
    """Print a message about a copy of `size` bytes, if it takes seconds."""
    if size > 200e6:
        print(text, file=sys.stderr, flush=True)


def _with_model(run_dir: Path, adapter: bool) -> tuple[Path, dict[int, Path]]:
    """Return the folder of the run or of a program's last finished stage, and its checkpoints with a
    model (or adapter) by step.
    """
    from rft.launch import stages
    from rft.trainer.checkpoint import manifest as manifests

    if stages.record(run_dir):
        if not (done := stages.read(run_dir)):
            raise ConfigError(
                f"{run_dir} is a program of stages, and none of them is done", key="RUN_DIR"
            )
        run_dir = run_dir / done[-1].name
    committed = manifests.committed(run_dir / "checkpoints")
    kinds = ("trainer/adapters",) if adapter else ("huggingface", "trainer/pretrained")
    folders = {
        manifests.step_of(f): f for f in committed if any((f / name).is_dir() for name in kinds)
    }
    none = f"{run_dir} has {len(committed)} checkpoints and none of them holds"
    if not folders and adapter:
        raise ConfigError(f"{none} an adapter; it trained the whole model", key="--adapter")
    if not folders:
        raise ConfigError(
            f"{none} a model; set trainer.save_hf_checkpoint to last or always", key="RUN_DIR"
        )
    return run_dir, folders


def _fill(manifest: Manifest, aside: Path, *, adapter: bool) -> None:
    beginning = "trainer/adapters/" if adapter else "huggingface/"
    names = [n for n in manifest.files if n.startswith(beginning)]
    if adapter and names:
        beginning = "/".join(names[0].split("/")[:3])  # the folder has the adapter's name
    if adapter or names:
        if not any(n.endswith(".safetensors") for n in names):
            raise CheckpointInvalid(
                f"{manifest.folder}: its manifest lists no safetensors file below {beginning}"
            )
        for name in names:
            target = aside / Path(name).relative_to(beginning)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(manifest.folder / name, target)
        return
    from rft.trainer.checkpoint.hf_folder import assemble

    assemble(manifest.folder / "trainer", aside)
