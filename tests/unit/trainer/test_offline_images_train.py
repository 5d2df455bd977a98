"""SFT and DPO of given rows with images, from the file to the gradient, are those of plain
transformers.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from rft.algorithm.composition import build
from rft.algorithm.settings import AlgorithmSettings
from rft.taskset.offline_data import open_offline_data
from rft.taskset.settings import FormatSettings, OfflineDataSettings, TasksetSettings
from rft.testing import tiny_vision
from rft.trainer.loop.learner import Learner
from rft.trainer.loop.offline_reader import OfflineReader
from rft.trainer.rows.batch_builder import build_step, decode_lease
from rft.trainer.rows.pack import Budget
from rft.trainer.settings import LearnerSettings
from tests.helpers import shown

Settings = Callable[..., LearnerSettings]
SFT = AlgorithmSettings(algorithm_type="sft", advantage_fn="none", policy_loss_fn="sft")
DPO = AlgorithmSettings(algorithm_type="dpo", advantage_fn="none", policy_loss_fn="dpo")
BETA = 0.1
PICTURES = [
    tiny_vision.picture((90, 160 * n, 200), size=size, seed=n)
    for n, size in enumerate(((20, 31), (32, 16), (17, 40)))
]
# question, its images, two answers
ROWS = (("what?", (), "rg", "b"), ("colour?", (0,), "y", "brr"), ("both?", (1, 2), "gb", "ry"))


@pytest.fixture(
    scope="module", params=["qwen2_5_vl", pytest.param("gemma3", marks=pytest.mark.e2e)]
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shown.make(tmp_path_factory.mktemp("vision") / "model", request.param)


def written(file: Path, kind: str) -> Path:
    urls = [f"data:image/png;base64,{base64.b64encode(x).decode()}" for x in PICTURES]
    rows = []
    for question, numbers, good, bad in ROWS:
        answers = {"response": good} if kind == "chats" else {"chosen": good, "rejected": bad}
        rows.append({"prompt": question, "images": [urls[n] for n in numbers], **answers})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def logprobs(
    model: Any, folder: Path, question: str, numbers: tuple[int, ...], answer: str
) -> torch.Tensor:
    """Return log-probs [L] of an answer and its end token, by transformers' tokenizer, image
    processor and model.
    """
    from PIL import Image
    from transformers import AutoImageProcessor, AutoTokenizer

    words = AutoTokenizer.from_pretrained(folder)
    gemma = model.config.model_type == "gemma3"
    inputs: dict[str, Any] = {}
    texts = []
    if numbers:
        pictures = [Image.open(io.BytesIO(PICTURES[n])).convert("RGB") for n in numbers]
        batch = AutoImageProcessor.from_pretrained(folder)(images=pictures, return_tensors="pt")
        inputs = {name: batch[name] for name in ("pixel_values", "image_grid_thw") if name in batch}
        if gemma:
            tokens = "<image_soft_token>" * 4
            texts = [f"\n\n<start_of_image>{tokens}<end_of_image>\n\n"] * len(numbers)
        else:
            texts = ["<|image_pad|>" * (int(g.prod()) // 4) for g in batch["image_grid_thw"]]
    content: Any = [{"type": "image"} for _ in numbers] + [{"type": "text", "text": question}]
    messages = [{"role": "user", "content": content if numbers else question}]
    prompt = words.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    first, *rest = prompt.split("<start_of_image>" if gemma else "<|image_pad|>")
    prompt = first + "".join(a + b for a, b in zip(texts, rest, strict=True))
    start = len(words(prompt, add_special_tokens=False)["input_ids"])
    ids = words(f"{prompt}{answer}<|im_end|>", add_special_tokens=False, return_tensors="pt")
    ids = ids["input_ids"]
    types = (ids == model.config.image_token_id).long()
    if numbers:
        inputs["token_type_ids" if gemma else "mm_token_type_ids"] = types
    out = model(input_ids=ids, use_cache=False, **inputs).logits[0, start - 1 : -1].log_softmax(-1)
    found: torch.Tensor = out.gather(1, ids[0, start:, None])[:, 0]
    return found


def change(parameters: Mapping[str, torch.nn.Parameter]) -> None:
    """Move the language model, whose tower stays frozen."""
    with torch.no_grad():
        for name, parameter in parameters.items():
            if not shown.of_tower(name):
                parameter.mul_(1.2)


@pytest.mark.parametrize("kind", ["chats", "pairs"])
def test_the_loss_and_gradient_of_a_step(
    kind: Any, folder: Path, tmp_path: Path, settings: Settings
) -> None:
    form = FormatSettings(image_key="images")
    file = written(tmp_path / "rows.jsonl", kind)
    rows = TasksetSettings(name="mine", path=str(file), workflow="", format=form)
    data = open_offline_data(
        OfflineDataSettings(rows=rows, kind=kind, model_path=str(folder), max_tokens=200)
    )
    algorithm = SFT if kind == "chats" else DPO
    lease = OfflineReader(data, size=3, seed=0, lineage=1, total_steps=1).rows_of(1)
    assert len(lease.images) == len(PICTURES)
    decoded = decode_lease(lease, samples="none", pairs=kind == "pairs")
    own = settings(model_path=str(folder), algorithm=algorithm)
    (share,) = build_step(decoded, build(algorithm), Budget(90), world_size=1).shares
    learner = Learner(own)
    # away from the reference model, where the gradient of dpo depends on each log-prob
    change(learner.policy.names())
    model, base = shown.reference(folder), shown.reference(folder)
    change(dict(model.named_parameters()))
    model.zero_grad()
    if kind == "chats":
        each = [logprobs(model, folder, q, at, good) for q, at, good, _ in ROWS]
        loss = -torch.cat(each).mean()
    else:
        ratios = []
        each = []
        for question, at, *answers in ROWS:
            pair = [logprobs(model, folder, question, at, answer) for answer in answers]
            each += pair
            with torch.no_grad():
                anchor = [logprobs(base, folder, question, at, answer) for answer in answers]
            ratios.append((pair[0].sum() - anchor[0].sum()) - (pair[1].sum() - anchor[1].sum()))
        loss = -torch.nn.functional.logsigmoid(BETA * torch.stack(ratios)).mean()
        assert abs(loss.item() - 0.6931) > 1e-3
    loss.backward()
    (scores,) = learner.score([decoded.rows])
    for score, want in zip(scores, each, strict=True):
        assert score["old"] == pytest.approx(want.detach().numpy(), rel=1e-5, abs=1e-5)
    gradient = learner.gradient(share)
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    expected = {n: g for n, g in expected.items() if not shown.of_tower(n)}
    assert shown.apart(gradient, expected) <= 1e-5
    result = learner.step(share)
    found = result.sums["pg_loss"] / result.trained_tokens
    assert found == pytest.approx(loss.item(), rel=1e-5)
