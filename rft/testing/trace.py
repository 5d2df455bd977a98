"""The result of a task that was run, and its text form: messages by role, tool calls, rewards by part,
trained tokens.

Depends on results only.
Invariant: no text of a model or data set can drive the terminal.
"""

from __future__ import annotations

import io
import itertools
import json
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rft.engine.scripted import decode as decode_bytes
from rft.reward import exchanges
from rft.reward.readings import AnswerReading
from rft.secrets import redact, safe
from rft.types.completion import Completion, Score, Transcript
from rft.types.experience import Experience
from rft.types.ports import GenerateRequest, ScoreRow
from rft.types.task import Task
from rft.workflow.group import PlayedGroup
from rft.workflow.play_run import PlayedRun

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text


POLICY = "policy"


@dataclass(frozen=True)
class Call:
    """One model call with its results or error, and its duration.  `run` is None if it belongs to
    no run.
    """

    model: str
    run: int | None
    request: GenerateRequest | ScoreRow | list[dict[str, Any]]
    answers: tuple[Completion, ...] = ()
    values: tuple[float, ...] = ()  # log-probs or scores
    error: BaseException | None = None
    took_s: float = 0.0


@dataclass(frozen=True)
class RunResult:
    """One run.  `transcript` also exists for a failed run, if it made a call."""

    number: int
    played: PlayedRun
    transcript: Transcript | None
    calls: tuple[Call, ...]  # of all models, in the order of their ends
    error: BaseException | None  # error of the workflow or reward
    readings: tuple[AnswerReading, ...] = ()  # comparisons of its reward

    @property
    def experiences(self) -> tuple[Experience, ...]:
        return self.played.experiences

    @property
    def failed(self) -> bool:
        return self.played.failed

    @property
    def reason(self) -> str:
        """Reason of a failure in one line; empty for a successful run."""
        return self.experiences[0].reason

    @property
    def traceback(self) -> str:
        return str(self.experiences[0].info.get("traceback", ""))

    @property
    def reward(self) -> float | None:
        return self.played.value

    @property
    def score(self) -> Score:
        """Reward, its parts and its reason."""
        first = self.experiences[0]
        return Score(
            value=self.reward,
            parts=first.reward_parts,
            reason=str(first.info.get("reward_reason", "")),
        )

    @property
    def answers(self) -> list[str]:
        """The policy's answers, call by call."""
        return [] if self.transcript is None else [t.completion.text for t in self.transcript.turns]

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation: messages of the last call and its answer."""
        if self.transcript is None or not self.transcript.turns:
            return []
        last = self.transcript.turns[-1]
        return [*last.messages, last.completion.message]


@dataclass(frozen=True)
class WorkflowResult:
    """All runs of one task.  Attributes in the singular are those of the first run."""

    group: PlayedGroup
    runs: tuple[RunResult, ...]
    calls: tuple[Call, ...] = field(repr=False)

    @property
    def task(self) -> Task:
        return self.group.task

    @property
    def experiences(self) -> list[Experience]:
        return self.group.rows

    @property
    def rewards(self) -> list[float | None]:
        return [r.reward for r in self.runs]

    @property
    def failed(self) -> bool:
        return any(r.failed for r in self.runs)

    @property
    def reason(self) -> str:
        return next((r.reason for r in self.runs if r.failed), "")

    @property
    def transcript(self) -> Transcript:
        if (transcript := self.runs[0].transcript) is None:
            raise ValueError(f"the run has no transcript: {self.runs[0].reason}")
        return transcript

    @property
    def experience(self) -> Experience:
        return self.runs[0].experiences[0]

    @property
    def reward(self) -> float | None:
        return self.runs[0].reward

    @property
    def score(self) -> Score:
        return self.runs[0].score

    @property
    def answers(self) -> list[str]:
        return self.runs[0].answers

    @property
    def messages(self) -> list[dict[str, Any]]:
        return self.runs[0].messages

    @property
    def metrics(self) -> dict[str, float]:
        return self.experience.metrics

    @property
    def info(self) -> dict[str, Any]:
        return self.experience.info

    def trace(self, *, tokens: bool = False) -> str:
        """Return a readable trace; `tokens` adds the trained tokens and their log-probs."""
        return trace(self, tokens=tokens)

    def __str__(self) -> str:
        return self.trace()


Decode = Callable[[Sequence[int]], str]
_STYLES = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}
_PACKAGE = Path(__file__).parents[1]
LONGEST = 4000  # displayed characters of one message


def trace(
    result: WorkflowResult, *, tokens: bool = False, decode: Decode = decode_bytes, width: int = 110
) -> str:
    """Return the whole result as plain text.  `decode` converts token ids to text; the default fits
    the scripted model.
    """
    from rich.console import Console

    out = io.StringIO()
    show(
        result,
        Console(file=out, width=width, no_color=True, highlight=False, emoji=False),
        tokens=tokens,
        decode=decode,
    )
    return out.getvalue()


def show(
    result: WorkflowResult,
    out: Console,
    *,
    tokens: bool = False,
    explain: bool = False,
    decode: Decode = decode_bytes,
) -> None:
    """Print the whole result; `explain` adds the values that rewards read."""
    for run in result.runs:
        _run(result, run, out)
        if explain:
            _explain(run, out)
        if tokens:
            for row in run.experiences:
                if row.num_tokens:
                    _tokens(row, out, decode)
    calls = [c for c in result.calls if c.run is None]
    if calls:
        _line(out, "calls for all runs together", "bold")
        for call in calls:
            _call(call, (), out)
    if len(result.runs) > 1:
        rewards = ", ".join("none" if r is None else f"{r:g}" for r in result.rewards)
        group = (
            "can be trained"
            if result.group.accepted
            else f"cannot be trained: {result.group.reason}"
        )
        equal = (
            "; all are equal, so the runs cannot be told apart"
            if len(set(result.rewards)) == 1
            else ""
        )
        _line(out, f"rewards {rewards}{equal}; the group {group}", "bold")


def _run(result: WorkflowResult, run: RunResult, out: Console) -> None:
    task = result.task
    first = run.experiences[0]
    head = f"{first.workflow} plays {task.taskset}[{task.index}], run {run.number}: {first.status}"
    _line(out, head, "bold red" if run.failed else "bold")
    if task.truth is not None:
        _line(out, f"  truth      {_short(task.truth)}", "dim")
    shown: tuple[Any, ...] = ()
    for call in run.calls:
        shown = _call(call, shown, out)
    if run.failed:
        _line(out, f"  failed     {run.reason}", "red")
        for line in traceback_of(run).splitlines():
            _line(out, f"             {line}", "red")
    else:
        _rewards(run, out)
    spent = (
        f"{run.played.run_s:.3f} s playing, {run.played.reward_s:.3f} s scoring, "
        f"{len(run.calls)} model calls"
    )
    tried = f", attempt {run.played.attempts}" if run.played.attempts > 1 else ""
    _line(out, f"  time       {spent}{tried}", "dim")


def traceback_of(run: RunResult) -> str:
    """Return the traceback of a failed run, reduced to the author's own lines if there are any."""
    if run.error is None:
        return run.traceback
    frames = traceback.extract_tb(run.error.__traceback__)
    shown = [f for f in frames if not Path(f.filename).is_relative_to(_PACKAGE)] or frames
    lines = traceback.format_list(shown) + traceback.format_exception_only(run.error)
    return redact("".join(lines)).rstrip()


def _explain(run: RunResult, out: Console) -> None:
    """Print the reward's readings of the last answer."""
    if run.transcript is not None:
        completion = run.transcript.turns[-1].completion
        thought = len(completion.with_thought) - len(completion.answer)
        _line(
            out,
            f"  answer     {_short(completion.answer)}"
            + (f"  behind {thought} characters of thought" if thought else ""),
        )
    for reading in run.readings:
        _line(
            out,
            f"  reads      {reading.part}: "
            f"{'none' if reading.text is None else _short(reading.text)}",
        )
        _line(
            out,
            f"  as         "
            f"{'nothing that it knows' if reading.value is None else _short(str(reading.value))}",
        )
        if reading.truth is not None:
            _line(out, f"  truth as   {_short(str(reading.truth))}")
        if reading.right is not None:
            _line(out, f"  verdict    {'right' if reading.right else 'wrong'}")
    if not run.readings:
        _line(out, "  reads      in its own way: it notes nothing (rft.reward.readings.note)")


def _rewards(run: RunResult, out: Console) -> None:
    score = run.score
    rows = run.experiences
    value = "none: unscored, never trained" if score.value is None else f"{score.value:g}"
    parts = "".join(f", {safe(n)} {v:g}" for n, v in score.parts.items()) if len(rows) == 1 else ""
    _line(
        out,
        f"  reward     {value}{parts}" + (f"  ({score.reason})" if score.reason else ""),
        "bold",
    )
    if len(rows) > 1:
        for step, row in enumerate(rows):
            reward = "none" if row.reward is None else f"{row.reward:g}"
            row_parts = "".join(f", {n} {v:g}" for n, v in row.reward_parts.items())
            _line(
                out,
                f"    step {step}: reward {reward}{row_parts}, {row.num_response_tokens} trained tokens",
            )
    first = rows[0]
    if first.metrics:
        _line(out, "  metrics    " + ", ".join(f"{n} {v:g}" for n, v in first.metrics.items()))
    info = {
        n: v
        for n, v in first.info.items()
        if n not in ("reward_reason", "gold_answer", exchanges.KEY)
    }
    if info:
        _line(out, f"  info       {_short(info)}")


def _call(call: Call, shown: tuple[Any, ...], out: Console) -> tuple[Any, ...]:
    """Print a call without the messages in `shown`; return the messages shown so far, for the
    policy's next call.
    """
    of_policy = call.model == POLICY
    if not of_policy:
        _line(out, f"  {call.model} is asked", "blue")
    request = call.request
    messages = (
        tuple(request.messages)
        if isinstance(request, GenerateRequest)
        else tuple(request)
        if isinstance(request, list)
        else ()
    )
    new = (
        messages[len(shown) :]
        if of_policy and shown and messages[: len(shown)] == shown
        else messages
    )
    if of_policy and shown and new is messages and messages:
        _line(out, "  (a new conversation)", "dim")
    if isinstance(request, GenerateRequest) and request.tools and not shown:
        _line(
            out,
            "  tools      "
            + ", ".join(str(t.get("function", t).get("name")) for t in request.tools),
            "dim",
        )
    if isinstance(request, GenerateRequest) and request.prompt_tokens:
        _line(out, f"  prompt     {len(request.prompt_tokens)} tokens", "dim")
    for m in new:
        _message(m, out)
    if call.error is not None:
        _line(
            out,
            f"  raised     {type(call.error).__name__}: {call.error}  [{call.took_s:.3f} s]",
            "red",
        )
        return messages if of_policy else shown
    for c in call.answers:
        if c.reasoning:
            _print_message("reasoning", c.reasoning, out, "dim")
        cut = ", cut off" if c.finish_reason == "length" else ""
        _message(c.message, out, note=f"[{len(c.tokens)} tokens{cut}, {call.took_s:.3f} s]")
    if call.values:
        _line(
            out,
            f"  gives      "
            f"{', '.join(f'{v:.4g}' for v in call.values[:8])}{' ...' if len(call.values) > 8 else ''}",
        )
    return (*messages, call.answers[0].message) if of_policy and call.answers else shown


def _message(m: Mapping[str, Any], out: Console, note: str = "") -> None:
    role = str(m.get("role", "?"))
    content = m.get("content")
    calls = m.get("tool_calls") or ()
    text = (
        content
        if isinstance(content, str)
        else ""
        if content is None
        else json.dumps(content, ensure_ascii=False)
    )
    if text or not calls:
        _print_message(role, text, out, _STYLES.get(role, ""), note)
        note = ""
    for call in calls:
        function = call.get("function", {})
        _print_message(
            role, f"-> {function.get('name')}({function.get('arguments')})", out, "yellow", note
        )
        note = ""


def _print_message(role: str, text: str, out: Console, style: str, note: str = "") -> None:
    more = len(text) - LONGEST
    shown = text if more <= 0 else f"{text[:LONGEST]} ... and {more} characters more"
    lines = safe(shown, lines=True).expandtabs(4).split("\n")
    for i, line in enumerate(lines):
        name = safe(role)[:10] if i == 0 else ""
        _line(
            out, f"  {name:10} {line}{'  ' + note if note and i == len(lines) - 1 else ''}", style
        )


def _tokens(row: Experience, out: Console, decode: Decode) -> None:
    """Print one line per trained token with its log-prob; untrained tokens are grouped."""
    from rich.text import Text

    trained = row.num_response_tokens
    mean = float(row.logprobs[row.loss_mask].mean()) if trained else 0.0
    _line(
        out,
        f"  tokens     {row.num_tokens}, of which {trained} are trained, mean log-prob {mean:.3f}",
        "bold",
    )
    edges = [0, *(np.flatnonzero(np.diff(row.loss_mask)) + 1).tolist(), row.num_tokens]
    for start, end in itertools.pairwise(edges):
        ids = row.tokens[start:end].tolist()
        if not row.loss_mask[start]:
            _line(out, f"    {start:5}-{end - 1:<5} not trained  {_short(decode(ids), 300)}", "dim")
            continue
        for i, token in enumerate(ids, start):
            logp = float(row.logprobs[i])
            line = Text(f"    {i:5} {token:7}   ")
            line.append(f"{logp:8.3f} {'#' * min(20, round(-logp * 4)):20} ", style=_heat(logp))
            line.append(safe(decode([token])), style=f"bold {_heat(logp)}")
            if row.teacher_logprobs is not None:
                line.append(f"   teacher {float(row.teacher_logprobs[i]):.3f}", style="dim")
            _print(out, line)


def _heat(logp: float) -> str:
    """Return a colour from green for likely to red for unlikely tokens."""
    return (
        "green"
        if logp > -0.5
        else "yellow"
        if logp > -1.5
        else "dark_orange"
        if logp > -3
        else "red"
    )


def _short(value: Any, most: int = 200) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return safe(text if len(text) <= most else f"{text[:most]} ...")


def _line(out: Console, text: str, style: str = "") -> None:
    from rich.text import Text

    _print(out, Text(safe(text), style=style))


def _print(out: Console, text: Text) -> None:
    out.print(text, soft_wrap=True)


def console(*, width: int | None = None) -> Console:
    """Return a console on the current standard output, with colours on a terminal."""
    from rich.console import Console

    return Console(file=sys.stdout, width=width, highlight=False, emoji=False)
