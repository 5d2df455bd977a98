"""The rules behind `monitor.alarms`, one function each: what it reads, from which amount on, and
what to try.

Pure: a history and the newest record in, findings out.  A rule reads only series of its record's
role to decide whether it is due.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from statistics import fmean, median

from rft.monitor.alarms import REWARD, WINDOW, AlarmFinding, History, Rule
from rft.monitor.curves import reward_parts
from rft.types.metrics import MetricRecord

LENGTH = "rollout/response_length/mean"
_RISE = 0.25  # of the spread of rewards in a batch: what counts as more reward
_JUMP = 5.0  # times the median of the steps before


def reward_divergence(h: History, r: MetricRecord) -> Iterator[AlarmFinding]:
    """The training reward has risen since an independent measure was at its best, and that has
    fallen: an evaluation, or a part of it.

    Evaluations: by more than 2.5 standard errors of the difference, twice in a row.  Parts of the
    reward (names with a spread): by a quarter of their spread, and outside their noise.
    """
    for name in [
        n for n in r.values if r.role == "eval" and n.startswith("eval/") and "/mean@" in n
    ]:
        mine = h.of(name)
        if len(mine) < 3 or not r.values.get(f"{name.rpartition('/')[0]}/tasks"):
            continue
        peak = max(mine[:-2], key=lambda p: p[1])
        limit = 2.5 * 2**0.5 * _standard_error(r, name)
        if all(peak[1] - v > limit for _, v in mine[-2:]) and _rose(h, peak[0]):
            yield AlarmFinding(
                "reward_divergence",
                name,
                r.role,
                r.step,
                mine[-2][0],
                f"the training reward rose to {h.recent(REWARD) or 0:.3g}, while {name} fell from "
                f"{peak[1]:.3g} (step {peak[0]}) to "
                f"{mine[-1][1]:.3g}",
                "The policy may exploit the training reward, or overfit its tasks: read its best "
                "answers; go back to the checkpoint of the "
                "peak.",
            )
    for name in reward_parts(r.values) if r.role == "explorer" else ():
        mine = h.of(name)
        if len(mine) < 3 * WINDOW:
            continue
        means = [fmean(v for _, v in mine[i : i + WINDOW]) for i in range(len(mine) - WINDOW + 1)]
        best = max(range(len(means) - WINDOW), key=means.__getitem__)
        fall = means[best] - means[-1]
        spread = fmean(v for _, v in h.of(f"{name[:-5]}/std")[: best + WINDOW])
        outside = fall > 4 * h.noise(name) * (2 / WINDOW) ** 0.5
        if fall > _RISE * spread > 0 and outside and _rose(h, mine[best + WINDOW - 1][0]):
            since = mine[best + WINDOW - 1][0]
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
    """Answers are 1.5 times as long (or short) where length itself is paid, 3 times otherwise; not
    where an evaluation got better.
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
    """Entropy has lost 9 tenths and its tasks are not solved: the reward is below 8 tenths of its
    range, and does not rise any more.
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
    """In 10 steps all groups, or all but 2 %, had equal rewards, and not because everything is
    right: nothing can be learnt.
    """
    name = "frac_reward_zero_std"
    count = 2 * WINDOW
    if r.role != "explorer" or name not in r.values or len(h.of(name)) < count:
        return
    last = [v for _, v in h.of(name)[-count:]]
    solved = h.solved()
    if fmean(last) < 0.98 or (solved is not None and (solved > 0.9 or _rises(h))):
        return
    since = h.of(name)[-count][0]
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
    """Half of the tasks or more have an answer that is nearly that of another task, 3 steps in a
    row; not where it was so at the start.
    """
    name = "rollout/copied_answers"
    mine = h.of(name)
    if r.role != "explorer" or name not in r.values or len(mine) < WINDOW:
        return
    last = [v for _, v in mine[-3:]]
    if min(last) >= 0.5 and mine[0][1] < 0.25:
        since = mine[-3][0]
        yield AlarmFinding(
            "identical_answers",
            "",
            r.role,
            r.step,
            since,
            f"{fmean(last):.0%} of the tasks get an answer that another task got too, almost word "
            f"by word ({mine[0][1]:.0%} at the start)",
            "The reward pays for one text whatever the task: read it, and let the judge see the "
            "task and its truth.",
        )


def judge(h: History, r: MetricRecord) -> Iterator[AlarmFinding]:
    """A judge cannot be read in 3 of 10 calls, leaves a tenth of its questions without a verdict,
    or gives everything the same score.
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
    """The spread of what a judge gives is a tenth of what it was; of the whole reward where no part
    is named after the judge.
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
    """A KL of the policy is 5 times the median of the 10 steps before it, and above 0.1 nats, for 2
    steps.
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
    """Engine and trainer disagree 5 times as much as before, and by more than 0.02 nats; or half of
    the effective samples are lost.
    """
    hint = (
        "Engines may serve old or damaged weights, or sample otherwise than is set: see "
        "sync/canary_max_abs, rft log RUN -l warning."
    )
    if "mismatch/abs_diff_mean" in r.values:
        yield from _jump("mismatch_jump", h, r, "mismatch/abs_diff_mean", 0.02, hint)
    mine = h.of("mismatch/ess")
    fell = len(mine) > WINDOW and max(v for _, v in mine[-2:]) < 0.5 < 0.8 < fmean(
        v for _, v in mine[:WINDOW]
    )
    if "mismatch/ess" in r.values and fell:
        yield AlarmFinding(
            "mismatch_jump",
            "mismatch/ess",
            r.role,
            r.step,
            mine[-2][0],
            f"the effective sample size of a step fell to {mine[-1][1]:.2f} of its tokens",
            f"Lower max_staleness, or use rollout_correction.  {hint}",
        )


def _jump(
    kind: str, h: History, r: MetricRecord, name: str, floor: float, hint: str
) -> Iterator[AlarmFinding]:
    mine = h.of(name)
    before = [abs(v) for _, v in mine[-12:-2]]
    if (
        r.role == "trainer"
        and len(before) >= WINDOW
        and all(abs(v) > max(floor, _JUMP * median(before)) for _, v in mine[-2:])
    ):
        since = mine[-2][0]
        saw = f"{name} jumped from {median(before):.3g} to {mine[-1][1]:.3g}"
        yield AlarmFinding(kind, name, r.role, r.step, since, saw, hint)


def starving(h: History, r: MetricRecord) -> Iterator[AlarmFinding]:
    """10 steps of a second or more in which the trainer waited 95 % of the time; or as many
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
            h.of("time/wait_s")[-count][0],
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
            h.of("explorer/idle_ratio")[-count][0],
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


# ------------------------------------------------------------ what rules share


def _standard_error(r: MetricRecord, name: str) -> float:
    """Of an evaluation's mean over its tasks; if it was not reported, that of a proportion over as
    many tasks.
    """
    prefix, _, n = name.partition("/mean@")
    mean = r.values[name]
    tasks = r.values[f"{prefix}/tasks"]
    worst = (max(mean * (1 - mean), 0.0) / tasks) ** 0.5 if 0 <= mean <= 1 else 0.0
    return max(r.values.get(f"{prefix}/sem@{n}", 0.0), worst, 1 / (2 * tasks))


def _rose(h: History, since: int) -> bool:
    """Whether the training reward is higher than at step `since`: by a quarter of a batch's spread,
    and outside its noise.
    """
    mine = h.of(REWARD)
    before = (
        [v for s, v in mine if s <= max(since, mine[0][0] + WINDOW - 1)][-WINDOW:] if mine else []
    )
    now = h.recent(REWARD)
    spread = h.of("rollout/reward/std")
    if now is None or not before or not spread:
        return False
    rise = now - fmean(before)
    return (
        rise > _RISE * fmean(v for _, v in spread)
        and rise > 4 * h.noise(REWARD) * (2 / WINDOW) ** 0.5
    )


def _rises(h: History) -> bool:
    """Whether the reward of the last steps is above that of as many before them, outside the noise
    of one step.
    """
    mine = [v for _, v in h.of(REWARD)]
    return (
        len(mine) >= 4 * WINDOW
        and fmean(mine[-2 * WINDOW :]) - fmean(mine[-4 * WINDOW : -2 * WINDOW])
        > h.noise(REWARD) / WINDOW**0.5
    )


def _evals_better(h: History) -> bool:
    """Whether any evaluation is above its first value."""
    return any(
        mine[-1][1] > mine[0][1]
        for n, mine in h.points.items()
        if n.startswith("eval/") and "/mean@" in n
    )


def _more(h: History, name: str) -> float:
    """What a running total grew by over 3 steps; totals begin anew with the process that counts
    them.
    """
    mine = [v for _, v in h.of(name)[-4:]]
    return sum(b - a if b >= a else b for a, b in pairwise(mine))
