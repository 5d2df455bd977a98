"""Turn the sums of a train step into metrics: of the policy, of the critic, and of the mismatch
with the samplers.

Depends on step results, not on the destination of metrics.  Invariant: a metric without data in a
step is left out, never 0.
"""

from __future__ import annotations

from collections.abc import Mapping

from rft.trainer.loop.step_result import MISMATCH, StepResult
from rft.trainer.rows.batch_builder import StepBatch


def step_values(
    batch: StepBatch,
    report: StepResult | None,
    factors: Mapping[str, float],
    whole_s: float,
    parts_s: Mapping[str, float],
) -> dict[str, float]:
    """Return the metrics of a train step that took `whole_s` seconds, of which `parts_s` by phase.

    `report` None: nothing was trained.
    """
    values = {
        **batch.metrics,
        "perf/step_s": whole_s,
        "perf/tokens_per_s": batch.tokens / parts_s["train"],
    }
    values |= {f"time/{name}_s": value for name, value in parts_s.items()}
    if report is not None:
        values |= numbers(batch, report, factors)
        values |= {
            "train/finite": float(report.finite),
            "perf/computed_positions": float(report.computed_positions),
        }
        values |= {f"time/train/{name}_s": value for name, value in report.seconds.items()}
    return values


def numbers(batch: StepBatch, report: StepResult, factors: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of the policy and the critic.  `factors`: those of the step."""
    values = {
        "train/updates": float(report.updates),
        "train/skipped_updates": float(report.skipped),
    }
    if report.updates + report.skipped:
        values |= _actor(batch, report) | _mismatch(batch, report)
        for name in ("kl", "entropy"):
            if (factor := factors.get(f"{name}_loss")) is not None:
                values[f"actor/{name}_coef"] = factor
    if batch.kl is not None:
        # a user's advantage part has no controller
        values["advantage/kl"] = batch.kl
        if (factor := factors.get("kl_penalty")) is not None:
            values["advantage/kl_coef"] = factor
    if (critic := report.critic) is not None:
        values |= {
            f"critic/{name}": value / critic.trained_tokens for name, value in critic.sums.items()
        }
        values |= {"critic/grad_norm": critic.grad_norm, "critic/lr": critic.lr}
        values |= {f"time/train/critic_{name}_s": value for name, value in critic.seconds.items()}
    return values


def _actor(batch: StepBatch, report: StepResult) -> dict[str, float]:
    """Return means of the policy loss's sums.

    Loss terms and KL are divided by all trained tokens, including skipped rows of zero loss; other
    sums by computed tokens.
    """
    values = {
        "actor/loss": 0.0,
        "actor/pg_loss": 0.0,
        "actor/grad_norm": report.grad_norm,
        "actor/lr": report.lr,
    }
    computed = max(1, report.trained_tokens)
    for name, value in report.sums.items():
        of_all_rows = name.endswith("loss") or name == "kl"
        values[f"actor/{name}"] = value / (batch.tokens if of_all_rows else computed)
    values |= {f"actor/{name}": value for name, value in report.maxima.items()}
    return {name: v for name, v in values.items() if not name.startswith(f"actor/{MISMATCH}")}


def _mismatch(batch: StepBatch, report: StepResult) -> dict[str, float]:
    """Return importance ratios of the policy before the step to the samplers, over computed tokens."""
    sums = {
        name.removeprefix(MISMATCH): value
        for name, value in report.sums.items()
        if name.startswith(MISMATCH)
    }
    if not (tokens := sums.get("tokens", 0.0)):
        return {}
    values = {
        "ratio_mean": sums["ratio"] / tokens,
        "ratio_max": report.maxima[f"{MISMATCH}ratio"],
        "ratio_outside": sums["outside"] / tokens,
        "ess": sums["ratio"] ** 2 / (tokens * sums["squares"]),
    }
    if not any(batch.staleness):  # on-policy rows: numerical error of engines
        values |= {
            "abs_diff_mean": sums["abs_diff"] / tokens,
            "abs_diff_max": report.maxima[f"{MISMATCH}abs_diff"],
        }
    return {MISMATCH + name: value for name, value in values.items()}
