"""Look up the text of single tokens with the tokenizer of a run's newest export or of its base
model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rft.types import modelfiles


class TokenTexts:
    """Maps a token to its text, or to its number without a tokenizer.  Texts are unescaped."""

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
    """Return the tokenizer.json of the newest exported model, else of the base model."""
    exported = sorted(
        run_dir.glob("checkpoints/global_step_*/huggingface/tokenizer.json"),
        key=lambda p: p.stat().st_mtime,
    )
    try:
        model = json.loads((run_dir / "config.json").read_text(encoding="utf-8"))["tree"]["model"]
        model_path = model.get("tokenizer_path") or model["model_path"]
        first = (
            modelfiles.snapshot(model_path) or Path(model_path).expanduser()
        ) / "tokenizer.json"
    except (OSError, ValueError, KeyError):  # a folder of another program; token numbers suffice
        first = run_dir / "tokenizer.json"
    return exported[-1] if exported else first if first.is_file() else None
