"""Every layout of rows gives what transformers gives for each row by itself, or the model is
refused when it is loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from rft.errors import ConfigError, RunFailed, SetupError
from rft.trainer.loop.learner import Learner
from rft.trainer.model import attention, batch, layer_copy, row_proof, state_layers
from rft.trainer.model import policy as policies
from rft.trainer.model.policy import Policy
from rft.trainer.rows.pack import TrainRow
from rft.trainer.settings import CriticSettings, LearnerSettings
from rft.types.row_layout import Choice
from tests.helpers import families

Settings = Callable[..., LearnerSettings]
MakeRow = Callable[..., TrainRow]

# what transformers says of kernels that are not installed
pytestmark = pytest.mark.filterwarnings("ignore")

LAYOUTS = {
    # short convolutions, linear attention, Mamba
    **dict.fromkeys(("lfm2", "qwen3_5_text", "nemotron_h", "granitemoehybrid", "jamba"), "packed"),
    "mistral": "shared",  # sliding windows
    "gemma2": "shared",  # soft caps of scores and of logits
    "gpt_oss": "shared",  # sinks, and no sdpa
    "llama4_text": "shared",  # chunks
    "granite": "shared",  # scaled logits
    "deepseek_v3": "shared",  # values are narrower than keys
    "seed_oss": "shared",  # dropout that is on by default, and no module
    "phimoe": "shared",  # a threshold of its routers is called jitter
    "deepseek_v4": "padded",  # compressed keys; no sdpa, and weights of other names
    "stablelm": "padded",  # its layers are not told of the tree
}


@pytest.fixture
def group_of_rows(make_row: MakeRow) -> list[TrainRow]:
    """Three rows with one prompt and one without, all of other lengths."""
    draw = np.random.default_rng(0)
    prompt = draw.integers(3, 120, 9).tolist()
    made = [make_row(prompt, draw.integers(3, 120, n).tolist(), group="0") for n in (5, 8, 3)]
    return [
        *made,
        make_row(
            draw.integers(3, 120, 4).tolist(),
            draw.integers(3, 120, 16).tolist(),
            group="1",
            temperature=0.9,
        ),
    ]


def apart(learner: Learner, rows: list[TrainRow], dtype: torch.dtype = torch.float32) -> float:
    """How far the learner's log-probs are from those of transformers in `dtype`, row by row, in
    nats.
    """
    from transformers import AutoModelForCausalLM

    # grouped kernels know no float64
    more = {"experts_implementation": "eager"} if dtype == torch.float64 else {}
    plain = AutoModelForCausalLM.from_pretrained(
        learner.settings.model_path, dtype=dtype, **more
    ).eval()
    worst = 0.0
    with torch.no_grad():
        for row, mine in zip(rows, learner.score([rows])[0], strict=True):
            ids = torch.from_numpy(row.tokens)[None].long()
            at = torch.from_numpy(row.loss_mask.nonzero()[0])
            temperature = float(np.asarray(row.temperatures).flat[0])
            logp = (
                plain(input_ids=ids, use_cache=False).logits[0, at - 1] / temperature
            ).log_softmax(-1)
            worst = max(
                worst,
                float(np.abs(mine["old"] - logp.gather(1, ids[0, at, None])[:, 0].numpy()).max()),
            )
    return worst


@pytest.mark.parametrize("family", families.each(families.FAMILIES))
def test_a_family_is_exact(
    family: str, tmp_path: Path, settings: Settings, group_of_rows: list[TrainRow]
) -> None:
    folder = families.make(family, tmp_path / family)
    learner = Learner(settings(model_path=str(folder)))
    assert apart(learner, group_of_rows) <= 1e-5
    assert learner.settings.row_layout == LAYOUTS.get(family, learner.settings.row_layout)
    padded = Learner(settings(model_path=str(folder), row_layout="padded"))
    assert apart(padded, group_of_rows) <= 1e-5


# what a review from outside found wrong, beside those of `families`
FOUND_WRONG: dict[str, dict[str, Any]] = {
    "biogpt": {
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
        "scale_embedding": True,
    },
    "gpt_bigcode": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "attn_pdrop": 0.1},
    "recurrent_gemma": {
        "block_types": ["recurrent", "attention"],
        "attention_window_size": 6,
        "lru_width": 32,
    },
    "modernbert-decoder": {
        "layer_types": ["sliding_attention", "full_attention"],
        "local_attention": 6,
    },
    "lfm2_moe": {
        "layer_types": ["conv", "full_attention"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_dense_layers": 1,
    },
    "doge": {"keep_window_size": 6},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "inkling_text": {"logits_mup_width_multiplier": 4.0},
    "gemma4": {
        "text_config": {
            **families._SIZES,
            "model_type": "gemma4_text",
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 6,
            "final_logit_softcapping": 3.0,
        }
    },
}


@pytest.mark.parametrize(
    "family", [f if f == "biogpt" else pytest.param(f, marks=pytest.mark.slow) for f in FOUND_WRONG]
)
@pytest.mark.parametrize("layout", ["auto", "padded"])
def test_a_family_is_exact_or_refused(
    family: str,
    layout: Any,
    tmp_path: Path,
    settings: Settings,
    group_of_rows: list[TrainRow],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(families.FAMILIES, family, FOUND_WRONG[family])
    if family == "falcon":  # which derives it
        monkeypatch.delitem(families._SIZES, "head_dim")
    folder = families.make(family, tmp_path / "model")
    try:
        learner = Learner(settings(model_path=str(folder), row_layout=layout))
    except (ConfigError, SetupError) as e:
        assert str(folder) in str(e) or "trainer." in str(e)
        return
    assert apart(learner, group_of_rows) <= 1e-5


LLAMA4 = {"no_rope_layers": [1, 0], "attn_temperature_tuning": True}
# what a family's forward may take from the place in the input, and its layout
FAR: dict[str, tuple[dict[str, Any], str]] = {
    "llama4_text": ({**LLAMA4, "floor_scale": 100}, "padded"),  # the attention's temperature
    "smollm3": ({"no_rope_layers": [1, 0]}, "shared"),
    "gpt2": ({}, "shared"),  # learned positions
    "opt": ({}, "shared"),
    "mistral": ({"sliding_window": 50}, "shared"),
    "cohere2": ({"sliding_window": 50}, "shared"),
    "gemma3_text": ({"sliding_window": 50}, "shared"),
    "gpt_oss": (families.TINY["gpt_oss"] | {"head_dim": 8, "sliding_window": 50}, "shared"),  # yarn
    "phimoe": ({}, "shared"),  # longrope
    "ministral3": (
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 20,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.5,
            }
        },
        "shared",
    ),  # the attention's temperature, by position_ids
}


@pytest.mark.e2e
@pytest.mark.parametrize("layout", ["auto", "packed"])
@pytest.mark.parametrize("family", FAR)
def test_rows_far_into_the_input_are_exact(
    family: str,
    layout: Any,
    tmp_path: Path,
    settings: Settings,
    make_row: MakeRow,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """M1: forty rows in one micro-batch of 1,100 positions, against each by itself in float64."""
    changes, expected = FAR[family]
    monkeypatch.setitem(families.FAMILIES, family, families.FAMILIES.get(family, {}))
    folder = families.make(family, tmp_path / "model", **changes)
    made = settings(model_path=str(folder), row_layout=layout, max_token_len_per_gpu=1500)
    if expected == "padded" and layout != "auto":
        with pytest.raises(
            ConfigError,
            match=r"are not exact: .* up to 1,500 positions into the input, whose places the model",
        ):
            Learner(made)
        return
    learner = Learner(made)
    assert learner.settings.row_layout == (expected if layout == "auto" else layout)
    draw = np.random.default_rng(3)
    rows = [
        make_row(
            draw.integers(3, 120, 8).tolist(), draw.integers(3, 120, 20).tolist(), group=str(i)
        )
        for i in range(40)
    ]
    assert learner._micro_batch(rows).computed > 1000
    assert apart(learner, rows, torch.float64) <= 1e-5


@pytest.mark.e2e
def test_llama4_is_packed_where_no_place_reaches_its_scale(
    tmp_path: Path, settings: Settings
) -> None:
    """M1: with its own defaults the first 8,191 positions are right, and micro-batches of more are
    not.
    """
    folder = str(families.make("llama4_text", tmp_path / "model", **LLAMA4))
    assert (
        Learner(settings(model_path=folder, max_token_len_per_gpu=8000)).settings.row_layout
        == "shared"
    )
    assert (
        Learner(settings(model_path=folder, max_token_len_per_gpu=8400)).settings.row_layout
        == "padded"
    )


@pytest.mark.e2e
def test_places_that_cannot_be_compared_in_float64_are_padded(
    tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M1: in bfloat16 the noise hides what a temperature does."""
    folder = str(families.make("llama4_text", tmp_path / "model", **LLAMA4))
    made = settings(model_path=folder, dtype="bfloat16", max_token_len_per_gpu=8400)
    padded = Learner(made)
    assert padded.settings.row_layout == "padded"
    padded.close()
    monkeypatch.setattr(row_proof.layer_copy, "free_bytes", lambda device: 0)
    learner = Learner(made)
    assert learner.settings.row_layout == "padded"
    learner.close()


def test_packed_rows_share_nothing(settings: Settings, group_of_rows: list[TrainRow]) -> None:
    packed = Learner(settings(row_layout="packed"))
    shared = Learner(settings())
    assert shared.settings.row_layout == "shared"
    assert packed._micro_batch(group_of_rows).computed == sum(len(r.inputs) for r in group_of_rows)
    assert shared._micro_batch(group_of_rows).computed < packed._micro_batch(group_of_rows).computed
    assert apart(packed, group_of_rows) <= 1e-5


def _believe(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the model is, its configuration seems to allow `layout`."""
    monkeypatch.setattr(
        row_proof,
        "choose",
        lambda config, asked: Choice(layout if asked == "auto" else asked, "no reason"),
    )  # type: ignore[arg-type]


HYBRIDS = (
    "qwen3_5_text",
    "qwen3_next",
    "olmo_hybrid",
    "nemotron_h",
    "granitemoehybrid",
    "bamba",
    "zamba2",
    "falcon_h1",
    "jamba",
    "lfm2",
    "minimax",
)


@pytest.mark.e2e
@pytest.mark.parametrize("family", HYBRIDS)
def test_packed_rows_of_hybrids_have_the_gradients_of_rows_alone(
    family: str, tmp_path: Path, settings: Settings, group_of_rows: list[TrainRow]
) -> None:
    """Against autograd through transformers' own forward, row by row; with recomputed activations."""
    from transformers import AutoModelForCausalLM

    folder = families.make(family, tmp_path / family)
    learner = Learner(settings(model_path=str(folder), gradient_checkpointing=True))
    assert learner.settings.row_layout == "packed"
    assert apart(learner, group_of_rows) <= 1e-5
    micro = batch.make(group_of_rows, layout="packed", device=torch.device("cpu"))
    logprobs = learner.policy(micro)[0]
    weights = torch.linspace(-1, 1, len(logprobs))
    (logprobs * weights).sum().backward()
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    done = 0
    for row in group_of_rows:
        out = learner.policy.read(
            plain(input_ids=torch.from_numpy(row.tokens)[None].long(), use_cache=False).logits[0],
            row,
        )
        (out * weights[done : done + len(out)]).sum().backward()
        done += len(out)
    mine = learner.policy.names()
    right = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    assert right.keys() <= mine.keys()
    norm = torch.stack([g.norm() for g in right.values()]).norm()
    apart_by = [(mine[n].grad - g).norm() for n, g in right.items()]  # type: ignore[operator]
    assert torch.stack(apart_by).norm() <= 1e-5 * norm


@pytest.mark.parametrize("layout", ["shared", "packed"])
def test_a_layout_that_is_not_exact_is_left(
    layout: str,
    tmp_path: Path,
    settings: Settings,
    group_of_rows: list[TrainRow],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = str(families.make("lfm2", tmp_path / "model"))
    _believe(layout, monkeypatch)
    # its convolutions are computed over the rows' ends
    monkeypatch.setattr(state_layers, "_carries_state", lambda module: False)
    learner = Learner(settings(model_path=folder))
    assert learner.settings.row_layout == "padded"
    assert f"{layout} rows are not used, and rows are p" in caplog.text
    assert "packed rows are not used, and rows are padded: the largest difference" in caplog.text
    assert apart(learner, group_of_rows) <= 1e-5
    with pytest.raises(
        ConfigError,
        match=rf"trainer.row_layout: {layout} rows of \w+ are not exact.*Write auto or padded",
    ):
        Learner(settings(model_path=folder, row_layout=layout))


def test_a_model_that_does_not_know_the_layout_is_padded(
    tmp_path: Path,
    settings: Settings,
    group_of_rows: list[TrainRow],
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = str(families.make("stablelm", tmp_path / "model"))
    assert apart(Learner(settings(model_path=folder)), group_of_rows) <= 1e-5
    assert "is not told where rows begin" in caplog.text
    with pytest.raises(
        ConfigError, match=r"trainer.row_layout: shared rows of \w+ cannot be computed"
    ):
        Learner(settings(model_path=folder, row_layout="shared"))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        (
            "gptj",
            {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 256},
        ),  # attention that cannot be exchanged
        ("doge", {}),  # attention with a mask that it learns, and that is 0 at first
    ],
)
def test_attention_of_ones_own_is_padded(
    family: str,
    changes: dict[str, Any],
    tmp_path: Path,
    settings: Settings,
    group_of_rows: list[TrainRow],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(families.FAMILIES, family, changes)
    folder = str(families.make(family, tmp_path / "model"))
    learner = Learner(settings(model_path=folder))
    assert learner.settings.row_layout == "padded"
    assert apart(learner, group_of_rows) <= 1e-5
    with pytest.raises(ConfigError, match=r"trainer.row_layout: .*Write auto or padded"):
        Learner(settings(model_path=folder, row_layout="shared"))


def test_a_model_that_is_never_exact_is_refused(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = Policy.numbers
    monkeypatch.setattr(Policy, "numbers", lambda self, batch: numbers(self, batch) + 1e-3)
    with pytest.raises(
        SetupError,
        match=r"padded rows of \w+ are not exact: the largest difference .* cannot train this "
        r"model",
    ):
        Learner(settings())


def test_a_noisy_model_does_not_hide_a_wrong_layout(
    tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above 1e-5 the noise of float32 allows a difference only where float64 shows that the layout
    is exact.
    """
    _believe("shared", monkeypatch)
    monkeypatch.setattr(row_proof, "_MULTIPLE", 1e9)
    monkeypatch.setitem(row_proof._CEILING, "float32", 1e9)
    folder = str(families.make("lfm2", tmp_path / "model"))
    with pytest.raises(
        ConfigError,
        match=r"shared rows of \w+ are not exact.*the first layers in float64 are \d.\de[+-]00 "
        r"apart",
    ):
        Learner(settings(model_path=folder, row_layout="shared"))
    numbers = Policy.numbers
    monkeypatch.setattr(
        Policy,
        "numbers",
        lambda self, batch: numbers(self, batch) + (1e-4 if type(self) is Policy else 0.0),
    )
    assert Learner(settings()).settings.row_layout == "shared"  # as far apart, and exact in float64


def test_bfloat16_does_not_hide_a_wrong_layout(
    tmp_path: Path,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    _believe("shared", monkeypatch)
    hybrid = settings(
        model_path=str(families.make("lfm2", tmp_path / "model")),
        dtype="bfloat16",
        row_layout="shared",
    )
    monkeypatch.setattr(row_proof.layer_copy, "free_bytes", lambda device: 0)
    # there is no room for the copy, and the noise is larger than what is wrong
    small = Learner(hybrid)
    small.close()
    assert (
        "the layout was not computed in float64 (MemoryError: a copy of its first layers in "
        "float64 needs" in caplog.text
    )
    monkeypatch.undo()
    _believe("shared", monkeypatch)
    with pytest.raises(
        ConfigError, match=r"are not exact: the mean difference .* the first layers in float64"
    ):
        Learner(hybrid)
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("family", "layers"),
    [("lfm2", 2), ("llama", 1), ("jamba", 2), ("deepseek_v3", 2), ("gemma2", 2)],
)
def test_the_copy_has_one_layer_of_every_kind(
    family: str, layers: int, tmp_path: Path, settings: Settings
) -> None:
    folder = families.make(family, tmp_path / "model")
    state = torch.get_rng_state()
    copied = layer_copy.make(settings(model_path=str(folder), row_layout="padded"))
    assert len(policies.layers(copied.lm)) == layers
    assert torch.equal(state, torch.get_rng_state())
    allowed = 1e-6 if family == "deepseek_v3" else 1e-12  # its routers compute in float32
    assert row_proof.copy_apart(settings(model_path=str(folder), row_layout="padded")) < allowed


def test_the_copy_is_computed_where_flash_attention_trains(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for the package, whose kernels take no float64."""

    def kernel(*given: Any, **more: Any) -> None:
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")

    package = ModuleType("flash_attn")
    package.flash_attn_varlen_func = kernel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setattr(
        attention, "installed", lambda name, *where: "flash_attention_2" if name == "auto" else name
    )
    assert row_proof.copy_apart(settings(row_layout="shared", dtype="bfloat16")) < 1e-12


def test_the_critic_is_proven_too(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rft.trainer.settings import AlgorithmSettings

    ppo = AlgorithmSettings(algorithm_type="ppo", advantage_fn="ppo")
    assert Learner(settings(algorithm=ppo)).settings.critic.row_layout == "shared"
    hybrid = str(families.make("lfm2", tmp_path / "model"))
    _believe("shared", monkeypatch)
    learner = Learner(settings(algorithm=ppo, critic=CriticSettings(model_path=hybrid)))
    assert (
        learner.settings.row_layout == "shared" and learner.settings.critic.row_layout == "packed"
    )


@pytest.mark.parametrize("checkpointing", [False, True])
def test_training_is_without_dropout(
    checkpointing: bool,
    tmp_path: Path,
    settings: Settings,
    group_of_rows: list[TrainRow],
    make_batch: Any,
) -> None:
    """Dropout that modules keep as a number, and use as a function, is off in training, with
    checkpointing too.
    """
    folder = str(families.make("starcoder2", tmp_path / "model"))
    made = settings(model_path=folder, gradient_checkpointing=checkpointing)
    norms = {Learner(made).step(make_batch(group_of_rows, made)).grad_norm for _ in range(2)}
    assert len(norms) == 1
    torch.manual_seed(1)
    learner = Learner(made)
    first, second = (learner.score([group_of_rows])[0] for _ in range(2))
    assert all(np.array_equal(a["old"], b["old"]) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("family", ["mistral", "llama4_text"])
def test_a_window_longer_than_the_compared_rows_is_proven_too(
    family: str, tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(
        families.make(family, tmp_path / "model", sliding_window=4096, attention_chunk_size=4096)
    )
    learner = Learner(settings(model_path=folder))
    assert learner.settings.row_layout == "shared"
    config = learner.policy.lm.config
    assert 4096 in (
        getattr(config, "sliding_window", None),
        getattr(config, "attention_chunk_size", None),
    )
    monkeypatch.setattr(attention, "_reach", lambda module, window: (None, None))
    assert Learner(settings(model_path=folder)).settings.row_layout == "padded"


def test_the_first_batch_is_compared(settings: Settings, group_of_rows: list[TrainRow]) -> None:
    learner = Learner(settings())
    assert learner.check_rows(group_of_rows).startswith(
        "first batch: 4 of its rows are what transformers computes: the largest difference"
    )
    norm = learner.policy.lm.model.layers[0].input_layernorm
    # wrong in training's layout and in plain rows alike: not what this check is for
    norm.forward = lambda x: x * norm.weight
    learner.check_rows(group_of_rows)
    forward = learner.policy.forward
    learner.policy.forward = lambda *a, **k: tuple(
        None if x is None else x + 2e-3 for x in forward(*a, **k)
    )  # type: ignore[method-assign]
    with pytest.raises(
        RunFailed,
        match="the first batch, as shared rows of LlamaForCausalLM, is not what transformers "
        "computes",
    ):
        learner.check_rows(group_of_rows)
