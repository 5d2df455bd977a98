"""The terms of a memory estimate, and the constants that are equal for all models.

Depends on neither plans nor models.
"""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20
GIB = 1 << 30
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

# Processes with their imports, before any model, measured on CPU (docs/concepts/memory.md).
TRAINER_PROCESS = 540 * MIB
VLLM_CORE = 730 * MIB
VLLM_KERNELS = 300 * MIB  # kept by oneDNN after many different numbers of rows
VLLM_FRONT = 700 * MIB  # the hosting process, and vLLM's resource tracker
TRANSFORMERS_PROCESS = 600 * MIB
TOKENIZER_ENTRY = 1400  # bytes of one vocabulary entry in a tokenizer
PART_PROCESS = 150 * MIB  # explorer, buffer, coordinator
RAY_AND_LAUNCHER = 1300 * MIB
# On a GPU: memory of the driver and the libraries before the first tensor.  Usual values, not
# measured here.
CUDA_CONTEXT = 600 * MIB
NCCL = 400 * MIB


@dataclass(frozen=True)
class Term:
    """One part of a role's peak.  `shared` bytes belong to several roles and exist once."""

    name: str
    nbytes: int
    how: str
    shared: bool = False


@dataclass(frozen=True, kw_only=True)
class RoleMemory:
    """Peak of one role: all processes of an engine, a trainer rank, or the rest of the run."""

    role: str
    # cpu: resident bytes of its processes; cuda: bytes on each of its GPUs; disk: bytes of files
    device: str
    terms: tuple[Term, ...]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.terms)

    @property
    def own(self) -> int:
        return sum(t.nbytes for t in self.terms if not t.shared)


def size_text(nbytes: int) -> str:
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB else f"{nbytes / MIB:.0f} MiB"


def count_text(parameters: int, item: int) -> str:
    return f"{parameters:,} x {item} bytes"


@dataclass(frozen=True, kw_only=True)
class Moment:
    """Bytes on a rank's device at one moment of a micro-batch, besides weights and optimizer state."""

    name: str
    # FSDP2's unsharded copies of parameters, and unsharded gradients before their reduction
    gathered: int = 0
    activations: int = 0  # stored by the layers for the backward pass
    images: int = 0  # pixels, features, and what the tower stores for the backward pass
    work: int = 0
    gradients: int = 0  # this rank's shards

    @property
    def nbytes(self) -> int:
        return self.gathered + self.activations + self.images + self.work + self.gradients
