"""Load a causal language model as a policy: micro-batch in, log-probs of its trained tokens out.

Depends on transformers and FSDP2, not on losses, optimizers or files of a run.
Invariant: callers always call the outermost module, so FSDP2's hooks run for the output layer and
the log-probs too.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method

from rft.engine.forwards import body_of
from rft.engine.routers import Routers
from rft.engine.weights import saved_buffers
from rft.errors import ConfigError, SetupError
from rft.plugins import import_library
from rft.trainer.model import (
    attention,
    image_rows,
    loading,
    lora,
    recompute,
    sharding,
    tensors,
    ulysses,
)
from rft.trainer.model.balance import RouterLogits, probabilities
from rft.trainer.model.batch import MicroBatch
from rft.trainer.model.logprobs import token_logprobs, token_statistics
from rft.trainer.model.state_layers import StateLayers
from rft.trainer.rows.pack import TrainRow
from rft.trainer.settings import LearnerSettings
from rft.types import row_layout
from rft.types.row_layout import AskedLayout

log = logging.getLogger(__name__)


class Policy(nn.Module):
    """A Hugging Face causal model that outputs log-probs."""

    exact: ClassVar[tuple[str, ...]] = ()  # modules that always compute in float32
    # methods that callers use besides `forward`
    outermost: ClassVar[tuple[str, ...]] = ("reference_outputs", "choices")

    def __init__(self, lm: Any, chunk_tokens: int) -> None:
        super().__init__()
        self.lm = lm
        self.chunk_tokens = chunk_tokens
        self.fused = False
        self.entropy_chunking = self.entropy_checkpointing = True
        self.sequence: ulysses.SequenceGroup | None = None  # ranks that share each micro-batch
        # prescribes the experts that an engine chose, and records chosen experts
        self.routers: Routers | None = None
        self.router_logits: RouterLogits | None = None
        self.adapter: lora.Adapter | None = None  # trained instead of the full model
        self.head = row_layout.head(lm.config.to_dict())
        self.states = StateLayers(lm)

    def forward(
        self,
        batch: MicroBatch,
        entropy: bool = False,
        statistics: bool = False,
        balance: bool = False,
        top: bool = False,
    ) -> tuple[torch.Tensor | None, ...]:
        """Return log-probs float32 [N] of `batch`'s trained tokens, and their entropies or None.

        The output layer computes N positions only.  `top`: append the log-probs float32 [N, k + 1]
        at the batch's `top_ids`, and of all others together.  `statistics`: return all four of
        `token_statistics`, without gradient.  `balance`: append the router probabilities of each
        expert, float32 [E].
        """
        if balance:
            assert self.router_logits is not None, "the settings say so"
            self.router_logits.begin()
        share = None if self.sequence is None else self.sequence.share(batch)
        share_batch = batch if share is None else share.batch
        hidden = self.hidden(share_batch)
        head = self.lm.get_output_embeddings()
        inputs = (hidden, head.weight, share_batch.targets, share_batch.temperatures)
        tiles: dict[str, Any] = {
            "bias": head.bias,
            "chunk_tokens": self.chunk_tokens,
            "fused": self.fused,
            "head": self.head,
        }
        outputs: tuple[torch.Tensor | None, ...]
        if statistics:
            outputs = token_statistics(*inputs, **tiles)
        else:
            one_tile = entropy and not self.entropy_chunking
            keep_all = entropy and not self.entropy_checkpointing
            outputs = token_logprobs(
                *inputs,
                **tiles,
                ids=share_batch.top_ids if top else None,
                entropy=entropy,
                one_tile=one_tile,
                keep_all=keep_all,
            )
            outputs = outputs if top else outputs[:2]
        if share is not None:
            outputs = tuple(None if x is None else share.gather(x) for x in outputs)
        if not balance or self.router_logits is None:
            return outputs
        given_by_routers = probabilities(self.router_logits.take(), share_batch.counts)
        return (*outputs, given_by_routers if share is None else share.add(given_by_routers))

    def choices(self, batch: MicroBatch) -> torch.Tensor:
        """Return how often each expert is chosen at this rank's positions of `batch`: float32 [E]."""
        assert self.routers is not None and batch.counts is not None, "the settings say so"
        share_batch = batch if self.sequence is None else self.sequence.share(batch).batch
        with self.routers.recorded():
            self.hidden(share_batch)
        assert share_batch.counts is not None
        chosen = self.routers.chosen
        none = torch.zeros(self.routers.sizes.experts, device=chosen.device)
        return none.index_add_(
            0, chosen.flatten(), share_batch.counts[:, None, None].expand_as(chosen).flatten()
        )

    def hidden(self, batch: MicroBatch) -> torch.Tensor:
        """Return the last hidden states [N, H] that predict `batch`'s trained tokens."""
        more = {} if batch.tree is None else {"tree": batch.tree}
        self.states.begin(batch.tree)
        if self.routers is not None:
            self.routers.prescribe(batch.experts)
        hidden: torch.Tensor
        if batch.images is not None:
            hidden = image_rows.hidden_states(self.lm, batch)
        else:
            hidden = body_of(self.lm)(
                input_ids=batch.input_ids,
                position_ids=batch.position_ids,
                attention_mask=batch.attention_mask,
                use_cache=False,
                **more,
            ).last_hidden_state
        return hidden.flatten(0, 1).index_select(0, batch.predict)

    def reference_outputs(self, inputs: Sequence[Mapping[str, torch.Tensor]]) -> list[torch.Tensor]:
        """Return logits of transformers' own forward in eval mode for each of `inputs`, with
        `input_ids` int64 [S, W].

        Logits are [S, W, V] in float32, or in float64 for a float64 model.
        """
        logits = [self.lm(**names, use_cache=False).logits for names in inputs]
        return [x if x.dtype == torch.float64 else x.float() for x in logits]

    def numbers(self, batch: MicroBatch) -> torch.Tensor:
        """Return the numbers that a proof compares with separate rows: log-probs, float32 [N]."""
        logprobs: torch.Tensor = self(batch)[0]
        return logprobs

    @staticmethod
    def read(out: torch.Tensor, row: TrainRow) -> torch.Tensor:
        """Return the same numbers, float32 [L], from the logits [W, V] of one row."""
        at = torch.from_numpy(row.loss_mask.nonzero()[0]).to(out.device)
        targets = torch.from_numpy(row.tokens).to(out.device, torch.int64)[at]
        temperatures = torch.as_tensor(row.temperatures, device=out.device).expand(len(row.tokens))[
            at, None
        ]
        return (out[at - 1] / temperatures).log_softmax(-1).gather(1, targets[:, None])[:, 0]

    def to_shards(self) -> None:
        """Reshard after a forward without a backward, which leaves FSDP2's root unsharded."""
        from torch.distributed.fsdp import FSDPModule

        if isinstance(self, FSDPModule):
            for module in self.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    def names(self) -> dict[str, nn.Parameter]:
        """Return parameters by Hugging Face name, without the adapter's; tied parameters once."""
        return {name: p for n, p in self.named_parameters() if (name := self._name(n)) is not None}

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters: the adapter's by file name, else all of `names`."""
        return self.names() if self.adapter is None else self.adapter.parameters()

    def gathered(
        self,
        name: str,
        parameter: torch.Tensor,
        dtype: torch.dtype | None = None,
        device: str | None = None,
    ) -> torch.Tensor:
        """Return a parameter of `names` unsharded, with the adapter merged.  Collective if sharded.

        `dtype`, `device`: see `tensors.full`.
        """
        if self.adapter is None:
            return tensors.full(parameter, dtype, device)
        merged = self.adapter.merged(name, parameter)
        return merged if dtype is None else merged.to(dtype)

    def buffer_names(self) -> dict[str, torch.Tensor]:
        """Return buffers by Hugging Face name."""
        return {name: b for n, b in self.named_buffers() if (name := self._name(n)) is not None}

    def saved_buffers(self) -> dict[str, torch.Tensor]:
        """Return the buffers that a checkpoint stores besides `names`, by Hugging Face name."""
        return saved_buffers(self.lm)

    def tied(self) -> dict[str, str]:
        """Return names missing in `names()`, each with the name in `names()` of the same tensor."""
        name_of = {id(p): name for name, p in self.names().items()}
        every = {self._name(name): p for name, p in self.named_parameters(remove_duplicate=False)}
        return {
            n: name_of[id(p)] for n, p in every.items() if n is not None and n != name_of[id(p)]
        }

    def _name(self, name: str) -> str | None:
        """Return the Hugging Face name; None for a parameter of the adapter."""
        name = name.removeprefix("lm.")
        return name if self.adapter is None else lora.base_name(name)


_P = TypeVar("_P", bound=Policy)


def load(settings: LearnerSettings, *, trained: bool = True, anchored: bool = False) -> Policy:
    """Return the model of `settings` with float32 parameters, on its device, sharded if needed.

    Collective; each rank reads its own part of the weights.  `trained` False: a frozen copy (the
    reference model).  `anchored`: also keep the initial adapter of a folder in the model.
    """
    if not trained:
        settings = replace(
            settings,
            offload_policy=settings.offload_policy or settings.ref_offload,
            reshard_after_forward=settings.ref_reshard_after_forward,
        )
    import_library(settings.external_lib)
    policy, fill = built(Policy, settings)
    if settings.lora is not None:
        policy.adapter = lora.wrap(policy.lm, settings.lora, settings.model_path, anchored=anchored)
    if trained and (settings.router_replay or settings.router_aux_loss_coef):
        policy.routers = Routers(policy.lm)
    if trained and settings.router_aux_loss_coef:
        policy.router_logits = RouterLogits(policy.lm)
    place(policy, settings, trained=trained, fill=fill)
    if policy.adapter is not None:
        policy.adapter.fill(settings.seed)
    return policy


def built(kind: type[_P], settings: LearnerSettings, fresh: str = "") -> tuple[_P, Path | None]:
    """Return a model without weights, and the folder to fill it from; None: transformers already
    loaded the weights.

    `fresh`: prefix of parameter names that no file has.
    """
    folder = Path(settings.model_path)
    config = loading.config_of(
        folder, trust_remote_code=settings.trust_remote_code, override=settings.override_config
    )
    trust = settings.trust_remote_code
    lm = loading.skeleton(
        config, trust_remote_code=trust, attn_implementation=attention_name(settings)
    )
    attention.switch(lm, lm.config._attn_implementation)
    model = kind(without_dropout(lm), settings.logprob_chunk_tokens)
    due = {name: p for name, p in model.names().items() if not (fresh and name.startswith(fresh))}
    if loading.readable(lm, due, model.tied(), folder):
        return model, folder
    log.warning(
        "%s: its weights have other names than the model's; every rank loads all of them before it "
        "keeps its part",
        folder,
    )
    lm = loading.pretrained(
        config, folder, trust_remote_code=trust, attn_implementation=lm.config._attn_implementation
    )
    attention.switch(lm, lm.config._attn_implementation)
    return kind(without_dropout(lm), settings.logprob_chunk_tokens), None


def place(
    policy: Policy,
    settings: LearnerSettings,
    *,
    trained: bool,
    fill: Path | None,
    fresh: loading.Fresh | None = None,
) -> Policy:
    """Shard `policy`, allocate its meta parameters, and fill it from the folder `fill`."""
    if trained and settings.gradient_checkpointing:
        if not policy.lm.supports_gradient_checkpointing:
            raise ConfigError(
                f"is true, and transformers does not offer it for {type(policy.lm).__name__}; write "
                f"false, and a smaller trainer.max_token_len_per_gpu where memory is short",
                key="trainer.enable_gradient_checkpointing",
                given=True,
            )
        more = {"offload": True} if settings.activation_offload else {}
        policy.lm.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False}, **more
        )
    if settings.use_liger:
        loading.use_liger(policy.lm, settings.device)
    elif trained and not settings.compile:  # a compiler fuses these operations itself
        recompute.apply(policy.lm)
    _deterministic(policy)
    policy.requires_grad_(trained)
    tower = image_rows.tower(policy.lm)
    if settings.train_vision and not tower:
        raise ConfigError(
            f"{type(policy.lm).__name__} has no vision tower; write false",
            key="trainer.train_vision",
            given=True,
        )
    for parameter in tower:
        parameter.requires_grad_(trained and settings.train_vision)
    if policy.adapter is not None:
        lora.freeze(policy, policy.adapter)
    policy.sequence = ulysses.group(settings)
    policy.fused = settings.fused_logprobs
    policy.entropy_chunking = settings.entropy_chunking
    policy.entropy_checkpointing = settings.entropy_checkpointing
    if settings.compile:
        _compile(policy, settings)
    if settings.sharded:
        sharding.shard(policy, settings, list(layers(policy.lm)), policy.exact)
        for name in policy.outermost:
            register_fsdp_forward_method(policy, name)
    loading.materialise(policy, sharding.storage_device(settings), settings.device)
    if fill is not None:
        loading.fill(policy.lm, policy.names(), policy.buffer_names(), policy.tied(), fill, fresh)
    return policy


def attention_name(settings: LearnerSettings) -> str:
    """Return the name of transformers' attention implementation for `settings`.

    Raises ConfigError if it is not installed or does not fit the other settings.
    """
    layout = settings.row_layout
    if settings.attn_implementation == "eager" and layout != "padded":
        raise ConfigError(
            "needs attn_implementation auto, sdpa or flash_attention_2, not eager.  Write padded, "
            "or auto",
            key=row_layout.KEY,
            given=layout,
        )
    kernel = attention.installed(settings.attn_implementation, settings.device, settings.dtype)
    if layout != "padded":
        ours = attention.TREES[kernel]
        if settings.sequence_parallel > 1:
            ours = (f"{ours[0]}_sequence", partial(ulysses.attend, ours[1]))
        return attention.register(*ours, compiled=settings.compile)
    if settings.sequence_parallel > 1:
        raise ConfigError(
            "ranks that share a micro-batch share packed positions, and these rows are padded.  "
            "Set ulysses_sequence_parallel_size to 1",
            key=row_layout.KEY,
            given=layout,
        )
    return "sdpa" if kernel == "varlen" else kernel


def plain_attention(lm: Any, settings: LearnerSettings) -> str:
    """Return transformers' attention implementation for padded rows of `lm`."""
    name = attention_name(replace(settings, row_layout="padded", sequence_parallel=1))
    return "eager" if name == "sdpa" and not lm._supports_sdpa else name


def lay_out(policy: Policy, settings: LearnerSettings, layout: AskedLayout) -> None:
    """Let `policy`, whose layout is that of `settings`, compute micro-batches in `layout` from now
    on, also in the backward pass.
    """
    if layout == "padded":
        name = plain_attention(policy.lm, settings)
    else:
        name = attention_name(settings)
    if policy.lm.config._attn_implementation != name:
        attention.switch(policy.lm, name)


def without_dropout(lm: Any) -> Any:
    """Disable the dropout of `lm`; return `lm`."""
    # engines sample without noise, so the trainer's log-probs must not have noise either
    for module in lm.modules():
        noises = [
            name
            for name, value in vars(module).items()
            if isinstance(value, float) and _is_noise(name)
        ]
        for name in [*noises, *(["p"] if isinstance(module, nn.Dropout) else [])]:
            setattr(module, name, 0.0)
    return lm


def _is_noise(name: str) -> bool:
    # router jitter acts in training mode only; in eval mode phimoe uses it as a threshold
    return "drop" in name


def _deterministic(policy: Policy) -> None:
    """Set eval mode, without dropout and noise, as engines compute; modules that checkpoint
    activations stay in training mode, which they need for it.
    """
    for module in policy.eval().modules():
        if vars(module).get("gradient_checkpointing") is True:
            module.training = True


def _compile(policy: Policy, settings: LearnerSettings) -> None:
    """Compile each layer for any number of positions.  Raises ConfigError without a compiler."""
    if settings.device == "cpu" and not any(
        map(shutil.which, ("g++", "clang++", os.environ.get("CXX", "c++")))
    ):
        raise ConfigError(
            "no C++ compiler was found; install g++, or write false",
            key="trainer.use_torch_compile",
            given=True,
        )
    for mixer in policy.states.mixers:  # its shapes change with every micro-batch
        mixer.forward = torch.compiler.disable(mixer.forward)
    for block in layers(policy.lm):
        block.compile(dynamic=True)


def layers(lm: Any) -> nn.ModuleList:
    """Return the repeated transformer layers of the text model: its longest module list not nested
    in another (as experts are).
    """
    lists = {
        name: m
        for name, m in lm.get_decoder().named_modules()
        if isinstance(m, nn.ModuleList) and len(m)
    }
    if not lists:
        raise SetupError(f"{type(lm).__name__} has no list of layers to shard")
    return max(
        (m for name, m in lists.items() if not any(name.startswith(f"{n}.") for n in lists)),
        key=len,
    )
