"""Loads a causal language model and makes it a policy: micro-batch in, log-probs of its trained tokens out.

Knows transformers and FSDP2; not losses, optimizers or files of a run.
Invariant: what is called is always the outermost module, so FSDP2's hooks run for the output layer and the log-probs too.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from rft.errors import ConfigError, SetupError
from rft.trainer import attention, loading
from rft.trainer.batch import MicroBatch
from rft.trainer.logprobs import token_logprobs, token_statistics
from rft.trainer.settings import LearnerSettings

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_LOGIT_CHANGES = ("final_logit_softcapping", "logit_scale", "logits_scaling")


class Policy(nn.Module):
    """A Hugging Face causal model whose output are log-probs."""

    exact: ClassVar[tuple[str, ...]] = ()  # modules that compute in float32, whatever the rest does

    def __init__(self, lm: Any, chunk_tokens: int) -> None:
        super().__init__()
        self.lm = lm
        self.chunk_tokens = chunk_tokens

    def forward(self, batch: MicroBatch, entropy: bool = False, statistics: bool = False) -> tuple[torch.Tensor | None, ...]:
        """Log-probs float32 [N] of `batch`'s trained tokens, and their entropies if asked.  The output layer sees N positions only.

        `statistics`: all four of `token_statistics`, without gradient.
        """
        hidden = self.hidden(batch)
        head = self.lm.get_output_embeddings()
        if statistics:
            return token_statistics(
                hidden, head.weight, batch.targets, batch.temperatures, bias=head.bias, chunk_tokens=self.chunk_tokens
            )
        return token_logprobs(
            hidden,
            head.weight,
            batch.targets,
            batch.temperatures,
            bias=head.bias,
            chunk_tokens=self.chunk_tokens,
            entropy=entropy,
        )

    def hidden(self, batch: MicroBatch) -> torch.Tensor:
        """Last hidden states [N, H], from which `batch`'s trained tokens are predicted."""
        more = {"tree": batch.tree} if batch.tree is not None else {}
        body = getattr(self.lm, self.lm.base_model_prefix)
        out = body(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            attention_mask=batch.attention_mask,
            use_cache=False,
            **more,
        )
        hidden: torch.Tensor = out.last_hidden_state.flatten(0, 1).index_select(0, batch.predict)
        return hidden

    def to_shards(self) -> None:
        """Back to shards after a forward without a backward; FSDP2 keeps the root's parameters whole until then."""
        from torch.distributed.fsdp import FSDPModule

        if isinstance(self, FSDPModule):
            for module in self.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    def names(self) -> dict[str, nn.Parameter]:
        """Parameters by Hugging Face name; tied ones once."""
        return {name.removeprefix("lm."): p for name, p in self.named_parameters()}

    def buffer_names(self) -> dict[str, torch.Tensor]:
        """Buffers by Hugging Face name."""
        return {name.removeprefix("lm."): b for name, b in self.named_buffers()}

    def tied(self) -> dict[str, str]:
        """Names that are not in `names()`, each with the name of the same tensor that is."""
        kept = {id(p): name for name, p in self.named_parameters()}
        every = {name: kept[id(p)] for name, p in self.named_parameters(remove_duplicate=False)}
        return {n.removeprefix("lm."): k.removeprefix("lm.") for n, k in every.items() if n != k}


def load(settings: LearnerSettings, *, trained: bool = True) -> Policy:
    """The model of `settings.model_path` with float32 parameters, on its device, sharded if need be.  Collective.

    Each rank reads its own part of the weights.  `trained` False: a frozen copy (the reference model).
    """
    folder = Path(settings.model_path)
    if settings.external_lib is not None:
        loading.import_library(settings.external_lib)
    config = loading.config_of(folder, trust_remote_code=settings.trust_remote_code, override=settings.override_config)
    how = {"trust_remote_code": settings.trust_remote_code, "attn_implementation": attention_name(settings)}
    policy = Policy(plain(loading.skeleton(config, **how)), settings.logprob_chunk_tokens)
    by_name = loading.readable_by_name(policy.names(), policy.tied(), folder)
    if not by_name:
        policy = Policy(plain(loading.pretrained(config, folder, **how)), settings.logprob_chunk_tokens)
    return place(policy, settings, trained=trained, fill=folder if by_name else None)


def place(
    policy: Policy, settings: LearnerSettings, *, trained: bool, fill: Path | None, fresh: loading.Fresh | None = None
) -> Policy:
    """Shard `policy`, whose parameters may be on the meta device, give it memory, and fill it from the folder `fill`."""
    if trained and settings.gradient_checkpointing:
        policy.lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    policy.train(trained).requires_grad_(trained)
    if sharded(settings):
        _shard(policy, settings)
    loading.materialise(policy, storage_device(settings))
    if fill is not None:
        loading.fill(policy.names(), policy.buffer_names(), policy.tied(), fill, fresh)
    return policy


def storage_device(settings: LearnerSettings) -> str:
    """Where parameters live between uses."""
    return "cpu" if settings.offload_policy else settings.device


def sharded(settings: LearnerSettings) -> bool:
    """Whether FSDP2 is used: with several ranks, or to compute in another dtype than the parameters'.

    One float32 rank has nothing to shard, and FSDP2 would still copy every parameter twice and every gradient three times a step
    (about 1 s of a 5 s step of a 135 M model on two cores).
    """
    return settings.world_size > 1 or settings.dtype != "float32"


def heads_per_key(policy: Policy) -> int:
    config = policy.lm.config.get_text_config()
    return int(config.num_attention_heads // (getattr(config, "num_key_value_heads", None) or config.num_attention_heads))


def join(settings: LearnerSettings, rank: int, rendezvous: str | None) -> None:
    """Join the process group: NCCL on GPUs, gloo on CPU over the loopback, meeting at the file `rendezvous`."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend = "nccl" if settings.device == "cuda" else "gloo"
    if settings.world_size == 1:
        store: Any = dist.HashStore()  # type: ignore[attr-defined]
    elif rendezvous is None:
        raise SetupError(f"{settings.world_size} ranks need a rendezvous file that all of them can open")
    else:
        store = dist.FileStore(rendezvous, settings.world_size)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=settings.world_size, timeout=COLLECTIVE_TIMEOUT)


def attention_name(settings: LearnerSettings) -> str:
    """The attention that transformers is asked for.  Raises ConfigError for one that is not installed or does not go with the rest."""
    implementation = settings.attn_implementation
    if settings.share_prompts:
        if implementation not in ("sdpa", "auto"):
            raise ConfigError(f"needs attn_implementation sdpa, not {implementation}", key="trainer.share_prompts", given=True)
        attention.register()
        return attention.NAME
    return attention.installed(implementation, settings.device, settings.dtype)


def plain(lm: Any) -> Any:
    """`lm` without dropout, if its output is one that the log-probs know."""
    if changed := [k for k in _LOGIT_CHANGES if getattr(lm.config, k, None) not in (None, 1, 1.0)]:
        raise ConfigError(
            f"{type(lm).__name__} changes its logits by {changed[0]}, which the trainer does not support", key="model.model_path"
        )
    for module in lm.modules():  # the engines sample without dropout, so the trainer's log-probs must be without it too
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    return lm


def _shard(policy: Policy, settings: LearnerSettings) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    if settings.dtype == "float16":
        raise ConfigError("float16 needs loss scaling, which the trainer does not have; use bfloat16", key="trainer.param_dtype")
    mesh = init_device_mesh(settings.device, (settings.world_size,))
    low = DTYPES[settings.dtype]
    mixed = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32) if low != torch.float32 else MixedPrecisionPolicy()
    for block in _blocks(policy.lm):
        fully_shard(block, mesh=mesh, reshard_after_forward=settings.reshard_after_forward, mp_policy=mixed)
    for name in policy.exact:
        fully_shard(policy.get_submodule(name), mesh=mesh)
    fully_shard(policy, mesh=mesh, mp_policy=mixed)
    for module in policy.modules():  # losses are local sums over global counts: gradients must be added, never averaged
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)


def _blocks(lm: Any) -> list[nn.Module]:
    """The repeated transformer layers: the longest module list."""
    lists = [m for m in lm.modules() if isinstance(m, nn.ModuleList) and len(m)]
    if not lists:
        raise SetupError(f"{type(lm).__name__} has no list of layers to shard")
    return list(max(lists, key=lambda m: sum(1 for _ in m)))
