"""The whole learner on a fake GPU: every family and option builds, trains and publishes there, and
the host waits for the device only where `WAITS` says.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers import fake_gpu
from tests.helpers.fake_gpu.whole_learner import CASES

LOOP = "rft/trainer/loop"
# Each may be waited for once in a step.  An entry may go; a new one is a slower step on every GPU.
STEP = {f"{LOOP}/step_totals.py numbers item", "rft/trainer/model/critic.py apply item"}
WAITS: dict[str, set[str]] = {
    # the norm of a gradient on the host needs no wait; the gradient itself does
    "policy on the host": {f"{LOOP}/step_totals.py numbers item", "autograd to the host"},
    "kept log-probs": {*STEP, f"{LOOP}/rank_models.py by_row to the host"},
}
# Copies of weights and activations that an option keeps on the host.
COPIES: dict[str, set[str]] = {
    "reference on the host": {
        f"{LOOP}/rank_models.py _reference_logprobs",
        "rft/trainer/model/policy.py hidden",
    },
    "policy on the host": {
        "autograd",
        f"{LOOP}/rank_models.py _loss_inputs",
        "rft/trainer/model/policy.py hidden",
    },
    "checkpoints on the host": {"rft/trainer/model/recompute.py backward"},
}

pytestmark = pytest.mark.skipif(bool(fake_gpu.missing()), reason=f"needs {fake_gpu.missing()}")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_gpu.build(tmp_path_factory.mktemp("fake_gpu"))


@pytest.mark.e2e
def test_every_option_and_family_steps_on_a_gpu_without_new_waits(library: Path) -> None:
    names = list(CASES)
    results = fake_gpu.play("whole_learner", [str(library)], names)
    assert [r["case"] for r in results] == names
    wrong = [f"{r['case']}: {r['error']}" for r in results if "error" in r]
    for result in results:
        name = result["case"]
        for kind, allowed in (
            ("waits", WAITS.get(name, STEP)),
            ("copies", COPIES.get(name, set())),
        ):
            new = set(result.get(kind, ())) - allowed
            wrong += [f"{name}: {kind} at {place}" for place in sorted(new)]
        if "error" not in result:
            epochs = CASES[name].settings.get("ppo_epochs", 1)
            assert result["updates"] == epochs
            place = "cpu" if name == "lora" else "cuda"
            assert result["staged"] == [f"{place} {CASES[name].settings['dtype']}"], name
    assert not wrong, "\n".join(wrong)
