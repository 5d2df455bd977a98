"""Compare one model on this machine: transformers' separate rows, the trainer in each row layout,
and engines: `rft doctor --model`.

The reference is transformers' own forward, row by row, in float32 with eager attention; its
distance from float64 is measured, too. Depends on learners, and engines as processes
(`rft.extras.doctor.model_engine`), not on runs.  Invariant: every number is a difference computed
here, and a layout without a number is refused with its reason.
"""

from __future__ import annotations

import copy
import math
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
import numpy as np
import torch

from rft.algorithm.settings import AlgorithmSettings
from rft.errors import ConfigError, RftError, SetupError, is_out_of_memory
from rft.extras.doctor import machine
from rft.extras.doctor.model_engine import ANSWERS, Sampled, Served
from rft.trainer.loop.learner import Learner
from rft.trainer.model import layer_copy, loading
from rft.trainer.model import policy as policies
from rft.trainer.rows.pack import Budget, RankBatch, TrainRow, plan
from rft.trainer.settings import LearnerSettings, LoraSettings
from rft.types import adapter, modelfiles
from rft.types.row_layout import RowLayout

Objective = Literal["grpo", "sft", "lora"]
EXACT = 1e-5  # nats; for a gradient, relative to its length
ENGINE_LIMIT = 1e-3  # nats, for an engine in float32
_CLIP = 0.2
_ALGORITHMS = {
    "grpo": AlgorithmSettings(),
    "sft": AlgorithmSettings(algorithm_type="sft", advantage_fn="none", policy_loss_fn="sft"),
}
_LORA = LoraSettings(rank=4, alpha=8.0, target_modules="all-linear")
_DEADLINE_S = 600.0  # for an engine's start and two versions
_SPARE = 1.2  # factor for memory besides weights and gradients


@dataclass(frozen=True)
class Truth:
    """Results of transformers' separate rows: log-probs [N], gradients by objective and parameter."""

    logprobs: torch.Tensor
    gradients: Mapping[Objective, Mapping[str, torch.Tensor]]


@dataclass(frozen=True, kw_only=True)
class ModelLine:
    """One line of the table.  `refused`: why it has no numbers."""

    what: str
    logprobs: float | None = None  # largest difference, in nats
    gradients: Mapping[str, float] = field(default_factory=dict)  # relative difference by objective
    without: Mapping[str, str] = field(default_factory=dict)  # refused objective -> reason
    limit: float = EXACT
    refused: str = ""
    chosen: bool = False  # the layout that `auto` selects

    @property
    def exact(self) -> bool:
        return self.logprobs is not None and all(
            x <= self.limit for x in (self.logprobs, *self.gradients.values())
        )

    @property
    def verdict(self) -> str:
        return (
            f"refused: {self.refused}" if self.refused else "exact" if self.exact else "NOT EXACT"
        )


@dataclass(frozen=True, kw_only=True)
class ModelReport:
    """All lines of one model.  `error`: the error of a run with default settings."""

    lines: tuple[ModelLine, ...]
    error: RftError | None

    @property
    def good(self) -> bool:
        return all(line.exact or line.refused for line in self.lines) and any(
            line.chosen for line in self.lines
        )


def compare(
    folder: Path,
    device: str,
    *,
    engines: Sequence[str] = (),
    objectives: Sequence[Objective] = ("grpo",),
    layouts: Sequence[RowLayout] = get_args(RowLayout),
    on_line: Callable[[ModelLine], None] = lambda line: None,
) -> ModelReport:
    """Compare `layouts` and `engines` of the model in `folder`.

    Raises SetupError if its weights do not fit its configuration or the memory, or transformers
    cannot compute it; ConfigError if it cannot be built.
    """
    settings = LearnerSettings(
        model_path=str(folder),
        device=device,
        row_layout="padded",
        cpu_threads=torch.get_num_threads(),
    )
    policies.load(settings)  # refuses files that do not fit
    train_rows = rows(settings)
    with _computes(folder), torch.no_grad():  # before starting engines in vain
        _logprobs(
            _reference_model(settings), train_rows[0].tokens, train_rows[0].loss_mask.nonzero()[0]
        )
    lines: list[ModelLine] = []

    def report(line: ModelLine) -> None:
        lines.append(line)
        on_line(line)

    with tempfile.TemporaryDirectory(prefix="rft-doctor-") as aside:
        answers = {kind: _answers(kind, device, folder, Path(aside)) for kind in engines}
    served = {kind: answer for kind, answer in answers.items() if not isinstance(answer, str)}
    with _computes(folder):
        right, of_engines, double = _truth(
            settings,
            train_rows,
            objectives,
            {kind: answer.sampled for kind, answer in served.items()},
        )
    chosen = ""
    error = None
    if layouts:
        report(double)
        chosen, error = _chosen(settings)
    train_rows = _sampled(train_rows, right.logprobs)
    # float32 is no more precise for this model
    limit = max(EXACT, 4 * max([double.logprobs or 0.0, *double.gradients.values()]))
    for layout in layouts:
        line = _measured(replace(settings, row_layout=layout), train_rows, right, objectives)
        report(replace(line, limit=limit, chosen=layout == chosen))
    for kind, answer in answers.items():
        if isinstance(answer, str):
            report(ModelLine(what=f"{kind} engine", refused=answer))
        else:
            worst = max(of_engines[kind], *answer.canary)
            report(ModelLine(what=f"{kind} engine", logprobs=worst, limit=ENGINE_LIMIT))
    if engines and not served and error is None:
        error = SetupError(
            f"no engine serves {folder}: "
            f"{'; '.join(f'{kind}: {reason}' for kind, reason in answers.items())}"
        )
    return ModelReport(lines=tuple(lines), error=error)


@contextmanager
def _computes(folder: Path) -> Iterator[None]:
    """Raise SetupError if transformers' own code fails in the block."""
    try:
        yield
    except (
        RuntimeError,
        ValueError,
        TypeError,
        IndexError,
        KeyError,
        AttributeError,
        NotImplementedError,
    ) as e:
        if is_out_of_memory(e) or isinstance(e, RftError):
            raise
        error_text = f"{type(e).__name__}: {e}"
        raise SetupError(
            f"{folder}: transformers itself cannot compute it: {error_text}.  Compare config.json with "
            f"the weights"
        ) from e


def rows(settings: LearnerSettings) -> list[TrainRow]:
    """Return three answers to one prompt and a separate row, of different lengths, with advantages
    of both signs.
    """
    config = loading.config_of(
        Path(settings.model_path), trust_remote_code=False, override={}
    ).get_text_config()
    draw = np.random.default_rng(0)
    size = int(config.vocab_size)
    prompt = draw.integers(size, size=9)
    rows = []
    for begin, count, advantage in (
        (prompt, 5, 1.0),
        (prompt, 8, -0.5),
        (prompt, 3, 0.7),
        (prompt[:4], 16, -1.2),
    ):
        tokens = np.concatenate([begin, draw.integers(size, size=count)]).astype(np.int32)
        mask = np.arange(len(tokens)) >= len(begin)
        group = "0" if begin is prompt else "1"
        zeros = np.zeros(len(tokens), np.float32)
        advantages = np.full(count, advantage, np.float32)
        rows.append(
            TrainRow(
                tokens=tokens,
                loss_mask=mask,
                logprobs=zeros,
                temperatures=1.0,
                advantages=advantages,
                group=group,
            )
        )
    return rows


def _noise(count: int) -> np.ndarray:
    """Return differences of the sampler's log-probs from the policy's, so that some ratios are
    clipped: float32 [count] in nats.
    """
    return np.random.default_rng(1).uniform(-0.4, 0.4, count).astype(np.float32)


def _sampled(rows: Sequence[TrainRow], logprobs: torch.Tensor) -> list[TrainRow]:
    """Return `rows` as if sampled by a policy near that of `logprobs` [N]."""
    values = logprobs.cpu().float().numpy() + _noise(len(logprobs))
    sampled = []
    at = 0
    for row in rows:
        behaviour = np.zeros(len(row.tokens), np.float32)
        count = int(row.loss_mask.sum())
        behaviour[row.loss_mask] = values[at : at + count]
        sampled.append(msgspec.structs.replace(row, logprobs=behaviour))
        at += count
    return sampled


# ---------------------------------------------------------------- plain transformers


def _truth(
    settings: LearnerSettings,
    rows: Sequence[TrainRow],
    objectives: Sequence[Objective],
    answers: Mapping[str, Sequence[Sampled]],
) -> tuple[Truth, dict[str, float], ModelLine]:
    """Return the float32 results of separate rows, the distances of the engines' `answers` from
    them, and a line with their distance from float64.
    """
    # an upper bound: each number has at least two bytes
    numbers = sum(path.stat().st_size for path in modelfiles.files(Path(settings.model_path))) // 2
    free = layer_copy.free_bytes(settings.device)
    if free < (needed := int(numbers * 12 * _SPARE)):
        raise SetupError(
            f"{settings.model_path}: comparing gradients in float32 needs {needed / 1e9:.1f} GB of "
            f"{settings.device} memory, and "
            f"{free / 1e9:.1f} GB are free"
        )
    double = None
    short = f"needs {numbers * 24 * _SPARE / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free"
    if free >= numbers * 24 * _SPARE:
        try:
            double = _backward(_reference_model(settings).double(), rows, objectives)
        except RuntimeError as e:  # some models have constants of float32
            short = f"transformers cannot compute it in float64: {e}"
    lm = _reference_model(settings)
    right = _backward(lm, rows, objectives)
    with torch.no_grad():
        apart = {
            kind: max(_apart(lm, answer) for answer in answer_rows)
            for kind, answer_rows in answers.items()
        }
    what = "transformers, float64"
    if double is None:
        return right, apart, ModelLine(what=what, refused=short)
    return right, apart, ModelLine(what=what, limit=ENGINE_LIMIT, **_differences(double, right))


def _reference_model(settings: LearnerSettings) -> Any:
    config = copy.deepcopy(
        loading.config_of(Path(settings.model_path), trust_remote_code=False, override={})
    )
    config._experts_implementation = "eager"  # the grouped kernels do not support float64
    lm = loading.pretrained(
        config, Path(settings.model_path), trust_remote_code=False, attn_implementation="eager"
    )
    return lm.to(settings.device).eval()


def _backward(lm: Any, rows: Sequence[TrainRow], objectives: Sequence[Objective]) -> Truth:
    """Return log-probs of `lm` row by row, and explicit gradients of GRPO's and SFT's losses."""
    logprobs = torch.cat([_logprobs(lm, row.tokens, row.loss_mask.nonzero()[0]) for row in rows])
    advantages = torch.cat(
        [torch.from_numpy(a) for row in rows if (a := row.advantages) is not None]
    ).to(logprobs)
    ratio = (
        logprobs
        - logprobs.detach().float()
        - torch.from_numpy(_noise(len(logprobs))).to(logprobs.device)
    ).exp()
    worse = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - _CLIP, 1 + _CLIP))
    losses = {"grpo": worse.mean(), "sft": -logprobs.mean()}
    gradients: dict[Objective, Mapping[str, torch.Tensor]] = {}
    names = {name: p for name, p in lm.named_parameters() if p.requires_grad}
    for objective in dict.fromkeys("grpo" if o == "lora" else o for o in objectives):
        gradient_list = torch.autograd.grad(
            losses[objective], list(names.values()), retain_graph=True, allow_unused=True
        )
        gradients[objective] = {
            n: g for n, g in zip(names, gradient_list, strict=True) if g is not None
        }
    return Truth(logprobs.detach(), gradients)


def _logprobs(lm: Any, tokens: Sequence[int] | np.ndarray, at: np.ndarray) -> torch.Tensor:
    """Return log-probs of one row's tokens at the positions `at`."""
    ids = torch.as_tensor(np.asarray(tokens), dtype=torch.int64, device=lm.device)
    where = torch.from_numpy(at).to(lm.device)
    logits = lm(input_ids=ids[None], use_cache=False).logits[0, where - 1]
    logprobs: torch.Tensor = (
        logits.to(torch.promote_types(logits.dtype, torch.float32))
        .log_softmax(-1)
        .gather(1, ids[where, None])
    )
    return logprobs[:, 0]


def _apart(lm: Any, answer: Sampled) -> float:
    """Return the largest difference between an engine's log-probs and those of `lm`."""
    tokens = [*answer.prompt, *answer.tokens]
    begin = len(answer.prompt)
    right = _logprobs(lm, tokens, np.arange(begin, len(tokens))).cpu().numpy()
    return float(np.abs(right - np.asarray(answer.logprobs)).max())


# ---------------------------------------------------------------- the trainer


def _chosen(settings: LearnerSettings) -> tuple[str, RftError | None]:
    """Return the layout that `auto` selects, or its error."""
    try:
        return Learner(replace(settings, row_layout="auto")).settings.row_layout, None
    except RftError as e:
        return "", e


def _measured(
    settings: LearnerSettings,
    rows: Sequence[TrainRow],
    right: Truth,
    objectives: Sequence[Objective],
) -> ModelLine:
    """Measure the trainer in the layout of `settings`."""
    gradients: dict[str, float] = {}
    without: dict[str, str] = {}
    logprobs = 0.0
    for objective in objectives:
        lora = _LORA if objective == "lora" else None
        how = replace(settings, algorithm=_ALGORITHMS.get(objective, settings.algorithm), lora=lora)
        try:
            learner = Learner(how)
        except (ConfigError, SetupError) as e:
            without[objective] = e.message if isinstance(e, ConfigError) else str(e)
            continue
        (cut,) = plan(rows, 1, Budget(how.max_token_len_per_gpu, how.row_layout))
        micro_batches = tuple(tuple(rows[i] for i in micro) for micro in cut)
        scored = [part["old"] for micro in learner.score(micro_batches) for part in micro]
        row_logprobs = np.concatenate(
            [scored[i] for i in np.argsort([i for micro in cut for i in micro])]
        )
        logprobs = max(logprobs, float(np.abs(row_logprobs - right.logprobs.cpu().numpy()).max()))
        batch = RankBatch(
            step=1,
            micro_batches=micro_batches,
            tokens=float(len(row_logprobs)),
            rows=float(len(rows)),
        )
        gradients[objective] = _relative(
            _right_gradient(learner, right, objective), learner.gradient(batch)
        )
    if not gradients:
        return ModelLine(what=settings.row_layout, refused=without[objectives[0]])
    return ModelLine(
        what=settings.row_layout, logprobs=logprobs, gradients=gradients, without=without
    )


def _right_gradient(
    learner: Learner, right: Truth, objective: Objective
) -> Mapping[str, torch.Tensor]:
    """Return the reference gradient of an objective.

    For LoRA, W + s B A with B = 0, it is s G A^T for B and 0 for A, where G is the gradient of W.
    """
    if objective != "lora":
        return right.gradients[objective]
    gradient = {}
    assert learner.policy.adapter is not None
    values = learner.policy.adapter.parameters()
    for name, value in values.items():
        module, side = adapter.split(name) or ("", "")
        full_gradient = right.gradients["grpo"].get(f"{module}.weight")
        if side == "A" or full_gradient is None:
            gradient[name] = torch.zeros_like(value)
        else:
            gradient[name] = (
                learner.policy.adapter.form.scale
                * full_gradient
                @ values[adapter.key(module, "A")].detach().t()
            )
    return gradient


def _differences(a: Truth, b: Truth) -> dict[str, Any]:
    gradients = {
        objective: _relative(gradients, b.gradients[objective])
        for objective, gradients in a.gradients.items()
    }
    return {"logprobs": float((a.logprobs - b.logprobs).abs().max()), "gradients": gradients}


def _relative(right: Mapping[str, torch.Tensor], measured: Mapping[str, torch.Tensor]) -> float:
    """Return the length of the difference of two gradients relative to that of `right`; a missing
    tensor counts as 0.
    """
    off = total = 0.0
    for name, g in right.items():
        g = g.double()
        other = measured[name].to(g) if name in measured else torch.zeros_like(g)
        off = off + float((other - g).square().sum())
        total = total + float(g.square().sum())
    return math.sqrt(off / total if total else off)


# ---------------------------------------------------------------- engines


def _answers(kind: str, device: str, folder: Path, aside: Path) -> Served | str:
    """Return an engine's results before and after a weight sync, or the reason for a failure."""
    for line in machine.checked(
        kind, device, folder, aside, module="rft.extras.doctor.model_engine", deadline_s=_DEADLINE_S
    ):
        if line.state != "ok":
            return " <- ".join(filter(None, [line.text, _cause(aside / f"{kind}.out")]))
    return msgspec.json.decode((aside / f"{kind}.{ANSWERS}").read_bytes(), type=Served)


def _cause(printed: Path) -> str:
    """Return the last error that an engine's own processes printed."""
    errors = (
        re.findall(r"\] (\w+(?:Error|Exception): .+)$", printed.read_text("utf-8", "replace"), re.M)
        if printed.exists()
        else []
    )
    return next((text for text in reversed(errors) if not text.startswith("EngineDead")), "")
