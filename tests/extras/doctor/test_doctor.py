"""`rft doctor`: the lists of keys, and the checks of a machine with GPUs, made here on the CPU by
the same code.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from rft.engine.settings import EngineSettings
from rft.errors import ConfigError, SetupError
from rft.extras.doctor import doctor_command, machine, machine_checks
from rft.extras.doctor.machine import CHECKS, Line
from rft.extras.sandbox import code_sandbox as sandbox


@pytest.fixture
def lines() -> list[Line]:
    return []


def test_the_level_of_the_sandbox_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The strongest one, and why the stronger ones are not to be had; less than what rewards take
    by themselves is only a note.
    """
    for works, state, text in [
        ("namespaces", "ok", "run programs at sandbox_level namespaces"),
        ("landlock", "ok", "run programs at sandbox_level landlock (namespaces: switched off)"),
        ("seccomp", "note", "sandbox_level: seccomp is all that rewards can ask for here"),
        ("none", "note", "rewards cannot run programs here"),
    ]:
        monkeypatch.setattr(
            sandbox,
            "_fault",
            lambda server, works=works: "" if server.level == works else "switched off",
        )
        (found,) = [f for f in doctor_command.examine() if f.topic == "sandbox"]
        assert found.state == state and text in found.text
        assert (state == "note") == ("max_user_namespaces" in found.text)


def test_without_a_gpu_it_says_so_and_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SetupError, match=r"sees no GPU.*--gpu --device cpu") as caught:
        doctor_command.doctor(gpu=True)
    assert caught.value.exit_code == 3
    with pytest.raises(ConfigError, match="write one of cuda, cpu"):
        doctor_command.doctor(gpu=True, device="npu")


@pytest.mark.e2e
def test_checks_that_are_right(tiny_model: Path, lines: list[Line]) -> None:
    """Arithmetic, attention, two ranks of FSDP2, an engine with each transport: on the CPU, in
    processes of their own.
    """
    names = ("arithmetic", "attention", "collective", "training", "transformers")
    assert machine.run("cpu", tiny_model, 2, lines.append, checks=names), lines
    found = {line.topic: line for line in lines}
    assert all(line.state == "ok" for line in lines), lines
    assert {
        "arithmetic",
        "attention",
        "shared prompts",
        "collective",
        "training",
        "transformers",
    } <= set(found)
    assert (
        "over 2 rank(s)" in found["collective"].text
        and "FSDP2 over 2 rank(s)" in found["training"].text
    )
    synced = [line.text for line in lines if line.topic == "transformers sync"]
    assert [text.partition(":")[0] for text in synced] == list(machine.TRANSPORTS["transformers"])
    assert found["training"].seconds > 0


@pytest.mark.slow
def test_vllm_and_what_is_left(tiny_model: Path, lines: list[Line]) -> None:
    assert machine.run("cpu", tiny_model, 1, lines.append, checks=("versions", "vllm", "memory")), (
        lines
    )
    assert [line.topic for line in lines] == [
        "versions",
        "vllm",
        "vllm sync",
        "vllm sync",
        "vllm sync",
        "leftovers",
    ]
    assert [line.text.partition(":")[0] for line in lines[2:5]] == [
        "memory",
        "checkpoint",
        "nccl over gloo",
    ]


@pytest.mark.e2e
def test_a_check_that_fails_has_reason_and_remedy(tmp_path: Path, lines: list[Line]) -> None:
    # and no weights
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 10}')
    assert not machine.run("cpu", tmp_path, 1, lines.append, checks=("training", "arithmetic"))
    failed = [line for line in lines if line.state == "failed"]
    assert failed and all(line.remedy == CHECKS["training"] for line in failed)
    assert lines[-1].topic == "arithmetic" and lines[-1].state == "ok", "the others go on"


def test_a_check_that_does_not_end_is_ended(tiny_model: Path, lines: list[Line]) -> None:
    assert not machine.run(
        "cpu", tiny_model, 1, lines.append, checks=("attention",), deadline_s=0.2
    )
    (line,) = lines
    assert line.state == "failed" and line.text.startswith("no end after 0 s") and line.remedy


@pytest.mark.e2e
def test_wrong_log_probs_are_found(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rft.trainer.loop.learner import Learner

    score = Learner.score

    def wrong(self: Learner, micro: object, *more: object) -> object:
        scored = score(self, micro, *more)  # type: ignore[arg-type]
        if self.settings.row_layout == "padded":
            scored[0][0]["old"] = scored[0][0]["old"] + 0.01
        return scored

    monkeypatch.setattr(Learner, "score", wrong)
    assert (
        machine_checks.main(
            machine_checks.CHECKS, "attention", "cpu", str(tiny_model), "0", "1", str(tmp_path)
        )
        == 1
    )
    last = json.loads((tmp_path / "attention.jsonl").read_text().splitlines()[-1])
    assert last["state"] == "failed" and "allowed are 1e-3" in last["text"]


def test_every_rank_sees_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    seen = [
        machine._environment("collective", "cuda", Path("m"), r, 2)["CUDA_VISIBLE_DEVICES"]
        for r in (0, 1)
    ]
    assert seen == ["3", "5"]
    assert machine._environment("vllm", "cuda", Path("m"), 0, 1)["CUDA_VISIBLE_DEVICES"] == "3,5"
    assert EngineSettings().device == "cpu" and os.environ["CUDA_VISIBLE_DEVICES"] == "3,5"
