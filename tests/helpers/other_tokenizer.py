"""A tiny model with another tokenizer than the tiny models': tokens of several bytes, other special
tokens, another chat template.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rft.testing import tiny

SIZE = 320
TEXT = "the number that you are shown is the answer to the question, and it is right: 12 34 56 789"


def tokenizer() -> Any:
    """Merges of common pairs of `TEXT`, in tokens that begin with a space."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["</s>", "<s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([TEXT] * 4, trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", clean_up_tokenization_spaces=False
    )
    made.chat_template = (
        "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<s>assistant: {% endif %}"
    )
    return made


def model(folder: Path, seed: int = 7) -> Path:
    tiny.make(folder, seed=seed, vocab_size=SIZE, bos_token_id=None, eos_token_id=0)
    tokenizer().save_pretrained(folder)
    return folder
