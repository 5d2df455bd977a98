"""Loads a causal language model and makes it a policy: micro-batch in, log-probs of its trained tokens out.

Knows transformers and FSDP2; not losses, optimizers or files of a run.
Invariant: what is called is always the outermost module, so FSDP2's hooks run for the output layer and the log-probs too.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from rft.errors import ConfigError, SetupError
from rft.trainer import attention, lean, loading, lora, sharding, tensors, ulysses
from rft.trainer.batch import MicroBatch
from rft.trainer.logprobs import token_logprobs, token_statistics
from rft.trainer.settings import LearnerSettings

_LOGIT_CHANGES = ("final_logit_softcapping", "logit_scale", "logits_scaling")


class Policy(nn.Module):
    """A Hugging Face causal model whose output are log-probs."""

    exact: ClassVar[tuple[str, ...]] = ()  # modules that compute in float32, whatever the rest does

    def __init__(self, lm: Any, chunk_tokens: int) -> None:
        super().__init__()
        self.lm = lm
        self.chunk_tokens, self.fused = chunk_tokens, False
        self.entropy_chunking = self.entropy_checkpointing = True
        self.sequence: ulysses.Group | None = None  # ranks that share each micro-batch
        self.adapter: lora.Adapter | None = None  # what is trained instead of the whole model

    def forward(self, batch: MicroBatch, entropy: bool = False, statistics: bool = False) -> tuple[torch.Tensor | None, ...]:
        """Log-probs float32 [N] of `batch`'s trained tokens, and their entropies if asked.  The output layer sees N positions only.

        `statistics`: all four of `token_statistics`, without gradient.
        """
        share = None if self.sequence is None else self.sequence.share(batch)
        mine = batch if share is None else share.batch
        hidden, head = self.hidden(mine), self.lm.get_output_embeddings()
        given = (hidden, head.weight, mine.targets, mine.temperatures)
        found: tuple[torch.Tensor | None, ...]
        if statistics:
            found = token_statistics(*given, bias=head.bias, chunk_tokens=self.chunk_tokens, fused=self.fused)
        else:
            more = {"whole": entropy and not self.entropy_chunking, "keep_all": entropy and not self.entropy_checkpointing}
            how: dict[str, Any] = {"chunk_tokens": self.chunk_tokens, "entropy": entropy, "fused": self.fused, **more}
            found = token_logprobs(*given, bias=head.bias, **how)
        return found if share is None else tuple(None if x is None else share.gather(x) for x in found)

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
        """Parameters by Hugging Face name, without an adapter's; tied ones once."""
        return {name: p for n, p in self.named_parameters() if (name := self._name(n)) is not None}

    def trainable(self) -> dict[str, nn.Parameter]:
        """What the optimizer changes: the adapter's parameters by their name in its file, else all of `names`."""
        return self.names() if self.adapter is None else self.adapter.parameters()

    def whole(self, name: str, parameter: torch.Tensor) -> torch.Tensor:
        """One of `names` for others to use: whole, and with the adapter added.  A collective where it is sharded."""
        return tensors.full(parameter) if self.adapter is None else self.adapter.merged(name, parameter)

    def buffer_names(self) -> dict[str, torch.Tensor]:
        """Buffers by Hugging Face name."""
        return {name: b for n, b in self.named_buffers() if (name := self._name(n)) is not None}

    def tied(self) -> dict[str, str]:
        """Names that are not in `names()`, each with the name of the same tensor that is."""
        kept = {id(p): name for name, p in self.names().items()}
        every = {self._name(name): p for name, p in self.named_parameters(remove_duplicate=False)}
        return {n: kept[id(p)] for n, p in every.items() if n is not None and n != kept[id(p)]}

    def _name(self, name: str) -> str | None:
        """The Hugging Face name; None for an adapter's."""
        name = name.removeprefix("lm.")
        return name if self.adapter is None else lora.base_name(name)


def load(settings: LearnerSettings, *, trained: bool = True, anchored: bool = False) -> Policy:
    """The model of `settings.model_path` with float32 parameters, on its device, sharded if need be.  Collective.

    Each rank reads its own part of the weights.  `trained` False: a frozen copy (the reference model).  `anchored`: an adapter that is
    read from a folder stays in the model as it was, too.
    """
    folder = Path(settings.model_path)
    if not trained:
        settings = replace(
            settings,
            offload_policy=settings.offload_policy or settings.ref_offload,
            reshard_after_forward=settings.ref_reshard_after_forward,
        )
    if settings.external_lib is not None:
        loading.import_library(settings.external_lib)
    config = loading.config_of(folder, trust_remote_code=settings.trust_remote_code, override=settings.override_config)
    how: dict[str, Any] = {"trust_remote_code": settings.trust_remote_code, "attn_implementation": attention_name(settings)}
    policy = Policy(plain(loading.skeleton(config, **how)), settings.logprob_chunk_tokens)
    by_name = loading.readable_by_name(policy.names(), policy.tied(), folder)
    if not by_name:
        policy = Policy(plain(loading.pretrained(config, folder, **how)), settings.logprob_chunk_tokens)
    if settings.lora is not None:
        policy.adapter = lora.wrap(policy.lm, settings.lora, settings.model_path, anchored=anchored)
    place(policy, settings, trained=trained, fill=folder if by_name else None)
    if policy.adapter is not None:
        policy.adapter.fill(settings.seed)
    return policy


def place(
    policy: Policy, settings: LearnerSettings, *, trained: bool, fill: Path | None, fresh: loading.Fresh | None = None
) -> Policy:
    """Shard `policy`, whose parameters may be on the meta device, give it memory, and fill it from the folder `fill`."""
    if trained and settings.gradient_checkpointing:
        more = {"offload": True} if settings.activation_offload else {}
        policy.lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False}, **more)
    if settings.use_liger:
        loading.use_liger(policy.lm, settings.device)
    elif trained and not settings.compile:  # a compiler joins these operations itself
        lean.apply(policy.lm)
    policy.train(trained).requires_grad_(trained)
    if policy.adapter is not None:
        lora.freeze(policy, policy.adapter)
    policy.sequence, policy.fused = ulysses.group(settings), settings.fused_logprobs
    policy.entropy_chunking, policy.entropy_checkpointing = settings.entropy_chunking, settings.entropy_checkpointing
    if settings.compile:
        _compile(policy, settings)
    if sharding.sharded(settings):
        sharding.shard(policy, settings, _blocks(policy.lm), policy.exact)
    loading.materialise(policy, sharding.storage_device(settings))
    if fill is not None:
        loading.fill(policy.names(), policy.buffer_names(), policy.tied(), fill, fresh)
    return policy


def heads_per_key(policy: Policy) -> int:
    """Query heads that share a key head where attention is computed."""
    config = policy.lm.config.get_text_config()
    heads = config.num_attention_heads
    keys = getattr(config, "num_key_value_heads", None) or heads
    copies = 1 if policy.sequence is None else ulysses.key_copies(heads, keys, policy.sequence.size)
    return int(heads // (keys * copies))


def attention_name(settings: LearnerSettings) -> str:
    """The attention that transformers is asked for.  Raises ConfigError for one that is not installed or does not go with the rest."""
    implementation = settings.attn_implementation
    if settings.share_prompts:
        if implementation not in ("sdpa", "auto"):
            raise ConfigError(f"needs attn_implementation sdpa, not {implementation}", key="trainer.share_prompts", given=True)
        if settings.sequence_parallel > 1:
            attention.register(ulysses.NAME, ulysses.attend, compiled=settings.compile)
            return ulysses.NAME
        attention.register(compiled=settings.compile)
        return attention.NAME
    if settings.sequence_parallel > 1:
        raise ConfigError(
            "ranks share packed positions, and without share_prompts rows are padded; set it to true",
            key="trainer.share_prompts",
            given=False,
        )
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


def _compile(policy: Policy, settings: LearnerSettings) -> None:
    """Compile each layer, for any number of positions.  Raises ConfigError where there is no compiler."""
    if settings.device == "cpu" and not any(map(shutil.which, ("g++", "clang++", os.environ.get("CXX", "c++")))):
        raise ConfigError("no C++ compiler was found; install g++, or write false", key="trainer.use_torch_compile", given=True)
    for block in _blocks(policy.lm):
        block.compile(dynamic=True)


def _blocks(lm: Any) -> list[nn.Module]:
    """The repeated transformer layers: the longest module list."""
    lists = [m for m in lm.modules() if isinstance(m, nn.ModuleList) and len(m)]
    if not lists:
        raise SetupError(f"{type(lm).__name__} has no list of layers to shard")
    return list(max(lists, key=lambda m: sum(1 for _ in m)))
