"""The one table of keys that are accepted and do nothing: which they are, why, and which of them a
configuration uses.

Knows names of keys, not what they configure.  Invariant: a configuration that uses none of them
means what it says in full.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from pydantic.fields import FieldInfo

from rft.algorithm.catalog import KINDS, RENAMED, algorithm_defaults, shipped
from rft.config.schema.base import sections
from rft.config.schema.root import RunConfig
from rft.config.schema.walk import all_keys, extra, models
from rft.errors import ConfigError


@dataclass(frozen=True)
class Inert:
    """What happens to a written value that is not the default.

    `why`: the reason, or what to write instead.  `level`: the configuration is refused; a run
    starts with a warning, or with a note.
    """

    why: str
    level: Literal["refused", "warned", "noted"] = "refused"


_GENERATED_ONLY = (
    "the log-prob of every generated token is always kept, and experiences have room for no other"
)
_FOR_TASKS = "is for tasks; rows that are trained on have none"
_FOR_DATA = "is for rows to train on (mode train): buffer.trainer_input.experience_buffer.format"
_STREAMS = (
    "experiences come from the explorer and go to the experience buffer; use "
    "buffer.trainer_input.auxiliary_buffers for others"
)
_ONE_PROCESS = "runs are coroutines of one process; explorer.max_concurrent_runs bounds them"
_ASKER = "whoever asks an auxiliary model says how its answer is sampled"
_ANSWERED = ("max_response_tokens", "min_response_tokens", "repetition_penalty", "ignore_eos")
_PREFIX = (
    "an answer is only what the model writes; ask for that beginning in the prompt, or end a "
    "workflow's prompt_tokens with it"
)
_ROLLOUT = "explorer.rollout_model"
_AUXILIARY = "explorer.auxiliary_models[]"
_TASKS = "buffer.explorer_input.tasksets[]"
_DATA = "buffer.trainer_input.experience_buffer"

TABLE: dict[str, Inert] = {
    "ignore_validator_suggestions": Inert("what is only a suggestion never stops a run", "noted"),
    "model.logprobs": Inert(_GENERATED_ONLY, "warned"),
    f"{_TASKS}.format.reply_prefix": Inert(_PREFIX),
    f"{_TASKS}.format.chosen_key": Inert(_FOR_DATA),
    f"{_TASKS}.format.rejected_key": Inert(_FOR_DATA),
    f"{_TASKS}.format.enable_concatenated_multi_turn": Inert(_FOR_DATA),
    f"{_TASKS}.rollout_args.logprobs": Inert(_GENERATED_ONLY, "warned"),
    f"{_TASKS}.max_retry_times": Inert(
        "rows are read once, at the start, and what cannot be read is named; "
        "explorer.max_retry_times is for runs",
        "warned",
    ),
    f"{_TASKS}.max_retry_interval": Inert("rows are read once, at the start", "warned"),
    f"{_TASKS}.enable_progress_bar": Inert("files are opened, not read through", "warned"),
    "buffer.explorer_input.eval_tasksets[].weight": Inert(
        "an evaluation plays all rows of each of its tasksets", "warned"
    ),
    f"{_DATA}.format.preset": Inert(_FOR_TASKS),
    f"{_DATA}.format.workflow_key": Inert(_FOR_TASKS),
    f"{_DATA}.format.reward_fn_key": Inert(_FOR_TASKS),
    f"{_DATA}.format.reply_prefix": Inert(_PREFIX),
    f"{_DATA}.enable_progress_bar": Inert("nothing is read beforehand", "warned"),
    "buffer.trainer_input.auxiliary_buffers": Inert(
        "only the one that sample_strategy mix names is read, of chats; leave others out"
    ),
    "data_processor.experience_pipeline.inputs": Inert(_STREAMS),
    "data_processor.experience_pipeline.output": Inert(_STREAMS),
    f"{_ROLLOUT}.external_model_config": Inert(
        "the policy is a local model, whose tokens and weights are known; name a server in "
        "explorer.auxiliary_models"
    ),
    f"{_ROLLOUT}.enable_history": Inert("every model call of a run is kept", "noted"),
    f"{_ROLLOUT}.use_v1": Inert("vLLM has no other engine", "noted"),
    **{f"{_AUXILIARY}.{n}": Inert(_ASKER, "warned") for n in _ANSWERED},
    f"{_AUXILIARY}.enable_prompt_truncation": Inert(
        "a prompt that is too long is refused", "warned"
    ),
    f"{_AUXILIARY}.enable_history": Inert("calls of auxiliary models are not trained on", "warned"),
    f"{_AUXILIARY}.use_v1": Inert("vLLM has no other engine", "warned"),
    f"{_AUXILIARY}.fully_sharded_loras": Inert("its weights have no adapter", "warned"),
    f"{_AUXILIARY}.max_cpu_loras": Inert("its weights have no adapter", "warned"),
    "explorer.runner_num": Inert(_ONE_PROCESS, "noted"),
    "explorer.runner_per_model": Inert(_ONE_PROCESS, "noted"),
    "explorer.runner_prepare_concurrency": Inert(_ONE_PROCESS, "noted"),
    "explorer.runner_prepare_max_retries": Inert(_ONE_PROCESS, "noted"),
    "explorer.max_repeat_times_per_runner": Inert(_ONE_PROCESS, "noted"),
    "explorer.concurrent_mode": Inert(_ONE_PROCESS, "noted"),
    "explorer.service_status_check_interval": Inert(
        "new weights are served when they are verified; nothing looks for them", "warned"
    ),
    "explorer.db_url": Inert(
        "answers and rewards are in the experience buffer's ledger: "
        "buffer.trainer_input.experience_buffer.path"
    ),
    "trainer.name": Inert("a run has one trainer; logs call it trainer and its rank", "warned"),
    "trainer.save_strategy": Inert(
        "every rank writes its own file, all at the same time", "warned"
    ),
    "trainer.fix_actor_microbatch_loss_scale": Inert(
        "losses are always divided by the totals of the whole step", "warned"
    ),
    "trainer.enable_preview": Inert(
        "rft buffer shows the rows of any step, and samples of every evaluation are logged",
        "warned",
    ),
    "synchronizer.group_name": Inert("the name is chosen automatically", "noted"),
    "synchronizer.wait_for_checkpoint": Inert("a version is used when it is complete", "noted"),
}
_SAME_KEYS = (  # sections with the keys of another
    (r"^buffer\.explorer_input\.(taskset|eval_tasksets\[\])(?=\.)", _TASKS),
    (r"^data_processor\.task_pipeline\.output(?=\.)", _TASKS),
    (r"^buffer\.trainer_input\.auxiliary_buffers\.\*(?=\.)", _DATA),
)


def inert(path: str) -> Inert | None:
    """The entry of a key of the schema, lists written as name[], mappings as name.*; else that of a
    section around it.
    """
    return TABLE.get(_entry(path))


def _entry(path: str) -> str:
    """The key of TABLE that speaks of `path`; "" for none."""
    for pattern, same in _SAME_KEYS:
        if (found := re.sub(pattern, same, path)) in TABLE:
            return found
    while path and path not in TABLE:
        path = path.rpartition(".")[0].removesuffix("[]")
    return path


def argument(field: FieldInfo) -> Inert | None:
    """The same of an argument of an algorithm's part, where the mark stands beside the argument."""
    why = extra(field, "moot")
    return Inert(why, "warned" if extra(field, "harmless") else "refused") if why else None


def listed() -> list[tuple[str, Inert]]:
    """(key, or "argument of part", entry) of everything that does nothing, for `rft doctor --keys`."""
    keys = [(key, entry) for key in all_keys() if (entry := inert(key)) is not None]
    found = [
        (k.replace("[]", "[i]"), entry)
        for k, entry in keys
        if inert(k.rpartition(".")[0].removesuffix("[]")) is None
    ]
    for (kind, part), model in shipped().items():
        fields = model.model_fields.items()
        found += [
            (f"algorithm.{kind}_args.{name} of {part}", entry)
            for name, field in fields
            if (entry := argument(field))
        ]
    return found


def used(config: RunConfig) -> Iterator[tuple[str, Any, Inert]]:
    """(key, value, entry) of what `config` writes of it, in the order of the schema; of a section
    that is refused whole, once.

    A value that equals the default is not written.
    """
    whole: set[str] = set()
    for key, path, value in _written(config):
        if (around := _entry(path)) not in TABLE:
            continue
        if TABLE[around].level == "refused" and (rest := path.removeprefix(around)).startswith(
            (".", "[]")
        ):
            parts = around.count(".") + 1 + rest.startswith(".*")
            key = ".".join(key.split(".")[:parts])
            value = {}
            if key in whole:
                continue
            whole.add(key)
        yield key, value, TABLE[around]
    yield from _arguments(config)


def _arguments(config: RunConfig) -> Iterator[tuple[str, Any, Inert]]:
    a = config.algorithm
    try:
        base = algorithm_defaults(a.algorithm_type)
    except ConfigError:
        return  # told by `resolve`
    for kind in KINDS:
        part = getattr(a, kind) or getattr(base, kind)
        model = shipped().get((kind, RENAMED.get((kind, part), part)))
        for name, value in getattr(a, f"{kind}_args").items():
            field = model.model_fields.get(name) if model is not None else None
            if field is not None and (entry := argument(field)) and value != field.default:
                yield f"algorithm.{kind}_args.{name}", value, entry


def _written(config: RunConfig) -> Iterator[tuple[str, str, Any]]:
    """(key, path of the schema, value) of every leaf that is not the default; an empty list says as
    much as null.
    """
    for key, path, section in sections(config):
        for name, field in type(section).model_fields.items():
            value = getattr(section, name)
            if section.written(name) and value != () and not any(models(field.annotation)):
                yield f"{key}.{name}".lstrip("."), f"{path}.{name}".lstrip("."), value
