"""What veRL's keys of sampling, rewards and rollout correction do to the result.  As `actions`, of
which it is the other half.

Invariant: it writes at most the keys that its outcome names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rft.extras.migrate.convert.draft import EVAL, TRAIN, ArgumentOutcome, Draft
from rft.extras.migrate.convert.names import (
    ROLLOUT,
    eval_samples,
    shows_images,
    trains_vision,
)
from rft.extras.migrate.convert.rule import (
    Rule,
    choice,
    derived,
    each_set,
    only_if,
    rule,
    switch,
    to,
    via,
    write,
)

if TYPE_CHECKING:
    from rft.extras.migrate.convert.launch import Argument


images = only_if(
    shows_images,
    "no images are expected: the model's name does not say that it reads them",
    each_set("format.image_key"),
)
vision = only_if(
    trains_vision,
    "the vision tower is not trained: there are no images, or an adapter alone is trained",
    to("trainer.train_vision", by=lambda frozen: frozen is not True),
)


_OLD_RS = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}


rejection = to(
    "algorithm.rollout_correction.rollout_rs",
    by=lambda name: _OLD_RS.get(name, name) if isinstance(name, str) else name,
)


@rule("algorithm.rollout_correction.rollout_rs_threshold")
def rejection_bounds(d: Draft, a: Argument) -> ArgumentOutcome:
    """Older veRL has the lower bound in a key of its own."""
    key = "algorithm.rollout_correction.rollout_rs_threshold"
    upper, lower = d.get(key), d.get(f"{key}_lower")
    if upper is None:
        return ArgumentOutcome("ignored", f"has no effect without {key}")
    return write(d, a, (key,), upper if lower is None else f"{lower}_{upper}")


_WORKFLOW = "buffer.explorer_input.default_workflow_type"
_TURNS = f"{ROLLOUT}.multi_turn"
_LOOP = f"{ROLLOUT}.agent.default_agent_loop"
_TOOL_FILES = tuple(f"{sets}[i].workflow_args.tool_config_path" for sets in (TRAIN, EVAL))


def _tools(d: Draft, a: Argument, reason: str) -> ArgumentOutcome:
    if _WORKFLOW in d.overridden:
        return ArgumentOutcome("derived", "played by the workflow that --set names", (_WORKFLOW,))
    return write(d, a, (_WORKFLOW,), "tool_workflow", f"tools are run by tool_workflow{reason}")


@rule(_WORKFLOW)
def agent_loop(d: Draft, a: Argument) -> ArgumentOutcome:
    if a.value == "single_turn_agent":
        return ArgumentOutcome("equal", "asks once")
    if a.value == "tool_agent" or _WORKFLOW in d.overridden:
        return _tools(d, a, "")
    return ArgumentOutcome(
        "refused",
        f"an agent loop is code of veRL's; write a workflow, named by --set {_WORKFLOW}=NAME",
    )


def _tools_alone(d: Draft) -> bool:
    """Whether a file of tools is all that asks for turns: veRL's agent loops read it whatever
    `enable` says.
    """
    return d.stated(f"{_TURNS}.tool_config_path") and not (
        d.stated(f"{_TURNS}.enable") or d.stated(_LOOP)
    )


def turns(d: Draft) -> bool:
    return d.flag(f"{_TURNS}.enable") or d.text(_LOOP) == "tool_agent" or _tools_alone(d)


@rule(_WORKFLOW, *_TOOL_FILES)
def tool_file(d: Draft, a: Argument) -> ArgumentOutcome:
    if _tools_alone(d):
        _tools(d, a, "")
        d.questions.append(
            f"{a.key} is given without multi_turn.enable: tools are offered.  Is that meant?  Else "
            f"leave it out"
        )
    return write(d, a, _TOOL_FILES, a.value)


@rule(_WORKFLOW)
def multi_turn(d: Draft, a: Argument) -> ArgumentOutcome:
    if not d.flag(a.key):
        return ArgumentOutcome("equal", "the workflow decides; a simple one asks once")
    return _tools(d, a, "; --set another one where yours plays the turns")


def rm(rule: Rule) -> Rule:
    return switch("reward_model.enable", "the reward model is off", rule)


rm_enable = switch(
    "reward_model.enable",
    "rewards come from functions",
    derived("one more engine, which scores", "explorer.auxiliary_models"),
)
rm_engine = choice(
    "explorer.auxiliary_models[i].engine_type",
    {"vllm": "vllm"},
    "the {} engine is not offered; use vllm",
)
MANAGER_TARGETS = tuple(f"{sets}[i].reward_fn_args.reward_manager" for sets in (TRAIN, EVAL))


@rule(*MANAGER_TARGETS)
def manager(d: Draft, a: Argument) -> ArgumentOutcome:
    if a.value == "naive":
        return ArgumentOutcome("equal", "one call for each answer")
    if a.value in ("batch", "prime", "dapo", "gdpo"):
        return write(d, a, MANAGER_TARGETS, a.value.replace("gdpo", "dapo"))
    return ArgumentOutcome("refused", "known reward managers: naive, batch, prime, dapo, gdpo")


@rule("algorithm.advantage_fn_args.weights")
def reward_parts(d: Draft, a: Argument) -> ArgumentOutcome:
    """The parts of the reward and their weights, in two keys of veRL's."""
    names, weights = (d.get(f"algorithm.gdpo_reward_{name}") for name in ("keys", "weights"))
    try:
        parts = dict(zip(list.copy(names), weights or [1.0] * len(names), strict=True))
    except (TypeError, ValueError):
        raise d.wrong(a.key, a.value, "a list, as long as gdpo_reward_keys") from None
    return write(d, a, ("algorithm.advantage_fn_args.weights",), parts)


def evaluated(name: str) -> Rule:
    target = f"{EVAL}[i].{'repeat_times' if name == 'n' else f'rollout_args.{name}'}"
    greedy = "do_sample is off: evaluation is greedy"
    written = via("", target)
    return (
        written
        if name == "n"
        else only_if(lambda d: eval_samples(d) or not d.exact, greedy, written)
    )


_OPERATORS = "data_processor.experience_pipeline.operators[i]"
_REWARDS = ("score", "seq_reward", "seq_final_reward")  # metrics of veRL that are the reward itself
FILTER_TARGETS = (f"{_OPERATORS}.name", f"{_OPERATORS}.args", "buffer.max_refill")


@rule(*FILTER_TARGETS)
def filter_groups(d: Draft, a: Argument) -> ArgumentOutcome:
    """Groups whose runs all have the same metric are dropped and replaced."""
    group, _, name = a.key.rpartition(".")
    if not d.flag(f"{group}.enable"):
        return ArgumentOutcome("ignored", "dynamic sampling is off")
    metric = d.text(f"{group}.metric")
    if name == "metric":
        return ArgumentOutcome("derived", f"{group}.enable chooses the operator by it")
    if name == "enable":
        if not metric:
            return ArgumentOutcome(
                "refused",
                f"{group}.metric must say which number is compared: acc, score, seq_reward ...",
            )
        if metric in _REWARDS:
            d.put(f"{_OPERATORS}.name", "reward_std_filter", a.key)
            return ArgumentOutcome(
                "mapped", "groups of equal reward are dropped and replaced", FILTER_TARGETS[:1]
            )
        d.put(f"{_OPERATORS}.name", "dapo_dynamic_sampling", a.key)
        d.put(f"{_OPERATORS}.args.metric_key", metric, f"{group}.metric")
        return ArgumentOutcome(
            "mapped",
            f"groups in which {metric} is above 0 in all or in none are dropped and replaced",
            FILTER_TARGETS[:2],
        )
    if name != "max_num_gen_batches":
        return ArgumentOutcome(
            "refused",
            "dynamic sampling has no such argument; known: enable, metric, max_num_gen_batches",
        )
    most = d.whole(a.key)
    size = d.whole("data.train_batch_size")
    if most <= 0:
        return ArgumentOutcome(
            "ignored",
            "no limit there; here buffer.max_refill, 3 x batch_size where it is not written",
        )
    spare = max(0, most * d.whole("data.gen_batch_size", size) - size) // d.interval
    return write(
        d,
        a,
        FILTER_TARGETS[2:],
        spare,
        f"{most} batches to draw from, less the {size} prompts that are trained",
    )
