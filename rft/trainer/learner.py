"""One rank of the trainer: the model, its optimizer, and what is done with them.

Knows rows, micro-batches and algorithms; not buffers, tasks or the training loop.  Every public method is collective: all ranks call
it together, each with its own share, in a thread of their own.
Invariant: a step whose gradient is not finite changes neither weights nor optimizer state.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from msgspec import Struct

from rft.algorithm.base import Denominators, LossInputs
from rft.algorithm.build import build
from rft.errors import CheckpointInvalid, OutOfMemory, is_out_of_memory
from rft.trainer import batch as batches
from rft.trainer import model as models
from rft.trainer import tensors
from rft.trainer.pack import RankBatch, TrainRow
from rft.trainer.schedule import learning_rate
from rft.trainer.settings import LearnerSettings
from rft.types.ids import Version
from rft.types.ports import WeightManifest

if TYPE_CHECKING:
    from rft.sync.base import Transport

log = logging.getLogger(__name__)

_TOKENIZER_FILES = (
    "*token*.json",
    "*.jinja",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.py",
    "generation_config.json",
    "chat_template*",
)
_IDLE = TrainRow(  # what a rank computes, without effect, where others have one micro-batch more
    tokens=np.zeros(2, np.int32),
    loss_mask=np.array([False, True]),
    logprobs=np.zeros(2, np.float32),
    temperatures=np.ones(2, np.float32),
)


class StepResult(Struct, kw_only=True):
    """What one rank says about a step.  `sums` and `maxima` are of its own rows; the other numbers are the same on all ranks."""

    sums: dict[str, float]
    maxima: dict[str, float]
    trained_tokens: int  # tokens whose loss was computed
    computed_positions: int  # positions the model computed, shared prefixes once
    finite: bool
    grad_norm: float
    lr: float
    seconds: dict[str, float]


class Learner:
    """The model of `settings` on rank `rank`; ranks meet at the file `rendezvous` (needed with more than one)."""

    def __init__(self, settings: LearnerSettings, rank: int = 0, rendezvous: str | None = None) -> None:
        self.settings, self.rank = settings, rank
        if settings.device == "cpu":
            torch.set_num_threads(settings.cpu_threads)
        if settings.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        torch.manual_seed(settings.seed)
        self.algorithm = build(settings.algorithm)
        self._grouped = models.sharded(settings)
        if self._grouped:
            models.join(settings, rank, rendezvous)
        with self._memory("loading the model"):
            self.policy = models.load(settings)
            self.reference = models.load(settings, trained=False) if self.algorithm.needs.reference else None
        o = settings.optim
        self.optimizer = torch.optim.AdamW(
            self.policy.parameters(), lr=o.lr, betas=o.betas, eps=o.eps, weight_decay=o.weight_decay, fused=True
        )
        self._heads_per_key = models.heads_per_key(self.policy)
        self._compute_dtype = models.DTYPES[settings.dtype]

    # ------------------------------------------------------------ training

    def step(self, batch: RankBatch) -> StepResult:
        """Forward, backward and update of train step `batch.step`, on this rank's micro-batches."""
        with self._memory(f"train step {batch.step}"):
            torch.manual_seed(self.settings.seed * 1_000_003 + batch.step)  # no generator state to save: a step has its own seed
            lr = learning_rate(self.settings.optim, batch.step, self.settings.total_steps)
            began = time.perf_counter()
            totals = _Totals()
            for rows in batch.micro_batches:
                self._accumulate(rows, batch, totals)
            sums, maxima = totals.numbers()  # waits for the device
            computed = time.perf_counter()
            norm = self._update(lr)
            seconds = {"forward_backward": computed - began, "update": time.perf_counter() - computed}
        return StepResult(
            sums=sums,
            maxima=maxima,
            trained_tokens=totals.tokens,
            computed_positions=totals.positions,
            finite=bool(np.isfinite(norm)),
            grad_norm=norm,
            lr=lr,
            seconds=seconds,
        )

    def _accumulate(self, rows: Sequence[TrainRow], batch: RankBatch, totals: _Totals) -> None:
        """Add the gradient of one micro-batch."""
        micro, s = self._micro_batch(rows), self.settings
        needs = self.algorithm.needs
        logprobs, entropy = self.policy(micro, needs.entropy)
        if not rows:
            (logprobs * 0).sum().backward()
            return
        x = LossInputs(
            logprobs=logprobs,
            # one update per batch: the policy before it is the one at hand, so recomputing its log-probs costs nothing
            old_logprobs=micro.rollout_logprobs if self.settings.algorithm.bypass_old_logprobs else logprobs.detach(),
            advantages=micro.advantages,
            mask=torch.ones_like(micro.targets, dtype=torch.bool),
            row=micro.row,
            num_rows=micro.num_rows,
            denominators=Denominators(batch.tokens, batch.rows, s.loss_scale_factor or s.max_response_tokens),
            ref_logprobs=self._reference_logprobs(micro),
            entropy=entropy,
            rollout_logprobs=micro.rollout_logprobs,
        )
        out = self.algorithm.loss(x)
        out.loss.backward()
        apart = (logprobs.detach() - micro.rollout_logprobs).abs()
        totals.add({**out.sums, "abs_diff": apart.sum()}, {**out.maxima, "abs_diff": apart.max()}, micro)

    def _reference_logprobs(self, micro: batches.MicroBatch) -> torch.Tensor | None:
        if self.reference is None:
            return None
        with torch.no_grad():
            logprobs: torch.Tensor = self.reference(micro)[0]
        return logprobs

    def _update(self, lr: float) -> float:
        """Clip and apply the gradient; returns its norm.  A norm that is not finite applies nothing."""
        parameters = list(self.policy.parameters())
        for p in parameters:
            if p.grad is None:  # no row had a loss: AdamW still moves by its momentum
                p.grad = torch.zeros_like(p)
        grads = [p.grad for p in parameters if p.grad is not None]
        norm = tensors.full(torch.nn.utils.get_total_norm(grads, foreach=True))
        value = norm.item()
        if np.isfinite(value):
            torch.nn.utils.clip_grads_with_norm_(parameters, self.settings.optim.clip_grad, norm, foreach=True)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(value)

    def score(self, micro_batches: Sequence[Sequence[TrainRow]]) -> list[list[np.ndarray]]:
        """Log-probs of the trained tokens of every row, float32 [tokens], under the weights as they are."""
        scored: list[list[np.ndarray]] = []
        with self._memory("scoring"), torch.no_grad():
            for rows in micro_batches:
                logprobs = self.policy(self._micro_batch(rows))[0].cpu().numpy()
                lengths = [int(r.loss_mask.sum()) for r in rows]
                scored.append(np.split(logprobs, np.cumsum(lengths)[:-1]) if rows else [])
            self.policy.to_shards()
        return scored

    def _micro_batch(self, rows: Sequence[TrainRow]) -> batches.MicroBatch:
        return batches.make(
            rows or [_IDLE],
            share=self.settings.share_prompts,
            heads_per_key=self._heads_per_key,
            dtype=self._compute_dtype,
            device=torch.device(self.settings.device),
        )

    # ------------------------------------------------------------ weights out

    def stage(self, version: Version, transport: Transport | None) -> WeightManifest | None:
        """Hand the full weights to `transport` (rank 0; the others give None and help to gather)."""
        dtype = self._compute_dtype
        given = ((name, tensor.to(dtype)) for name, tensor in self._gathered())
        if transport is None:
            for _ in given:
                pass
            return None
        return transport.stage(version, given, self.policy.tied())

    def export(self, folder: str) -> None:
        """A Hugging Face folder that `from_pretrained` and vLLM load: weights in the base model's own dtype, config, tokenizer."""
        target, source = Path(folder), Path(self.settings.model_path)
        config = json.loads((source / "config.json").read_text())
        dtype = models.DTYPES.get(str(config.get("dtype") or config.get("torch_dtype")), torch.float32)
        if self.rank == 0:
            target.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / "config.json", target / "config.json")
            for given in (source, Path(self.settings.tokenizer_path or source)):  # files of the second one win
                for path in (p for pattern in _TOKENIZER_FILES for p in given.glob(pattern)):
                    shutil.copyfile(path, target / path.name)
        self._write(target / "model.safetensors", self._gathered(), {n: (dtype, p.shape) for n, p in self.policy.names().items()})

    # ------------------------------------------------------------ checkpoints

    def save(self, folder: str, step: int) -> None:
        """Model, optimizer and state after `step`.  Full tensors, gathered one by one, so any number of ranks can load them."""
        target = Path(folder)
        if self.rank == 0:
            target.mkdir(parents=True, exist_ok=True)
        self._write(
            target / "model.safetensors", self._gathered(), {n: (p.dtype, p.shape) for n, p in self.policy.names().items()}
        )
        moments = self._moments()
        specs = {name: (t.dtype, t.shape) for name, t in moments.items()}
        self._write(target / "optimizer.safetensors", ((n, tensors.full(t)) for n, t in moments.items()), specs)
        if self.rank == 0:
            updates = next((int(s["step"].item()) for s in self.optimizer.state.values()), 0)
            (target / "state.json").write_text(json.dumps({"step": step, "updates": updates, "seed": self.settings.seed}))

    def load(self, folder: str) -> None:
        """Go on from a folder that `save` wrote.  Raises CheckpointInvalid naming the file that does not fit."""
        source = Path(folder)
        try:
            state = json.loads((source / "state.json").read_text())
            updates = int(state["updates"])
        except (OSError, ValueError, KeyError) as e:
            raise CheckpointInvalid(f"{source / 'state.json'}: {e}") from e
        tensors.fill(source / "model.safetensors", self.policy.names())
        if updates:
            self._make_moments(updates)
            tensors.fill(source / "optimizer.safetensors", self._moments())

    def close(self) -> None:
        """Leave the process group."""
        if self._grouped and dist.is_initialized():
            dist.destroy_process_group()

    def _gathered(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, p in self.policy.names().items():
            yield name, tensors.full(p)

    def _write(self, path: Path, given: Iterator[tuple[str, torch.Tensor]], specs: dict[str, Any]) -> None:
        tensors.write(path if self.rank == 0 else None, specs, given)

    def _moments(self) -> dict[str, torch.Tensor]:
        """AdamW's running averages by parameter name; empty before the first update."""
        state = self.optimizer.state
        names = self.policy.names()
        return {f"{key}.{name}": state[p][key] for key in ("exp_avg", "exp_avg_sq") for name, p in names.items() if p in state}

    def _make_moments(self, updates: int) -> None:
        for p in self.policy.parameters():
            self.optimizer.state[p] = {
                "step": torch.tensor(float(updates), dtype=torch.float32, device=p.device),
                "exp_avg": torch.zeros_like(p, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(p, requires_grad=False),
            }

    @contextmanager
    def _memory(self, doing: str) -> Iterator[None]:
        try:
            yield
        except (MemoryError, RuntimeError) as e:
            if not is_out_of_memory(e):
                raise
            raise OutOfMemory(self._remedy(doing)) from e

    def _remedy(self, doing: str) -> str:
        return (
            f"trainer rank {self.rank} ran out of {self.settings.device} memory while {doing}.  Lower trainer.max_token_len_per_gpu "
            f"(now {self.settings.max_token_len_per_gpu}), set trainer.enable_gradient_checkpointing: true, or use more ranks."
        )


class _Totals:
    """Metric sums and maxima of a step, kept on the device until they are read once."""

    def __init__(self) -> None:
        self.sums: dict[str, list[torch.Tensor]] = defaultdict(list)
        self.maxima: dict[str, list[torch.Tensor]] = defaultdict(list)
        self.tokens = 0
        self.positions = 0

    def add(self, sums: dict[str, torch.Tensor], maxima: dict[str, torch.Tensor], micro: batches.MicroBatch) -> None:
        for name, value in sums.items():
            self.sums[name].append(value)
        for name, value in maxima.items():
            self.maxima[name].append(value)
        self.tokens += len(micro.targets)
        self.positions += micro.computed

    def numbers(self) -> tuple[dict[str, float], dict[str, float]]:
        return (
            {name: torch.stack(v).double().sum().item() for name, v in self.sums.items()},
            {name: torch.stack(v).max().item() for name, v in self.maxima.items()},
        )
