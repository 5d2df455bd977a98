"""The estimate of a trainer rank beside the bytes that a whole step allocates on the fake GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rft.preflight.memory_estimate import MOST_OVER
from tests.helpers import fake_gpu
from tests.helpers.model_sizes import MODELS

CONFIG = Path(__file__).parent / "data" / "good" / "short.yaml"
CHECKPOINTING = "trainer.enable_gradient_checkpointing=true"
KEEPING = "trainer.enable_gradient_checkpointing=false"
LORA = "model.lora_configs=[{lora_rank: 16}]"
KL = "algorithm.kl_loss_fn=k2"
COLOCATE = "mode=colocate"
# (model, layers or None for all, engines, ranks, answer tokens, tokens of a micro-batch, ...)
FEW_LAYERS = (
    ("qwen3-8b", 4, 4, 4, 1024, 8192, CHECKPOINTING),
    ("qwen3-8b", 4, 4, 4, 1024, 8192, KEEPING),
    ("qwen3-30b-a3b", 2, 4, 4, 1024, 8192, KEEPING),
    ("llama-8b", 4, 4, 4, 1024, 8192, KEEPING, LORA),
)
WHOLE = (
    ("qwen3-8b", None, 1, 7, 8192, 18432, CHECKPOINTING),
    ("qwen3-8b", None, 4, 4, 1024, 16384, KEEPING),
    ("qwen3-8b", None, 8, 56, 8192, 18432, CHECKPOINTING),
    ("qwen3-8b", None, 8, 8, 4096, 16384, CHECKPOINTING, KL, COLOCATE),
    ("llama-8b", None, 1, 7, 1024, 8192, KEEPING),
    ("qwen3-30b-a3b", None, 1, 7, 4096, 16384, CHECKPOINTING),
    ("qwen3-30b-a3b", None, 8, 24, 4096, 16384, CHECKPOINTING),
    ("llama-70b", None, 8, 56, 4096, 8192, CHECKPOINTING),
    ("llama-70b", None, 1, 7, 2048, 8192, CHECKPOINTING, LORA),
    ("gemma3-4b", None, 1, 7, 1024, 8192, KEEPING),
)
needs_fake_gpu = pytest.mark.skipif(bool(fake_gpu.missing()), reason=f"needs {fake_gpu.missing()}")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_gpu.build(tmp_path_factory.mktemp("fake_gpu"))


def counted(library: Path, cases: tuple[tuple[Any, ...], ...]) -> list[dict[str, Any]]:
    """Run the cases in one process."""
    lines = []
    for number, (name, layers, engines, ranks, answer, tokens, *overrides) in enumerate(cases):
        folder = library.parent / f"{len(cases)}-{number}"
        folder.mkdir()
        sizes = MODELS[name] | ({} if layers is None else {"num_hidden_layers": layers})
        (folder / "config.json").write_text(json.dumps(sizes))
        shared = COLOCATE in overrides
        gpus = ranks if shared else ranks + engines
        lines.append(
            [
                1024,
                f"model.model_path={folder}",
                "cluster.gpu_per_node=8",
                f"cluster.node_num={gpus // 8}",
                f"synchronizer.sync_method={'memory' if gpus == 8 else 'nccl'}",
                f"explorer.rollout_model.engine_num={engines}",
                f"trainer.world_size={ranks}",
                "model.max_prompt_tokens=1024",
                f"model.max_response_tokens={answer}",
                f"trainer.max_token_len_per_gpu={tokens}",
                "buffer.batch_size=64",
                "algorithm.repeat_times=8",
                *overrides,
            ]
        )
    return fake_gpu.play("count_memory", [str(library), str(CONFIG)], map(json.dumps, lines))


def report(case: tuple[Any, ...], count: dict[str, Any]) -> str:
    """Return a line of the table in docs/measured/memory.md."""
    name, layers, engines, ranks, answer, tokens, *overrides = case
    gpus = ranks if COLOCATE in overrides else ranks + engines
    words = {CHECKPOINTING: "checkpointing", LORA: "LoRA", KL: "KL", COLOCATE: "colocate"}
    more = ", ".join(words[o] for o in overrides if o in words) or "–"
    model = name if layers is None else f"{layers} layers of {name}"
    sizes = [f"{count[key] / (1 << 30):.2f} GiB" for key in ("peak", "estimate")]
    over = f"{count['estimate'] / count['peak'] - 1:+.1%}"
    cells = [model, gpus, ranks, answer, tokens, more, *sizes, over]
    return f"| {' | '.join(map(str, cells))} |"


@needs_fake_gpu
@pytest.mark.e2e
def test_estimate_is_never_below_what_a_step_allocates(library: Path) -> None:
    """U5: models of real width with few layers."""
    _within(FEW_LAYERS, counted(library, FEW_LAYERS))


@needs_fake_gpu
@pytest.mark.slow
def test_estimate_of_whole_models_is_within_its_margin(library: Path) -> None:
    """U5: dense and mixture models, adapters, colocated engines, 4 to 56 ranks."""
    _within(WHOLE, counted(library, WHOLE))


def _within(cases: tuple[Any, ...], counts: list[dict[str, Any]]) -> None:
    lines = [report(case, count) for case, count in zip(cases, counts, strict=True)]
    print("\n".join(lines))
    wrong = [
        line
        for line, count in zip(lines, counts, strict=True)
        if not 1 <= count["estimate"] / count["peak"] <= MOST_OVER
    ]
    assert not wrong, "\n".join(wrong)
    # no logits of all trained tokens at a time
    assert all(count["logit_rows"] <= 1024 < count["trained"] for count in counts)
