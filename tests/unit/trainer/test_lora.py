"""An adapter in place of the whole model: what moves, what is published, what the reference is,
what is saved, what is refused.

Run as a script it is one of two ranks: `test_lora.py RANK 2 RENDEZVOUS MODEL FOLDER`.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rft.algorithm.settings import AlgorithmSettings
from rft.cli.export_command import copy_model
from rft.config.load import load
from rft.config.resolve import resolve
from rft.errors import CheckpointInvalid, ConfigError
from rft.launch import debug_session
from rft.launch.bench import BASE, Target, plan_for
from rft.trainer.checkpoint import saving, shards
from rft.trainer.checkpoint.checkpoints import Checkpoints
from rft.trainer.checkpoint.hf_folder import assemble
from rft.trainer.loop.learner import Learner
from rft.trainer.loop.ranks import Ranks
from rft.trainer.model import adapterfiles, tensors
from rft.trainer.model.adapterfiles import Form, choose
from rft.trainer.rows.pack import Budget, RankBatch, TrainRow, plan
from rft.trainer.settings import LearnerSettings, LoraSettings, OptimizerConfig
from rft.types.adapter import key
from rft.types.ids import Version
from rft.types.modelfiles import fingerprint
from rft.types.ports import Consumption, ScoreRow, WeightManifest
from tests.helpers import families, ranks

Settings = Callable[..., LearnerSettings]
Batch = Callable[..., RankBatch]
LORA = LoraSettings(rank=4, alpha=8.0)
KL = AlgorithmSettings(
    loss_agg_mode="seq-mean-token-mean", kl_loss_fn="k2", kl_loss_fn_args={"kl_coef": 0.5}
)
QUICK = OptimizerConfig(lr=1e-2, weight_decay=0.0)
TINY = Path(__file__).parents[3] / "examples" / "tiny" / "config.yaml"


class Kept:
    """A transport that keeps what it is given."""

    def stage(self, version: Version, given: Any, tied: Any) -> WeightManifest:
        self.weights = {name: t.clone() for name, t in given}
        self.tied = dict(tied)
        return WeightManifest(version=version, transport="memory", path="", tensors=())


def values(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: tensors.full(p).clone() for name, p in learner.policy.trainable().items()}


def base(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in learner.policy.names().items()}


def scores(learner: Learner, rows: list[TrainRow], what: str = "old") -> np.ndarray:
    (found,) = learner.score([rows], (what,))  # type: ignore[arg-type]
    return np.concatenate([f[what] for f in found])  # type: ignore[index]


def logprobs(model: Any, rows: list[TrainRow]) -> np.ndarray:
    """By transformers alone."""
    found = []
    for row in rows:
        with torch.no_grad():
            logits = model(torch.from_numpy(row.tokens.astype(np.int64))[None]).logits[0]
        at = np.flatnonzero(row.loss_mask)
        scaled = (logits[at - 1] / torch.from_numpy(row.temperatures[at])[:, None]).log_softmax(-1)
        found.append(
            scaled[torch.arange(len(at)), torch.from_numpy(row.tokens[at].astype(np.int64))].numpy()
        )
    return np.concatenate(found)


def apart(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max())


@pytest.fixture
def trained(settings: Settings, rows: list[TrainRow], make_batch: Batch) -> Learner:
    learner = Learner(settings(lora=LORA, algorithm=KL, optim=QUICK))
    for step in (1, 2):
        learner.step(make_batch(rows, learner.settings, step=step))
    return learner


# ---------------------------------------------------------------- what is trained


def test_all_linear_layers_are_those_that_texts_go_through(tmp_path: Path) -> None:
    """Adapters in a tower for images would have no gradient, and engines name its layers otherwise."""
    base = families.with_images(tmp_path / "base")
    made = [
        Learner(LearnerSettings(model_path=str(base), lora=LoraSettings(rank=4, target_modules=t)))
        for t in (None, "all-linear")
    ]
    for adapter in (learner.policy.adapter for learner in made):
        assert adapter is not None and len(adapter.layers) == 14
        assert all(name.startswith("model.language_model.layers.") for name in adapter.layers)


def test_only_the_adapter_moves(
    settings: Settings, rows: list[TrainRow], make_batch: Batch
) -> None:
    learner = Learner(settings(lora=LORA, optim=QUICK))
    before = base(learner)
    adapter = values(learner)
    assert learner.step(make_batch(rows, learner.settings)).finite
    assert all(torch.equal(before[name], now) for name, now in base(learner).items())
    moved = {name for name, now in values(learner).items() if not torch.equal(adapter[name], now)}
    assert moved == {name for name in adapter if ".lora_B." in name}, (
        "A has no gradient while B is zero"
    )
    learner.step(make_batch(rows, learner.settings, step=2))
    assert all(not torch.equal(adapter[name], now) for name, now in values(learner).items())
    held = {id(p) for group in learner.optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in learner.policy.parameters() if p.requires_grad}
    assert held == {id(p) for p in learner.policy.trainable().values()} and len(held) == 2 * 7 * 2
    assert set(learner.optimizer.state) == set(learner.policy.trainable().values()), (
        "the base has no moments"
    )


def test_a_new_adapter_changes_nothing_and_is_the_seeds(
    settings: Settings, rows: list[TrainRow]
) -> None:
    one, again, other = (Learner(settings(lora=LORA, seed=seed)) for seed in (1, 1, 2))
    assert all(
        torch.equal(a, b) for a, b in zip(values(one).values(), values(again).values(), strict=True)
    )
    name = key("model.layers.0.mlp.down_proj", "A")
    assert not torch.equal(values(one)[name], values(other)[name])
    a = values(one)[name]
    bound = a.shape[1] ** -0.5
    assert a.abs().max() <= bound and a.std() == pytest.approx(bound / 3**0.5, rel=0.1)
    assert apart(scores(one, rows), scores(Learner(settings()), rows)) == 0.0


def test_the_gradient_is_the_same_however_the_step_is_cut(
    settings: Settings, rows: list[TrainRow], make_batch: Batch
) -> None:
    """Sharing prompts or not, in one micro-batch or many, with activations computed again."""
    ways = (
        {},
        {"max_token_len_per_gpu": 40},
        {"row_layout": "padded"},
        {"gradient_checkpointing": True},
    )
    found = []
    for way in ways:
        learner = Learner(
            settings(
                lora=LORA,
                algorithm=KL,
                optim=QUICK.model_copy(update={"optimizer_type": "sgd"}),
                grad_clip=1e9,
                **way,
            )
        )
        with torch.no_grad():
            for name, p in learner.policy.trainable().items():
                p.add_(
                    torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name))) * 0.05
                )
        norm = learner.step(make_batch(rows, learner.settings)).grad_norm
        found.append((norm, torch.cat([v.flatten() for v in values(learner).values()])))
    for norm, after in found[1:]:
        assert norm == pytest.approx(found[0][0], rel=1e-5)
        assert float((after - found[0][1]).abs().max()) < 1e-5


def test_clipping_counts_the_adapters_gradient_only(
    settings: Settings, rows: list[TrainRow], make_batch: Batch
) -> None:
    learner = Learner(
        settings(
            lora=LORA,
            optim=OptimizerConfig(optimizer_type="sgd", lr=1.0, weight_decay=0.0),
            grad_clip=0.01,
        )
    )
    before = values(learner)
    assert learner.step(make_batch(rows, learner.settings)).grad_norm > 0.01
    change = torch.cat([(values(learner)[n] - before[n]).flatten() for n in before])
    assert float(change.norm()) == pytest.approx(0.01, rel=1e-4)


def test_a_proximal_window_keeps_the_adapter_only(
    trained: Learner, rows: list[TrainRow], make_batch: Batch
) -> None:
    before = scores(trained, rows)
    trained.remember()
    trained.step(make_batch(rows, trained.settings, step=3))
    (kept,) = trained.score([rows], ("old",), "window")
    assert (
        apart(np.concatenate([k["old"] for k in kept]), before) == 0.0
        and apart(scores(trained, rows), before) > 0.01
    )
    kept = trained._proximal._weights
    assert kept is not None and set(kept) == set(trained.policy.trainable())


# ---------------------------------------------------------------- what is published


def test_merged_weights_give_the_adapters_logprobs(
    trained: Learner, rows: list[TrainRow], tiny_model: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    kept = Kept()
    trained.settings = replace(trained.settings, lora=replace(LORA, merge=True))
    trained.stage(Version(1, 2), kept)  # type: ignore[arg-type]
    lm = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    assert set(kept.weights) == {n for n, _ in lm.named_parameters()} and set(kept.tied) == {
        "lm_head.weight"
    }
    lm.load_state_dict(
        {**kept.weights, "lm_head.weight": kept.weights["model.embed_tokens.weight"]}
    )
    assert apart(logprobs(lm, rows), scores(trained, rows)) <= 1e-5
    plain = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    assert apart(logprobs(plain, rows), scores(trained, rows)) > 0.1
    trained.export(str(tmp_path))
    exported = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(exported[n], t) for n, t in kept.weights.items())


def test_the_reference_is_the_base(
    trained: Learner, settings: Settings, rows: list[TrainRow], make_batch: Batch
) -> None:
    plain = Learner(settings())
    assert trained.reference is None, "no second model is loaded"
    assert apart(scores(trained, rows, "ref"), scores(plain, rows)) == 0.0
    assert apart(scores(trained, rows), scores(plain, rows)) > 0.1, "the adapter is on again"
    assert all(p.requires_grad for p in trained.policy.trainable().values())
    each = np.split(
        (scores(trained, rows) - scores(plain, rows)) ** 2 / 2,
        np.cumsum([r.loss_mask.sum() for r in rows])[:-1],
    )
    batch = make_batch(rows, trained.settings, step=3)
    assert trained.step(batch).sums["kl"] == pytest.approx(
        np.mean([x.mean() for x in each]) * batch.tokens, rel=1e-4
    )


# ---------------------------------------------------------------- files


def test_a_checkpoint_holds_the_adapter_as_peft_reads_it(
    trained: Learner, rows: list[TrainRow], tiny_model: Path, tmp_path: Path
) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    hashes = trained.save(str(tmp_path), 2)
    assert shards.kinds(tmp_path) == {"optimizer"}, "the base is not saved"
    assert {f"adapters/lora/{name}" for name in (adapterfiles.CONFIG, adapterfiles.WEIGHTS)} <= set(
        hashes
    )
    assert (
        sum(p.stat().st_size for p in tmp_path.glob("*.safetensors"))
        < 0.5 * (tiny_model / "model.safetensors").stat().st_size
    )
    found = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32),
        str(tmp_path / "adapters" / "lora"),
    )
    assert apart(logprobs(found, rows), scores(trained, rows)) <= 1e-5
    page = json.loads((tmp_path / "adapters" / "lora" / adapterfiles.CONFIG).read_text())
    assert (
        page["target_modules"] == sorted(page["target_modules"])
        and len(page["target_modules"]) == 7
    )


def test_a_resumed_run_is_the_same_run(
    trained: Learner, rows: list[TrainRow], make_batch: Batch, tmp_path: Path
) -> None:
    trained.save(str(tmp_path), 2)
    again = Learner(trained.settings)
    again.load(str(tmp_path))
    for step in (3, 4, 5):
        one, two = (x.step(make_batch(rows, x.settings, step=step)) for x in (trained, again))
        assert one.sums["loss"] == two.sums["loss"] and one.grad_norm == two.grad_norm
    without = Learner(replace(trained.settings, load_contents=("model",)))
    without.load(str(tmp_path))
    assert not without.optimizer.state


@pytest.mark.e2e
def test_another_base_name_rank_or_kind_is_refused(
    trained: Learner, settings: Settings, tiny_model: Path, tmp_path: Path
) -> None:
    saved = tmp_path / "saved"
    trained.save(str(saved), 2)
    other = shutil.copytree(tiny_model, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 3] += 0.5
    save_file(weights, other / "model.safetensors")
    for changes, text in (
        ({"model_path": str(other)}, "those in .*other are others"),
        ({"lora": replace(LORA, name="mine")}, "name is lora, not mine"),
        ({"lora": replace(LORA, rank=8)}, "has rank 4 and scale 2, the run 8 and 1"),
        ({"lora": None}, "holds the adapter lora of .*write its model.lora_configs"),
    ):
        with pytest.raises(CheckpointInvalid, match=text):
            Learner(replace(trained.settings, **changes)).load(str(saved))  # type: ignore[arg-type]
    whole = Learner(settings())
    whole.save(str(tmp_path / "whole"), 1)
    with pytest.raises(CheckpointInvalid, match="holds a whole model, not an adapter"):
        trained.load(str(tmp_path / "whole"))
    (saved / "adapters" / "lora" / adapterfiles.WEIGHTS).unlink()
    with pytest.raises(CheckpointInvalid, match=r"adapters/lora has no adapter_model.safetensors"):
        trained.load(str(saved))


def test_what_is_not_to_be_saved_is_not(trained: Learner, tmp_path: Path) -> None:
    trained.settings = replace(trained.settings, save_contents=("optimizer",))
    trained.save(str(tmp_path), 2)
    assert not (tmp_path / saving.ADAPTERS).exists() and shards.kinds(tmp_path) == {"optimizer"}


def test_export_merges_or_gives_the_adapter(trained: Learner, tmp_path: Path) -> None:
    async def save() -> None:
        async def fill(aside: Path) -> dict[str, str]:
            trained.save(str(aside / "trainer"), 2)
            return {}

        used = Consumption(num_uses=1, digest="ab" * 16, cursor=1)
        await Checkpoints(tmp_path / "checkpoints", keep=0).save(Version(1, 2), None, used, fill)

    asyncio.run(save())
    trained.export(str(tmp_path / "hf"))
    model = copy_model(tmp_path, tmp_path / "model", None)
    made = load_file(model / "model.safetensors")
    wanted = load_file(tmp_path / "hf" / "model.safetensors")
    assert all(float((made[n] - wanted[n]).abs().max()) < 1e-6 for n in wanted)
    adapter = copy_model(tmp_path, tmp_path / "adapter", 2, adapter=True)
    assert {p.name for p in adapter.iterdir()} == {adapterfiles.CONFIG, adapterfiles.WEIGHTS}
    assert all(
        torch.equal(load_file(adapter / adapterfiles.WEIGHTS)[n], v)
        for n, v in values(trained).items()
    )


def test_export_without_the_base_is_refused(trained: Learner, tmp_path: Path) -> None:
    moved = tmp_path / "base"
    shutil.copytree(trained.settings.model_path, moved)
    learner = Learner(replace(trained.settings, model_path=str(moved)))
    learner.save(str(tmp_path / "saved"), 1)
    (tmp_path / "out").mkdir()
    weights = load_file(moved / "model.safetensors")
    save_file({n: t + 1 for n, t in weights.items()}, moved / "model.safetensors")
    with pytest.raises(CheckpointInvalid, match="are not those that the adapter"):
        assemble(tmp_path / "saved", tmp_path / "out")
    shutil.rmtree(moved)
    with pytest.raises(CheckpointInvalid, match="export the adapter alone, or put it back"):
        assemble(tmp_path / "saved", tmp_path / "out")


def test_a_run_without_adapters_has_none_to_export(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none of them holds an adapter"):
        copy_model(tmp_path, tmp_path / "out", None, adapter=True)


# ---------------------------------------------------------------- an adapter to begin with


@pytest.fixture
def there(trained: Learner, tmp_path: Path) -> Path:
    trained.save(str(tmp_path / "first"), 2)
    return tmp_path / "first" / "adapters" / "lora"


def test_a_run_goes_on_with_an_adapter_and_keeps_to_it(
    trained: Learner, there: Path, rows: list[TrainRow], make_batch: Batch, tmp_path: Path
) -> None:
    """The reference is the policy that the run began with, which is the base with that adapter."""
    began = replace(trained.settings, lora=LoraSettings(path=str(there)))
    learner = Learner(began)
    start = scores(trained, rows)
    assert (
        apart(scores(learner, rows), start) == 0.0
        and apart(scores(learner, rows, "ref"), start) == 0.0
    )
    assert learner.step(make_batch(rows, began)).sums["kl"] == pytest.approx(0.0, abs=1e-9)
    learner.step(make_batch(rows, began, step=2))
    assert (
        apart(scores(learner, rows), start) > 0.01
        and apart(scores(learner, rows, "ref"), start) == 0.0
    )
    held = {id(p) for group in learner.optimizer.param_groups for p in group["params"]}
    assert (
        held == {id(p) for p in learner.policy.parameters() if p.requires_grad} and len(held) == 28
    )
    learner.save(str(tmp_path / "second"), 2)
    again = Learner(began)
    again.load(str(tmp_path / "second"))
    assert (
        apart(scores(again, rows), scores(learner, rows)) == 0.0
        and apart(scores(again, rows, "ref"), start) == 0.0
    )
    shutil.copyfile(
        tmp_path / "second" / "adapters" / "lora" / adapterfiles.WEIGHTS,
        there / adapterfiles.WEIGHTS,
    )
    with pytest.raises(CheckpointInvalid, match="which is the reference model, has changed"):
        Learner(began).load(str(tmp_path / "second"))


def test_an_adapter_of_pefts_is_read(
    settings: Settings, rows: list[TrainRow], tiny_model: Path, tmp_path: Path
) -> None:
    """With another scale rule, only some layers, and no word of ours."""
    import peft
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    config = peft.LoraConfig(
        r=3,
        lora_alpha=5,
        use_rslora=True,
        target_modules=["q_proj", "down_proj"],
        init_lora_weights=False,
    )
    model = peft.get_peft_model(lm, config)
    model.save_pretrained(str(tmp_path))
    learner = Learner(
        settings(lora=LoraSettings(path=str(tmp_path), base_name=str(tiny_model), merge=True))
    )
    assert learner.policy.adapter is not None
    assert learner.policy.adapter.form.scale == pytest.approx(5 / 3**0.5)
    assert apart(scores(learner, rows), logprobs(model, rows)) <= 1e-5
    learner.save(str(tmp_path / "again"), 1)
    with torch.no_grad():
        kept = Kept()
        learner.stage(Version(1, 0), kept)  # type: ignore[arg-type]
    merged = model.merge_and_unload().state_dict()
    assert all(float((kept.weights[n] - merged[n]).abs().max()) < 1e-6 for n in kept.weights)
    fresh = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    loaded = peft.PeftModel.from_pretrained(fresh, str(tmp_path / "again" / "adapters" / "lora"))
    assert apart(scores(learner, rows), logprobs(loaded, rows)) <= 1e-5


def test_what_is_evaluated_before_the_first_step_has_the_adapter_that_a_run_begins_with(
    trained: Learner, there: Path, rows: list[TrainRow], tiny_model: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    given = [
        f"model.model_path={tiny_model}",
        f"model.lora_configs=[{{path: {there}}}]",
        f"checkpoint_root_dir={tmp_path}",
    ]
    plan = resolve(load(TINY, given))
    with plan_for(plan, Target(BASE)) as served:
        found = AutoModelForCausalLM.from_pretrained(
            served.engines[0].model_path, dtype=torch.float32
        )
        assert (Path(served.engines[0].model_path) / "tokenizer.json").is_file()
        assert apart(logprobs(found, rows), scores(trained, rows)) <= 1e-5
    assert not Path(served.engines[0].model_path).exists() and there.exists()


async def test_one_task_is_played_with_the_adapter_that_a_run_begins_with(
    trained: Learner, there: Path, rows: list[TrainRow], tiny_model: Path, tmp_path: Path
) -> None:
    given = [
        f"model.model_path={tiny_model}",
        f"model.lora_configs=[{{path: {there}}}]",
        f"checkpoint_root_dir={tmp_path}",
    ]
    plan = resolve(load(TINY, given))
    heated = [msgspec.structs.replace(r, temperatures=1.0) for r in rows]
    models = debug_session.Models(plan, lambda _: None)
    try:
        engine = await models.policy(debug_session.policy_settings(plan, "transformers"))
        found = [
            (
                await engine.score(ScoreRow(tokens=r.tokens, prompt_length=1, temperature=1.0))
            ).logprobs
            for r in heated
        ]
    finally:
        await models.close()
    trained_ones = [f[np.flatnonzero(r.loss_mask) - 1] for f, r in zip(found, heated, strict=True)]
    assert apart(np.concatenate(trained_ones), scores(trained, heated)) <= 1e-4


def change_config(**entries: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        page = json.loads((folder / adapterfiles.CONFIG).read_text())
        (folder / adapterfiles.CONFIG).write_text(json.dumps(page | entries))

    return change


def rename_tensors(old: str, new: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        found = load_file(folder / adapterfiles.WEIGHTS)
        save_file({n.replace(old, new): t for n, t in found.items()}, folder / adapterfiles.WEIGHTS)

    return change


def as_pickle(folder: Path) -> None:
    (folder / adapterfiles.WEIGHTS).rename(folder / "adapter_model.bin")


def cut_short(folder: Path) -> None:
    data = (folder / adapterfiles.WEIGHTS).read_bytes()
    (folder / adapterfiles.WEIGHTS).write_bytes(data[:50])


@pytest.mark.parametrize(
    ("change", "settings_", "text"),
    [
        (
            shutil.rmtree,
            {},
            "path: .*is not a folder; an adapter is a folder with adapter_config.json",
        ),
        (as_pickle, {}, "other formats can run code"),
        (cut_short, {}, "cannot be read as safetensors"),
        (change_config(use_dora=True), {}, "has use_dora: True; only False"),
        (change_config(peft_type="IA3"), {}, "has peft_type: 'IA3'"),
        (change_config(init_lora_weights="pissa"), {}, "has init_lora_weights: 'pissa'"),
        (change_config(rank_pattern={"q_proj": 2}), {}, "has rank_pattern"),
        (change_config(r=0), {}, "has r 0 and lora_alpha"),
        (change_config(r=8), {}, "does not fit the model's .* at rank 8"),
        (
            rename_tensors("up_proj", "w1"),
            {},
            r"adapts model.layers.0.mlp.w1, which is no linear layer .* another model",
        ),
        (rename_tensors("lora_A", "lora_embedding_A"), {}, "is not of a linear layer's adapter"),
        (rename_tensors("q_proj", "down_proj_"), {}, "another model"),
        (
            lambda folder: None,
            {"rank": 16},
            r"lora_rank: is 16, but the adapter in .* has 4; leave it out",
        ),
        (lambda folder: None, {"alpha": 9.0}, r"lora_alpha: is 9, but the adapter in .* has 8"),
        (
            lambda folder: None,
            {"target_modules": ("q_proj",)},
            "names other layers than the adapter",
        ),
    ],
)
def test_adapters_that_do_not_fit_are_refused(
    change: Callable[[Path], None],
    settings_: dict[str, Any],
    text: str,
    there: Path,
    tiny_model: Path,
) -> None:
    change(there)
    linear = {n: (o, i) for n, (o, i) in LINEAR(tiny_model).items()}
    with pytest.raises(ConfigError, match=text) as caught:
        adapterfiles.form(LoraSettings(path=str(there), **settings_), linear, str(tiny_model))
    assert caught.value.key.startswith("model.lora_configs[0].")


def LINEAR(model: Path) -> dict[str, tuple[int, int]]:
    from rft.preflight.lora_checks import linear_layers
    from rft.preflight.model_folder import look

    return linear_layers(look(str(model)).tensors)


def test_an_adapter_of_another_base_is_refused(
    there: Path, tiny_model: Path, tmp_path: Path
) -> None:
    linear = LINEAR(tiny_model)
    moved = shutil.copytree(tiny_model, tmp_path / "elsewhere")
    assert adapterfiles.form(LoraSettings(path=str(there)), linear, str(moved)).rank == 4, (
        "the same weights in another place"
    )
    weights = load_file(moved / "model.safetensors")
    save_file({n: t * 1.001 for n, t in weights.items()}, moved / "model.safetensors")
    with pytest.raises(ConfigError, match="was trained on other weights than those in"):
        adapterfiles.form(LoraSettings(path=str(there)), linear, str(moved))
    # one that says nothing of its base
    save_file(load_file(there / adapterfiles.WEIGHTS), there / adapterfiles.WEIGHTS)
    change_config(base_model_name_or_path="org/Some-Model")(there)
    with pytest.raises(
        ConfigError, match=r"was trained on org/Some-Model, not on org/Other; .*base_model_name"
    ):
        adapterfiles.form(LoraSettings(path=str(there), base_name="org/Other"), linear, str(moved))
    assert (
        adapterfiles.form(
            LoraSettings(path=str(there), base_name="/models/Some-Model"), linear, str(moved)
        ).rank
        == 4
    )


# ---------------------------------------------------------------- names and hashes

LAYERS = [
    f"model.layers.{i}.{name}"
    for i in range(2)
    for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj")
]


def test_layers_are_chosen_by_name() -> None:
    assert choose(LAYERS, "all-linear", None) == tuple(LAYERS)
    assert choose(LAYERS, ("q_proj",), None) == (LAYERS[0], LAYERS[3])
    assert choose(LAYERS, ("self_attn.q_proj", "model.layers.1.mlp.up_proj"), None) == (
        LAYERS[0],
        LAYERS[3],
        LAYERS[5],
    )
    assert choose(LAYERS, r".*\.1\..*_proj", None) == tuple(LAYERS[3:])
    assert choose(LAYERS, "all-linear", ("mlp.up_proj",)) == tuple(
        n for n in LAYERS if "mlp" not in n
    )
    for targets, exclude, text in (
        (
            ("q_proj", "query"),
            None,
            r"target_modules: .*query is no linear layer of the model; there are q_proj, up_proj, "
            r"v_proj",
        ),
        ("q_proj,v_proj", None, "target_modules: .*no name of a linear layer"),
        ("all-linear", ("lm_head",), "exclude_modules: .*lm_head is no linear layer"),
        ("all-linear", ".*", "leaves no layer"),
    ):
        with pytest.raises(ConfigError, match=text):
            choose(LAYERS, targets, exclude)  # type: ignore[arg-type]


def test_a_config_names_layers_shortly_where_that_is_the_same() -> None:
    form = Form(rank=2, alpha=1.5, modules=tuple(LAYERS[:3]))
    assert adapterfiles.config_page(form, LAYERS)["target_modules"] == LAYERS[:3], (
        "q_proj alone would be of both layers"
    )
    assert adapterfiles.config_page(replace(form, modules=(LAYERS[0], LAYERS[3])), LAYERS)[
        "target_modules"
    ] == ["q_proj"]
    assert adapterfiles.config_page(form, LAYERS)["lora_alpha"] == 1.5


def test_a_fingerprint_is_of_the_weights(tmp_path: Path) -> None:
    whole = {"a": torch.randn(300, 200), "b": torch.randn(5), "c": torch.zeros(2, 2)}
    one = tmp_path / "one"
    two = tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
    save_file(whole, one / "model.safetensors", {"format": "pt"})
    for i, (name, tensor) in enumerate(reversed(whole.items())):
        save_file({name: tensor}, two / f"model-{i}.safetensors")
    assert fingerprint(one) == fingerprint(two), "however the files are cut"
    save_file({**whole, "a": whole["a"] + 1e-3}, one / "model.safetensors")
    assert fingerprint(one) != fingerprint(two)
    save_file({**whole, "d": whole["c"] + 1}, one / "model.safetensors")
    assert fingerprint(one) != fingerprint(two)
    with pytest.raises(CheckpointInvalid, match="no safetensors files"):
        fingerprint(tmp_path)


def test_a_rank_larger_than_a_layer_is_refused(settings: Settings) -> None:
    with pytest.raises(
        ConfigError, match=r"lora_rank: .*is more than the size \d+ of model.layers.0"
    ):
        Learner(settings(lora=LoraSettings(rank=4096)))
    with pytest.raises(ConfigError, match="lm_head is no linear layer"):
        Learner(settings(lora=LoraSettings(target_modules=("lm_head",))))


async def test_the_canarys_scores_are_the_adapters(trained: Learner, rows: list[TrainRow]) -> None:
    asked = [
        ScoreRow(tokens=r.tokens, prompt_length=int(np.argmax(r.loss_mask)), temperature=1.0)
        for r in rows[6:]
    ]
    plain = [replace_row(r) for r in rows[6:]]
    found = await Ranks(trained).score(asked)
    assert apart(np.concatenate(found), scores(trained, plain)) < 1e-5


def replace_row(row: TrainRow) -> TrainRow:
    fields = {f: getattr(row, f) for f in row.__struct_fields__} | {
        "temperatures": np.ones(len(row.tokens), np.float32)
    }
    return TrainRow(**fields)


# ---------------------------------------------------------------- ranks

# other ways to spread the same step; each must give its gradient
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sequence": {"sequence_parallel": 2},
    "host": {"offload_policy": True, "gradient_checkpointing": True},
}


def given_rows() -> list[TrainRow]:
    rng = np.random.default_rng(3)
    made = []
    for group in range(3):
        prompt = rng.integers(3, 250, 5 + 4 * group).tolist()
        for _ in range(3):
            tokens = prompt + rng.integers(3, 250, int(rng.integers(1, 9))).tolist()
            mask = np.arange(len(tokens)) >= len(prompt)
            made.append(
                TrainRow(
                    tokens=np.array(tokens, np.int32),
                    loss_mask=mask,
                    logprobs=np.where(mask, -5.5, 0).astype(np.float32),
                    temperatures=np.ones(len(mask), np.float32),
                    advantages=np.full(int(mask.sum()), rng.normal(), np.float32),
                    group=str(group),
                )
            )
    return made


def share(rank: int, world: int, step: int, tokens: int = 60) -> RankBatch:
    """Three groups: of two ranks, one has a micro-batch more."""
    given = given_rows()
    cut = plan(given, world, Budget(tokens))
    micro = tuple(tuple(given[i] for i in m) for m in cut[rank])
    return RankBatch(
        step=step,
        micro_batches=micro,
        tokens=float(sum(r.loss_mask.sum() for r in given)),
        rows=float(len(given)),
    )


def replace_batch(batch: RankBatch, **changes: Any) -> RankBatch:
    return RankBatch(**{f: getattr(batch, f) for f in batch.__struct_fields__} | changes)


def of_ranks(model: str, world: int) -> LearnerSettings:
    optim = OptimizerConfig(lr=1e-2)
    return LearnerSettings(
        model_path=model,
        cpu_threads=1,
        world_size=world,
        total_steps=9,
        algorithm=KL,
        optim=optim,
        grad_clip=0.5,
        lora=LORA,
        max_response_tokens=12,
    )


def one_of_two(rank: int, rendezvous: str, model: str, folder: Path) -> None:
    for name, changes in VARIANTS.items():
        settings = replace(of_ranks(model, 2), **changes)
        learner = Learner(settings, rank, f"{rendezvous}.{name}")
        each = settings.sequence_parallel
        learner.save(str(folder / name / "0"), 0)
        for step in (1, 2):
            learner.step(share(rank // each, 2 // each, step))
            learner.save(str(folder / name / str(step)), step)
        if name == "plain":
            mine = share(0, 1, 3)
            idle = replace_batch(mine, micro_batches=((),) * len(mine.micro_batches))
            assert learner.step(mine if rank == 0 else idle).finite, (
                "a rank without rows computes along"
            )
            learner.load(str(folder / name / "2"))
            learner.export(str(folder / "huggingface"))
            losses = [learner.step(share(rank, 2, step)).sums["loss"] for step in (3, 4, 5)]
            (folder / f"losses{rank}.json").write_text(json.dumps(losses))
        learner.close()


@pytest.fixture(scope="module")
def two(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks leave."""
    folder = tmp_path_factory.mktemp("two")
    ranks.run(__file__, 2, folder, tiny_model, folder)
    return folder


@pytest.fixture(scope="module")
def one(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    learner = Learner(of_ranks(str(tiny_model), 1))
    learner.save(str(folder / "0"), 0)
    for step in (1, 2):
        learner.step(share(0, 1, step))
        learner.save(str(folder / str(step)), step)
    return folder


def adapter(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapters" / "lora" / adapterfiles.WEIGHTS)


@pytest.mark.e2e
@pytest.mark.parametrize("name", VARIANTS)
def test_however_it_is_spread_it_is_the_same_adapter(name: str, one: Path, two: Path) -> None:
    first = adapter(one / "0")
    same = adapter(two / name / "0")
    assert all(torch.equal(first[n], same[n]) for n in first), (
        "the beginning does not depend on how many ranks there are"
    )
    for step, limit in ((1, 1e-6), (2, 1e-5)):
        mine, other = (shards.find(f / str(step), "optimizer") for f in (one, two / name))
        assert set(mine) == set(other) and len(list(mine)) == 2 * 28
        assert max(float((mine.read(n) - other.read(n)).abs().max()) for n in mine) < limit


@pytest.mark.e2e
def test_one_rank_goes_on_from_two(two: Path, tiny_model: Path) -> None:
    learner = Learner(of_ranks(str(tiny_model), 1))
    learner.load(str(two / "plain" / "2"))
    losses = np.array([learner.step(share(0, 1, step)).sums["loss"] for step in (3, 4, 5)])
    there = np.sum(
        [json.loads((two / f"losses{rank}.json").read_text()) for rank in range(2)], axis=0
    )
    assert np.abs(losses - there).max() < 1e-4 * np.abs(there).max()


@pytest.mark.e2e
def test_two_ranks_merge_their_rows(two: Path, tiny_model: Path, tmp_path: Path) -> None:
    learner = Learner(of_ranks(str(tiny_model), 1))
    learner.load(str(two / "plain" / "2"))
    learner.export(str(tmp_path))
    mine = load_file(tmp_path / "model.safetensors")
    theirs = load_file(two / "huggingface" / "model.safetensors")
    assert mine.keys() == theirs.keys() and all(
        float((mine[n] - theirs[n]).abs().max()) < 1e-6 for n in mine
    )


if __name__ == "__main__":
    import warnings

    warnings.simplefilter("error")
    place, _, meet, path, out = sys.argv[1:]
    one_of_two(int(place), meet, path, Path(out))
