"""What a train step's sums come to: the metrics of the policy, of the critic, and of how far the
samplers were.

Knows reports of steps; not where metrics go.  Invariant: a number whose step has nothing to say
about it is left out, never 0.
"""

from __future__ import annotations

from collections.abc import Mapping

from rft.trainer.batch_builder import StepBatch
from rft.trainer.step_result import MISMATCH, StepResult


def step_values(
    batch: StepBatch,
    report: StepResult | None,
    kl_coefs: Mapping[str, float],
    whole_s: float,
    parts_s: Mapping[str, float],
) -> dict[str, float]:
    """Of a train step that took `whole_s` seconds, `parts_s` by what was done in them; no report:
    nothing was trained.
    """
    values = {
        **batch.metrics,
        "perf/step_s": whole_s,
        "perf/tokens_per_s": batch.tokens / parts_s["train"],
    }
    values |= {f"time/{name}_s": value for name, value in parts_s.items()}
    if report is not None:
        values |= numbers(batch, report, kl_coefs)
        values |= {
            "train/finite": float(report.finite),
            "perf/computed_positions": float(report.computed_positions),
        }
        values |= {f"time/train/{name}_s": value for name, value in report.seconds.items()}
    return values


def numbers(
    batch: StepBatch, report: StepResult, kl_coefs: Mapping[str, float]
) -> dict[str, float]:
    """`kl_coefs`: the factors that the step had."""
    values = {
        "train/updates": float(report.updates),
        "train/skipped_updates": float(report.skipped),
    }
    if report.updates + report.skipped:
        values |= _actor(batch, report) | _mismatch(batch, report)
        if "kl_loss" in kl_coefs:
            values["actor/kl_coef"] = kl_coefs["kl_loss"]
    if batch.kl is not None:
        # a part of one's own has none
        factor = {"advantage/kl_coef": kl_coefs["kl_penalty"]} if "kl_penalty" in kl_coefs else {}
        values |= {"advantage/kl": batch.kl, **factor}
    if (critic := report.critic) is not None:
        values |= {
            f"critic/{name}": value / critic.trained_tokens for name, value in critic.sums.items()
        }
        values |= {"critic/grad_norm": critic.grad_norm, "critic/lr": critic.lr}
        values |= {f"time/train/critic_{name}_s": value for name, value in critic.seconds.items()}
    return values


def _actor(batch: StepBatch, report: StepResult) -> dict[str, float]:
    """Means of the loss's numbers.  Rows left out (exactly zero loss) count in the losses; ratios
    are over computed tokens.
    """
    values = {
        "actor/loss": 0.0,
        "actor/pg_loss": 0.0,
        "actor/grad_norm": report.grad_norm,
        "actor/lr": report.lr,
    }
    computed = max(1, report.trained_tokens)
    for name, value in report.sums.items():
        if not name.startswith(MISMATCH):
            values[f"actor/{name}"] = value / (
                batch.tokens if name.endswith("loss") or name == "kl" else computed
            )
    return values | {
        f"actor/{name}": value
        for name, value in report.maxima.items()
        if not name.startswith(MISMATCH)
    }


def _mismatch(batch: StepBatch, report: StepResult) -> dict[str, float]:
    """Ratios of the policy before the step to the samplers, over the tokens that were computed."""
    found = {
        name.removeprefix(MISMATCH): value
        for name, value in report.sums.items()
        if name.startswith(MISMATCH)
    }
    if not (tokens := found.get("tokens", 0.0)):
        return {}
    values = {
        "ratio_mean": found["ratio"] / tokens,
        "ratio_max": report.maxima[f"{MISMATCH}ratio"],
        "ratio_outside": found["outside"] / tokens,
        "ess": found["ratio"] ** 2 / (tokens * found["squares"]),
    }
    if not any(batch.staleness):  # then it is the engines' error alone
        values |= {
            "abs_diff_mean": found["abs_diff"] / tokens,
            "abs_diff_max": report.maxima[f"{MISMATCH}abs_diff"],
        }
    return {MISMATCH + name: value for name, value in values.items()}
