"""`rft export`: the Hugging Face model of a checkpoint, verified, in a folder of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def export(
    run_dir: Annotated[Path, typer.Argument(help="folder of the run", show_default=False)],
    out: Annotated[Path, typer.Option("--out", "-o", help="new folder for the model", show_default=False)],
    step: Annotated[int | None, typer.Option(help="train step; default: the newest that has a model", show_default=False)] = None,
) -> None:
    """Copy the verified Hugging Face model of a checkpoint."""
    print(copy_model(run_dir, out, step))


def copy_model(run_dir: Path, out: Path, step: int | None) -> Path:
    """Copy to `out`, which must not exist yet; it appears whole or not at all.

    The folder of a program stands for that of its last finished stage.
    Raises ConfigError for a wrong folder or step, CheckpointInvalid naming the file that is not what the manifest says.
    """
    import os
    import shutil

    from rft.errors import CheckpointInvalid, ConfigError, SetupError
    from rft.launch import stages
    from rft.trainer import manifest as manifests

    if stages.record(run_dir):
        if not (done := stages.read(run_dir)):
            raise ConfigError(f"{run_dir} is a program of stages, and none of them is done", key="RUN_DIR")
        run_dir = run_dir / done[-1].name
    folders = manifests.committed(run_dir / "checkpoints")
    steps = {int(f.name.rpartition("_")[2]): f for f in folders if (f / "huggingface").is_dir()}
    if not steps:
        raise ConfigError(
            f"{run_dir} has {len(folders)} checkpoints and none of them holds a Hugging Face model; "
            "set trainer.save_hf_checkpoint to last or always",
            key="RUN_DIR",
        )
    if step is not None and step not in steps:
        raise ConfigError(
            f"{step} has no model in {run_dir}; there are {', '.join(map(str, sorted(steps)))}", key="--step", given=step
        )
    if out.exists():
        raise ConfigError(f"{out} exists; name a folder that does not", key="--out")
    manifest = manifests.read(steps[max(steps) if step is None else step])  # hashes every file
    names = [n for n in manifest.files if n.startswith("huggingface/")]
    if not any(n.endswith(".safetensors") for n in names):
        raise CheckpointInvalid(f"{manifest.folder}: its manifest lists no safetensors file below huggingface/")
    aside = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        for name in names:
            target = aside / Path(name).relative_to("huggingface")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(manifest.folder / name, target)
        aside.rename(out)
    except OSError as e:
        raise SetupError(f"{out} cannot be written: {e.strerror}") from e
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return out
