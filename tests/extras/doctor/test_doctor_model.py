"""`rft doctor --model`: one model, every layout, and what is said of models that cannot be trained
as they are.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file, save_file

from rft.errors import ConfigError, RftError, RunFailed, SetupError
from rft.extras.doctor import (
    doctor_command,
    doctor_model,
    machine,
    machine_checks,
    model_check,
    model_engine,
)
from rft.extras.doctor.model_engine import ANSWERS, Sampled, Served
from rft.trainer.model import attention
from rft.trainer.model.policy import Policy
from tests.helpers import families

# what transformers says of kernels that are not installed
pytestmark = pytest.mark.filterwarnings("ignore")
Report = Callable[[Path], tuple[list[dict[str, Any]], RftError | None]]


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Report:
    """The lines for a folder, and the error that ends the command; engines apart, which are
    processes.
    """
    monkeypatch.setattr(doctor_model, "ENGINES", ())

    def run(folder: Path) -> tuple[list[dict[str, Any]], RftError | None]:
        error = None
        try:
            doctor_command.doctor(model=str(folder), device="cpu", as_json=True)
        except RftError as e:
            error = e
        text = capsys.readouterr().out
        return json.loads(text) if text else [], error

    return run


@pytest.mark.parametrize(
    ("family", "exact"),
    [("gemma2", ("shared", "packed", "padded")), ("lfm2", ("packed", "padded"))],
)
def test_every_layout_has_a_verdict(
    family: str, exact: tuple[str, ...], tmp_path: Path, report: Report
) -> None:
    lines, error = report(families.make(family, tmp_path / "model"))
    assert error is None
    assert [line["what"] for line in lines] == [
        "transformers, float64",
        "shared",
        "packed",
        "padded",
    ]
    for line in lines[1:]:
        if line["what"] in exact:
            assert (
                line["verdict"] == "exact" and line["logprobs"] <= 1e-5 and line["gradient"] <= 1e-5
            )
        else:
            assert (
                line["verdict"] == "refused"
                and "carries state, so it computes packed rows one by one" in line["refused"]
            )
    assert [line["what"] for line in lines if line["auto"]] == [exact[0]]


@pytest.mark.e2e
def test_what_is_not_exact_is_said_and_ends_with_4(
    tmp_path: Path, report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gradient that is wrong while log-probs are right, which no proof at load can see."""
    folder = families.make("llama", tmp_path / "model")
    hidden = Policy.hidden
    monkeypatch.setattr(
        Policy, "hidden", lambda self, batch: (h := hidden(self, batch)) + (h - h.detach()) * 0.01
    )
    lines, error = report(folder)
    assert isinstance(error, RunFailed) and error.exit_code == 4
    assert {line["verdict"] for line in lines[1:]} == {"not exact"}
    assert all(line["logprobs"] <= 1e-5 < line["gradient"] for line in lines[1:])


@pytest.mark.e2e
def test_unknown_layers_are_named_with_the_way_out(tmp_path: Path, report: Report) -> None:
    folder = families.make("llama", tmp_path / "model")
    page = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**page, "block_types": ["quantum_attention"] * 2})
    )
    lines, error = report(folder)
    assert isinstance(error, ConfigError) and error.exit_code == 2
    assert "layers of type quantum_attention" in str(error) and "Write padded" in str(error)
    assert [line["verdict"] for line in lines] == ["exact", "refused", "refused", "exact"]


def _lie(folder: Path, **entries: Any) -> Path:
    page = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**page, **entries}))
    return folder


@pytest.mark.parametrize(
    ("family", "entries"),
    [
        ("qwen3", {"head_dim": 16}),
        ("mixtral", {"num_local_experts": 8}),
        ("llama", {"num_hidden_layers": 3}),
    ],
)
def test_a_configuration_that_lies_about_its_weights_is_refused(
    family: str, entries: dict[str, Any], tmp_path: Path, report: Report
) -> None:
    lines, error = report(_lie(families.make(family, tmp_path / "model"), **entries))
    assert isinstance(error, SetupError) and error.exit_code == 3 and not lines
    assert str(tmp_path / "model") in str(error) and (
        "model.layers." in str(error) or ".experts." in str(error)
    )


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"num_attention_heads": 5}, "cannot read its config.json: StrictDataclass"),
        ({"hidden_act": "loud"}, "cannot build it from its config.json: KeyError: 'loud'"),
        (
            {"model_type": "vit"},
            "cannot build it from its config.json: ValueError: Unrecognized configuration class",
        ),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "its weights are stored as fp8, which is not trained",
        ),
    ],
)
def test_a_configuration_without_a_model_is_refused(
    entries: dict[str, Any], said: str, tmp_path: Path, report: Report, tiny_model: Path
) -> None:
    folder = _lie(Path(shutil.copytree(tiny_model, tmp_path / "model")), **entries)
    lines, error = report(folder)
    assert isinstance(error, ConfigError) and error.exit_code == 2 and not lines
    assert (
        said in str(error) and str(error).startswith("model.model_path: ") and len(str(error)) < 600
    )


@pytest.mark.e2e
@pytest.mark.parametrize(  # adapters; padding; routers without a call
    "family", [pytest.param("deepseek_v4", marks=pytest.mark.slow), "gemma3n_text", "longcat_flash"]
)
def test_gradients_are_exact_wherever_they_are_not_refused(family: str, tmp_path: Path) -> None:
    report = model_check.compare(
        families.make(family, tmp_path / "model"), "cpu", objectives=get_args(model_check.Objective)
    )
    assert report.good and report.error is None, report.lines


def test_missing_experts_are_named(tmp_path: Path, report: Report) -> None:
    folder = families.make("mixtral", tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    gone = [name for name in weights if ".experts.3." in name]
    assert gone
    save_file(
        {n: w for n, w in weights.items() if n not in gone},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    _, error = report(folder)
    assert isinstance(error, SetupError) and "mlp.experts.gate_up_proj is (3, " in str(error)


def test_what_cannot_be_a_model_is_refused(tmp_path: Path, report: Report) -> None:
    assert "does not exist" in str(report(tmp_path / "nowhere" / "at" / "all")[1])
    folder = _lie(families.make("llama", tmp_path / "model"), model_type="unheard_of")
    error = report(folder)[1]
    assert isinstance(error, ConfigError) and "unheard_of" in str(error)


@pytest.mark.e2e
def test_engines_are_compared_on_what_they_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probs of an engine's own tokens against plain rows; one that cannot load says why."""
    import msgspec

    folder = families.make("llama", tmp_path / "model")
    right = model_check._reference_model(model_check.LearnerSettings(model_path=str(folder)))
    prompt = [5, 6, 7]
    tokens = [8, 9]
    with torch.no_grad():
        logprobs = right(torch.tensor([[*prompt, *tokens]])).logits[0].log_softmax(-1)
    given = [float(logprobs[at - 1, token]) for at, token in ((3, 8), (4, 9))]

    def answered(
        kind: str, device: str, model: Path, aside: Path, *, module: str, deadline_s: float
    ) -> list[model_check.machine.Line]:
        if kind == "vllm":
            return [model_check.machine.Line(topic=kind, state="note", text="not installed")]
        off = [0.0, 0.25] if kind == "wrong" else [0.0, 0.0]
        answers = [
            Sampled(
                prompt=prompt,
                tokens=tokens,
                logprobs=[a + b for a, b in zip(given, off, strict=True)],
            )
        ]
        served = Served(sampled=answers, canary=[0.0, 0.5 if kind == "stale" else 0.0])
        (aside / f"{kind}.{ANSWERS}").write_bytes(msgspec.json.encode(served))
        return [model_check.machine.Line(topic=kind, state="ok", text="2 versions")]

    monkeypatch.setattr(model_check.machine, "checked", answered)
    found = model_check.compare(folder, "cpu", engines=("transformers", "vllm", "wrong", "stale"))
    good, missing, wrong, stale = found.lines[-4:]
    assert good.verdict == "exact" and good.logprobs is not None and good.logprobs <= 1e-5
    assert missing.verdict == "refused: not installed"
    assert (
        wrong.verdict == "NOT EXACT"
        and wrong.logprobs == pytest.approx(0.25, abs=1e-4)
        and not found.good
    )
    assert stale.verdict == "NOT EXACT" and stale.logprobs == 0.5, "after a weight sync"


def test_an_engine_that_cannot_start_says_why(tmp_path: Path) -> None:
    assert (
        machine_checks.main(
            model_engine.CHECKS, "transformers", "cpu", str(tmp_path), "0", "1", str(tmp_path)
        )
        == 1
    )
    assert "config.json" in (tmp_path / "transformers.jsonl").read_text()


def test_an_engine_that_is_not_installed_is_not_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: None)
    monkeypatch.delattr(machine.subprocess, "Popen")
    (line,) = machine.checked("vllm", "cpu", tmp_path, tmp_path, module=model_engine.__name__)
    assert (line.state, line.text) == ("note", "not installed")


@pytest.mark.e2e
@pytest.mark.parametrize("objective", ["sft", "lora"])
def test_the_other_objectives_of_the_table_are_exact_too(objective: Any, tmp_path: Path) -> None:
    folder = families.make("mistral", tmp_path / "model")
    found = model_check.compare(folder, "cpu", objectives=(objective,))
    assert found.good and all(0 < line.gradients[objective] <= 1e-5 for line in found.lines[1:])


def test_a_window_that_is_ignored_is_not_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_reach", lambda module, window: (None, None))
    found = model_check.compare(families.make("mistral", tmp_path / "model"), "cpu")
    verdicts = {line.what: line.verdict for line in found.lines}
    assert (
        verdicts["shared"].startswith("refused: shared rows of MistralForCausalLM are not exact")
        and verdicts["padded"] == "exact"
    )
