"""Protocols between packages, which `rft/launch` connects across Ray or inside one process.

Every call is awaited; every wait has a name and, inside or at the caller, a deadline.  No port
carries a Ray handle or a torch tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from msgspec import Struct, field

from rft.types.adapter import AdapterSpec
from rft.types.completion import Completion, Credit, TokenScores
from rft.types.ids import Version
from rft.types.images import Image, ImagePlace
from rft.types.metrics import Metric, MetricRecord
from rft.types.task import SamplingArgs

NO_IMAGES: Mapping[str, bytes] = {}
MANIFEST_FORMAT = 5  # of checkpoints

# ---------------------------------------------------------------- engine


class GenerateRequest(Struct, frozen=True, kw_only=True):
    """Ask for `n` completions of one prompt: either chat `messages` (rendered by the engine, once)
    or `prompt_tokens`.
    """

    messages: tuple[dict[str, Any], ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    prompt_tokens: tuple[int, ...] = ()
    images: tuple[Image, ...] = ()  # that `messages` show, each once
    # int32: prompt and answer of an earlier call, with which the prompt begins
    prefix_tokens: np.ndarray | None = None
    prefix_places: tuple[ImagePlace, ...] = ()  # of the images in `prefix_tokens`
    prefix_messages: int = (
        0  # number of `messages` that `prefix_tokens` cover; the rest is rendered
    )
    chat_template: str | None = None  # Jinja text; None = the engine's
    chat_template_args: dict[str, Any] = field(default_factory=dict)  # over the engine's
    # chat_template_args set by a client: the template must read each of these names
    strict_template_args: tuple[str, ...] = ()
    # left | right | middle: where to cut a prompt that is too long; error: PromptTooLong
    prompt_truncation: str = "error"
    sampling: SamplingArgs = SamplingArgs()
    # answer with the first token of one of these (the likeliest at temperature 0); its log-prob is
    # relative to them.  Engines without this feature raise ValueError
    choices: tuple[str, ...] = ()
    n: int = 1
    request_id: str = ""
    may_wait: bool = True  # False: a draining engine raises `engine.admission.Draining`


class ChatModel(Protocol):
    """An engine or a pool of engines, for workflows and judges."""

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        """Return `request.n` completions, in order.

        Raises `PromptTooLong` (a ValueError) before generating, `EngineFailed` when broken.
        """
        ...

    async def score(self, row: ScoreRow) -> TokenScores:
        """Score the tokens after the prompt, all under one version of the weights.

        Raises ValueError if the engine cannot, PromptTooLong for a prompt that leaves no room.
        """
        ...

    async def classify(self, messages: Sequence[dict[str, Any]]) -> list[float]:
        """Return the logits of a classification head for a chat.

        Raises ValueError without one.
        """
        ...


class Engine(ChatModel, Protocol):
    """Generates tokens with one weight version at a time.

    Implementations: vllm, transformers, scripted.
    """

    async def pause(self, *, clear_cache: bool = True) -> None:
        """Stop scheduling; running requests continue after `resume`."""
        ...

    async def sleep(self) -> None:
        """While paused: free the device's memory until `load` or `resume`."""
        ...

    async def load(self, manifest: WeightManifest) -> LoadReport:
        """While paused: verify hashes of the staged weights, load and probe them.

        Tokens after it are labelled with `manifest.version`.
        """
        ...

    async def resume(self) -> None: ...

    async def drain(self, timeout_s: float) -> None:
        """Before a pause, while other engines answer: accept only requests with `may_wait`, until
        `admit`, also after `resume`.

        Returns when no request is running, or after `timeout_s`.
        """
        ...

    async def admit(self) -> None:
        """Accept every request again."""
        ...

    async def health(self) -> None:
        """Raise `EngineFailed` when the engine cannot answer."""
        ...

    async def metrics(self) -> list[Metric]: ...

    async def close(self) -> None: ...


@runtime_checkable
class Identified(Protocol):
    """A model with a name by which its answers can be cached."""

    identity: str


@runtime_checkable
class Measured(Protocol):
    """A model with counters since its start, such as a local engine or a pool."""

    async def metrics(self) -> list[Metric]: ...


# ---------------------------------------------------------------- weights


class TensorSpec(Struct, frozen=True, array_like=True):
    """Place of a tensor in the blob: bytes [offset, offset + nbytes), row-major, little-endian."""

    name: str  # Hugging Face parameter name
    dtype: str  # safetensors name: "F32", "BF16", ...
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    xxh3_128: str


class Broadcast(Struct, frozen=True, kw_only=True):
    """One round of sending a version from the trainer to engine workers: meeting point and members.

    Rank 0 is the trainer; the workers of `engines` follow, engine by engine.
    """

    host: str
    port: int
    token: str  # secret prefix of all names at the meeting point
    backend: Literal["gloo", "nccl"]
    bucket_bytes: int | None  # None: tensor by tensor
    overlap: bool  # receive the next bucket while one is verified
    timeout_s: float  # of the meeting, and of each bucket
    changes: bool = False  # send only changed words; workers keep the last version for it
    # set by the synchronizer for each load:
    round: int = 0
    engines: tuple[int, ...] = ()
    workers: tuple[int, ...] = ()  # number of workers of each engine
    place: int = 0  # index of the reader's engine in `engines`

    @property
    def world(self) -> int:
        return 1 + sum(self.workers)

    @property
    def first(self) -> int:
        """The rank of the reader's first worker."""
        return 1 + sum(self.workers[: self.place])


class WeightManifest(Struct, frozen=True, kw_only=True):
    """One published weight version: its tensors, the place of their bytes, and their hashes.

    `path` can be opened by every engine worker on this node: a file, or /proc/PID/fd/N of an
    anonymous memory file.  With `broadcast` the bytes are received instead; a transport of a plugin
    may write any text that its `fetch` reads.  Tied tensors are listed once, under the name in the
    checkpoint; `tied` maps the other name to it.
    """

    version: Version
    transport: str
    path: str
    tensors: tuple[TensorSpec, ...]
    # {"lm_head.weight": "model.embed_tokens.weight"}
    tied: dict[str, str] = field(default_factory=dict)
    broadcast: Broadcast | None = None
    stage_s: float = 0.0  # duration of staging on the trainer's ranks
    adapter: AdapterSpec | None = None  # set: `tensors` are the adapter's, the engine has the base

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)


class PausedRequests(Struct, frozen=True, kw_only=True):
    """Requests of one engine at its pause, and the cost of the pause."""

    requests: int = 0  # running completions
    aborted: int = 0  # of these, lost by the load; each is a fault
    recomputed_tokens: int = 0  # of prompts and answers whose keys and values were dropped
    tokens_per_s: float = 0.0  # generated before the pause


class LoadReport(Struct, frozen=True, kw_only=True):
    """Result of a load on an engine's workers; the synchronizer compares it with the manifest."""

    version: Version
    num_tensors: int
    nbytes: int
    missing: tuple[str, ...] = ()  # tensors of the model that are not in the manifest
    unexpected: tuple[str, ...] = ()  # tensors of the manifest that the model does not have
    bad_hash: tuple[str, ...] = ()
    failed: str = ""  # error of the transport
    probed_layers: int = 0
    # `probe_*`: not of the canary's probes.  Fused layers are tried on random inputs: their largest
    # difference to the published weights, relative to the output's scale
    probe_error: float = 0.0
    probe_worst: str = ""  # the layer with that difference
    moved_bytes: int = 0  # transferred for it
    load_s: float = 0.0  # in all; of this:
    meeting_s: float = 0.0  # forming the process group of a broadcast
    transfer_s: float = 0.0  # waiting for bytes
    verify_s: float = 0.0  # hashing
    probe_s: float = 0.0  # probing layers
    paused: PausedRequests = PausedRequests()  # set by the engine, not by its workers

    @property
    def intact(self) -> bool:
        """Whether all bytes arrived and fit the model."""
        return not (self.failed or self.missing or self.unexpected or self.bad_hash)


class Scorer(Protocol):
    """The trainer, which scores sequences under the weights it published last."""

    async def score(self, rows: Sequence[ScoreRow]) -> list[np.ndarray]:
        """Return log-probs of the tokens after each row's prompt: float32 [T - prompt_length]."""
        ...


class Sender(Protocol):
    """The trainer, which broadcasts a staged version to engine workers (sync_method: nccl)."""

    async def send(self, manifest: WeightManifest) -> None:
        """Send one round.

        Raises WeightSyncFailed naming missing workers, or the error.
        """
        ...

    async def abort_round(self, round: int, reason: str) -> None:
        """Release all waiters of rounds up to `round`."""
        ...


class ScoreRow(Struct, frozen=True, kw_only=True):
    """Tokens to score, from `prompt_length` on.

    `prompt`: the engine renders it and puts its tokens first; `prompt_length` is 0 then.  `chat`
    and `logprobs` are for a teacher with another tokenizer (`rft.engine.spans`).
    """

    tokens: np.ndarray  # int32 [T]
    prompt_length: int
    prompt: GenerateRequest | None = None
    chat: GenerateRequest | None = None  # the prompt of the tokens as messages
    logprobs: np.ndarray | None = None  # float32 [R], those of the policy that wrote the tokens
    top: int = 0  # also return so many most likely tokens at each position
    temperature: float = 1.0
    routed_experts: np.ndarray | None = None  # replace the router's choice, see rft.types.experts
    places: tuple[ImagePlace, ...] = ()  # of the images among the tokens
    images: tuple[Image, ...] = ()  # their files, each once
    rounded: str | None = None  # dtype: compute with its other roundings, to measure the noise


class WeightSync(Protocol):
    """The trainer's view of the synchronizer."""

    async def publish(self, manifest: WeightManifest) -> list[Metric]:
        """Load the version into every engine and verify it with the canary, which calls the scorer.

        Returns when it is served.  Raises WeightSyncFailed naming engine and reason; the version
        before is then served again.
        """
        ...

    async def step_finished(self, step: int, *, finished: bool = False) -> bool:
        """Report that optimizer step `step` is done; `finished`: it was the last.

        Returns True if the explorer waits for these weights: publish them now.
        """
        ...

    async def wait_for_demand(self, step: int) -> bool:
        """Wait for the explorer to demand the weights of `step`, while the trainer waits for rows.

        Returns True on demand (publish them now), False when a step begins.
        """
        ...

    async def step_started(self, step: int) -> None:
        """Report that step `step` begins; wait for devices shared with engines."""
        ...

    async def allow_batch(self, batch: int) -> None:
        """Let explore batch `batch` begin with the served weights, because the next step lacks rows
        (on_short_batch: carry).
        """
        ...


class Assignment(Struct, frozen=True, kw_only=True):
    """An explore batch to play now."""

    batch: int
    version: Version  # expected; may be provisional
    again: bool = False  # another explorer began it, so the buffer may hold some of its groups


class ExploreGate(Protocol):
    """One explorer's view of the coordinator."""

    async def next_batch(
        self, *, lag: int | None, fingerprint: str, total: int | None
    ) -> Assignment | str:
        """Wait for the next batch that may begin, or for the reason (a text) that none will.

        `lag`: all batches before the next but the last `lag` must be closed, because its tasks
        depend on them (None: they do not).  `fingerprint`: of the task order, which all explorers
        share. `total`: number of batches in that order (None: endless).  Raises ConfigError when
        another explorer has another order.
        """
        ...

    async def wait_verified(self, version: Version) -> bool:
        """Wait for the canary of `version`; False if it failed and its rows are never trained."""
        ...

    async def acquire_group(self, batch: int, group: int | None) -> bool:
        """Wait until group `group` (None: a replacement) of explore batch `batch` may start.

        Called only where groups are limited.  Returns False when the trainer is finished; after
        True, call `release_group`.
        """
        ...

    async def release_group(self) -> None:
        """Report that a group acquired with `acquire_group` generates no more."""
        ...

    async def explored(self, batch: int) -> None:
        """Report that all groups of explore batch `batch` are in the buffer."""
        ...

    async def evaluates(self) -> bool:
        """Return whether this explorer evaluates the final weights."""
        ...

    async def wait_final(self) -> Version:
        """Wait until the trainer is finished and its last version is served."""
        ...


# ---------------------------------------------------------------- buffer


class StoredGroup(Struct, frozen=True, array_like=True):
    batch: int
    task: int
    accepted: bool


class TaskOutcome(Struct, frozen=True, array_like=True):
    """Mean reward of one task of a closed explore batch; task selectors use it as its pass rate."""

    batch: int
    task: int  # number in the batch
    taskset: str
    index: int  # row of the taskset
    pass_rate: float  # mean reward of its scored runs
    num_runs: int  # scored runs


class AppendResult(Struct, frozen=True, kw_only=True):
    appended: int
    duplicates: int  # same id, same content: a no-op


class GroupStats(Struct, frozen=True, kw_only=True):
    """Statistics of all scored rows of a group, frozen at the lease (`rft.types.credit`).

    `rewards`, `runs`, `steps`, `lengths`, `credits` and `parts` have one entry per row, by run,
    attempt and step, including rows that were filtered out or leased elsewhere.
    `mean` and `std` (unbiased, 0 for one) are over runs, not rows.
    """

    group: str  # text form of GroupId
    rewards: tuple[float, ...]
    mean: float
    std: float
    runs: tuple[int, ...] = ()  # number of the run; empty: each entry is a run
    steps: tuple[int, ...] = ()  # number in the run
    lengths: tuple[int, ...] = ()  # trained tokens
    credits: tuple[Credit, ...] = ()  # empty: all "run"
    parts: tuple[dict[str, float], ...] = ()  # of the rewards, by name; empty: none has parts


class Lease(Struct, frozen=True, kw_only=True):
    """One train batch.

    Rows are sorted by (batch, task, run, step).
    """

    step: int
    frame: bytes  # the leased experiences, encoded, see types.block
    images: dict[str, bytes] = field(default_factory=dict)  # files of their images, by sha256
    groups: tuple[GroupStats, ...]
    available_after: int = 0  # rows that further steps may lease
    missing: int = 0  # groups (or rows) short of the request; only with on_short_batch: train


class Consumption(Struct, frozen=True, kw_only=True):
    """Rows used so far in a lineage, as its checkpoint manifest records them."""

    num_uses: int
    digest: str  # of all counted uses, see docs/reference/files.md
    cursor: int  # first explore batch with a row neither used nor explained
    mixed: dict[str, int] = field(default_factory=dict)  # uses of rows of other sources, by source


class BufferWriter(Protocol):
    """The explorer's view of the buffer."""

    async def append(
        self,
        frame: bytes,
        *,
        accepted: bool,
        reason: str = "",
        images: Mapping[str, bytes] = NO_IMAGES,
    ) -> AppendResult:
        """Append one group (encoded rows; a failed run is one without tokens) and its image files.

        Returns when durable.

        Rows of a group that is not accepted are discarded for `reason` and never leased; they still
        count as acknowledged.  Raises IdConflict, Fenced.
        """
        ...

    async def room(self, batch: int) -> None:
        """Wait until there is room for explore batch `batch` (capacity)."""
        ...

    async def close_batch(
        self, batch: int, *, accepted: int, expected: int, reasons: dict[str, int]
    ) -> None:
        """Close `batch` after all its groups: `accepted` of `expected` ones can be trained, and
        `reasons` count the rejected ones.
        """
        ...

    async def stored_groups(self, first_batch: int) -> list[StoredGroup]:
        """Return stored groups from `first_batch` on, without orphaned ones."""
        ...

    async def outcomes(self, first_batch: int, end_batch: int) -> list[TaskOutcome]:
        """Return outcomes of scored groups of batches [first_batch, end_batch), rejected ones too,
        orphaned ones not, by batch and task.
        """
        ...

    async def check_taskset_fingerprints(self, fingerprints: dict[str, str]) -> list[str]:
        """Store or compare the fingerprint of each taskset (`eval/NAME`: evaluation tasksets).

        Raises ConfigError for a changed training taskset; returns names of changed evaluation ones.
        """
        ...

    async def finish(self, reason: str) -> None:
        """Announce the last row; a lease that cannot be filled then fails with `reason`."""
        ...


class BufferReader(Protocol):
    """The trainer's view of the buffer."""

    async def lease(
        self,
        step: int,
        *,
        groups: int | None,
        rows: int | None,
        deadline_s: float,
        max_staleness: int | None,
        until: int | None = None,
    ) -> Lease:
        """Lease rows for optimizer step `step` (from 1): `groups` accepted groups or `rows` rows.

        `until`: first explore batch that waits for this step.  If all batches before it are closed
        and rows are missing, `on_short_batch` decides: ShortBatch, a shorter lease
        (`Lease.missing`), or NeedMore.  Raises EndOfData when the explorer finished and no row is
        available, ShortBatch when it finished and too few are, DeadlineExceeded after `deadline_s`,
        Fenced when another trainer took over.
        """
        ...

    async def use(self, step: int, logprobs: bytes | None = None) -> None:
        """Record one use of each row of the lease of `step`.

        Durable on return.

        `logprobs`: the trainer's log-probs (`rft.types.token_logprobs.encode`), stored at the first
        use of each row.
        """
        ...

    async def discard(self, step: int, reason: str) -> None:
        """Discard the rows of the lease of `step`, which is never trained (e.g. "nonfinite")."""
        ...

    async def consumption(self, step: int) -> Consumption:
        """Return the consumption for a manifest of `step`."""
        ...


class EndOfData(Exception):
    """The explorer is done and every row is accounted for; not an error."""


class NeedMore(Exception):
    """A step lacks rows, so explore batch `args[0]` has to begin before it; not an error."""

    @property
    def batch(self) -> int:
        return int(self.args[0])


# ---------------------------------------------------------------- monitor


class MetricSink(Protocol):
    """Collects metrics of explorer, trainer and synchronizer; one process writes them."""

    async def log(self, record: MetricRecord) -> None: ...

    async def samples(self, name: str, step: int, rows: list[dict[str, Any]]) -> None:
        """Log a table of examples, e.g. evaluation answers: {prompt, answer, truth, reward}."""
        ...
