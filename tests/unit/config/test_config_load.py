"""Files, overrides and interpolations → RunConfig."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rft.config import yamlfile
from rft.config.load import from_dict, load
from rft.config.schema.source import dotted
from rft.errors import ConfigError, ConfigErrors, nearest

IN = "buffer.explorer_input"
GOOD = Path(__file__).parent / "data" / "good"


def test_full_file() -> None:
    c = load(GOOD / "full.yaml")
    assert c.group == "baseline" and c.name == "demo-GRPO"
    assert c.algorithm.optimizer.lr == 1e-6 and c.algorithm.optimizer.betas == (0.9, 0.95)
    assert (
        c.algorithm.optimizer.lr_scheduler_type == "cosine"
        and c.algorithm.optimizer.optimizer_type == "adamw"
    )
    assert c.explorer.rollout_model.engine_type == "transformers"
    assert c.synchronizer.sync_method == "checkpoint"
    assert c.log.level == "DEBUG"
    warm, cool = c.buffer.explorer_input.tasksets
    assert cool.format == warm.format and cool.rollout_args.temperature == 0.6
    assert cool.data_selector.selector_type == "shuffle"
    assert c.monitor.monitor_type == ("tensorboard", "wandb")


@pytest.mark.parametrize(
    ("override", "get", "value"),
    [
        ("algorithm.optimizer.lr=1e-5", lambda c: c.algorithm.optimizer.lr, 1e-5),
        ("algorithm.optimizer.lr=3", lambda c: c.algorithm.optimizer.lr, 3.0),
        (
            f"{IN}.eval_tasksets.0.split=dev",
            lambda c: c.buffer.explorer_input.eval_tasksets[0].split,
            "dev",
        ),
        (
            f"{IN}.eval_tasksets[0].split=dev",
            lambda c: c.buffer.explorer_input.eval_tasksets[0].split,
            "dev",
        ),
        (
            f"{IN}.tasksets[-1].repeat_times=3",
            lambda c: c.buffer.explorer_input.tasksets[1].repeat_times,
            3,
        ),
        (
            f"{IN}.tasksets.0.rollout_args.stop=[a, b]",
            lambda c: c.buffer.explorer_input.tasksets[0].rollout_args.stop,
            ("a", "b"),
        ),
        ("buffer.total_steps=null", lambda c: c.buffer.total_steps, None),
        ("buffer.total_steps=", lambda c: c.buffer.total_steps, None),
        ("name=2024", lambda c: c.name, "2024"),
        ("name=1e-3", lambda c: c.name, "1e-3"),
        ("name=on", lambda c: c.name, "on"),
        ("project=a=b", lambda c: c.project, "a=b"),
        ("monitor.monitor_type=wandb", lambda c: c.monitor.monitor_type, ("wandb",)),
        ("monitor.monitor_type=none", lambda c: c.monitor.monitor_type, ()),
        (
            "monitor={monitor_type: [tensorboard]}",
            lambda c: c.monitor.monitor_type,
            ("tensorboard",),
        ),
        (
            "algorithm.kl_loss_fn_args.kl_coef=${algorithm.optimizer.weight_decay}",
            lambda c: c.algorithm.kl_loss_fn_args,
            {"kl_coef": 0.5},
        ),
        ("trainer.total_steps=${oc.env:RFT_TEST_STEPS}", lambda c: c.trainer.total_steps, 12),
        (
            "model.custom_chat_template=~/ä b/t.jinja",
            lambda c: c.model.custom_chat_template,
            "~/ä b/t.jinja",
        ),
        ("trainer.use_dynamic_bsz=False", lambda c: c.trainer.use_dynamic_bsz, False),
        ("plugin_dirs.0=x", None, "is a list of 0"),
        ("plugin_dirs=[mine]", lambda c: c.plugin_dirs, ("mine",)),
    ],
)
def test_overrides(override: str, get: Any, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RFT_TEST_STEPS", "12")
    extra = ["algorithm.optimizer.weight_decay=0.5", "plugin_dirs=[]"]
    if get is None:
        with pytest.raises(ConfigError, match=value):
            load(GOOD / "full.yaml", [*extra, override])
    else:
        assert get(load(GOOD / "full.yaml", [*extra, override])) == value


def test_a_tab_inside_a_text_is_a_part_of_it() -> None:
    assert yamlfile.scalar("custom_chat_template: |\n  {% if x %}\n  \ty\n") == {
        "custom_chat_template": "{% if x %}\n\ty\n"
    }


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algorithm.optimizer.lr", "is not of the form key.path=value"),
        ("=3", "is not of the form key.path=value"),
        ("+trainer.total_steps=3", "leave out the '+'"),
        ("--trainer.total_steps=3", "leave out the '-'"),
        ('model.override_config."a.b"=1', "cannot read the key"),
        ("buffer..batch_size=1", "cannot read the key"),
        ("seed.a=1", "seed is 7 and has no keys below it"),
        (f"{IN}.tasksets.2.split=x", "is a list of 2; indexes: 0 to 1"),
        (f"{IN}.tasksets.x.split=x", "is a list of 2; indexes: 0 to 1"),
        ("buffer[0]=x", "buffer is not a list"),
        (
            "explorer.auxiliary_models[0].name=x",
            "is not written, so it has no entries; write explorer.auxiliary_models=[...]",
        ),
        ("trainer.total_steps=[1", "override trainer.total_steps, line 1"),
        ("trainer.total_step=3", "Did you mean trainer.total_steps"),
        ("buffer.batch-size=3", "buffer.batch-size: unknown key.  Did you mean buffer.batch_size?"),
        (
            "algorithm.optimizer.learning_rate=3",
            "algorithm.optimizer.learning_rate: unknown key.  Known here: ",
        ),
        ("batch-size=3", "batch-size: unknown key.  Did you mean buffer.batch_size?"),
        (
            "trainer.total_steps=many",
            "given 'many'; must be a whole number (train steps)  (override)",
        ),
        ("name=null", "given null; must be a text, or left out"),
        ("synchronizer.sync_timeout=inf", "must be a number (s)  (override)"),
        ("trainer.checkpoint.save_contents=[]", "must have at least 1 of them"),
        ("model.lora_configs=[{}, {}]", "must have at most 1 of them"),
        (
            "trainer.eval_interval=${trainer.max_nonfinite_steps}",
            "references see what is written, no defaults: write that key, too",
        ),
        ("name=a${b}", "'b' not found; a text that is no reference is written \\${...}"),
    ],
)
def test_bad_overrides(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(GOOD / "full.yaml", [override])
    assert message in str(caught.value)


def test_all_bad_overrides_are_reported() -> None:
    with pytest.raises(ConfigErrors) as caught:
        load(GOOD / "full.yaml", ["a", "b", "seed=3"])
    assert len(caught.value.errors) == 2


def test_numbers_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RFT_TEST_LR", "2e-5")
    monkeypatch.setenv("RFT_TEST_NAME", "77")
    c = load(
        GOOD / "full.yaml",
        ["algorithm.optimizer.lr=${oc.env:RFT_TEST_LR}", "name=${oc.env:RFT_TEST_NAME}"],
    )
    assert c.algorithm.optimizer.lr == 2e-5 and c.name == "77"
    assert c.source.where(("algorithm", "optimizer", "lr")) == "override, $RFT_TEST_LR"


def test_where_values_come_from() -> None:
    source = load(GOOD / "full.yaml", ["seed=9"]).source
    assert source.where(("seed",)) == "override"
    assert source.where(("algorithm", "repeat_times")) == "line 8"
    assert source.where(("group",)) == "line 2, $RFT_TEST_GROUP"
    assert source.where(("deterministic",)) == ""


def test_a_variable_in_an_unused_default_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    override = "group=${oc.env:RFT_TEST_GROUP,${oc.env:RFT_TEST_OTHER,x}}"
    both = "override, $RFT_TEST_GROUP, $RFT_TEST_OTHER"
    monkeypatch.delenv("RFT_TEST_GROUP", raising=False)
    assert load(GOOD / "full.yaml", [override]).source.where(("group",)) == both
    monkeypatch.setenv("RFT_TEST_GROUP", "y")
    assert (
        load(GOOD / "full.yaml", [override]).source.where(("group",)) == "override, $RFT_TEST_GROUP"
    )


@pytest.mark.parametrize(
    ("name", "question"),
    [
        ("gpro", "  Did you mean grpo?"),  # two letters swapped
        ("grxo", "  Did you mean grpo?"),
        ("gxpo", "  Did you mean gspo or grpo or gmpo?"),  # all are equally near
        ("unlike", ""),
    ],
)
def test_the_nearest_name(name: str, question: str) -> None:
    assert nearest(name, ("gmpo", "grpo", "gspo", "ppo")) == question


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("1E6", 1e6),
        ("-.5", -0.5),
        ("1_000", 1000),
        ("0x1F", 31),
        ("010", "010"),
        ("1:30", "1:30"),
        ("2020-01-01", "2020-01-01"),
        ("1_5", "1_5"),
        ("0.5_2", "0.5_2"),
        ("1_000.5", 1000.5),
        ("true", True),
        ("off", False),
        ("~", None),
        ("null", None),
        ("'1e-6'", "1e-6"),
        ("1e", "1e"),
        ("e5", "e5"),
        (".inf", float("inf")),
        ("[1, 2e3]", [1, 2000.0]),
        ("{a: {b: 1}}", {"a": {"b": 1}}),
        ("", None),
        ("a: b: c", ConfigError),
    ],
)
def test_scalars(text: str, value: Any) -> None:
    if value is ConfigError:
        with pytest.raises(ConfigError):
            yamlfile.scalar(text)
    else:
        assert yamlfile.scalar(text) == value


@pytest.mark.e2e
@given(st.text(max_size=200))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    """Whatever is in a file, the answer is values or a ConfigError."""
    with contextlib.suppress(ConfigError):
        yamlfile.parse(text, "file")


LEAVES = st.none() | st.booleans() | st.integers() | st.text(max_size=5)
TREES = st.recursive(
    LEAVES, lambda c: st.lists(c, max_size=3) | st.dictionaries(st.text(max_size=4), c, max_size=3)
)


@pytest.mark.e2e
@given(TREES)
def test_any_values_are_validated_or_refused(value: Any) -> None:
    with pytest.raises(ConfigError):
        from_dict({"trainer": {"total_steps": [value]}, "unknown": value})


def test_dotted() -> None:
    assert dotted(("a", 0, "b", 2)) == "a[0].b[2]"


def test_frozen() -> None:
    c = load(GOOD / "short.yaml")
    with pytest.raises(ValueError, match="frozen"):
        c.seed = 3  # type: ignore[misc]


def test_an_override_of_one_place_leaves_the_others_of_an_alias(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "buffer: {explorer_input: {tasksets: [{path: a.jsonl, workflow_args: &shared {k: 1}}, "
        "{path: b.jsonl, workflow_args: *shared}]}}\n"
    )
    c = load(file, ["buffer.explorer_input.tasksets.1.workflow_args.k=2"])
    assert [t.workflow_args for t in c.buffer.explorer_input.tasksets] == [{"k": 1}, {"k": 2}]
