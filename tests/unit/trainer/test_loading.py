"""Models without their weights first: buffers, names, refusals; what a checkpoint gives back
without ranks; traces.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.testing._internal.distributed.fake_pg import FakeStore

from rft.errors import CheckpointInvalid, ConfigError, SetupError
from rft.launch import start as starts
from rft.sync.schedule import Schedule
from rft.trainer.checkpoint import manifest as manifests
from rft.trainer.checkpoint.hf_folder import assemble
from rft.trainer.loop.learner import Learner
from rft.trainer.model import attention, loading, tensors, ulysses
from rft.trainer.model import policy as policies
from rft.trainer.rows.pack import RankBatch, TrainRow
from rft.trainer.settings import LearnerSettings, ProfilerConfig
from rft.types.ids import Version
from rft.types.ports import Consumption
from tests.helpers import families

Settings = Callable[..., LearnerSettings]
Batch = Callable[..., RankBatch]


@pytest.fixture
def copied(tiny_model: Path, tmp_path: Path) -> Path:
    """The tiny model in a folder that a test may change."""
    target = tmp_path / "model"
    target.mkdir()
    for path in tiny_model.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


def test_buffers_are_where_is_computed_and_parameters_where_they_are_kept(tiny_model: Path) -> None:
    """With trainer.offload_policy FSDP2 brings parameters to the GPU for each pass, and nothing
    brings buffers.  Meta stands for it.
    """
    config = loading.config_of(tiny_model, trust_remote_code=False, override={})
    lm = loading.skeleton(config, trust_remote_code=False, attn_implementation="sdpa")
    loading.materialise(lm, "cpu", "meta")
    assert {p.device.type for p in lm.parameters()} == {"cpu"} and {
        b.device.type for b in lm.buffers()
    } == {"meta"}
    loading.materialise(lm, "meta", "cpu")
    assert {p.device.type for p in lm.parameters()} == {"meta"}, (
        "they have memory already, and move"
    )


@pytest.mark.parametrize("model", ["tiny_model", "tiny_untied"])
def test_parameters_buffers_and_ties_are_those_of_transformers(
    model: str, request: pytest.FixtureRequest, settings: Settings
) -> None:
    from transformers import AutoModelForCausalLM

    folder = request.getfixturevalue(model)
    policy = policies.load(settings(model_path=str(folder)))
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert all(torch.equal(p, policy.names()[n]) for n, p in expected.named_parameters())
    buffers = policy.buffer_names()
    assert "model.rotary_emb.inv_freq" in buffers
    assert all(torch.equal(b, buffers[n]) for n, b in expected.named_buffers())
    tied = policy.lm.lm_head.weight is policy.lm.model.embed_tokens.weight
    assert tied == (model == "tiny_model") == bool(policy.tied())
    assert all(p.requires_grad and not p.is_meta for p in policy.parameters())


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v4"])
def test_a_rank_reads_its_own_experts_alone(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files have a tensor for each expert, the model one for all: transformers would load every
    weight, in float32, on every rank.
    """
    from transformers import AutoModelForCausalLM

    folder = families.make(family, tmp_path)
    stored = load_file(folder / "model.safetensors")
    # a buffer that has another name in the files
    for name in (n for n in stored if n.endswith("tid2eid")):
        stored[name] = torch.arange(stored[name].numel()).view_as(stored[name]) % 4
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    read: list[str] = []
    real = tensors.Files.read
    monkeypatch.setattr(
        tensors.Files, "read", lambda files, name: (read.append(name), real(files, name))[1]
    )
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        settings = LearnerSettings(
            model_path=str(folder), row_layout="padded", attn_implementation="eager", world_size=2
        )
        policy, fill = policies.built(policies.Policy, settings)
        assert fill == folder
        policies.place(policy, settings, trained=True, fill=fill)
        for name, tensor in {**policy.names(), **policy.saved_buffers()}.items():
            part = tensors.piece(name, tensor)
            assert torch.equal(
                part.data, expected[name][part.first : part.first + len(part.data)]
            ), name
    finally:
        dist.destroy_process_group()
    assert {n.split(".experts.")[1].split(".")[0] for n in read} == {"2", "3"}


def test_scaled_rotary_embeddings_are_right(copied: Path, settings: Settings) -> None:
    from transformers import AutoModelForCausalLM

    config = json.loads((copied / "config.json").read_text())
    config["rope_parameters"] = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    (copied / "config.json").write_text(json.dumps(config))
    found = policies.load(settings(model_path=str(copied))).buffer_names()
    expected = dict(
        AutoModelForCausalLM.from_pretrained(copied, dtype=torch.float32).named_buffers()
    )
    assert all(torch.equal(b, found[n]) for n, b in expected.items())


def test_written_rotary_embeddings_reach_model_and_export(
    settings: Settings, tmp_path: Path
) -> None:
    from rft.engine.settings import EngineSettings
    from rft.engine.transformers import _load_model

    override = {"rope_theta": 500.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    plain = settings()
    learner = Learner(settings(override_config=override))
    found = learner.policy.buffer_names()["model.rotary_emb.inv_freq"]
    exponents = torch.arange(0, 2 * len(found), 2) / (2 * len(found))
    torch.testing.assert_close(found, 500.0**-exponents / 2)
    assert not torch.equal(found, policies.load(plain).buffer_names()["model.rotary_emb.inv_freq"])
    learner.export(str(tmp_path / "out"))
    for model_path, given in ((tmp_path / "out", {}), (plain.model_path, override)):
        engine = _load_model(
            EngineSettings(
                engine_type="transformers", model_path=str(model_path), extra_engine_args=given
            )
        )
        assert torch.equal(engine.model.rotary_emb.inv_freq, found)


def test_weights_in_several_files_and_other_dtypes(copied: Path, settings: Settings) -> None:
    weights = load_file(copied / "model.safetensors")
    (copied / "model.safetensors").unlink()
    half = list(weights)[::2]
    files = {"a.safetensors": half, "b.safetensors": [n for n in weights if n not in half]}
    for name, names in files.items():
        save_file({n: weights[n].bfloat16() for n in names}, copied / name)
    index = {"weight_map": {n: f for f, names in files.items() for n in names}}
    (copied / "model.safetensors.index.json").write_text(json.dumps(index))
    found = policies.load(settings(model_path=str(copied))).names()
    assert all(torch.equal(found[n], w.bfloat16().float()) for n, w in weights.items())


def test_missing_weights_are_refused_by_name(copied: Path, settings: Settings) -> None:
    weights = load_file(copied / "model.safetensors")
    lost = "model.layers.0.mlp.up_proj.weight"
    save_file({n: w for n, w in weights.items() if n != lost}, copied / "model.safetensors")
    with pytest.raises(SetupError, match=f"has no weights for {lost}"):
        policies.load(settings(model_path=str(copied)))
    (copied / "model.safetensors").unlink()
    with pytest.raises(SetupError, match="has no safetensors files"):
        policies.load(settings(model_path=str(copied)))


def test_entries_of_the_config_can_be_replaced(settings: Settings, tmp_path: Path) -> None:
    own = settings(override_config={"rms_norm_eps": 0.5})
    learner = Learner(own)
    assert learner.policy.lm.model.norm.variance_epsilon == 0.5
    learner.export(str(tmp_path / "out"))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["rms_norm_eps"] == 0.5
    with pytest.raises(ConfigError, match=r"model.override_config: .*has no entry rms_eps"):
        policies.load(settings(override_config={"rms_eps": 0.5}))
    with pytest.raises(SetupError, match="does not fit the weights"):
        policies.load(settings(override_config={"intermediate_size": 24}))


def test_a_library_is_imported_and_said(
    settings: Settings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "rft_test_library.py").write_text("loaded = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with caplog.at_level(logging.WARNING):
        policies.load(settings(external_lib="rft_test_library"))
    assert (
        sys.modules.pop("rft_test_library").loaded and "importing rft_test_library" in caplog.text
    )
    with pytest.raises(ConfigError, match=r"model.external_lib: cannot be imported"):
        policies.load(settings(external_lib="rft_no_such_library"))


def test_what_is_not_installed_is_refused(settings: Settings) -> None:
    plain = settings(row_layout="padded")
    assert policies.attention_name(replace(plain, attn_implementation="auto")) == "sdpa"
    with pytest.raises(
        ConfigError, match=r"trainer.attn_implementation: it does not compute float32 on cpu"
    ):
        policies.attention_name(replace(plain, attn_implementation="flash_attention_2"))
    with pytest.raises(
        ConfigError, match=r"trainer.attn_implementation: flash_attn is not installed"
    ):
        attention.installed("flash_attention_2", "cuda", "bfloat16")
    with pytest.raises(ConfigError, match=r"trainer.use_liger: its kernels run on GPUs"):
        policies.load(settings(use_liger=True))
    with pytest.raises(
        ConfigError,
        match=r"trainer.row_layout: ranks that share a micro-batch share packed positions",
    ):
        policies.attention_name(replace(plain, sequence_parallel=2))


@pytest.mark.parametrize(
    ("heads", "keys", "size", "copies"),
    [(8, 8, 2, 1), (8, 2, 2, 1), (8, 2, 4, 2), (8, 1, 8, 8), (12, 3, 2, 2)],
)
def test_key_heads_are_repeated_where_ranks_outnumber_them(
    heads: int, keys: int, size: int, copies: int
) -> None:
    assert ulysses.key_copies(heads, keys, size) == copies
    with pytest.raises(ConfigError, match="cannot be dealt to 5 ranks"):
        ulysses.key_copies(heads, keys, 5)


def test_parts_are_put_together_without_ranks(
    settings: Settings, rows: list[TrainRow], make_batch: Batch, tmp_path: Path
) -> None:
    learner = Learner(settings())
    learner.step(make_batch(rows, learner.settings))
    learner.save(str(tmp_path / "trainer"), 1)
    learner.export(str(tmp_path / "exported"))
    (tmp_path / "made").mkdir()
    assemble(tmp_path / "trainer", tmp_path / "made")
    names = {p.name for p in (tmp_path / "exported").iterdir()}
    assert {p.name for p in (tmp_path / "made").iterdir()} == names
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in ("exported", "made"))
    assert a.keys() == b.keys() and all(torch.equal(t, b[n]) for n, t in a.items())


@pytest.mark.e2e
@pytest.mark.parametrize("discrete", [False, True])
def test_only_the_named_step_is_traced(
    discrete: bool, settings: Settings, rows: list[TrainRow], make_batch: Batch, tmp_path: Path
) -> None:
    learner = Learner(
        settings(
            profiler=ProfilerConfig(steps=(2,), discrete=discrete),
            profile_folder=tmp_path / "profile",
        )
    )
    for step in (1, 2, 3):
        learner.step(make_batch(rows, learner.settings, step=step))
    (file,) = (tmp_path / "profile").iterdir()
    assert file.name == f"step_2{'_policy' if discrete else ''}_rank_0.json"
    assert json.loads(file.read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("sizes", "batch"), [((4, 4), 7), ((16, 32), 14), ((16, 8), 3), ((6, 4), 4)]
)
async def test_a_checkpoint_of_another_run_is_where_a_run_begins(
    tmp_path: Path, sizes: tuple[int, int], batch: int
) -> None:
    """With the explore batch that `batch` and `step` of the new run's `sizes` have for that step,
    whatever those of the other run were.
    """
    folder = tmp_path / "other" / "checkpoints" / "global_step_7"
    folder.mkdir(parents=True)
    (folder / "x").write_text("x")
    used = Consumption(num_uses=3, digest="ab" * 16, cursor=4)
    manifests.commit(folder, version=Version(2, 7), parent=None, consumption=used)

    class Empty:
        async def start_lineage(self, parent: Any, consumption: Any, step: int) -> Any:
            assert (parent, consumption.cursor, step) == (None, batch, 7), (
                "the other run's step; its lineage is not this run's"
            )
            when = Schedule(batch_units=sizes[0], step_units=sizes[1], start_step=step)
            assert when.may_explore(batch, step) and when.required_step(batch + sizes[1]) > step, (
                "neither never nor too early"
            )
            return type("Lineage", (), {"lineage": 1})()

    for path in (folder, folder.parent, folder.parent.parent):
        found = starts.origin(path)
        assert found is not None and found.version == Version(2, 7)
        start = await starts.begin(Empty(), None, found, sizes=sizes)
        assert (start.lineage, start.step, start.parent, start.cursor, start.checkpoint) == (
            1,
            7,
            None,
            batch,
            str(folder),
        )
    with pytest.raises(ConfigError, match=r"resume_from_path: holds no checkpoint"):
        starts.origin(tmp_path)
    with pytest.raises(CheckpointInvalid, match="was never committed"):
        starts.origin(tmp_path / "global_step_3")


@pytest.mark.slow
# of the compiler itself
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_compiled_layers_give_the_same_gradient_for_any_shape(
    settings: Settings, rows: list[TrainRow], make_batch: Batch
) -> None:
    plain = Learner(settings())
    compiled = Learner(settings(compile=True))
    for step, some in enumerate((rows, rows[:5], rows[2:]), 1):
        a, b = (
            learner.step(make_batch(some, learner.settings, step=step))
            for learner in (plain, compiled)
        )
        assert a.sums["loss"] == pytest.approx(b.sums["loss"], rel=1e-4, abs=1e-4)
        assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-4)
