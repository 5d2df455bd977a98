"""Tokens are read with the tokenizer that wrote them."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, models

from rft.buffer.token_texts import TokenTexts


def test_the_tokenizer_of_the_run_is_read_before_that_of_its_model(tmp_path: Path) -> None:
    for name in ("model", "tokenizer"):
        (tmp_path / name).mkdir()
        Tokenizer(models.WordLevel({f"of the {name}": 0}, unk_token="?")).save(
            str(tmp_path / name / "tokenizer.json")
        )
    paths = {
        name: str(tmp_path / name.removesuffix("_path"))
        for name in ("model_path", "tokenizer_path")
    }
    for given, text in (
        (paths, "of the tokenizer"),
        (paths | {"tokenizer_path": None}, "of the model"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({"tree": {"model": given}}))
        assert TokenTexts(tmp_path)(0) == text
