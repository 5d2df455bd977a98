"""What a trainer writes for others: names, values and buffers of a checkpoint that transformers and
engines load.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rft.engine.weights import saved_buffers
from rft.taskset.chatfiles import ChatFiles, read_settings
from rft.testing import tiny
from rft.trainer.checkpoint import hf_folder, saving
from rft.trainer.loop.learner import Learner
from rft.trainer.model.policy import layers
from rft.trainer.rows.pack import RankBatch
from rft.trainer.settings import LearnerSettings, LoraSettings, OptimizerConfig
from tests.helpers import families

# what transformers says of kernels that are not installed
pytestmark = pytest.mark.filterwarnings("ignore")
OTHERS = ("qwen3_moe", "mixtral", "gpt_oss", "granitemoe", "nemotron_h")
EXPERTS = ["deepseek_v3", *(pytest.param(f, marks=pytest.mark.e2e) for f in OTHERS)]


def shaken(learner: Learner) -> Learner:
    """Weights, and biases of routers, that differ from those of the folder."""
    with torch.no_grad():
        for tensor in (*learner.policy.names().values(), *learner.policy.saved_buffers().values()):
            tensor.add_(torch.randn_like(tensor), alpha=0.05)
    return learner


def logits(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model, told = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not told["missing_keys"] and not told["unexpected_keys"]
    with torch.no_grad():
        found: torch.Tensor = model.eval()(torch.arange(24).view(2, 12)).logits
    return found


def both_ways(learner: Learner, root: Path) -> list[Path]:
    """Its model as it is exported, and as it is put together from a checkpoint."""
    folders = [root / name for name in ("exported", "assembled")]
    for folder in folders:
        folder.mkdir()
    learner.export(str(folders[0]))
    learner.save(str(root / "step" / "trainer"), 1)
    hf_folder.assemble(root / "step" / "trainer", folders[1])
    return folders


@pytest.mark.parametrize("family", EXPERTS)
def test_an_export_has_the_names_of_the_base_and_the_weights_of_the_trainer(
    family: str, tmp_path: Path
) -> None:
    base = families.make(family, tmp_path / "base")
    settings = LearnerSettings(model_path=str(base), row_layout="padded")
    learner = shaken(Learner(settings))
    with torch.no_grad():
        want = learner.policy.lm(torch.arange(24).view(2, 12), use_cache=False).logits
    folders = both_ways(learner, tmp_path)
    names = {n: t.dtype for n, t in load_file(base / "model.safetensors").items()}
    for folder in folders:
        assert {n: t.dtype for n, t in load_file(folder / "model.safetensors").items()} == names
        assert (logits(folder) - want).abs().max() < 1e-5
    assert (logits(base) - want).abs().max() > 0.01
    for checkpoint in (
        tmp_path / "step" / "trainer",
        _exported_only(tmp_path, folders[0], learner),
    ):
        again = Learner(settings)
        again.load(str(checkpoint))
        for name, tensor in {**learner.policy.names(), **saved_buffers(learner.policy.lm)}.items():
            assert torch.equal(
                {**again.policy.names(), **saved_buffers(again.policy.lm)}[name], tensor
            ), name


@pytest.mark.parametrize(
    ("tokenizer", "given", "exported"),
    [
        ("tokenizer", None, "of the tokenizer"),
        ("tokenizer", "own", "own"),
        ("model", None, "of the model"),
        ("model", "own", "own"),
    ],
)
def test_an_export_has_the_tokenizer_and_the_template_of_the_run(
    tokenizer: str, given: str | None, exported: str, tmp_path: Path
) -> None:
    """Whoever serves the model later must write the prompts that it was trained on; what ends an
    answer is the model's own.
    """
    for name in ("model", "tokenizer"):
        (tmp_path / name / "additional_chat_templates").mkdir(parents=True)
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": name}))
        (tmp_path / name / "generation_config.json").write_text(
            json.dumps({"eos_token_id": len(name)})
        )
        (tmp_path / name / "tokenizer_config.json").write_text(
            json.dumps({"chat_template": f"of the {name}"})
        )
    (tmp_path / "model" / "chat_template.jinja").write_text("of the model")
    (tmp_path / "model" / "additional_chat_templates" / "tool_use.jinja").write_text("for tools")
    settings = LearnerSettings(
        model_path=str(tmp_path / "model"),
        tokenizer_path=str(tmp_path / tokenizer),
        chat_template=given,
    )
    saving.side_files(settings, out := tmp_path / "out")
    found = ChatFiles(folder=out, tokenizer_config=read_settings(out / "tokenizer_config.json"))
    assert found.chat_template == exported
    assert (out / "additional_chat_templates").exists() == (exported == "of the model"), (
        "the run's own is for all prompts"
    )
    assert json.loads((out / "config.json").read_text()) == {"model_type": "model"}
    assert json.loads((out / "generation_config.json").read_text()) == {
        "eos_token_id": len("model")
    }


def _exported_only(folder: Path, exported: Path, learner: Learner) -> Path:
    """A checkpoint that holds the exported model and no parts of ranks."""
    only = Learner(replace(learner.settings, save_contents=("hf_model",)))
    only.save(str(folder / "only" / "trainer"), 1)
    exported.rename(folder / "only" / "huggingface")
    return folder / "only" / "trainer"


@pytest.mark.parametrize("family", ["nemotron_h", "deepseek_v3", "qwen3_moe", "llama4_text"])
def test_an_adapter_is_added_to_a_base_with_other_names(family: str, tmp_path: Path) -> None:
    base = families.make(family, tmp_path / "base")
    lora = LoraSettings(rank=4, alpha=8.0, target_modules="all-linear")
    learner = Learner(LearnerSettings(model_path=str(base), row_layout="padded", lora=lora))
    adapter: Any = learner.policy.adapter
    with torch.no_grad():
        for value in adapter.parameters().values():
            value.normal_(std=0.2)
        want = learner.policy.lm(torch.arange(24).view(2, 12), use_cache=False).logits
    learner.save(str(tmp_path / "trainer"), 1)
    for name in ("exported", "assembled"):
        (tmp_path / name).mkdir()
    learner.export(str(tmp_path / "exported"))
    hf_folder.assemble(tmp_path / "trainer", tmp_path / "assembled")
    assert (logits(base) - want).abs().max() > 0.01
    for name in ("exported", "assembled"):
        assert (logits(tmp_path / name) - want).abs().max() < 1e-4


def test_an_export_has_all_files_that_vllm_and_tokenizers_read(tmp_path: Path) -> None:
    """Processors of a model that also takes images, and vocabularies of Mistral and of tiktoken."""
    names = {
        "config.json",
        "preprocessor_config.json",
        "processor_config.json",
        "tekken.json",
        "qwen.tiktoken",
    }
    base = tmp_path / "base"
    out = tmp_path / "out"
    base.mkdir()
    for name in names:
        (base / name).write_text("{}")
    assert {p.name for p in saving.side_files(LearnerSettings(model_path=str(base)), out)} == names


def test_an_export_keeps_what_is_not_trained(tmp_path: Path) -> None:
    """Towers for images and layers that foretell tokens, which programs load that know the whole
    model.
    """
    base = tiny.make(tmp_path / "base")
    # the head is tied
    more = {
        "visual.blocks.0.weight": torch.randn(3, 2).bfloat16(),
        "lm_head.weight": torch.zeros(259, 128),
    }
    save_file(
        load_file(base / "model.safetensors") | more,
        base / "model.safetensors",
        metadata={"format": "pt"},
    )
    learner = shaken(Learner(LearnerSettings(model_path=str(base))))
    folders = both_ways(learner, tmp_path)
    for folder in folders:
        found = load_file(folder / "model.safetensors")
        assert torch.equal(found.pop("visual.blocks.0.weight"), more["visual.blocks.0.weight"])
        assert found.keys() == learner.policy.names().keys()
        assert all(torch.equal(found[name], p) for name, p in learner.policy.names().items())


@pytest.mark.parametrize(
    "lora",
    [None, LoraSettings(rank=4, alpha=8.0, target_modules="all-linear")],
    ids=["whole", "adapter"],
)
@pytest.mark.parametrize("family", ["qwen3_5", "llama4"])
def test_a_language_model_is_put_back_under_the_names_and_beside_the_tower_of_its_base(
    family: str, lora: LoraSettings | None, tmp_path: Path
) -> None:
    """transformers trains the text model alone, whose layers have other names than in the files of
    the whole.
    """
    from transformers import AutoModelForImageTextToText

    base = families.with_tower(family, tmp_path / "base")
    learner = Learner(LearnerSettings(model_path=str(base), row_layout="padded", lora=lora))
    with torch.no_grad():
        for parameter in learner.policy.trainable().values():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
        logits = learner.policy.lm(torch.arange(24).view(2, 12), use_cache=False).logits
    folders = both_ways(learner, tmp_path)
    want = load_file(base / "model.safetensors")
    exported, assembled = (load_file(folder / "model.safetensors") for folder in folders)
    assert exported.keys() == assembled.keys() == want.keys()
    assert all(torch.equal(assembled[n], t) for n, t in exported.items())
    trained = {n for n, t in want.items() if not torch.equal(assembled[n], t)}
    assert trained and not any("vis" in n or "multi_modal" in n for n in trained)
    assert lora or len(trained) == len(learner.policy.names())
    whole, told = AutoModelForImageTextToText.from_pretrained(folders[1], output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"]
    with torch.no_grad():
        assert (whole.eval()(torch.arange(24).view(2, 12)).logits - logits).abs().max() < 1e-4


@pytest.mark.extra("doctor")
@pytest.mark.parametrize("optimizer", ["adamw", "adagrad"])
def test_a_tower_for_images_is_not_sharded_decayed_or_resumed(
    optimizer: Any, tmp_path: Path
) -> None:
    """Deeper than the language model: the layers are still those that read texts, and weight decay
    leaves the tower as it is.
    """
    from rft.extras.doctor import model_check

    base = families.with_tower("gemma3", tmp_path / "base")
    optim = OptimizerConfig(optimizer_type=optimizer, lr=1e-2, weight_decay=0.1)
    settings = LearnerSettings(model_path=str(base), row_layout="padded", optim=optim)
    learner = Learner(settings)
    assert layers(learner.policy.lm) is learner.policy.lm.model.language_model.layers
    before = {n: p.detach().clone() for n, p in learner.policy.names().items()}
    rows = tuple((row,) for row in model_check.rows(settings))
    for step in (1, 2):
        learner.step(RankBatch(step=step, micro_batches=rows, tokens=32.0, rows=4.0))
        learner.save(str(tmp_path / str(step)), step)
        learner.load(str(tmp_path / str(step)))
    for name, p in learner.policy.names().items():
        assert torch.equal(p, before[name]) == ("vision" in name or "multi_modal" in name), name
