"""What a run keeps of its configuration: no secrets, and which changes a resumed run accepts."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import yaml

from rft.config.load import load
from rft.config.plan import Facts
from rft.config.resolve import resolve
from rft.config.save import changed, changes, refuse_changes, save
from rft.config.schema.source import plain
from rft.errors import ConfigError, ConfigErrors
from rft.preflight.check import check

GOOD = Path(__file__).parent / "data" / "good"
SECRET = "canary-7f3a9b"

TEXT = f"""
# api_key: {SECRET}-a
model: {{model_path: m, max_model_len: 64}}
monitor:
  monitor_type: wandb
  monitor_args:
    api_key: {SECRET}-b
    nested: [{{password: "{SECRET}-c"}}]
    secret: |
      {SECRET}-d
      {SECRET}-e
    host: https://me:{SECRET}-f@example.org
buffer:
  total_steps: 2
  trainer_input: {{experience_buffer: {{path: "postgres://u:{SECRET}-g@h/db"}}}}
  explorer_input:
    default_workflow_type: math_workflow
    taskset: {{path: rows.jsonl, workflow_args: {{token: {SECRET}-h, max_tokens: 5, key: "${{oc.env:RFT_TEST_API_KEY}}"}}}}
"""


@pytest.fixture
def secret_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RFT_TEST_API_KEY", f"{SECRET}-i")
    path = tmp_path / "secret.yaml"
    path.write_text(TEXT)
    return path


def test_no_secret_is_saved_or_shown(secret_file: Path, tmp_path: Path) -> None:
    overrides = [
        f"buffer.explorer_input.taskset.reward_fn_args.auth_token={SECRET}-j",
        "buffer.explorer_input.taskset.args.password=ab1",
    ]
    config = load(secret_file, overrides)
    save(config, tmp_path / "run")
    report = check(secret_file, [*overrides, f"trainer.api_key={SECRET}-k"], schema_only=True)
    good = check(secret_file, overrides, schema_only=True, facts=Facts(cpus=1, gpus=0))
    assert good.ok, good.errors
    shown = json.dumps([report.to_json(), good.to_json()])
    for text in [
        *(p.read_text() for p in (tmp_path / "run").iterdir()),
        shown,
        *map(str, report.errors),
    ]:
        assert SECRET not in text
        assert "ab1" not in text
    assert (
        config.monitor.monitor_args is not None
        and config.monitor.monitor_args["api_key"] == f"{SECRET}-b"
    ), "the run itself has it"
    warned = " ".join(good.warnings)
    assert "monitor.monitor_args.api_key is a secret in plain text" in warned
    assert "experience_buffer.path is a secret in plain text" in warned
    assert "max_tokens" not in warned and "workflow_args.key" not in warned


def test_saved_files(secret_file: Path, tmp_path: Path) -> None:
    config = load(secret_file, ["seed=5"])
    save(config, tmp_path / "run")
    written = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert (
        written["monitor"]["monitor_args"]["api_key"] == "***"
        and written["buffer"]["total_steps"] == 2
    )
    resolved = yaml.safe_load((tmp_path / "run" / "config.resolved.yaml").read_text())
    assert resolved["seed"] == 5 and resolved["trainer"]["logprob_chunk_tokens"] == 1024
    record = json.loads((tmp_path / "run" / "config.json").read_text())
    assert record["sha256"] == hashlib.sha256(secret_file.read_bytes()).hexdigest()
    assert record["overrides"] == ["seed=5"]
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [
        "config.json",
        "config.resolved.yaml",
        "config.yaml",
    ]


def test_resolved_file_can_be_loaded_again(tmp_path: Path) -> None:
    config = load(GOOD / "full.yaml")
    save(config, tmp_path)
    again = load(tmp_path / "config.resolved.yaml")
    assert again.model_dump() == config.model_dump()
    facts = Facts(cpus=2, gpus=0, exists=lambda _: False)
    assert plain(resolve(again, facts)) == plain(resolve(config, facts))


def test_changes_on_resume(tmp_path: Path) -> None:
    save(load(GOOD / "full.yaml"), tmp_path)
    assert changes(load(GOOD / "full.yaml"), tmp_path) == []
    safe = load(
        GOOD / "full.yaml",
        ["trainer.save_interval=7", "algorithm.optimizer.lr=1e-5", "log.level=INFO"],
    )
    assert {c.key: c.kind for c in refuse_changes(safe, tmp_path)} == {
        "trainer.save_interval": "safe",
        "algorithm.optimizer.lr": "safe",
        "log.level": "safe",
    }
    unsafe = load(
        GOOD / "full.yaml",
        [
            "model.model_path=other",
            "algorithm.kl_loss_fn_args.kl_coef=0.5",
            "trainer.save_interval=7",
        ],
    )
    with pytest.raises(ConfigErrors) as caught:
        refuse_changes(unsafe, tmp_path)
    assert sorted(e.key for e in caught.value.errors) == [
        "algorithm.kl_loss_fn_args.kl_coef",
        "model.model_path",
    ]
    assert "was 'MODEL' when the run" in str(caught.value)


def test_what_a_stopped_run_asks_for_may_change_on_resume(tmp_path: Path) -> None:
    """`ShortBatch` and `BudgetUsedUp` name these keys as the remedy."""
    args = "buffer.explorer_input.taskset.reward_fn_args"
    save(
        load(
            GOOD / "short.yaml",
            [f"{args}={{max_cost_usd: 1, rewards: {{j: {{args: {{max_cost_usd: 1}}}}}}}}"],
        ),
        tmp_path,
    )
    more = [
        f"{args}.max_cost_usd=2",
        f"{args}.rewards.j.args.max_cost_usd=3",
        "buffer.on_short_batch=train",
        "buffer.max_refill=9",
    ]
    found = refuse_changes(
        load(GOOD / "short.yaml", [f"{args}.rewards.j.args={{}}", *more]), tmp_path
    )
    assert {c.key for c in found} == {text.partition("=")[0] for text in more}
    with pytest.raises(ConfigErrors, match=r"reward_fn_args\.temperature: was"):
        refuse_changes(
            load(GOOD / "short.yaml", [f"{args}.rewards={{}}", f"{args}.temperature=1"]), tmp_path
        )


def test_evaluation_tasksets_may_change_on_resume(tmp_path: Path) -> None:
    save(load(GOOD / "full.yaml"), tmp_path)
    more = load(
        GOOD / "full.yaml",
        ["buffer.explorer_input.eval_tasksets=[{path: a.jsonl}, {path: b.jsonl}]"],
    )
    assert [c.kind for c in refuse_changes(more, tmp_path)] == ["safe"]


def test_a_run_of_a_version_with_other_keys_is_refused(tmp_path: Path) -> None:
    save(load(GOOD / "full.yaml"), tmp_path)
    file = tmp_path / "config.json"
    record = json.loads(file.read_text())
    record["tree"]["trainer"]["save_strategy"] = "unrestricted"
    file.write_text(json.dumps(record))
    with pytest.raises(ConfigError, match=r"another version of rft, which had trainer\.save_st"):
        refuse_changes(load(GOOD / "full.yaml"), tmp_path)
    assert "trainer.save_strategy" not in changed(record["tree"])


def test_a_run_goes_on_under_a_version_that_knows_more_keys(tmp_path: Path) -> None:
    save(load(GOOD / "full.yaml"), tmp_path)
    file = tmp_path / "config.json"
    record = json.loads(file.read_text())
    del record["tree"]["trainer"]["critic"], record["tree"]["algorithm"]["optimizer"]["num_cycles"]
    file.write_text(json.dumps(record))
    assert changes(load(GOOD / "full.yaml"), tmp_path) == []
    other = load(GOOD / "full.yaml", ["algorithm.optimizer.num_cycles=2"])
    assert [(c.key, c.old) for c in changes(other, tmp_path)] == [
        ("algorithm.optimizer.num_cycles", 0.5)
    ]


def test_damaged_record(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="is damaged"):
        changes(load(GOOD / "full.yaml"), tmp_path)


def test_empty_folder_has_no_changes(tmp_path: Path) -> None:
    assert refuse_changes(load(GOOD / "full.yaml"), tmp_path) == []


def test_the_resolved_file_is_read_as_it_was(tmp_path: Path) -> None:
    """A text that looks like a number to our reader only."""
    config = load(GOOD / "short.yaml", ["name=1e-6"])
    save(config, tmp_path)
    assert load(tmp_path / "config.resolved.yaml").name == config.name == "1e-6"
