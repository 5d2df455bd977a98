"""`rft doctor --model`: show as a table whether a model trains and generates exactly on this
machine.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rft.extras.doctor.model_check import ModelLine

ENGINES = ("transformers", "vllm")
_HEAD = f"{'':25}  {'log-probs':>9}  {'gradient':>9}  verdict"


def model(path: str, device: str, as_json: bool) -> None:
    """Compare the model of `path`, a folder or a hub id in the local cache, and print a line per
    comparison.

    Raises the error of a run with default settings, and RunFailed if something is not exact.
    """
    from rft.errors import ConfigError, RunFailed, SetupError
    from rft.taskset.chatfiles import find_model

    folder = find_model(path)
    try:
        import torch
    except ImportError as e:
        raise SetupError(
            f"torch cannot be imported: {e}.  Install the build for this machine."
        ) from e
    if device not in ("", "cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise ConfigError(
            "is none of cuda, cpu" if device != "cuda" else "torch sees no GPU; write cpu",
            key="--device",
            given=device,
        )
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    from rft.extras.doctor import model_check

    # the table reports what the trainer would log
    logging.getLogger("rft.trainer").setLevel(logging.ERROR)

    if not as_json:
        print(
            f"{folder} on {device}, in float32; differences to plain transformers rows: nats, and "
            f"the gradient of one GRPO step.\n"
            "Of engines: the largest one of what they sample, and of the canaries of two versions "
            "that a trainer publishes to them."
        )
        print(_HEAD)
    report = model_check.compare(
        folder,
        device,
        engines=ENGINES,
        on_line=lambda line: None if as_json else print(_line(line), flush=True),
    )
    if as_json:
        print(json.dumps([_json(line) for line in report.lines], indent=1))
    if report.error is not None:
        raise report.error
    if not report.good:
        raise RunFailed(
            f"{Path(path).name}: what is NOT EXACT above must not be trained or served here; "
            f"report the table"
        )


def _line(line: ModelLine) -> str:
    def number(x: float | None) -> str:
        return "" if x is None else f"{x:.0e}"

    name = f"{line.what}{' (auto)' if line.chosen else ''}"
    return (
        f"{name:25}  {number(line.logprobs):>9}  {number(line.gradients.get('grpo')):>9}  "
        f"{line.verdict}"
    )


def _json(line: ModelLine) -> dict[str, object]:
    return {
        "what": line.what,
        "logprobs": line.logprobs,
        "gradient": line.gradients.get("grpo"),
        "verdict": line.verdict.partition(":")[0].lower(),
        "refused": line.refused or None,
        "auto": line.chosen,
    }
