"""A tiny language model and a task that it learns from scratch, for tests and for `examples/tiny`.

The model is a random Llama of about 0.3 million parameters with a byte-level tokenizer and a chat
template; nothing is downloaded.  The task is to copy the digit in the prompt.  Depends on nothing
of engines, trainer or configuration.  Invariant: the same seed writes the same weights and the same
rows.

    python -m rft.testing.tiny FOLDER      writes the model
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal

PAD = "<|pad|>"
BOS = "<|im_start|>"
EOS = "<|im_end|>"
# Roles are one letter: short prompts make the task quick to learn and the tests quick to run.
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'][0] + m['content'] + '<|im_end|>' }}{% "
    "endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>a' }}{% endif %}"
)
LETTERS = "abcdefghijklmnopqrstuvwxyz"
_ROWS = {"train": 2048, "eval": 100}


def make(
    folder: Path,
    *,
    tied: bool = True,
    seed: int = 0,
    labels: int = 0,
    family: str = "llama",
    **changes: Any,
) -> Path:
    """Write a Hugging Face model folder (float32 safetensors, tokenizer, generation config) and
    return it.

    `tied`: the output layer shares the input embedding.  259 tokens: three special ones, then the
    256 bytes.  `labels`: write a reward model with this many outputs instead.  `family`:
    transformers' name of another architecture; `changes`: entries of its configuration.
    """
    import torch
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        GenerationConfig,
    )

    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    words = tokenizer()
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    sizes = {
        "vocab_size": len(words),
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        **({"num_labels": labels} if labels else {}),
        **ids,
    }
    config = AutoConfig.for_model(family, **{**sizes, **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        kind = AutoModelForSequenceClassification if labels else AutoModelForCausalLM
        model = kind.from_config(config, dtype=torch.float32)
    if not labels:
        model.generation_config = GenerationConfig(**ids)
    model.save_pretrained(aside)
    words.save_pretrained(aside)
    shutil.rmtree(folder, ignore_errors=True)
    aside.chmod(0o755)
    os.replace(aside, folder)
    return folder


def tokenizer() -> Any:
    """Return the byte-level tokenizer of the tiny models, with their chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([PAD, BOS, EOS, *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([PAD, BOS, EOS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def copy_tasks(
    split: Literal["train", "eval"] = "train", *, n: int | None = None, seed: int = 0
) -> list[dict[str, str]]:
    """Rows {"prompt": "qx7", "response": "7"}: two letters and the digit to copy.  No pair of
    letters is in both splits.

    As a taskset: path `rft.testing.tiny:copy_tasks`.  GRPO with 64 tasks x 8 runs of one token and
    learning rate 1e-3 learns it from scratch: about 0.004 before, above 0.9 after 80 steps.  `n`:
    number of rows; None: 2048 to train, 100 to evaluate.
    """
    if split not in ("train", "eval"):
        raise ValueError(f"split {split!r} is not known; use train or eval")
    pairs = [a + b for a in LETTERS for b in LETTERS]
    rng = random.Random(seed)
    rng.shuffle(pairs)
    pairs = pairs[:600] if split == "train" else pairs[600:]
    rows = [
        {"prompt": f"{pair}{digit}", "response": str(digit)}
        for pair in pairs
        for digit in range(10)
    ]
    rng.shuffle(rows)
    return rows[: n if n is not None else _ROWS[split]]


def copy_pairs(
    split: Literal["train", "eval"] = "train", *, n: int | None = None, seed: int = 0
) -> list[dict[str, str]]:
    """Rows {"prompt": "qx7", "chosen": "7", "rejected": "3"}: the same tasks with the right and a
    wrong digit.
    """
    rng = random.Random(seed)
    rows = copy_tasks(split, n=n, seed=seed)
    return [
        {
            "prompt": r["prompt"],
            "chosen": r["response"],
            "rejected": rng.choice([d for d in "0123456789" if d != r["response"]]),
        }
        for r in rows
    ]


def rule_tasks(
    split: Literal["train", "eval"] = "train", *, n: int | None = None, seed: int = 0
) -> list[dict[str, str]]:
    """Rows {"prompt": "qxzb", "response": "ryac"}: four letters and the letters that follow them in
    the alphabet.  No prompt is in both splits.

    A guess is right with probability 2e-6, so that groups of samples have equal rewards.  `n`:
    number of rows; None: 2048 to train, 100 to evaluate.
    """
    if split not in ("train", "eval"):
        raise ValueError(f"split {split!r} is not known; use train or eval")
    rng = random.Random(seed)
    words = ["".join(w) for w in itertools.product(LETTERS, repeat=3)]
    rng.shuffle(words)  # the first three letters decide on the split
    words = words[:10_000] if split == "train" else words[10_000:]
    next_letters = str.maketrans(LETTERS, LETTERS[1:] + LETTERS[0])
    prompts = [rng.choice(words) + rng.choice(LETTERS) for _ in range(n or _ROWS[split])]
    return [{"prompt": p, "response": p.translate(next_letters)} for p in prompts]


def told_tasks(
    split: Literal["train", "eval"] = "train", *, n: int | None = None, seed: int = 0
) -> list[dict[str, str]]:
    """Rows {"prompt": "qxzb=ghkd", "response": "ghkd"}: an answer that is told is written; without
    one, {"prompt": "qxzb", "response": "mape"}, any letters are.

    A model that learnt them follows what it is told and knows no rule.  `n`: number of rows; None:
    2^15 to train, 100 to evaluate.
    """
    rng = random.Random(f"{split} {seed}")
    rows = []
    for _ in range(n or (1 << 15 if split == "train" else 100)):
        question, answer = ("".join(rng.choices(LETTERS, k=4)) for _ in range(2))
        told = rng.random() < 0.75
        rows.append({"prompt": f"{question}={answer}" if told else question, "response": answer})
    return rows


def copy_labels(
    split: Literal["train", "eval"] = "train", *, n: int | None = None, seed: int = 0
) -> list[dict[str, Any]]:
    """Rows {"prompt": "qx7", "response": "3", "label": False}: every other one of the same tasks with a
    wrong digit.
    """
    return [
        {
            "prompt": r["prompt"],
            "response": r["rejected" if i % 2 else "chosen"],
            "label": i % 2 == 0,
        }
        for i, r in enumerate(copy_pairs(split, n=n, seed=seed))
    ]


if __name__ == "__main__":
    print(make(Path(sys.argv[1])))
