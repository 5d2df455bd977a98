"""The seams between rooms.  Rooms code against these; `rft/launch` connects them, across Ray or
inside one process.

Every call is awaited, every wait inside has a deadline and a name.  No port carries a Ray handle or
a torch tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from msgspec import Struct, field

from rft.types.adapter import AdapterSpec
from rft.types.completion import Completion, Credit
from rft.types.ids import Version
from rft.types.metrics import Metric, MetricRecord
from rft.types.task import SamplingArgs

MANIFEST_FORMAT = 5  # of checkpoints

# ---------------------------------------------------------------- engine


class GenerateRequest(Struct, frozen=True, kw_only=True):
    """Ask for `n` completions of one prompt: either chat `messages` (rendered by the engine, once)
    or `prompt_tokens`.
    """

    messages: tuple[dict[str, Any], ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    prompt_tokens: tuple[int, ...] = ()
    # int32: prompt and answer of the call before, which the prompt begins with;
    prefix_tokens: np.ndarray | None = None
    # number of `messages` that these tokens cover; only what follows is rendered
    prefix_messages: int = 0
    chat_template: str | None = None  # Jinja text; None = the engine's
    chat_template_args: dict[str, Any] = field(default_factory=dict)  # over the engine's
    # names of chat_template_args that a client chose: the template must read each
    strict_template_args: tuple[str, ...] = ()
    # left | right | middle: where a prompt that is too long is cut; error: PromptTooLong
    prompt_truncation: str = "error"
    sampling: SamplingArgs = SamplingArgs()
    # the answer is the first token of one of these; at temperature 0 the likelier one, and its
    choices: tuple[str, ...] = ()
    n: int = 1  # log-prob is that among them.  Engines that cannot do so raise ValueError
    request_id: str = ""
    # False: an engine that drains refuses it with `engine.admission.Draining`, so that another is
    # asked
    may_wait: bool = True


class ChatModel(Protocol):
    """What workflows and judges see of an engine or a pool of engines."""

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        """`request.n` completions, in order.  Raises `PromptTooLong` (a ValueError) before
        generating, `EngineFailed` when broken.
        """
        ...

    async def logprobs(self, row: ScoreRow) -> np.ndarray:
        """float32 [len(tokens) - prompt_length]: log-probs of given tokens after the prompt,
        natural log.

        Raises ValueError where the engine cannot say (`engine.base.no_logprobs`).
        """
        ...

    async def classify(self, messages: Sequence[dict[str, Any]]) -> list[float]:
        """Raw scores (logits) of a model with a classification head for a whole chat.  Raises
        ValueError where it has none.
        """
        ...


class Engine(ChatModel, Protocol):
    """Generates tokens with one weight version at a time.  Implementations: vllm, transformers,
    scripted.
    """

    async def pause(self, *, clear_cache: bool = True) -> None:
        """Stop scheduling; running requests are kept and go on after `resume`."""
        ...

    async def sleep(self) -> None:
        """While paused: give the device's memory back, for one who shares it; `load` and `resume`
        take it again.
        """
        ...

    async def load(self, manifest: WeightManifest) -> LoadReport:
        """While paused: verify the staged weights' hashes, load them, probe them, and label what
        follows with `manifest.version`.
        """
        ...

    async def resume(self) -> None: ...

    async def drain(self, timeout_s: float) -> None:
        """Before a pause, while other engines answer: take only requests that may wait, until
        `admit`; also after `resume`.

        Returns when nothing is under way any more, or after `timeout_s`.
        """
        ...

    async def admit(self) -> None:
        """Take every request again."""
        ...

    async def health(self) -> None:
        """Raises `EngineFailed` when the engine cannot answer any more."""
        ...

    async def metrics(self) -> list[Metric]: ...

    async def close(self) -> None: ...


@runtime_checkable
class Identified(Protocol):
    """A model with a name by which its answers can be cached."""

    identity: str


@runtime_checkable
class Measured(Protocol):
    """A model that counts what it does, as local engines and pools do."""

    async def metrics(self) -> list[Metric]:
        """Counted from its start; those of several engines are reduced by their names."""
        ...


# ---------------------------------------------------------------- weights


class TensorSpec(Struct, frozen=True, array_like=True):
    """Where one tensor lies in the blob: bytes [offset, offset + nbytes), row-major, little-endian."""

    name: str  # Hugging Face parameter name
    dtype: str  # safetensors name: "F32", "BF16", ...
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    xxh3_128: str


class Broadcast(Struct, frozen=True, kw_only=True):
    """How a version that is sent reaches the engines: where trainer and workers meet, and who takes
    part in this round.

    Rank 0 is the trainer; the workers of `engines` follow, engine by engine.
    """

    host: str
    port: int
    # begins the names of everything that is agreed at the meeting point; no stranger guesses it
    token: str
    backend: Literal["gloo", "nccl"]
    bucket_bytes: int | None  # None: tensor by tensor
    overlap: bool  # the next bucket is under way while one is verified
    timeout_s: float  # of the meeting, and of each bucket
    # the workers keep the version, so that of the next one only what changed is sent
    changes: bool = False
    round: int = 0  # this and what follows: set by the synchronizer for each load
    engines: tuple[int, ...] = ()
    workers: tuple[int, ...] = ()  # of each of them
    place: int = 0  # which of them reads this

    @property
    def world(self) -> int:
        return 1 + sum(self.workers)

    @property
    def first(self) -> int:
        """The rank of the reader's first worker."""
        return 1 + sum(self.workers[: self.place])


class WeightManifest(Struct, frozen=True, kw_only=True):
    """One published weight version: which tensors, where the bytes are, and how to tell that they
    are whole.

    `path` can be opened by every engine worker on this node: a file, or /proc/PID/fd/N of an
    anonymous memory file.  With `broadcast` the bytes are not read there but received; for a
    transport from outside it is what its `fetch` understands. Tied tensors are listed once, under
    the name the checkpoint uses; `tied` maps the other name to it.
    """

    version: Version
    transport: str
    path: str
    tensors: tuple[TensorSpec, ...]
    # {"lm_head.weight": "model.embed_tokens.weight"}
    tied: dict[str, str] = field(default_factory=dict)
    broadcast: Broadcast | None = None
    stage_s: float = 0.0  # how long the trainer's ranks took for it
    # `tensors` are those of an adapter alone: the engine has the base
    adapter: AdapterSpec | None = None

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)


class HeldRequests(Struct, frozen=True, kw_only=True):
    """What one engine was doing when it was paused, and what the pause costs."""

    requests: int = 0  # completions under way
    aborted: int = 0  # of them, those that were gone after the load; every one is a fault
    # of prompts and answers whose keys and values are to be computed again
    recomputed_tokens: int = 0
    tokens_per_s: float = 0.0  # generated until then: what every second of the pause loses


class LoadReport(Struct, frozen=True, kw_only=True):
    """What an engine's workers say after a load; the synchronizer compares it with the manifest."""

    version: Version
    num_tensors: int
    nbytes: int
    missing: tuple[str, ...] = ()  # tensors of the model that were not in the manifest
    unexpected: tuple[str, ...] = ()  # tensors of the manifest that the model does not have
    bad_hash: tuple[str, ...] = ()
    failed: str = ""  # why the bytes did not arrive
    probed_layers: int = 0
    # max abs difference of packed layers against the published weights, relative to the output's
    # scale
    probe_error: float = 0.0
    probe_worst: str = ""  # the layer with that difference
    moved_bytes: int = 0  # that came for it
    load_s: float = 0.0  # all of it; of this:
    meeting_s: float = 0.0  # until the group of a broadcast stood
    transfer_s: float = 0.0  # waiting for bytes
    verify_s: float = 0.0  # hashes
    probe_s: float = 0.0  # layers against the published weights
    held: HeldRequests = HeldRequests()  # said by the engine, not by its workers

    @property
    def whole(self) -> bool:
        """Whether the model was touched."""
        return not (self.failed or self.missing or self.unexpected or self.bad_hash)


class Scorer(Protocol):
    """The trainer, asked for log-probs of given sequences under the weights it published last."""

    async def score(self, rows: Sequence[ScoreRow]) -> list[np.ndarray]:
        """For each row float32 [len(tokens) - prompt_length]: log-probs of the tokens after the
        prompt.
        """
        ...


class Sender(Protocol):
    """The trainer, asked to send a version that it has staged to those who are asked to load it
    (sync_method: nccl).
    """

    async def send(self, manifest: WeightManifest) -> None:
        """One round; returns when everything was sent.  Raises WeightSyncFailed that names who did
        not come, or what broke.
        """
        ...

    async def abandon(self, round: int, reason: str) -> None:
        """Nobody waits any more in this round or an earlier one for those who have not come."""
        ...


class ScoreRow(Struct, frozen=True, kw_only=True):
    tokens: np.ndarray  # int32 [T]
    prompt_length: int
    temperature: float = 1.0
    # to go through instead of the model's own choice, see rft.types.experts
    routed_experts: np.ndarray | None = None
    # by the trainer: with other roundings than usual, of this type; what they do is its noise
    rounded: str | None = None


class WeightSync(Protocol):
    """The trainer's view of the synchronizer."""

    async def publish(self, manifest: WeightManifest) -> list[Metric]:
        """Every engine loads the version, and the canary verifies it (it calls the scorer back).
        Returns when it counts as served.

        Raises WeightSyncFailed, naming engine and reason, when that cannot be reached; the weights
        before are then served again.
        """
        ...

    async def step_finished(self, step: int, *, finished: bool = False) -> bool:
        """Tell that optimizer step `step` is done (also when it is not published); `finished` = no
        more steps come.

        True: the explorer waits for these weights, publish them now.
        """
        ...

    async def wait_for_demand(self, step: int) -> bool:
        """Where weights move when the explorer asks: nothing is trained since `step`, because rows
        are waited for.

        Waits until these weights are asked for (True: publish them now) or a step begins (False).
        """
        ...

    async def step_started(self, step: int) -> None:
        """Step `step` begins.  Returns when the trainer may have the devices that it shares with
        engines.
        """
        ...

    async def allow_batch(self, batch: int) -> None:
        """Let explore batch `batch` begin under the weights that are served: the next step lacks
        rows (on_short_batch: carry).
        """
        ...


class Assignment(Struct, frozen=True, kw_only=True):
    """An explore batch to play now.  `again`: another explorer has begun it before, so the buffer
    may hold some of its groups.
    """

    batch: int
    version: Version  # to expect; it may be provisional
    again: bool = False


class ExploreGate(Protocol):
    """One explorer's view of the coordinator: which batches it plays, when, and which of its rows
    count.
    """

    async def next_batch(
        self, *, lag: int | None, fingerprint: str, total: int | None
    ) -> Assignment | str:
        """Wait for the next batch that may begin; a text says why none is left.

        `lag`: all batches but so many before it are closed by then, because the choice of its tasks
        depends on them; None: it does not. `fingerprint`: of the order of the tasks, which all
        explorers share.  `total`: how many batches that order has (None: no end). Raises
        ConfigError when another explorer has another order.
        """
        ...

    async def wait_verified(self, version: Version) -> bool:
        """Wait for the canary of `version`: True, rows that it wrote count; False, this attempt
        failed and they never count.
        """
        ...

    async def acquire_group(self, batch: int, group: int | None) -> bool:
        """Wait until group `group` of explore batch `batch` may start; None = one that replaces
        another.  Asked only where groups count.

        False = the trainer is finished.  After True `release_group` has to follow.
        """
        ...

    async def release_group(self) -> None:
        """Tell that a group for which `acquire_group` said True generates no more."""
        ...

    async def explored(self, batch: int) -> None:
        """Tell that all groups of explore batch `batch` are in the buffer."""
        ...

    async def evaluates(self) -> bool:
        """Whether this explorer is the one that evaluates the final weights."""
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
    """How often one task of a closed explore batch was solved; selectors learn from it."""

    batch: int
    task: int  # number in the batch
    taskset: str
    index: int  # row of the taskset
    pass_rate: float  # mean reward of its scored runs
    num_runs: int  # scored ones


class AppendResult(Struct, frozen=True, kw_only=True):
    appended: int
    duplicates: int  # same id, same content: a no-op


class GroupStats(Struct, frozen=True, kw_only=True):
    """Statistics of all scored rows of a group, frozen when the batch is leased; made by
    `rft.types.credit.group_statistics`.

    `rewards`, `runs`, `steps`, `lengths` and `credits` are of the rows, by run, attempt and step,
    also of those filtered out or leased elsewhere.  `mean` and `std` (unbiased, 0 for one) are of
    what the group compares: its runs, not their rows.
    """

    group: str  # text form of GroupId
    rewards: tuple[float, ...]
    mean: float
    std: float
    runs: tuple[int, ...] = ()  # number of the run; none: each entry is a run
    steps: tuple[int, ...] = ()  # number in the run
    lengths: tuple[int, ...] = ()  # trained tokens
    credits: tuple[Credit, ...] = ()  # see rft.types.credit; none: all "run"


class Lease(Struct, frozen=True, kw_only=True):
    """One train batch.  Rows are sorted by (batch, task, run, step)."""

    step: int
    frame: bytes  # block of the leased experiences, see types.block
    groups: tuple[GroupStats, ...]
    available_after: int = 0
    missing: int = 0  # groups (or rows) fewer than asked for; only with on_short_batch: train


class Consumption(Struct, frozen=True, kw_only=True):
    """What a checkpoint manifest says about the rows used so far in its lineage."""

    num_uses: int
    digest: str  # of all counted uses, see docs/reference/files.md
    cursor: int  # first explore batch that is not wholly used or explained
    mixed: dict[str, int] = field(default_factory=dict)  # uses of rows of other sources, by source


class BufferWriter(Protocol):
    """The explorer's view of the buffer."""

    async def append(self, frame: bytes, *, accepted: bool, reason: str = "") -> AppendResult:
        """Append one group (a block; failed runs are header rows in it).  Returns when durable.
        Raises IdConflict, Fenced.

        Rows of a group that is not accepted are discarded for `reason` at once and never leased;
        they still count as acknowledged.
        """
        ...

    async def room(self, batch: int) -> None:
        """Wait until there is room for explore batch `batch` (capacity)."""
        ...

    async def close_batch(
        self, batch: int, *, accepted: int, wanted: int, reasons: dict[str, int]
    ) -> None:
        """All groups of `batch` are appended: `accepted` of `wanted` groups can be trained;
        `reasons` count the rejected ones.
        """
        ...

    async def stored_groups(self, first_batch: int) -> list[StoredGroup]:
        """Every group from `first_batch` on that is stored and not orphaned: these are not explored
        again.
        """
        ...

    async def outcomes(self, first_batch: int, end_batch: int) -> list[TaskOutcome]:
        """Of every scored group of batches [first_batch, end_batch) that stands, also of rejected
        ones, by batch and task.
        """
        ...

    async def same_tasksets(self, fingerprints: dict[str, str]) -> list[str]:
        """Remember the rows of each taskset, `eval/NAME` of one that is evaluated.  Where a run
        goes on that had others before: raises ConfigError for one that is explored, returns the
        names of those that are evaluated.
        """
        ...

    async def finish(self, reason: str) -> None:
        """No more rows will come; a lease that cannot be filled fails with `reason` instead of
        waiting.
        """
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
        """Rows for optimizer step `step` (from 1): exactly `groups` accepted groups, or exactly
        `rows` rows.

        `until`: the first explore batch that waits for this step to be trained.  When all before it
        are closed and too little is there, waiting on would never end: ShortBatch, a shorter lease
        (`Lease.missing`), or NeedMore, as `on_short_batch` says. Raises EndOfData when the explorer
        finished and nothing is left, ShortBatch when it finished and too little is left,
        DeadlineExceeded after `deadline_s`, Fenced when another trainer took over.
        """
        ...

    async def use(self, step: int, logprobs: bytes | None = None) -> None:
        """The lease of `step` was trained on: record one use of each row by (lineage, step).
        Durable on return.

        `logprobs`, a frame of `rft.types.token_logprobs`: what the trainer gave the rows' tokens;
        kept at the first use of each row.
        """
        ...

    async def discard(self, step: int, reason: str) -> None:
        """The lease of `step` will never be trained on (e.g. "nonfinite"): account for its rows."""
        ...

    async def consumption(self, step: int) -> Consumption:
        """What a manifest of `step` has to state."""
        ...


class EndOfData(Exception):
    """The explorer is done and every row is accounted for; not an error."""


class NeedMore(Exception):
    """A step lacks rows, and explore batch `args[0]` would only begin after it: it has to begin
    now.  Not an error.
    """

    @property
    def batch(self) -> int:
        return int(self.args[0])


# ---------------------------------------------------------------- monitor


class MetricSink(Protocol):
    """Takes numbers from explorer, trainer and synchronizer; one process writes them everywhere."""

    async def log(self, record: MetricRecord) -> None: ...

    async def samples(self, name: str, step: int, rows: list[dict[str, Any]]) -> None:
        """A table of examples, e.g. evaluation answers: {prompt, answer, truth, reward}."""
        ...
