"""Texts of single tokens, by the tokenizer that lies in a run's folder, or the one that it began
with.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rft.types import modelfiles


class TokenTexts:
    """The text of a token; its number where no tokenizer is available.  What models wrote is
    returned as it is, unescaped.
    """

    def __init__(self, run_dir: Path) -> None:
        self._tokenizer: Any = None
        if path := _tokenizer_file(run_dir):
            from tokenizers import Tokenizer

            self._tokenizer = Tokenizer.from_file(str(path))

    def __call__(self, token: int) -> str:
        text = (
            None
            if self._tokenizer is None
            else self._tokenizer.decode([token], skip_special_tokens=False)
        )
        return text or str(token)


def _tokenizer_file(run_dir: Path) -> Path | None:
    """tokenizer.json of the newest exported model, or the one that the run began with."""
    found = sorted(
        run_dir.glob("checkpoints/global_step_*/huggingface/tokenizer.json"),
        key=lambda p: p.stat().st_mtime,
    )
    try:
        model = json.loads((run_dir / "config.json").read_text(encoding="utf-8"))["tree"]["model"]
        given = model.get("tokenizer_path") or model["model_path"]
        first = (modelfiles.snapshot(given) or Path(given).expanduser()) / "tokenizer.json"
    except (OSError, ValueError, KeyError):  # a folder that another program filled; numbers will do
        first = run_dir / "tokenizer.json"
    return found[-1] if found else first if first.is_file() else None
