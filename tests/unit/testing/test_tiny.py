"""The tiny model is a real Hugging Face folder, the same for the same seed; its task has a clean
hold-out.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rft.testing import tiny


@pytest.mark.parametrize("tied", [True, False])
def test_model_folder(tied: bool, tiny_model: Path, tiny_untied: Path) -> None:
    folder = tiny_model if tied else tiny_untied
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert model.config.tie_word_embeddings is tied
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) is tied
    assert 200_000 < model.num_parameters() < 450_000
    assert (
        model.generation_config.pad_token_id,
        model.generation_config.bos_token_id,
        model.generation_config.eos_token_id,
    ) == (
        0,
        1,
        2,
    )


def test_tokenizer_is_lossless_and_renders_chats(tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    text = "Grüße 你好\n\t 12+3 🙂"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer) == 259
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "qx7"}], add_generation_prompt=True, tokenize=False
    )
    assert rendered == "<|im_start|>uqx7<|im_end|><|im_start|>a"
    ids = tokenizer.encode(rendered, add_special_tokens=False)
    assert (
        ids[0] == tokenizer.bos_token_id
        and ids.count(tokenizer.eos_token_id) == 1
        and len(ids) == 8
    )


def test_same_seed_same_weights(tmp_path: Path, tiny_model: Path) -> None:
    again = tiny.make(tmp_path / "again")
    other = tiny.make(tmp_path / "other", seed=1)
    name = "model.safetensors"
    assert (again / name).read_bytes() == (tiny_model / name).read_bytes()
    assert (other / name).read_bytes() != (tiny_model / name).read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again", "other"]


def test_copy_task() -> None:
    train = tiny.copy_tasks("train")
    held_out = tiny.copy_tasks("eval")
    assert (len(train), len(held_out)) == (2048, 100)
    assert all(row["prompt"][-1] == row["response"] for row in train + held_out)
    assert not {row["prompt"][:2] for row in train} & {row["prompt"][:2] for row in held_out}
    assert {row["response"] for row in held_out} == set("0123456789")
    with pytest.raises(ValueError, match="use train or eval"):
        tiny.copy_tasks("test")  # type: ignore[arg-type]
