"""veRL's generation (main_generation, main_generation_server) → mode bench: every row answered, the
answers written and scored.

Its keys are read as those of the ordinary trainer that mean the same (`RENAMED`, `SECTIONS`).
Invariant: every argument has one outcome.
"""

from __future__ import annotations

import posixpath
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rft.extras.migrate.convert import key_groups
from rft.extras.migrate.convert.draft import EVAL, ArgumentOutcome, Draft
from rft.extras.migrate.convert.names import ENGINE, MODEL, ROLLOUT
from rft.extras.migrate.convert.rule import Rule, account, always, among, choice, ignored, to, via
from rft.extras.migrate.convert.rules import rule_of
from rft.extras.migrate.convert.sizes import nodes

if TYPE_CHECKING:
    from rft.extras.migrate.convert.launch import Argument

SECTIONS = {"model": MODEL, "rollout": ROLLOUT}
RENAMED = {
    "data.path": "data.val_files",
    "data.train_files": "data.val_files",
    "data.n_samples": f"{ROLLOUT}.n",
}
OWN: dict[str, Any] = {
    f"{ROLLOUT}.n": 5,
    f"{ROLLOUT}.top_k": 50,
    f"{ROLLOUT}.top_p": 0.7,
    f"{ROLLOUT}.prompt_length": 1536,
    f"{ROLLOUT}.tensor_model_parallel_size": 1,
}
"""Defaults of veRL's generation.yaml that are not those of its trainer; main_generation_server has
the trainer's.
"""
_LENGTHS = {"prompt": "model.max_prompt_tokens", "response": "model.max_response_tokens"}
_SAMPLING = ("temperature", "top_p", "top_k")
RULES: dict[str, Rule] = {
    "data.val_files": via("one taskset per file", f"{EVAL}[i].path", f"{EVAL}[i].split"),
    "data.output_path": via(
        "a folder; one file of JSON lines for each taskset", "monitor.eval_dump_dir"
    ),
    "data.batch_size": ignored("the engine schedules by itself"),
    f"{ROLLOUT}.n": via("", f"{EVAL}[i].repeat_times"),
    **{f"{ROLLOUT}.{name}": via("", f"{EVAL}[i].rollout_args.{name}") for name in _SAMPLING},
    **{f"{ROLLOUT}.{name}_length": via("", target) for name, target in _LENGTHS.items()},
    f"{ROLLOUT}.do_sample": among(
        (True,), always("answers are sampled"), "write temperature=0 for greedy answers"
    ),
    f"{ROLLOUT}.tensor_model_parallel_size": to(f"{ENGINE}.tensor_parallel_size"),
    "trainer.device": choice(
        f"{ENGINE}.device",
        {"cuda": "cuda", "cpu": "cpu"},
        "{} devices are not offered; use cuda or cpu",
    ),
}


def own(arguments: Sequence[Argument]) -> dict[str, Any]:
    """The defaults of the program that has these arguments."""
    return {} if any(a.key.startswith("actor_rollout_ref.") for a in arguments) else OWN


def prepare(d: Draft) -> None:
    """What is written whatever the arguments are."""
    d.put("mode", "bench", "it answers and trains nothing")
    d.put("explorer.eval_on_startup", True, "the model itself is asked")
    d.evals = key_groups.one_taskset_per_file(d, EVAL, "data.val_files")
    d.put(f"{key_groups.INPUT}.default_workflow_type", "simple_workflow", "one answer per prompt")
    d.put(
        f"{EVAL}[i].repeat_times", d.whole(f"{ROLLOUT}.n", 1), key_groups.said_by(d, f"{ROLLOUT}.n")
    )
    for name in _SAMPLING:
        value = d.get(f"{ROLLOUT}.{name}")
        d.put(
            f"{EVAL}[i].rollout_args.{name}",
            -1 if name == "top_k" and value == 0 else value,
            f"{ROLLOUT}.{name}",
        )
    for name, target in _LENGTHS.items():
        key = f"{ROLLOUT}.{name}_length"
        d.put(target, d.whole(key, 512), key_groups.said_by(d, key))
    count, per_node = nodes(d)
    tp = max(1, d.whole(f"{ROLLOUT}.tensor_model_parallel_size"))
    d.put("cluster.node_num", count, "trainer.nnodes")
    d.put("cluster.gpu_per_node", per_node, "trainer.n_gpus_per_node")
    if count > 1:
        d.put("synchronizer.sync_method", "checkpoint", "several nodes")
    d.put(
        f"{ENGINE}.engine_num",
        d.engine_num or max(1, count * per_node // tp),
        "its GPUs / tensor_parallel_size",
    )
    if d.stated("data.output_path"):
        d.put(
            "monitor.eval_dump_dir",
            posixpath.splitext(d.text("data.output_path"))[0],
            "data.output_path",
        )
    d.put("project", "verl", "free choice")
    d.put("name", "generation", "free choice")
    d.note(
        "answers are scored too, by the function that data_source names; main_eval, which scores "
        "stored ones, is not needed"
    )


def finish(d: Draft) -> None:
    d.fill("model.model_path", d.get(f"{MODEL}.path"), "veRL's default")
    d.fill(
        f"{ENGINE}.tensor_parallel_size",
        d.whole(f"{ROLLOUT}.tensor_model_parallel_size"),
        "veRL's default",
    )


def outcome(d: Draft, a: Argument) -> ArgumentOutcome:
    score = (
        {*RULES, a.key} if (rule := RULES.get(a.key) or rule_of(a.key)) is not None else set(RULES)
    )
    if a.key.startswith("actor."):
        return ArgumentOutcome("ignored", "nothing is trained")
    return account(d, a, rule, score)
