"""The rules of `monitor.alarms`, one function each: series, thresholds, and advice.

Pure: a history and the newest record in, findings out.  A rule decides from its record's role
whether it is due.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from statistics import fmean, median

from rft.monitor.alarms import REWARD, WINDOW, AlarmFinding, History, Rule
from rft.monitor.curves import reward_parts
from rft.types.metrics import MetricRecord

LENGTH = "rollout/response_length/mean"
_RISE = 0.25  # a significant rise of the reward, relative to its spread in a batch
_JUMP = 5.0  # times the median of the previous steps


def reward_divergence(h: History, r: MetricRecord) -> Iterator[AlarmFinding]:
    """Report a training reward that rose since an independent measure (an evaluation or a reward
    part) peaked and fell.

    Evaluations: by more than 2.5 standard errors of the difference, twice in a row.  Parts of the
    reward (names with a spread): by a quarter of their spread, and outside their noise.
    """
    for name in [
        n for n in r.values if r.role == "eval" and n.startswith("eval/") and "/mean@" in n
    ]:
        points = h.series(name)
        if len(points) < 3 or not r.values.get(f"{name.rpartition('/')[0]}/tasks"):
            continue
        peak = max(points[:-2], key=lambda p: p[1])
        limit = 2.5 * 2**0.5 * _standard_error(r, name)
        if all(peak[1] - v > limit for _, v in points[-2:]) and _rose(h, peak[0]):
            yield AlarmFinding(
                "reward_divergence",
                name,
                r.role,
                r.step,
                points[-2][0],
                f"the training reward rose to {h.recent(REWARD) or 0:.3g}, while {name} fell from "
                f"{peak[1]:.3g} (step {peak[0]}) to "
                f"{points[-1][1]:.3g}",
                "The policy may exploit the training reward, or overfit its tasks: read its best "
                "answers; go back to the checkpoint of the "
                "peak.",
            )
    for name in reward_parts(r.values) if r.role == "explorer" else ():
        points = h.series(name)
        if len(points) < 3 * WINDOW:
            continue
        means = [
            fmean(v for _, v in points[i : i + WINDOW]) for i in range(len(points) - WINDOW + 1)
        ]
        best = max(range(len(means) - WINDOW), key=means.__getitem__)
        fall = means[best] - means[-1]
        spread = fmean(v for _, v in h.series(f"{name[:-5]}/std")[: best + WINDOW])
        outside = fall > 4 * h.noise(name) * (2 / WINDOW) ** 0.5
        if fall > _RISE * spread > 0 and outside and _rose(h, points[best + WINDOW - 1][0]):
            since = points[best + WINDOW - 1][0]
            yield AlarmFinding(
                "reward_divergence",
                name,
                r.role,
                r.step,
                since,
                f"the reward rose to {h.recent(REWARD) or 0:.3g}, while its part {name[8:-5]} fell "
                f"from {means[best]:.3g} to "
                f"{means[-1]:.3g}",
                "One part of the reward is earned at the cost of another: read the best answers, "
                "change the weights or the judge's prompt.",
            )


def length_drift(h: History, r: MetricRecord) -> Iterator[AlarmFinding]:
    """Report answers 1.5 times as long (or short) where length is rewarded, 3 times otherwise,
    unless an evaluation improved.
    """
    if r.role != "explorer" or LENGTH not in r.values:
        return
    first, now, clear = h.moved(LENGTH)
    if not clear or abs(now - first) < 8:
        return
    paid = h.recent("rollout/reward_length_corr") or 0.0
    grown = now > first
    factor = 1.5 if (paid > 0.5) == grown and abs(paid) > 0.5 else 3.0
    if (now < first * factor if grown else now * factor > first) or (
        factor == 3.0 and _evals_better(h)
    ):
        return
    since = h.since(LENGTH, lambda v: v >= first * factor if grown else v * factor <= first)
    yield AlarmFinding(
        "length_drift",
        "",
        r.role,
        r.step,
        since,
        f"answers went from {first:.0f} to {now:.0f} tokens; correlation of reward and length "
        f"inside groups {paid:.2f}",
        "Is length rewarded?  Try the reward overlong_penalty, another prompt of the judge, "
        "loss_agg_mode seq-mean-token-sum-norm, or a "
        "lower max_response_tokens.",
    )


def entropy_collapse(h: History, r: MetricRecord) -> Iterator[AlarmFinding]:
    """Report entropy below a tenth of its start with unsolved tasks: a reward below 80 % of its
    range that no longer rises.
    """
    name = "rollout/entropy"
    if r.role != "explorer" or name not in r.values:
        return
    first, now, clear = h.moved(name)
    solved = h.solved()
    if not clear or now > 0.1 * first or solved is None or solved > 0.8 or _rises(h):
        return
    since = h.since(name, lambda v: v <= 0.1 * first)
    yield AlarmFinding(
        "entropy_collapse",
        "",
        r.role,
        r.step,
        since,
        f"the entropy of sampled tokens fell from {first:.3g} to {now:.3g} nats with the reward at "
        f"{solved:.0%} of its range",
        "Nothing new is tried any more: raise clip_range_high, temperature or entropy_coef, lower "
        "the learning rate, or go back to an "
        "earlier checkpoint.",
    )


def no_spread(h: History, r: MetricRecord) -> Iterator[AlarmFinding]:
    """Report 10 steps in which at least 98 % of the groups had equal rewards although not
    everything is right: nothing can be learnt.
    """
    name = "frac_reward_zero_std"
    count = 2 * WINDOW
    if r.role != "explorer" or name not in r.values or len(h.series(name)) < count:
        return
    last = [v for _, v in h.series(name)[-count:]]
    solved = h.solved()
    if fmean(last) < 0.98 or (solved is not None and (solved > 0.9 or _rises(h))):
        return
    since = h.series(name)[-count][0]
    yield AlarmFinding(
        "no_spread",
        "",
        r.role,
        r.step,
        since,
        f"{fmean(last):.0%} of the groups of {count} steps had equal rewards, their mean is "
        f"{h.recent(REWARD) or 0:.3g}",
        "Does the reward read the answers (rft debug reward)?  Is the chat template right (rft "
        "check)?  Else take easier tasks or more "
        "runs of each.",
    )


def identical_answers(h: History, r: MetricRecord) -> Iterator[AlarmFinding]:
    """Report that at least half of the tasks have an answer nearly equal to another task's, 3 steps
    in a row, unlike at the start.
    """
    name = "rollout/copied_answers"
    points = h.series(name)
    if r.role != "explorer" or name not in r.values or len(points) < WINDOW:
        return
    last = [v for _, v in points[-3:]]
    if min(last) >= 0.5 and points[0][1] < 0.25:
        since = points[-3][0]
        yield AlarmFinding(
            "identical_answers",
            "",
            r.role,
            r.step,
            since,
            f"{fmean(last):.0%} of the tasks get an answer that another task got too, almost word "
            f"by word ({points[0][1]:.0%} at the start)",
            "The reward pays for one text whatever the task: read it, and let the judge see the "
            "task and its truth.",
        )


def judge(h: History, r: MetricRecord) -> Iterator[AlarmFinding]:
    """Report a judge that is unreadable in 30 % of its calls, gives no verdict on 10 % of its
    questions, or scores everything the same.
    """
    if r.role != "explorer":
        return
    for name in [
        n[: -len("/calls")] for n in r.values if n.startswith("judge/") and n.endswith("/calls")
    ]:
        calls = _more(h, f"{name}/calls")
        unread = _more(h, f"{name}/unreadable")
        unscored = _more(h, f"{name}/unscored")
        if calls >= 10 and (unread >= 0.3 * calls or unscored >= 0.1 * calls):
            yield AlarmFinding(
                "judge",
                f"{name} unreadable",
                r.role,
                r.step,
                max(r.step - 2, 1),
                f"of {calls:.0f} calls of {name[6:]} in 3 steps {unread:.0f} could not be read and "
                f"{unscored:.0f} questions got no verdict",
                "Look at its replies with rft debug reward; ask for a shorter form, raise its "
                "max_tokens, or take a better model.",
            )
        yield from _saturated(h, r, name[6:])


def _saturated(h: History, r: MetricRecord, judge_name: str) -> Iterator[AlarmFinding]:
    """Report that the spread of a judge's scores fell to a tenth; without a part named after the
    judge, that of the reward.
    """
    parts = [
        n
        for n in r.values
        if n.startswith("rollout/") and n.endswith("/std") and n.split("/")[1] == judge_name
    ]
    name = parts[0] if parts else "rollout/reward/std"
    first, now, clear = h.moved(name)
    if clear and now < 0.1 * first:
        mean = h.recent(f"{name[:-4]}/mean") or 0.0
        since = h.since(name, lambda v: v < 0.1 * first)
        yield AlarmFinding(
            "judge",
            f"{judge_name} saturated",
            r.role,
            r.step,
            since,
            f"{judge_name} gives nearly every answer {mean:.3g}: the spread of its scores fell "
            f"from {first:.3g} to {now:.3g}",
            "It tells answers apart no more: compare with another measure (rft judge), sharpen its "
            "rubric, or let it compare pairs.",
        )


def kl_jump(h: History, r: MetricRecord) -> Iterator[AlarmFinding]:
    """Report a KL of the policy above 5 times the median of the 10 steps before, and 0.1 nats, for
    2 steps.
    """
    for name in [
        n
        for n in ("actor/kl_loss", "advantage/kl", "actor/ppo_kl", "rollout_corr/kl")
        if n in r.values
    ]:
        hint = (
            "The last updates were too large: lower the learning rate or clip_range, or raise "
            "kl_coef."
        )
        yield from _jump("kl_jump", h, r, name, 0.1, hint)


def mismatch_jump(h: History, r: MetricRecord) -> Iterator[AlarmFinding]:
    """Report that engine and trainer disagree 5 times as much as before, and by more than 0.02
    nats, or that half of the effective samples are lost.
    """
    hint = (
        "Engines may serve old or damaged weights, or sample otherwise than is set: see "
        "sync/canary_max_abs, rft log RUN -l warning."
    )
    if "mismatch/abs_diff_mean" in r.values:
        yield from _jump("mismatch_jump", h, r, "mismatch/abs_diff_mean", 0.02, hint)
    points = h.series("mismatch/ess")
    fell = len(points) > WINDOW and max(v for _, v in points[-2:]) < 0.5 < 0.8 < fmean(
        v for _, v in points[:WINDOW]
    )
    if "mismatch/ess" in r.values and fell:
        yield AlarmFinding(
            "mismatch_jump",
            "mismatch/ess",
            r.role,
            r.step,
            points[-2][0],
            f"the effective sample size of a step fell to {points[-1][1]:.2f} of its tokens",
            f"Lower max_staleness, or use rollout_correction.  {hint}",
        )


def _jump(
    kind: str, h: History, r: MetricRecord, name: str, floor: float, hint: str
) -> Iterator[AlarmFinding]:
    points = h.series(name)
    before = [abs(v) for _, v in points[-12:-2]]
    if (
        r.role == "trainer"
        and len(before) >= WINDOW
        and all(abs(v) > max(floor, _JUMP * median(before)) for _, v in points[-2:])
    ):
        since = points[-2][0]
        saw = f"{name} jumped from {median(before):.3g} to {points[-1][1]:.3g}"
        yield AlarmFinding(kind, name, r.role, r.step, since, saw, hint)


def starving(h: History, r: MetricRecord) -> Iterator[AlarmFinding]:
    """Report 10 steps of at least a second in which the trainer waited 95 % of the time, or as many
    versions in which the explorer did.
    """
    count = 2 * WINDOW
    step_s = h.recent("perf/step_s", count)
    wait_s = h.recent("time/wait_s", count)
    if (
        r.role == "trainer"
        and "time/wait_s" in r.values
        and step_s
        and wait_s
        and step_s >= 1.0
        and wait_s > 0.95 * step_s
    ):
        yield AlarmFinding(
            "starving",
            "trainer",
            "",
            r.step,
            h.series("time/wait_s")[-count][0],
            f"the trainer waited for rows in {wait_s / step_s:.0%} of the last {count} steps "
            f"({wait_s:.1f} of {step_s:.1f} s)",
            "Generation is the bottleneck: more engines, more runs at a time, or "
            "synchronizer.sync_offset; see rft timeline RUN.",
        )
    idle = h.recent("explorer/idle_ratio", count)
    if (
        r.role == "synchronizer"
        and "explorer/idle_ratio" in r.values
        and idle
        and idle > 0.95
        and step_s
        and step_s >= 1.0
    ):
        yield AlarmFinding(
            "starving",
            "explorer",
            "",
            r.step,
            h.series("explorer/idle_ratio")[-count][0],
            f"engines waited for weights in {idle:.0%} of the time of {count} versions",
            "Training is the bottleneck: more ranks, or let exploring run ahead "
            "(synchronizer.sync_offset); see rft timeline RUN.",
        )


RULES: dict[str, Rule] = {
    "reward_divergence": reward_divergence,
    "length_drift": length_drift,
    "entropy_collapse": entropy_collapse,
    "no_spread": no_spread,
    "identical_answers": identical_answers,
    "judge": judge,
    "kl_jump": kl_jump,
    "mismatch_jump": mismatch_jump,
    "starving": starving,
}


# ------------------------------------------------------------ shared by the rules


def _standard_error(r: MetricRecord, name: str) -> float:
    """Return the standard error of an evaluation's mean over its tasks, at least that of a
    proportion.
    """
    prefix, _, n = name.partition("/mean@")
    mean = r.values[name]
    tasks = r.values[f"{prefix}/tasks"]
    worst = (max(mean * (1 - mean), 0.0) / tasks) ** 0.5 if 0 <= mean <= 1 else 0.0
    return max(r.values.get(f"{prefix}/sem@{n}", 0.0), worst, 1 / (2 * tasks))


def _rose(h: History, since: int) -> bool:
    """Return whether the training reward is higher than at step `since`: by a quarter of a batch's
    spread, and outside its noise.
    """
    points = h.series(REWARD)
    before = (
        [v for s, v in points if s <= max(since, points[0][0] + WINDOW - 1)][-WINDOW:]
        if points
        else []
    )
    now = h.recent(REWARD)
    spread = h.series("rollout/reward/std")
    if now is None or not before or not spread:
        return False
    rise = now - fmean(before)
    return (
        rise > _RISE * fmean(v for _, v in spread)
        and rise > 4 * h.noise(REWARD) * (2 / WINDOW) ** 0.5
    )


def _rises(h: History) -> bool:
    """Return whether the mean reward of the last steps exceeds that of as many before, outside the
    noise.
    """
    rewards = [v for _, v in h.series(REWARD)]
    return (
        len(rewards) >= 4 * WINDOW
        and fmean(rewards[-2 * WINDOW :]) - fmean(rewards[-4 * WINDOW : -2 * WINDOW])
        > h.noise(REWARD) / WINDOW**0.5
    )


def _evals_better(h: History) -> bool:
    """Return whether any evaluation is above its first value."""
    return any(
        points[-1][1] > points[0][1]
        for n, points in h.points.items()
        if n.startswith("eval/") and "/mean@" in n
    )


def _more(h: History, name: str) -> float:
    """Return the growth of a running total over 3 steps; totals restart with their process."""
    totals = [v for _, v in h.series(name)[-4:]]
    return sum(b - a if b >= a else b for a, b in pairwise(totals))
