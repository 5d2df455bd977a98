"""rft check of tasks with images: sizes and tokens are shown, what the model cannot read is refused."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from rft.config.plan import Facts
from rft.preflight.check import check
from rft.preflight.check_report import Report
from rft.testing import tiny, tiny_vision

EXAMPLE = Path(__file__).parents[3] / "examples" / "tiny" / "config.yaml"


IN = "buffer.explorer_input"
COLOURS = (
    f"{IN}.taskset.path=rft.testing.tiny_vision:colour_tasks",
    f"{IN}.taskset.format.image_key=images",
    f"{IN}.taskset.reward_fn_args={{compare: text}}",
    f"{IN}.eval_tasksets=[]",
)


def checked(model: Path, *overrides: str) -> Report:
    written = [f"model.model_path={model}", *COLOURS, *overrides]
    return check(EXAMPLE, written, facts=Facts(cpus=8, gpus=0))


def test_images_are_shown_with_their_size_and_tokens(tmp_path: Path) -> None:
    model = tiny_vision.make(tmp_path / "model")
    limit = "model.image_processor_args.max_pixels=128"
    reports = [checked(model), checked(model, limit)]
    first, smaller = (r.tasksets[0].rows[0] for r in reports)
    size, tokens = re.fullmatch(r"(\d+ x \d+ pixels), (\d+) tokens", first.images[0]).groups()  # type: ignore[union-attr]
    assert smaller.images == (f"{size}, 1 tokens",)
    assert first.tokens - smaller.tokens == int(tokens) - 1 > 0  # type: ignore[operator]
    (settings,) = reports[1].plan.engines
    assert settings.image_processor_args == reports[1].plan.learner.image_processor_args


def test_vllm_needs_torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)  # it is not installed
    report = checked(
        tiny_vision.make(tmp_path / "model"), "explorer.rollout_model.engine_type=vllm"
    )
    (error,) = report.errors
    assert "vllm needs the package torchvision for images" in str(error)


def test_what_the_model_cannot_read_is_refused_with_its_row(tmp_path: Path) -> None:
    limits = "model.image_processor_args={min_pixels: 64, max_pixels: 32}"
    gemma = tiny_vision.make(tmp_path / "gemma", "gemma3")
    refused = {
        r"row 0 of .* is no model of a family": checked(tiny.make(tmp_path / "text")),
        r"row 0 of .* Gemma3\w+ of .* has no max_pixels": checked(
            gemma, "model.image_processor_args.max_pixels=128"
        ),
        r"vllm is proven with images of Qwen2-VL": checked(
            gemma, "explorer.rollout_model.engine_type=vllm"
        ),
        r"min_pixels: given 100000000000; must be at most 64000000": checked(
            gemma, "model.image_processor_args.min_pixels=100000000000"
        ),
        r"row 0 of .* has 0 placeholders .* and 1 images": checked(
            gemma, "model.custom_chat_template='{{ messages[0].role }}'"
        ),
        r"min_pixels: 64 is more than max_pixels 32": checked(gemma, limits),
    }
    for message, report in refused.items():
        assert any(re.search(message, str(e)) for e in report.errors), (message, report.errors)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "gemma3"])
def test_the_sizes_of_the_language_model_are_limits(family: str, tmp_path: Path) -> None:
    model = tiny_vision.make(tmp_path / "model", family)
    judge = f"{{name: j, model_path: {model}, engine_type: transformers, max_model_len: 513}}"
    engine = "explorer.rollout_model"
    refused = {
        "the model knows 512 positions": (
            "model.max_prompt_tokens=500",
            "model.max_response_tokens=13",
        ),
        "j: is 513 tokens, but the model knows 512": (f"explorer.auxiliary_models=[{judge}]",),
        "is 4, which does not divide the attention heads": (
            f"{engine}.engine_type=vllm",
            f"{engine}.tensor_parallel_size=4",
        ),
    }
    for message, overrides in refused.items():
        assert message in str(checked(model, *overrides).errors), message
    longer = "model.override_config={text_config: {max_position_embeddings: 513}}"
    within = "model.max_prompt_tokens=500", "model.max_response_tokens=12"
    for overrides in (within, ("model.max_prompt_tokens=501", within[1], longer)):
        assert checked(model, *overrides).errors == ()


def test_sizes_that_a_config_leaves_out_are_those_of_transformers(tmp_path: Path) -> None:
    model = tiny_vision.make(tmp_path / "model", "gemma3")
    file = model / "config.json"
    config = json.loads(file.read_text())
    for name in ("max_position_embeddings", "num_attention_heads", "vocab_size"):
        config["text_config"].pop(name)
    file.write_text(json.dumps(config))
    engine = "explorer.rollout_model"
    report = checked(
        model,
        "model.max_model_len=131073",
        f"{engine}.engine_type=vllm",
        f"{engine}.tensor_parallel_size=3",
    )
    assert "the model knows 131072 positions" in str(report.errors)
    assert "is 3, which does not divide the attention heads" in str(report.errors)  # 8 by default
    assert "memory is not estimated" not in str(report.notes)


def test_a_judge_of_texts_is_refused_unless_it_need_not_see(tmp_path: Path) -> None:
    model = tiny_vision.make(tmp_path / "model")
    text = tiny.make(tmp_path / "text")
    config = json.loads((text / "config.json").read_text())
    (text / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1 << 13}))
    judged = f"{IN}.taskset.default_reward_fn_type=rubric_judge"

    def report(judge: Path, args: str) -> Report:
        engine = (
            f"{{name: judge, model_path: {judge}, engine_type: transformers, max_model_len: 4000}}"
        )
        models = f"explorer.auxiliary_models=[{engine}]"
        return checked(model, judged, models, f"{IN}.taskset.reward_fn_args={args}")

    sees = "reads no images, which a question of"
    assert any(sees in str(e) for e in report(text, "{}").errors)
    for judge, args in ((text, "{show_images: false}"), (model, "{}")):
        assert not any(sees in str(e) for e in report(judge, args).errors)
