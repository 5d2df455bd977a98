"""Arguments of algorithm parts: what is refused, and what the message says."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rft.algorithm.catalog import (
    BUILT,
    KINDS,
    algorithm_defaults,
    algorithms,
    check_args,
    compares_in_groups,
    shipped,
)
from rft.algorithm.kl import KlArgs
from rft.algorithm.needs import needs
from rft.algorithm.ppo import PpoArgs
from rft.algorithm.settings import AlgorithmSettings
from rft.errors import ConfigError, ConfigErrors
from rft.plugins import REGISTRY


@pytest.mark.parametrize(
    ("kind", "name", "given", "expected"),
    [
        ("policy_loss_fn", "ppo", {"clip_rnge": 0.2}, "_args.clip_rnge.*Did you mean clip_range"),
        (
            "policy_loss_fn",
            "ppo",
            {"clip_ratio_c": 1.0},
            "clip_ratio_c: 1.0: input should be greater than 1",
        ),
        (
            "policy_loss_fn",
            "ppo",
            {"clip_range": "0.2"},
            "clip_range: '0.2': input should be a valid number",
        ),
        ("policy_loss_fn", "ppo", {"clip_range": math.nan}, "finite number"),
        ("policy_loss_fn", "ppo", {"clip_range": 2.0}, "less than or equal to 1"),
        ("policy_loss_fn", "pppo", {}, "unknown policy loss 'pppo'.*Did you mean ppo"),
        (
            "advantage_fn",
            "grpo",
            {"std_threshold": -0.1},
            "std_threshold: -0.1: input should be greater than or equal to 0",
        ),
        (
            "advantage_fn",
            "grpo",
            {"std_cal_level": "all"},
            "std_cal_level: 'all': input should be 'group' or 'batch'",
        ),
        ("advantage_fn", "grpo", {"epsilon": 0.0}, "greater than 0"),
        ("kl_loss_fn", "none", {"kl_coef": 0.1}, "takes no arguments"),
        ("kl_loss_fn", "k2", {"adaptive": 1}, "adaptive: 1: input should be a valid boolean"),
        ("kl_loss_fn", "k2", {"horizon": 0}, "horizon: 0: input should be greater than 0"),
        ("kl_penalty_fn", "none", {"kl_coef": 0.1}, "takes no arguments"),
        ("kl_loss_fn", "full", {}, "not offered.*vocabulary"),
        ("kl_loss_fn", "low_var", {}, "Did you mean low_var_kl"),
        ("entropy_loss_fn", "default", {"entropy_coef": -1.0}, "greater than or equal to 0"),
        (
            "entropy_loss_fn",
            "default",
            {"adaptive": True, "entropy_coef": 0.1, "max_coef": 0.05},
            "entropy_coef 0.1 must be between min_coef 0.0 and max_coef 0.05",
        ),
    ],
)
def test_refused(kind: str, name: str, given: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s)algorithm.{kind}.*{expected}"):
        check_args(kind, name, given)


def test_all_wrong_arguments_are_reported_together() -> None:
    with pytest.raises(ConfigErrors) as caught:
        check_args("policy_loss_fn", "ppo", {"clip_rang": 1, "clip_ratio_c": 0})
    assert {e.key for e in caught.value.errors} == {
        f"algorithm.policy_loss_fn_args.{name}" for name in ("clip_rang", "clip_ratio_c")
    }


def test_clip_bounds_default_to_clip_range() -> None:
    assert (PpoArgs(clip_range=0.3).low, PpoArgs(clip_range=0.3).high) == (0.3, 0.3)
    args = check_args("policy_loss_fn", "ppo", {"clip_range_low": 0, "clip_range_high": 0.28})
    assert isinstance(args, PpoArgs)
    assert (args.low, args.high) == (0.0, 0.28)


def test_every_field_is_documented() -> None:
    undocumented = [
        (n, f)
        for (_, n), model in shipped().items()
        for f, info in model.model_fields.items()
        if not info.description
    ]
    assert not undocumented


def test_every_listed_part_is_registered_with_its_args_and_the_reverse() -> None:
    REGISTRY.scan_package("rft.algorithm")
    registered = {
        (p.kind, p.name): p.args
        for p in REGISTRY.all()
        if p.kind in BUILT and Path(p.source).parent.name == "algorithm"
    }
    assert registered == {k: model for k, model in shipped().items() if k[0] in BUILT}


def test_algorithms_pass_their_own_checks() -> None:
    for d in algorithms().values():
        for kind in KINDS:
            check_args(kind, getattr(d, kind), getattr(d, f"{kind}_args", {}))
    assert all(
        d.repeat_times >= 2 for d in algorithms().values() if compares_in_groups(d.advantage_fn)
    )


def test_algorithm_names() -> None:
    assert algorithm_defaults("dr_grpo").advantage_fn_args == {"norm_by_std": False}
    assert algorithm_defaults("grpo_verl").name == "grpo"
    assert algorithm_defaults("gspo").loss_agg_mode == "run-mean"
    assert algorithm_defaults("dapo").repeat_times == 16
    with pytest.raises(
        ConfigError, match=r"algorithm.algorithm_type: unknown algorithm 'grppo'.*Did you mean grpo"
    ):
        algorithm_defaults("grppo")


@pytest.mark.parametrize(
    ("kind", "name", "defaults"),
    [
        ("advantage_fn", "ppo", {"gamma": 1.0, "lam": 1.0}),
        ("advantage_fn", "opmd", {"opmd_baseline": "mean", "tau": 1.0}),
        ("advantage_fn", "asymre", {"baseline_shift": -0.1}),
        (
            "advantage_fn",
            "gigpo",
            {"omega": 1.0, "fnorm": "none", "env_state_hash_key": "env_state_hash"},
        ),
        ("advantage_fn", "clipv", {"mu": 8.5, "max_frac": 1e-4}),
        ("policy_loss_fn", "gspo", {"clip_range_low": 3e-4, "clip_range_high": 4e-4}),
        (
            "policy_loss_fn",
            "cispo",
            {"clip_range_low": 1.0, "clip_range_high": 0.28, "enable_mask_clip": False},
        ),
        ("policy_loss_fn", "sapo", {"tau_pos": 1.0, "tau_neg": 1.05}),
        (
            "policy_loss_fn",
            "rec",
            {"epsilon_low_prime": 0.6, "epsilon_high_prime": 2.0, "clip_mode": "none"},
        ),
        ("policy_loss_fn", "dpo", {"beta": 0.1, "label_smoothing": 0.0}),
        ("policy_loss_fn", "m2po", {"m2_threshold": 0.04, "log_ratio_clip": 20.0}),
        (
            "kl_penalty_fn",
            "k1",
            {"kl_coef": 0.001, "adaptive": False, "target_kl": 0.1, "horizon": 10000},
        ),
        ("sample_strategy", "pf_ppo", {"reweight_method": "pow", "weight_pow": 2.0}),
    ],
)
def test_documented_defaults(kind: str, name: str, defaults: dict[str, Any]) -> None:
    assert check_args(kind, name, {}).model_dump().items() >= defaults.items()
    with pytest.raises(ConfigError, match=f"algorithm.{kind}_args.nonsense: unknown key"):
        check_args(kind, name, {"nonsense": 1})


def test_needs_nothing_that_is_not_used() -> None:
    assert not needs(AlgorithmSettings()).reference
    off = needs(
        AlgorithmSettings(
            kl_loss_fn="k2", kl_loss_fn_args={"kl_coef": 0.0}, entropy_loss_fn="default"
        )
    )
    assert not off.reference
    assert not off.entropy
    on = needs(
        AlgorithmSettings(
            kl_loss_fn="k2", entropy_loss_fn="default", entropy_loss_fn_args={"entropy_coef": 0.01}
        )
    )
    assert on.reference
    assert on.entropy


def test_checking_loads_no_torch() -> None:
    code = (
        "import sys; from rft.algorithm.catalog import algorithm_defaults, check_args\n"
        "algorithm_defaults('grpo'); check_args('policy_loss_fn', 'ppo', {'clip_range': 0.1})\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_args_do_not_change() -> None:
    with pytest.raises(ValueError, match="frozen"):
        KlArgs().kl_coef = 1.0  # type: ignore[misc]
