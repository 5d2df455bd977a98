"""Files that extend files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from rft.config import extends, yamlfile
from rft.config.load import from_dict, load
from rft.config.save import refuse_changes, save
from rft.errors import ConfigError

BASE = """\
model: {model_path: m, max_prompt_tokens: 8, max_response_tokens: 8}
algorithm:
  repeat_times: 4
  optimizer:
    lr: 1.0e-5
    betas: [0.9, 0.95]
buffer:
  batch_size: 4
  explorer_input:
    tasksets: [{path: a.jsonl}, {path: b.jsonl}]
"""


def write(folder: Path, **files: str) -> Path:
    """Writes name.yaml for each; the path of the last."""
    for name, text in files.items():
        (folder / f"{name}.yaml").parent.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.yaml").write_text(text)
    return folder / f"{list(files)[-1]}.yaml"


def test_mappings_merge_lists_and_values_replace(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        base=BASE,
        run="extends: base.yaml\nalgorithm:\n  optimizer: {lr: 2.0e-5}\nbuffer: {explorer_input: "
        "{tasksets: [{path: c.jsonl}]}}\n",
    )
    c = load(file)
    assert (
        c.algorithm.optimizer.lr == 2e-5
        and c.algorithm.optimizer.betas == (0.9, 0.95)
        and c.algorithm.repeat_times == 4
    )
    assert [t.path for t in c.buffer.explorer_input.tasksets] == ["c.jsonl"]
    assert c.source.where(("algorithm", "optimizer", "lr")) == "line 3"
    assert c.source.where(("algorithm", "repeat_times")) == "base.yaml line 3"
    assert c.source.where(("buffer", "explorer_input", "tasksets", 1, "path")) == ""
    assert load(file, ["algorithm.repeat_times=9"]).algorithm.repeat_times == 9


def test_several_bases_in_other_folders(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    write(tmp_path, base=BASE)
    write(
        tmp_path / "sub",
        small="extends: ../base.yaml\nalgorithm: {repeat_times: 2}\n",
        fast="trainer: {grad_clip: 0.5}\nseed: 1\n",
    )
    file = write(tmp_path, run="extends: [sub/small.yaml, sub/fast.yaml]\nseed: 2\n")
    c = load(file)
    assert (c.algorithm.repeat_times, c.trainer.grad_clip, c.seed, c.buffer.batch_size) == (
        2,
        0.5,
        2,
        4,
    )
    assert c.source.where(("trainer", "grad_clip")) == "sub/fast.yaml line 1"
    assert c.source.where(("buffer", "batch_size")) == "../base.yaml line 8"
    assert [Path(p).name for p, _ in c.source.files] == [
        "run.yaml",
        "small.yaml",
        "base.yaml",
        "fast.yaml",
    ]


def test_null_and_empty(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        base=BASE,
        run="extends: base.yaml\nalgorithm: {repeat_times: null, optimizer: {}}\ntrainer: {}\n",
    )
    c = load(file)
    assert c.algorithm.repeat_times is None and c.algorithm.optimizer.lr == 1e-5


def test_a_cycle_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path, a="extends: b.yaml\n", b="extends: c.yaml\n", c="extends: a.yaml\n")
    with pytest.raises(
        ConfigError, match=r"c.yaml → a.yaml → b.yaml → c.yaml: a file cannot extend itself"
    ):
        load(file)


def test_depth(tmp_path: Path) -> None:
    write(tmp_path, f0=BASE)
    for i in range(1, extends.MAX_DEPTH + 2):
        write(tmp_path, **{f"f{i}": f"extends: f{i - 1}.yaml\n"})
    assert load(tmp_path / f"f{extends.MAX_DEPTH}.yaml").buffer.batch_size == 4
    with pytest.raises(ConfigError, match="more than 8 files deep"):
        load(tmp_path / f"f{extends.MAX_DEPTH + 1}.yaml")


@pytest.mark.extra
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "extends: missing.yaml\n",
            "extends: run.yaml → missing.yaml: cannot read .*relative to the file it stands in",
        ),
        ("extends: 3\n", r"extends: must be a file name or a list of file names  \(line 1\)"),
        ("extends: [base.yaml, 3]\n", "must be a file name"),
        ("extends: [[base.yaml]]\n", "must be a file name"),
        ("extends: {a: b}\n", "must be a file name"),
        ("extends: big.yaml\n", "at most 1,048,576"),
        ("extends: broken.yaml\n", r"broken.yaml, line 3"),
        ("extends: wrong.yaml\n", r"given 'many'; must be a whole number .*\(wrong.yaml line 1\)"),
    ],
)
def test_what_is_wrong_in_a_base_is_named(text: str, message: str, tmp_path: Path) -> None:
    big = "# " + "x" * yamlfile.MAX_BYTES
    wrong = "buffer: {batch_size: many}\n"
    with pytest.raises(ConfigError, match=message):
        load(
            write(
                tmp_path,
                base=BASE,
                big=big,
                broken="a: 1\nb: [\n",
                wrong=wrong,
                run=text,
            )
        )


def test_only_a_file_can_extend(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="belongs into a file"):
        from_dict({"extends": "base.yaml"})
    with pytest.raises(ConfigError, match="extends: cannot be an override"):
        load(write(tmp_path, run=BASE), ["extends=base.yaml"])


def test_an_interpolated_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RFT_TEST_BASE", str(tmp_path / "base.yaml"))
    write(tmp_path, base=BASE)
    assert (
        load(write(tmp_path / "else", run="extends: ${oc.env:RFT_TEST_BASE}\n")).buffer.batch_size
        == 4
    )


def test_what_a_run_keeps_is_whole(tmp_path: Path) -> None:
    """config.yaml of the run folder holds every key, no secret of a base, and text that YAML could
    misread stays text.
    """
    base = (
        BASE + "group: '1e-3'\nmonitor: {monitor_type: [wandb], monitor_args: {api_key: "
        "base-secret-0123456789}}\n"
    )
    loaded = load(
        write(tmp_path, base=base, run="extends: base.yaml\nseed: 5\n"), ["buffer.batch_size=7"]
    )
    save(loaded, tmp_path / "kept")
    (tmp_path / "base.yaml").unlink()
    text = (tmp_path / "kept" / "config.yaml").read_text()
    assert "base-secret" not in text and "extends" not in yaml.safe_load(text)
    again = load(tmp_path / "kept" / "config.yaml", ["buffer.batch_size=7"])
    assert (
        again.seed == 5
        and again.group == "1e-3"
        and again.buffer == loaded.buffer
        and again.algorithm == loaded.algorithm
    )
    assert refuse_changes(again, tmp_path / "kept") == []
    files = json.loads((tmp_path / "kept" / "config.json").read_text())["files"]
    assert [Path(f).name for f in files] == ["run.yaml", "base.yaml"] and all(
        len(h) == 64 for h in files.values()
    )
