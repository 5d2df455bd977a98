"""What must hold of every group of experiences, whatever the workflow does: the trainer relies on it.

    check(group, transcripts)      (run_workflow does this by itself)

Knows neither workflow nor engine; it compares rows with the calls they were made of.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from rft.types.block import decode, encode
from rft.types.completion import Completion, Transcript, Turn
from rft.types.experience import Experience
from rft.workflow.group import Group
from rft.workflow.record import cut


class InvariantBroken(AssertionError):
    """Experiences that are not what was said; a fault of the workflow, or of the platform."""


def check(group: Group, transcripts: Sequence[Transcript | None]) -> None:
    """`transcripts` are those of the runs, in order.  Raises InvariantBroken that names the run and what does not hold."""
    rows = group.rows
    ids = [x.id for x in rows]
    _holds(len(set(ids)) == len(ids), f"group {group.id}: two experiences have one id")
    _holds(ids == sorted(ids), f"group {group.id}: experiences are not in the order of their ids")
    for number, (played, transcript) in enumerate(zip(group.runs, transcripts, strict=True)):
        for step, row in enumerate(played.experiences):
            where = f"run {number}, step {step}"
            _holds(row.group == group.id and row.id.run == number and row.id.step == step, f"{where}: its id is {row.id}")
            try:
                msgspec.json.encode([row.info, row.metrics, row.messages, row.tools])
            except (TypeError, RecursionError) as e:
                raise InvariantBroken(f"{where}: info, metrics, messages and tools must be JSON values: {e}") from None
        if not played.failed:
            _holds(transcript is not None, f"run {number}: it has experiences and no transcript")
            assert transcript is not None
            history(transcript, where=f"run {number}")
            parts = cut(transcript)
            _holds(len(parts) == len(played.experiences), f"run {number}: {len(parts)} parts, {len(played.experiences)} rows")
            for step, (turns, row) in enumerate(zip(parts, played.experiences, strict=True)):
                _row(row, [t.completion for t in turns], f"run {number}, step {step}")
    back = decode(encode(rows))
    _holds([x.id for x in back] == ids, f"group {group.id}: it does not survive being stored")


def history(transcript: Transcript, *, where: str = "run") -> None:
    """A call that goes on from an earlier one (its messages begin with that one's messages and answer) begins with its tokens."""
    for k, turn in enumerate(transcript.turns):
        before = next((t for t in reversed(transcript.turns[:k]) if _goes_on(turn, t)), None)
        if before is None:
            continue
        old = np.concatenate([before.completion.prompt_tokens, before.completion.tokens])
        prompt = turn.completion.prompt_tokens
        same = len(prompt) >= len(old) and np.array_equal(prompt[: len(old)], old)
        _holds(same, f"{where}, call {k}: what was said before was tokenised anew; its prompt does not begin with those tokens")


def _goes_on(turn: Turn, before: Turn) -> bool:
    n = len(before.messages)
    return len(turn.messages) > n and turn.messages[:n] == before.messages and turn.messages[n] == before.completion.message


def _row(x: Experience, said: Sequence[Completion], where: str) -> None:
    last = said[-1]
    _holds(x.num_tokens == len(last.prompt_tokens) + len(last.tokens), f"{where}: it ends elsewhere than its last call")
    own, logps = np.zeros(x.num_tokens, np.bool_), np.zeros(x.num_tokens, np.float32)
    for c in said:
        start, end = len(c.prompt_tokens), len(c.prompt_tokens) + len(c.tokens)
        own[start:end] = True
        logps[start:end] = np.minimum(c.logprobs, 0)
        _holds(np.array_equal(x.tokens[start:end], c.tokens), f"{where}: tokens {start} to {end} are not what the model wrote")
        for span in c.version_spans:
            written = [s for s in x.version_spans if s.start <= start + span.start and start + span.end <= s.end]
            fits = len(written) == 1 and written[0].version == span.version
            _holds(fits, f"{where}: tokens {start + span.start} to {start + span.end} must be of version {span.version} alone")
    _holds(np.array_equal(x.loss_mask, own), f"{where}: loss_mask does not cover exactly the tokens that the policy wrote")
    _holds(np.array_equal(x.logprobs, logps), f"{where}: log-probs are not those of the model, or stand outside of loss_mask")


def _holds(it: bool | np.bool_, otherwise: str) -> None:
    if not it:
        raise InvariantBroken(otherwise)
