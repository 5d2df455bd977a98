"""`model.lora_configs`: what reaches the trainer, what is refused before anything starts, and how
much memory it saves.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from rft.config.context import Problems
from rft.config.load import load
from rft.config.plan import Facts, Plan
from rft.config.resolve import resolve
from rft.errors import ConfigError
from rft.launch.bench import Target, plan_for
from rft.preflight import lora_checks
from rft.preflight.check import check
from rft.preflight.check_report import Report
from rft.preflight.memory_estimate import estimate
from rft.preflight.memory_terms import RoleMemory
from rft.preflight.model_folder import look, shape
from rft.trainer.model import adapterfiles
from rft.trainer.settings import LoraSettings
from rft.types.adapter import key
from rft.types.ids import Version

ROOT = Path(__file__).parents[3]
TINY = ROOT / "examples" / "tiny" / "config.yaml"
SHORT = Path(__file__).parent / "data" / "good" / "short.yaml"
KEY = "model.lora_configs"


def plan(*overrides: str) -> Plan:
    return resolve(load(SHORT, overrides), Facts(cpus=2, gpus=0))


def lora(text: str) -> LoraSettings:
    found = plan(f"{KEY}=[{text}]").learner.lora
    assert found is not None
    return found


def test_what_is_written_reaches_the_trainer() -> None:
    assert plan().learner.lora is None
    new = lora("{}")
    assert (new.name, new.rank, new.alpha, new.target_modules, new.exclude_modules) == (
        "lora",
        32,
        32,
        "all-linear",
        None,
    )
    assert new.base_name == plan().learner.model_path and new.path is None
    own = lora(
        "{name: mine, lora_rank: 8, lora_alpha: 16, target_modules: [q_proj, v_proj], "
        "exclude_modules: down_proj}"
    )
    assert (own.name, own.rank, own.alpha) == ("mine", 8, 16)
    assert (own.target_modules, own.exclude_modules) == (("q_proj", "v_proj"), ("down_proj",))
    assert lora("{target_modules: All-Linear}").target_modules == "all-linear"
    assert lora("{target_modules: '.*\\.1\\..*'}").target_modules == ".*\\.1\\..*"


def test_of_an_adapter_in_a_folder_only_what_is_written_is_asked(tmp_path: Path) -> None:
    there = lora(f"{{path: {tmp_path}, base_model_name: org/Base}}")
    assert there == LoraSettings(path=str(tmp_path), base_name="org/Base")
    assert lora(f"{{path: {tmp_path}, lora_rank: 32}}").rank == 32


@pytest.mark.extra
@pytest.mark.parametrize(
    ("text", "key", "message"),
    [
        ("{lora_rank: 0}", "lora_rank", "at least 1"),
        ("{lora_alpha: 0}", "lora_alpha", "more than 0|greater than 0|above 0"),
        ("{name: a/b}", "name", "."),
        ("{target_modules: []}", "target_modules", "no names"),
        ("{target_modules: ['']}", "target_modules", "no names, or an empty one"),
        (
            "{target_modules: '(q_proj'}",
            "target_modules",
            "neither a name nor a regular expression",
        ),
        ("{lora_dropout: 0.1}", "lora_dropout", "engines sample without dropout"),
        ("{use_rslora: true}", "use_rslora", "lora_alpha x sqrt"),
    ],
)
def test_bad_values_are_refused(text: str, key: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        plan(f"{KEY}=[{text}]")
    errors = getattr(caught.value, "errors", [caught.value])
    assert [e.key for e in errors] == [f"{KEY}[0].{key}"]


def test_what_a_checkpoint_must_hold() -> None:
    with pytest.raises(ConfigError, match=r"save_contents: .*from hf_model.*cannot be told again"):
        plan(f"{KEY}=[{{}}]", "trainer.checkpoint.save_contents=[hf_model, optimizer]")
    warned = plan(f"{KEY}=[{{}}]", "trainer.ref.param_offload=true").warnings
    assert any(
        "the reference is the model that is trained, its adapter switched off" in w for w in warned
    )


# ---------------------------------------------------------------- with the model's files


def checked(model: Path, text: str) -> Report:
    return check(
        TINY, (f"model.model_path={model}", f"{KEY}=[{text}]"), facts=Facts(cpus=2, gpus=0)
    )


def peft_folder(
    folder: Path, modules: dict[str, tuple[int, int]], rank: int = 2, **entries: Any
) -> Path:
    folder.mkdir()
    found = {}
    for name, (out, into) in modules.items():
        found[key(name, "A")] = np.zeros((rank, into), np.float32)
        found[key(name, "B")] = np.zeros((out, rank), np.float32)
    save_file(found, folder / adapterfiles.WEIGHTS)
    page = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 4,
        "base_model_name_or_path": None,
        **entries,
    }
    (folder / adapterfiles.CONFIG).write_text(json.dumps(page))
    return folder


@pytest.mark.e2e
def test_check_knows_the_models_layers(tiny_model: Path) -> None:
    assert not checked(tiny_model, "{target_modules: [q_proj, mlp.up_proj]}").errors
    (error,) = checked(tiny_model, "{target_modules: [q_proj, query_key_value]}").errors
    assert (
        error.key == f"{KEY}[0].target_modules"
        and "query_key_value is no linear layer of the model; there are down_proj" in str(error)
    )
    (error,) = checked(tiny_model, "{exclude_modules: [lm_head]}").errors
    assert error.key == f"{KEY}[0].exclude_modules"
    (error,) = checked(tiny_model, "{lora_rank: 1000}").errors
    assert error.key == f"{KEY}[0].lora_rank" and "is more than the size" in str(error)


def test_an_adapter_may_have_other_names_than_the_models_files(
    tiny_model: Path, tmp_path: Path
) -> None:
    """It has those of transformers' modules; files of Gemma 3 or Nemotron have others."""
    tensors = look(str(tiny_model)).tensors
    files = {f"language_model.{name}": about for name, about in tensors.items()}
    adapter = peft_folder(
        tmp_path / "adapter",
        {f"model.{n}": size for n, size in lora_checks.linear_layers(tensors).items()},
    )
    learner = replace(plan().learner, lora=LoraSettings(path=str(adapter)))
    lora_checks.check_adapter(learner, files, told := Problems())
    assert not told.errors
    other = peft_folder(tmp_path / "other", {"transformer.h.0.attn.c_proj": (4, 4)})
    lora_checks.check_adapter(replace(learner, lora=LoraSettings(path=str(other))), files, told)
    assert "belongs to another model" in str(told.errors[0])


@pytest.mark.e2e
def test_check_looks_into_an_adapters_folder(tiny_model: Path, tmp_path: Path) -> None:
    (error,) = checked(tiny_model, f"{{path: {tmp_path / 'nowhere'}}}").errors
    assert (
        error.key == f"{KEY}[0].path"
        and "is not a folder; an adapter is a folder with adapter_config.json" in str(error)
    )
    linear = lora_checks.linear_layers(look(str(tiny_model)).tensors)
    assert len(linear) == 14 and not any(
        "embed" in n or "norm" in n or "lm_head" in n for n in linear
    )
    good = peft_folder(tmp_path / "good", linear)
    assert not checked(tiny_model, f"{{path: {good}}}").errors
    wide = peft_folder(tmp_path / "wide", {n: (o, i + 1) for n, (o, i) in linear.items()})
    other = peft_folder(tmp_path / "other", linear, base_model_name_or_path="org/Other")
    for folder, text in (
        (wide, "which does not fit the model's"),
        (other, "was trained on org/Other, not on"),
    ):
        (error,) = checked(tiny_model, f"{{path: {folder}}}").errors
        assert error.key == f"{KEY}[0].path" and text in str(error)
    assert not checked(tiny_model, f"{{path: {other}, base_model_name: org/Other}}").errors
    (error,) = checked(tiny_model, f"{{path: {good}, lora_rank: 16}}").errors
    assert error.key == f"{KEY}[0].lora_rank" and "has 2; leave it out" in str(error)
    shutil.rmtree(good)


# ---------------------------------------------------------------- memory


def term(role: RoleMemory, name: str) -> int:
    return next((t.nbytes for t in role.terms if t.name == name), 0)


def test_an_adapter_takes_no_moments_of_the_base(tiny_model: Path) -> None:
    files = look(str(tiny_model))
    sizes = shape(files.config, files.tensors)
    settings = LoraSettings(rank=4, target_modules="all-linear")
    trained = lora_checks.parameters(settings, sizes, files.tensors)
    assert trained == 4 * sum(o + i for o, i in lora_checks.linear_layers(files.tensors).values())
    assert trained == lora_checks.parameters(settings, sizes, None), "from the sizes alone too"
    kl = ("algorithm.kl_loss_fn=k2",)
    (_, whole, *_) = estimate(plan(*kl), sizes)
    (_, rank, *_) = estimate(plan(*kl, f"{KEY}=[{{lora_rank: 4}}]"), sizes, trained=trained)
    weights = sizes.parameters * 4
    assert term(rank, "weights") == term(whole, "weights") == weights
    assert (term(rank, "adapter"), term(rank, "AdamW moments")) == (4 * trained, 8 * trained)
    assert (term(whole, "adapter"), term(whole, "AdamW moments")) == (0, 2 * weights)
    assert (term(rank, "reference model"), term(whole, "reference model")) == (0, weights)
    assert whole.nbytes > rank.nbytes


def test_the_estimate_counts_an_adapter_that_is_there(tiny_model: Path, tmp_path: Path) -> None:
    files = look(str(tiny_model))
    sizes = shape(files.config, files.tensors)
    modules = {
        n: s for n, s in lora_checks.linear_layers(files.tensors).items() if n.endswith("q_proj")
    }
    there = LoraSettings(path=str(peft_folder(tmp_path / "there", modules)))
    trained = lora_checks.parameters(there, sizes, files.tensors)
    assert trained == 2 * sum(o + i for o, i in modules.values())
    made = plan("algorithm.kl_loss_fn=k2", f"{KEY}=[{{path: {there.path}}}]")
    assert term(estimate(made, sizes, trained=trained)[1], "reference model") == 4 * trained, (
        "its first values are kept"
    )


# ---------------------------------------------------------------- from veRL


def converted(program: str, **arguments: Any) -> Any:
    from rft.extras.migrate.convert.launch import Argument, Launch
    from rft.extras.migrate.convert.verl import convert

    given = tuple(
        Argument(k.replace("__", "."), v, str(v), i)
        for i, (k, v) in enumerate(arguments.items(), 1)
    )
    return convert(Launch(program, given, False, path="x.sh"))  # type: ignore[arg-type]


@pytest.mark.extra("migrate")
@pytest.mark.parametrize("program", ["main_ppo", "sft", "yaml"])
def test_verls_lora_keys_are_ours(program: str) -> None:
    at = "model__" if program == "sft" else "actor_rollout_ref__model__"
    others = {"actor_rollout_ref__rollout__n": 5} if program == "yaml" else {}
    found = converted(program, **others, **{f"{at}lora_rank": 32})
    (entry,) = found.values["model"]["lora_configs"]
    assert (entry["lora_rank"], entry["lora_alpha"]) == (32, 16), (
        "a rank of 32 is ours too, but says that there is an adapter"
    )
    alpha = {
        f"{at}lora_rank": 32,
        f"{at}lora_alpha": 32,
        f"{at}target_modules": ["q_proj", "v_proj"],
    }
    (entry,) = converted(program, **others, **alpha).values["model"]["lora_configs"]
    assert entry.get("lora_alpha", 32) == 32 and entry["target_modules"] == ["q_proj", "v_proj"]
    none = converted(program, **others, **{f"{at}lora_rank": 0, f"{at}lora_alpha": 16})
    assert "lora_configs" not in none.values["model"]


@pytest.mark.parametrize(
    ("dtype", "merge", "told"),
    [("bfloat16", "true", True), ("float32", "true", False), ("bfloat16", "null", False)],
)
def test_rounding_of_the_adapter_is_told(dtype: str, merge: str, told: bool) -> None:
    problems = Problems()
    lora_checks.warn_of_rounding(
        plan(f"{KEY}=[{{merge: {merge}}}]", f"explorer.rollout_model.dtype={dtype}"), problems
    )
    assert any("rounded to it" in w for w in problems.warnings) == told


ENGINE = "explorer.rollout_model"
GRAPHS = f"{ENGINE}.enforce_eager=false"


@pytest.mark.parametrize(
    ("entry", "more", "merge", "rank"),
    [
        ("{}", (), False, None),  # on CPU vLLM runs eagerly: beside its layers
        ("{merge: true}", (), True, None),
        ("{merge: false}", (), False, None),
        ("{lora_rank: 700}", (), False, None),
        ("{}", (GRAPHS,), False, 32),
        ("{merge: true}", (GRAPHS,), True, None),
        ("{lora_rank: 700}", (GRAPHS,), True, None),
        ("{lora_rank: 8}", (f"{ENGINE}.fully_sharded_loras=true",), False, 8),
        ("{}", (f"{ENGINE}.engine_type=transformers",), False, None),
        ("{}", (f"{ENGINE}.engine_type=scripted",), True, None),
    ],
)
def test_what_engines_get(entry: str, more: tuple[str, ...], merge: bool, rank: int | None) -> None:
    found = plan(f"{KEY}=[{entry}]", *more)
    assert found.learner.lora is not None and found.learner.lora.merge == merge
    assert {e.lora_rank for e in found.engines} == {rank}
    told = [d.reason for d in found.derived if d.key == f"{KEY}[0].merge"]
    assert bool(told) == ("merge" not in entry)


def test_an_adapter_alone_that_cannot_be_is_refused() -> None:
    for entry, more, text in (
        (
            "{merge: false}",
            f"{ENGINE}.engine_type=scripted",
            "engine_type scripted takes whole weights only",
        ),
        ("{merge: false, lora_rank: 700}", GRAPHS, "go up to rank 512, not 700"),
    ):
        with pytest.raises(ConfigError, match=text):
            plan(f"{KEY}=[{entry}]", more)


def test_the_keys_of_vllms_own_layers() -> None:
    both = (f"{ENGINE}.fully_sharded_loras=true", f"{ENGINE}.max_cpu_loras=3")
    (engine, *_) = plan(f"{KEY}=[{{}}]", *both).engines
    assert engine.fully_sharded_loras and engine.max_cpu_loras == 3
    assert plan(f"{KEY}=[{{}}]", GRAPHS, both[1]).engines[0].max_cpu_loras == 3
    for given in (both, (f"{KEY}=[{{}}]", both[1]), (f"{KEY}=[{{merge: true}}]", both[0])):
        found = plan(*given)
        assert found.engines[0].max_cpu_loras is None and any(
            "_loras has no effect" in w for w in found.warnings
        )


def test_what_is_evaluated_apart_has_its_adapter_added() -> None:
    made = plan(f"{KEY}=[{{lora_rank: 8}}]", f"{ENGINE}.fully_sharded_loras=true")
    assert made.engines[0].lora_rank == 8
    with plan_for(made, Target(Version(1, 0))) as served:
        assert served.engines[0].lora_rank is None and served.engines[0].fixed_weights


def test_an_adapter_of_a_folder_brings_its_rank(tmp_path: Path) -> None:
    folder = peft_folder(tmp_path / "there", {"model.layers.0.self_attn.q_proj": (8, 8)}, rank=6)
    assert plan(f"{KEY}=[{{path: {folder}}}]", GRAPHS).engines[0].lora_rank == 6
    assert plan(f"{KEY}=[{{path: {tmp_path}}}]", GRAPHS).engines[0].lora_rank == 32, (
        "what is wrong with a folder is told elsewhere"
    )
