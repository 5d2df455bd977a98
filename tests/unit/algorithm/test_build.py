"""Parts put together: totals, what is left out, what masks hide, and parts of one's own."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rft.algorithm import composition
from rft.algorithm.base import Advantages, Denominators, LossInputs, StepInputs, StepRow
from rft.algorithm.catalog import check_args
from rft.algorithm.composition import as_advantages, build
from rft.algorithm.settings import AlgorithmSettings, CorrectionConfig
from rft.errors import ConfigError, RunFailed
from rft.types.ports import GroupStats

FULL = AlgorithmSettings(
    kl_loss_fn="k2",
    kl_loss_fn_args={"kl_coef": 0.5},
    entropy_loss_fn="default",
    entropy_loss_fn_args={"entropy_coef": 0.25},
)


def step() -> LossInputs:
    """Two rows; the last token of each is not trained."""
    return LossInputs(
        logprobs=torch.tensor([-1.0, -2.0, -3.0, -1.0, -1.5], requires_grad=True),
        old_logprobs=torch.tensor([-1.0, -2.0, -3.0, -1.0, -1.5]),
        advantages=torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0]),
        mask=torch.tensor([True, True, False, True, False]),
        row=torch.tensor([0, 0, 0, 1, 1]),
        num_rows=2,
        denominators=Denominators(tokens=3, rows=2, max_response_tokens=4),
        ref_logprobs=torch.tensor([-1.0, -1.0, -9.0, -3.0, -9.0]),
        entropy=torch.tensor([0.3, 0.6, 9.0, 0.9, 9.0]),
    )


def test_total_is_policy_minus_entropy_plus_kl() -> None:
    out = build(FULL).loss(step())
    policy = -1 / 3
    kl = (0 + 0.5 + 2) / 3
    entropy = 1.8 / 3
    assert out.loss.item() == pytest.approx(policy + 0.5 * kl - 0.25 * entropy)
    means = {k: v.item() / 3 for k, v in out.sums.items()}
    assert means["pg_loss"] == pytest.approx(policy)
    assert means["kl_loss"] == pytest.approx(kl)
    assert means["entropy"] == pytest.approx(entropy)
    assert means["loss"] == pytest.approx(out.loss.item())
    assert means["ratio"] == pytest.approx(1)
    assert not any(v.requires_grad for v in [*out.sums.values(), *out.maxima.values()])


def test_losses_in_the_sums_divide_to_the_loss_in_every_mode() -> None:
    out = build(dataclasses.replace(FULL, loss_agg_mode="seq-mean-token-sum-norm")).loss(step())
    assert out.sums["loss"].item() / 3 == pytest.approx(out.loss.item())
    assert out.sums["kl_loss"].item() / 3 == pytest.approx(2.5 / (4 * 2))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_the_mask_hides_is_harmless(bad: float) -> None:
    clean = step()
    dirty = step()
    hidden = ~clean.mask
    logprobs = dirty.logprobs.detach().masked_fill(hidden, bad).requires_grad_()
    names = ("old_logprobs", "advantages", "ref_logprobs", "entropy")
    dirty = dataclasses.replace(
        dirty, logprobs=logprobs, **{n: getattr(dirty, n).masked_fill(hidden, bad) for n in names}
    )
    algorithm = build(FULL)
    a = algorithm.loss(clean)
    b = algorithm.loss(dirty)
    torch.testing.assert_close(b.loss, a.loss)
    torch.testing.assert_close(
        torch.autograd.grad(b.loss, logprobs)[0], torch.autograd.grad(a.loss, clean.logprobs)[0]
    )
    for name, value in a.sums.items():
        torch.testing.assert_close(b.sums[name], value, msg=name)


def test_a_trained_token_that_is_not_finite_shows() -> None:
    x = step()
    broken = dataclasses.replace(
        x, logprobs=torch.full_like(x.logprobs, float("nan")).requires_grad_()
    )
    assert not torch.isfinite(build(AlgorithmSettings()).loss(broken).loss)


def test_parts_that_are_off_need_nothing() -> None:
    x = dataclasses.replace(step(), ref_logprobs=None, entropy=None)
    off = dataclasses.replace(
        FULL, kl_loss_fn_args={"kl_coef": 0.0}, entropy_loss_fn_args={"entropy_coef": 0.0}
    )
    assert build(off).loss(x).loss.item() == pytest.approx(-1 / 3)
    with pytest.raises(ValueError, match="ref_logprobs"):
        build(FULL).loss(x)


def test_an_empty_micro_batch_is_a_zero_with_a_gradient() -> None:
    x = step()
    empty = {
        f.name: v[:0]
        for f in dataclasses.fields(x)
        if isinstance(v := getattr(x, f.name), torch.Tensor)
    }
    out = build(FULL).loss(dataclasses.replace(x, **empty, num_rows=0))
    assert out.loss.item() == 0
    assert out.loss.requires_grad
    assert out.maxima["ratio_max"].item() == 0


def test_advantages_go_through() -> None:
    stats = GroupStats(group="g", rewards=(1.0, 0.0), mean=0.5, std=0.7071067811865476)
    rows = [
        StepRow(group="g", run=i, step=0, reward=1.0 - i, logprobs=np.zeros(2 + i, np.float32))
        for i in range(2)
    ]
    made = build(AlgorithmSettings(advantage_fn_args={"norm_by_std": False})).prepare(
        StepInputs(rows=rows, groups={"g": stats})
    )
    assert [a.tolist() for a in made.advantages] == [[0.5, 0.5], [-0.5, -0.5, -0.5]]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (np.zeros(3), "zip.. argument 2 is shorter"),
        (
            [np.zeros(2), np.zeros(5)],
            r"group g, run 1: shape \(5,\) for 3 trained tokens",
        ),
        (Advantages(values=[np.zeros(2, np.float32)] * 2), r"shape \(2,\) for 3 trained"),
    ],
)
def test_advantages_of_another_shape_are_refused(given: Any, says: str) -> None:
    rows = [
        StepRow(group="g", run=i, step=0, reward=1.0, logprobs=np.zeros(2 + i, np.float32))
        for i in range(2)
    ]
    with pytest.raises(ValueError, match=says):
        as_advantages(given, rows)


def test_unknown_aggregation() -> None:
    with pytest.raises(
        ConfigError, match=r"algorithm.loss_agg_mode: 'mean' is not one of token-mean"
    ):
        build(AlgorithmSettings(loss_agg_mode="mean"))


def test_a_policy_loss_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "plain.py"
    file.write_text(
        "from pydantic import BaseModel\n"
        "from rft.algorithm.aggregate import aggregate\n"
        "from rft.algorithm.base import LossOutput, policy_loss\n"
        "class PlainArgs(BaseModel, extra='forbid'):\n"
        "    scale: float = 1.0\n"
        "@policy_loss('plain', args=PlainArgs)\n"
        "def plain(x, args):\n"
        "    return LossOutput(loss=-args.scale * aggregate(x.advantages * x.logprobs, x))\n"
    )
    name = f"{file}:plain"
    out = build(AlgorithmSettings(policy_loss_fn=name, policy_loss_fn_args={"scale": 3.0})).loss(
        step()
    )
    assert out.loss.item() == pytest.approx(-3 * (-1 - 2 + 1) / 3)
    with pytest.raises(ConfigError, match="Did you mean scale"):
        build(AlgorithmSettings(policy_loss_fn=name, policy_loss_fn_args={"scal": 3.0}))


def test_a_loss_named_by_its_place_has_its_extra(tmp_path: Path) -> None:
    file = tmp_path / "late.py"
    file.write_text(
        "from rft.algorithm.aggregate import aggregate\n"
        "from rft.algorithm.base import LossOutput, policy_extra, policy_loss\n"
        "@policy_extra('late_tokens')\n"
        "def late(x, advantages, args):\n"
        "    return {'late': [a * 0 + range(len(a)) for a in advantages]}\n"
        "@policy_loss('late_tokens')\n"
        "def loss(x, args):\n"
        "    return LossOutput(loss=aggregate(x.extra['late'], x))\n"
    )
    rows = [
        StepRow(group="g", run=i, step=0, reward=float(i), logprobs=np.zeros(3, np.float32))
        for i in range(2)
    ]
    x = StepInputs(
        rows=rows, groups={"g": GroupStats(group="g", rewards=(0.0, 1.0), mean=0.5, std=0.5**0.5)}
    )
    prepared = build(AlgorithmSettings(policy_loss_fn=f"{file}:loss")).prepare(x)
    assert [e.tolist() for e in prepared.extra["late"]] == [[0, 1, 2]] * 2


def test_a_kl_penalty_of_ones_own(tmp_path: Path) -> None:
    """By file, with arguments of its own; the factor is one of them where it has that, else 1."""
    file = tmp_path / "own.py"
    file.write_text(
        "import numpy as np\nfrom pydantic import Field\nfrom rft.algorithm.args import Args\n"
        "class Half(Args):\n    share: float = Field(0.5, gt=0)\n"
        "def half(x, args):\n    return [args.share * (r.logprobs - r.ref) for r in x.rows]\n"
        "half.Args = Half\n"
    )
    row = StepRow(
        group="g",
        run=0,
        step=0,
        reward=1.0,
        logprobs=np.array([-1.0, -2.0], np.float32),
        ref=np.array([-1.5, -2.0], np.float32),
    )
    x = StepInputs(
        rows=[row], groups={"g": GroupStats(group="g", rewards=(1.0,), mean=1.0, std=0.0)}
    )
    settings = AlgorithmSettings(
        advantage_fn="reinforce", kl_penalty_fn=f"{file}:half", kl_penalty_fn_args={"share": 0.25}
    )
    algorithm = build(settings)
    assert algorithm.needs.kl_penalty and "ref" in algorithm.needs.before
    prepared = algorithm.prepare(x)
    assert prepared.kl == pytest.approx(0.25 * 0.5 / 2)
    assert prepared.rewards is not None and prepared.rewards[0].tolist() == pytest.approx(
        [-0.125, 1.0]
    )
    with pytest.raises(ConfigError, match="shar"):
        build(dataclasses.replace(settings, kl_penalty_fn_args={"shar": 0.25}))


@pytest.mark.parametrize(
    ("correction", "strategy", "calls"),
    [
        ({"rollout_is": "token"}, "default", 1),
        (
            {"rollout_is": "token", "rollout_rs": "token_k2", "rollout_rs_threshold": 9.0},
            "default",
            1,
        ),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": 9.0}, "default", 1),
        ({"rollout_is": "token"}, "pf_ppo", 1),
    ],
)
def test_a_correction_of_the_same_tokens_is_computed_once(
    correction: dict[str, Any], strategy: str, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []
    correct = composition.correct
    monkeypatch.setattr(composition, "correct", lambda *a: counted.append(1) or correct(*a))
    settings = AlgorithmSettings(
        bypass_old_logprobs=False,
        rollout_correction=CorrectionConfig(**correction),
        sample_strategy=strategy,
    )
    rows = [
        StepRow(
            group="g",
            run=run,
            step=0,
            reward=float(run),
            logprobs=np.array([-1.0, -2.0], np.float32),
            old=np.array([-1.5, -1.0], np.float32),
        )
        for run in range(2)
    ]
    groups = {"g": GroupStats(group="g", rewards=(0.0, 1.0), mean=0.5, std=0.5**0.5)}
    made = build(settings).prepare(StepInputs(rows=rows, groups=groups, step=1, seed=0))
    assert len(counted) == calls
    if "rollout_is" in correction:
        assert made.weights is not None and np.allclose(made.weights[0], [np.exp(-0.5), 2.0])


@pytest.mark.parametrize(
    ("kind", "result", "says"),
    [
        ("advantage_fn", "None", "None: "),
        ("advantage_fn", "[None] * len(x.rows)", "a number for each run"),
        ("advantage_fn", "['a'] * len(x.rows)", "a number for each run"),
        ("advantage_fn", "[1j] * len(x.rows)", "a number for each run"),
        ("sample_strategy", "None", "a list of numbers of runs"),
        ("sample_strategy", "'all'", "a list of numbers of runs"),
        ("sample_strategy", "[0.5]", "a list of numbers of runs"),
        ("sample_strategy", "[2]", "out of bounds"),
        ("policy_loss_fn", "None", "a LossOutput"),
        ("policy_loss_fn", "LossOutput(-x.logprobs)", "a LossOutput"),
        ("policy_loss_fn", "LossOutput(1.0)", "'float' object"),
    ],
)
def test_a_wrong_result_names_the_part_and_what_is_allowed(
    tmp_path: Path, kind: str, result: str, says: str
) -> None:
    file = tmp_path / "parts.py"
    file.write_text(f"from rft import LossOutput\ndef part(x, args): return {result}\n")
    algorithm = build(AlgorithmSettings(**{kind: f"{file}:part"}))
    with pytest.raises(RunFailed, match=rf"algorithm.{kind}: .*:part returned .*{says}") as raised:
        if kind == "policy_loss_fn":
            algorithm.loss(step())
        else:
            rows = [
                StepRow(group="g", run=i, step=0, reward=1.0, logprobs=np.zeros(2, np.float32))
                for i in range(2)
            ]
            stats = GroupStats(group="g", rewards=(1.0, 1.0), mean=1.0, std=0.0)
            algorithm.prepare(StepInputs(rows=rows, groups={"g": stats}))
    assert "; allowed is " in str(raised.value)


def test_a_sample_strategy_may_return_a_mask(tmp_path: Path) -> None:
    (tmp_path / "parts.py").write_text("def part(x, args): return [r.reward > 0 for r in x.rows]")
    rows = [
        StepRow(group="g", run=i, step=0, reward=i, logprobs=np.zeros(2, np.float32))
        for i in range(2)
    ]
    stats = GroupStats(group="g", rewards=(0.0, 1.0), mean=0.5, std=0.7)
    algorithm = build(AlgorithmSettings(sample_strategy=f"{tmp_path}/parts.py:part"))
    assert algorithm.prepare(StepInputs(rows=rows, groups={"g": stats})).selected == [1]


def test_an_async_part_is_refused_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "parts.py").write_text("async def part(x, args): ...")
    with pytest.raises(ConfigError, match=r"parts.py:part' is async"):
        check_args("advantage_fn", f"{tmp_path}/parts.py:part", {})
