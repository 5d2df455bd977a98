"""Keys of Trinity-RFT, of any version, that are spelled differently here or mean nothing here.

Knows names of keys, not the schema.  Invariant: a key that Trinity-RFT accepts is a key of the
schema, is moved to one, is taken out with a warning, or is refused with what to do (`not_offered`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from rft.config.foreign import ForeignKeys, Origins
from rft.config.schema.source import Loc
from rft.errors import ConfigError
from rft.extras.migrate.compat.keys.verl_spellings import put

_INTERNAL = "is filled in by the program itself"
_PLACES = "devices are counted and placed by themselves; rft check prints who sits where"
_OF_MODEL = "is written once, under model"
_ASKER = "whoever asks an auxiliary model says how its answer is sampled"
_ROWS = (
    "follows from the algorithm and from buffer.batch_size, buffer.total_epochs and "
    "buffer.total_steps"
)
_EXPERT = "its rows are read again as often as steps need them"


def _each(section: str, names: str, why: str) -> dict[str, str]:
    return {f"{section}.{name}": why for name in names.split()}


_OF_DATA = "batch_size schema_type tokenizer_path ray_namespace total_epochs total_steps"
IGNORED: dict[str, str] = {
    **_each(
        "algorithm.policy_loss_fn_args",
        "use_dynamic_bsz ppo_mini_batch_size ppo_micro_batch_size_per_gpu ngpus_trainer "
        "train_batch_size_usual train_batch_size_expert",
        "rows are counted by themselves",
    ),
    **_each(
        "algorithm.policy_loss_fn_args",
        "sft_loss_agg_mode grpo_loss_agg_mode",
        "algorithm.loss_agg_mode holds for all rows",
    ),
    "checkpoint_job_dir": "the run lives in <checkpoint_root_dir>/<project>/<group>/<name>",
    "buffer.explorer_output": "experiences go to the experience buffer",
    **_each("buffer", "cache_dir pad_token_id", _INTERNAL),
    "buffer.tokenizer_path": "the model's own is taken; model.tokenizer_path names another",
    **_each("buffer.explorer_input.taskset", f"index is_eval {_OF_DATA}", _ROWS),
    **_each("buffer.explorer_input.*tasksets[[]*]", f"index is_eval {_OF_DATA}", _ROWS),
    **_each("buffer.trainer_input.experience_buffer", f"index is_eval {_OF_DATA}", _ROWS),
    **_each("buffer.trainer_input.auxiliary_buffers.*", f"index {_OF_DATA}", _EXPERT),
    **_each(
        "cluster",
        "auxiliary_model_gpu_num explorer_gpu_num rollout_gpu_num total_gpu_num trainer_gpu_num "
        "trainer_gpu_num_per_node "
        "trainer_node_num",
        _PLACES,
    ),
    **_each(
        "explorer.*",
        "bundle_indices checkpoint_job_dir cuda_visible_devices engine_id gpu_per_engine nnodes "
        "node_rank ray_actor_name ray_namespace "
        "sync_method enable_lora enable_runtime_lora_updating lora_kwargs lora_modules "
        "enable_return_routed_experts",
        _INTERNAL,
    ),
    **_each(
        "explorer.rollout_model",
        "model_path logprobs temperature top_k top_p rope_scaling rope_theta",
        _OF_MODEL,
    ),
    **_each("explorer.auxiliary_models[[]*]", "logprobs temperature top_k top_p", _ASKER),
    "explorer.*.weight_sync_buffer_size": "belongs to SGLang",
    "explorer.api_port": "ports are chosen by themselves",
    "log.save_dir": "logs stand in the run's folder",
    "model.fully_sharded_loras": "explorer.rollout_model.fully_sharded_loras is read",
    "model.max_cpu_loras": "explorer.rollout_model.max_cpu_loras is read",
    "model.lora_configs[[]*].is_dummy": "without path the adapter is a new one",
    "monitor.cache_dir": "metrics stand in the run's folder",
    "service": "Data-Juicer's operators run in this process, with the extra data-juicer",
    "synchronizer.explorer_world_size": _INTERNAL,
    "synchronizer.ray_namespace": _INTERNAL,
    "trainer.megatron": "trainer.trainer_strategy is fsdp2, the one strategy there is",
    "trainer.trust_remote_code": "model.trust_remote_code is read",
}
_NAMES = ("default_workflow_type", "default_eval_workflow_type", "default_reward_fn_type")
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+(?<!\.py)")
MOVED = {
    "algorithm.enable_router_replay": "explorer.rollout_model.router_replay",
    "algorithm.policy_loss_fn_args.loss_agg_mode": "algorithm.loss_agg_mode",
}


class TrinityKeys(ForeignKeys):
    ignored = IGNORED

    def expand(
        self, values: dict[str, Any], origins: Origins, same_layer: Callable[[Loc], bool]
    ) -> list[str]:
        _plugin_paths(values)
        warnings = []
        for theirs, ours in MOVED.items():
            loc: Loc = tuple(theirs.split("."))
            place = values
            for part in loc[:-1]:
                inner = place.get(str(part))
                place = inner if isinstance(inner, dict) else {}
            if loc[-1] not in place:
                continue
            value = place.pop(str(loc[-1]))
            origin = next((o for at, o in origins.items() if at[: len(loc)] == loc), "")
            try:
                put(values, origins, ours, value, loc, origin, same_layer)
            except ConfigError as e:
                raise ConfigError(
                    e.message + (f"  ({origin})" if origin else ""), key=theirs, given=value
                ) from None
            origins.pop(loc, None)
            warnings.append(f"{theirs} is read as {ours}")
        return warnings


def _plugin_paths(value: Any) -> None:
    """Dotted paths of workflows, rewards and operators, pkg.module.Name, as pkg.module:Name."""
    inner = (
        list(value.items())
        if isinstance(value, dict)
        else list(enumerate(value))
        if isinstance(value, list)
        else []
    )
    for name, item in inner:
        if name in _NAMES and isinstance(item, str) and _DOTTED.fullmatch(item):
            value[name] = ":".join(item.rsplit(".", 1))
        elif name == "operators" and isinstance(item, list):
            for operator in item:
                if (
                    isinstance(operator, dict)
                    and isinstance(operator.get("name"), str)
                    and _DOTTED.fullmatch(operator["name"])
                ):
                    operator["name"] = ":".join(operator["name"].rsplit(".", 1))
        else:
            _plugin_paths(item)
