"""`rft chat`: talk to a checkpoint or a model folder, in one process, without Ray."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from rft.errors import ConfigError
from rft.secrets import safe


def chat(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="RUN | MODEL", help="folder of a run, or of a model", show_default=False
        ),
    ],
    step: Annotated[
        int | None,
        typer.Option(help="of a run: train step; default: the newest", show_default=False),
    ] = None,
    system: Annotated[str, typer.Option(help="system message", show_default=False)] = "",
    temperature: Annotated[
        float, typer.Option(min=0.0, help="of sampling; 0: the likeliest token")
    ] = 0.7,
    max_tokens: Annotated[int, typer.Option(min=1, help="of one answer")] = 512,
) -> None:
    """Talk to the model of a checkpoint, or of a folder.

    An empty line starts a new conversation, Ctrl-D ends.
    """
    from rft.cli.export_command import copy_model
    from rft.launch.stages import RECORD

    if (source / "config.json").is_file() and not (source / "checkpoints").exists():
        if step is not None:
            raise ConfigError(
                "is for runs; this is the folder of a model", key="--step", given=step
            )
        _talk(source, system, temperature, max_tokens, str(source))
    elif (source / "checkpoints").is_dir() or (source / RECORD).is_file():
        with tempfile.TemporaryDirectory(prefix="rft-chat-") as aside:
            model = copy_model(source, Path(aside) / "model", step)
            title = f"{'the newest step' if step is None else f'step {step}'} of {source}"
            _talk(model, system, temperature, max_tokens, title)
    else:
        raise ConfigError(
            "holds neither checkpoints nor a model", key="RUN | MODEL", given=str(source)
        )


def _talk(folder: Path, system: str, temperature: float, max_tokens: int, title: str) -> None:
    import torch

    from rft.engine.base import PromptTooLong
    from rft.engine.settings import EngineSettings
    from rft.engine.transformers import TransformersEngine
    from rft.preflight.model_folder import look
    from rft.types.ports import GenerateRequest
    from rft.types.task import SamplingArgs

    if look(str(folder)).chat_template is None:
        raise ConfigError(
            "has no chat template, so it cannot be talked to", key="RUN | MODEL", given=str(folder)
        )
    device, dtype = ("cuda", "bfloat16") if torch.cuda.is_available() else ("cpu", "float32")
    print(f"loading {title} on {device}", file=sys.stderr, flush=True)
    length = _context(folder)
    settings = EngineSettings(
        engine_type="transformers",
        name="chat",
        model_path=str(folder),
        device=device,
        dtype=dtype,
        fixed_weights=True,
        max_model_len=length,
        max_num_seqs=1,
        cpu_threads=torch.get_num_threads(),
    )
    opening: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    sampling = SamplingArgs(temperature=temperature, max_tokens=min(max_tokens, length // 2))
    with asyncio.Runner() as runner:
        engine = runner.run(TransformersEngine.start(settings))
        try:
            while (line := _line()) is not None:  # in the main thread, where Ctrl-C ends it
                if not line.strip():
                    messages = list(opening)
                    continue
                messages.append({"role": "user", "content": line})
                try:
                    (answer,) = runner.run(
                        engine.generate(
                            GenerateRequest(messages=tuple(messages), sampling=sampling)
                        )
                    )
                except PromptTooLong as e:
                    messages.pop()
                    print(f"{e}, or begin anew with an empty line", file=sys.stderr)
                    continue
                messages.append(answer.message)
                print(safe(answer.text, lines=True), flush=True)
        finally:
            runner.run(engine.close())


def _line() -> str | None:
    """Read a line from the user; None at the end."""
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None


def _context(folder: Path) -> int:
    """Return the model's context length, at most 8,192 tokens."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder).get_text_config().to_dict()
    return min(int(config.get("max_position_embeddings", 8192)), 8192)
