"""How the model is spread over ranks and the host, loaded and saved: the `trainer` keys that only the learner's room reads.

Knows no torch.  Invariant: what cannot work is an error here, with its key; what has no effect is a warning.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rft.config.problems import Problems
from rft.config.schema.root import RunConfig
from rft.trainer.settings import ProfilerSettings
from rft.types import rotary

_HOST = ("param_offload", "optimizer_offload", "grad_offload")


def learner(config: RunConfig, run_dir: Path, device: str, world: int, p: Problems) -> dict[str, Any]:
    """Fields of `LearnerSettings`."""
    t = config.trainer
    return {
        **_ranks(config, world, p),
        "offload_policy": _offload(config, device, p),
        "ref_offload": t.ref.param_offload and device == "cuda",
        "activation_offload": _activations(config, device, p),
        "reduce_dtype": t.reduce_dtype,
        "ref_reshard_after_forward": (
            t.reshard_after_forward if t.ref.reshard_after_forward is None else t.ref.reshard_after_forward
        ),
        "external_lib": _library(config, p),
        "override_config": overrides(config, p),
        "use_liger": t.use_liger,
        "fused_logprobs": _fused(config, device, p),
        "compile": t.use_torch_compile,
        "save_contents": t.checkpoint.save_contents,
        "load_contents": _loaded(config, p),
        "profiler": _profiler(config, run_dir, world, p),
    }


def overrides(config: RunConfig, p: Problems | None = None) -> dict[str, Any]:
    """Entries of config.json that are replaced, for trainer and engines; `p` hears what cannot be."""
    m = config.model
    written = {"rope_scaling": m.rope_scaling, "rope_theta": m.rope_theta}
    rope = {name: value for name, value in written.items() if value is not None}
    if p is not None and rope:
        if twice := [name for name in ("rope_parameters", *rope) if name in m.override_config]:
            p.error(f"model.{next(iter(rope))}", f"model.override_config has {twice[0]} too; write one of them", given=written)
        kind = (m.rope_scaling or {}).get("rope_type", (m.rope_scaling or {}).get("type"))
        if m.rope_scaling is not None and kind not in rotary.KINDS:
            p.error("model.rope_scaling", f"needs rope_type: {', '.join(rotary.KINDS[1:])}", given=m.rope_scaling)
    return {**m.override_config, **rope}


def critic_offload(config: RunConfig, device: str, p: Problems) -> bool:
    """Whether the critic lives on the host."""
    c = config.trainer.critic
    wanted = c.param_offload or c.optimizer_offload
    if wanted and device == "cpu":
        p.warn("trainer.critic.param_offload, optimizer_offload: no effect on CPU, where everything is in the host's memory")
    return wanted and device == "cuda"


def trainer(config: RunConfig, device: str, p: Problems) -> dict[str, Any]:
    """Fields of `TrainerSettings`."""
    t = config.trainer
    later = t.checkpoint.async_save
    if later is None:
        later = device == "cuda"
        p.derive("trainer.checkpoint.async_save", later, f"trainer on {device}")
    if t.checkpoint.best_metric is not None and not t.max_checkpoints_to_keep:
        p.warn("trainer.checkpoint.best_metric has no effect: all checkpoints are kept; set trainer.max_checkpoints_to_keep")
    always = "hf_model" in t.checkpoint.save_contents
    if always and t.save_hf_checkpoint == "never":
        p.error(
            "trainer.checkpoint.save_contents",
            "has hf_model, but trainer.save_hf_checkpoint is never; remove one of them",
            given=list(t.checkpoint.save_contents),
        )
    if always:
        p.derive("trainer.save_hf_checkpoint", "always", "hf_model in trainer.checkpoint.save_contents")
    return {
        "save_hf_checkpoint": "always" if always else t.save_hf_checkpoint,
        "async_save": later,
        "best_metric": t.checkpoint.best_metric,
        "best_mode": t.checkpoint.best_mode,
    }


def _ranks(config: RunConfig, world: int, p: Problems) -> dict[str, Any]:
    t = config.trainer
    size, sequence = t.fsdp_size, t.ulysses_sequence_parallel_size
    if size == 0 or (size > 0 and world % size):
        p.error("trainer.fsdp_size", f"is {size}; it must divide the {world} training rank(s), or be -1 for all", given=size)
    if world % sequence:
        p.error(
            "trainer.ulysses_sequence_parallel_size",
            f"is {sequence}; it must divide the {world} training rank(s)",
            given=sequence,
        )
    if sequence > 1 and not (t.share_prompts and t.use_remove_padding and t.critic.use_remove_padding):
        p.error(
            "trainer.ulysses_sequence_parallel_size",
            "needs trainer.share_prompts and use_remove_padding: true, the critic's too; ranks share packed positions, no padded ones",
            given=sequence,
        )
    if t.forward_prefetch and world == 1:
        p.warn("trainer.forward_prefetch has no effect: one rank gathers nothing")
    return {"fsdp_size": size, "sequence_parallel": sequence, "forward_prefetch": t.forward_prefetch}


def _offload(config: RunConfig, device: str, p: Problems) -> bool:
    t = config.trainer
    asked = [name for name in (*_HOST, "offload_policy") if getattr(t, name)]
    if not asked:
        return False
    if device == "cpu":
        p.warn(f"trainer.{', '.join(asked)}: no effect on CPU, where everything is in the host's memory")
        return False
    if not t.offload_policy:
        p.derive("trainer.offload_policy", True, f"trainer.{asked[0]}; FSDP2 keeps all of them on the host or none")
    return True


def _activations(config: RunConfig, device: str, p: Problems) -> bool:
    t = config.trainer
    if not t.enable_activation_offload:
        return False
    if not t.enable_gradient_checkpointing:
        p.error(
            "trainer.enable_activation_offload",
            "needs trainer.enable_gradient_checkpointing: true; what that keeps for the backward pass goes to the host",
            given=True,
        )
    if device == "cpu":
        p.warn("trainer.enable_activation_offload: no effect on CPU, where everything is in the host's memory")
    return True


def _fused(config: RunConfig, device: str, p: Problems) -> bool:
    """Whether the work on a tile of logits is compiled: fused_kernel_backend triton, where kernels are asked for."""
    t = config.trainer
    if t.fused_kernel_backend == "torch":
        if t.use_fused_kernels:
            p.note(
                "trainer.use_fused_kernels with fused_kernel_backend torch: log-probs and entropies are always computed so, by tiles"
            )
        return False
    if not t.use_fused_kernels:
        p.warn("trainer.fused_kernel_backend has no effect: use_fused_kernels is false")
        return False
    if device == "cpu":
        p.error(
            "trainer.fused_kernel_backend", "Triton's kernels run on GPUs; write torch, which works by tiles too", given="triton"
        )
    return True


def _library(config: RunConfig, p: Problems) -> str | None:
    name = config.model.external_lib
    if name is not None and not all(part.isidentifier() for part in name.split(".")):
        p.error("model.external_lib", "is not the name of a Python module, such as my_models.register", given=name)
    elif name is not None:
        p.warn(f"model.external_lib: the module {name} will be imported and can run any code with your rights")
    return name


def _loaded(config: RunConfig, p: Problems) -> tuple[str, ...] | None:
    c = config.trainer.checkpoint
    saved, loaded = c.save_contents, c.load_contents
    if not {"model", "hf_model"} & set(saved):
        p.error("trainer.checkpoint.save_contents", "needs model or hf_model; nothing could be loaded again", given=list(saved))
    if loaded is None:
        return None
    if missing := [name for name in loaded if name not in saved]:
        p.error(
            "trainer.checkpoint.load_contents", f"has {', '.join(missing)}, which save_contents leaves out", given=list(loaded)
        )
    if not {"model", "hf_model"} & set(loaded):
        p.error("trainer.checkpoint.load_contents", "needs model; training would start from other weights", given=list(loaded))
    return tuple("model" if name == "hf_model" else name for name in loaded)


def _profiler(config: RunConfig, run_dir: Path, world: int, p: Problems) -> ProfilerSettings:
    f = config.trainer.profiler
    ranks = tuple(range(world)) if f.all_ranks else (0,) if f.ranks is None else f.ranks
    if wrong := [r for r in ranks if not 0 <= r < world]:
        p.error("trainer.profiler.ranks", f"has {wrong[0]}; there are {world} training rank(s), from 0", given=list(ranks))
    if f.all_ranks and f.ranks is not None:
        p.warn("trainer.profiler.ranks has no effect: all_ranks is true")
    if (f.all_ranks or f.ranks is not None or f.discrete) and not f.steps:
        p.warn("trainer.profiler: no steps are named, so nothing is traced")
    return ProfilerSettings(steps=tuple(f.steps or ()), ranks=ranks, discrete=f.discrete, folder=run_dir / "profile")
