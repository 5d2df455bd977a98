"""Columns of text on a terminal, and what `rft buffer` prints: tables, CSV, JSON, and experiences
for people.

Invariant: texts of models are made safe for the terminal.
"""

from __future__ import annotations

import base64
import csv
import decimal
import itertools
import json
import math
import os
import re
import sys
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rft.secrets import safe

if TYPE_CHECKING:
    from rft.buffer.inspect import Shown
    from rft.buffer.query import QueryResult, Questions
    from rft.buffer.token_texts import TokenTexts


FORMATS = ("table", "csv", "json")
_NUMBERS = (int, float, decimal.Decimal)
_TIMES = ("created", "leased", "used", "trained")  # columns of the views
_INFO = {"reward_reason": "reason"}  # shorter names of entries of info
# what JSON would print as it is
_HIDDEN = re.compile("[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def on_terminal() -> bool:
    return sys.stdout.isatty()


def in_colour() -> bool:
    """Whether the output is a terminal that wants colours (see no-color.org)."""
    return on_terminal() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def progress() -> Callable[[str], None]:
    """Tells people what is under way, every two seconds at most; on a terminal in one line."""
    last = time.monotonic()
    end = "\r" if sys.stderr.isatty() else "\n"

    def told(text: str) -> None:
        nonlocal last
        if time.monotonic() - last >= 2:
            last = time.monotonic()
            print(f"{text:70}", end=end, file=sys.stderr, flush=True)

    return told


def as_json(value: Any, *, indent: int | None = 1) -> str:
    """JSON without characters that could drive a terminal; numbers that JSON cannot hold are null."""
    text = json.dumps(_finite(value), indent=indent, default=plain_value, ensure_ascii=False)
    return _HIDDEN.sub(lambda m: f"\\u{ord(m[0]):04x}", text)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    return [_finite(v) for v in value] if isinstance(value, list | tuple) else value


def plain_value(value: Any) -> Any:
    """Values of databases and arrays that JSON does not know."""
    if isinstance(value, decimal.Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, bytes | memoryview):
        return base64.b64encode(value).decode("ascii")
    return value.tolist() if hasattr(value, "tolist") else str(value)


# ------------------------------------------------------------ query


def views(questions: Questions) -> Iterator[str]:
    """The documented views and their columns."""
    from rft.buffer.schema import VIEWS

    for view in VIEWS:
        yield view
        line = "   "
        for name in questions.columns(view):
            if len(line) + len(name) > 100:
                yield line
                line = "   "
            line += f" {name}"
        yield line


def answer(found: QueryResult, output: str, limit: int) -> bool:
    """Print the rows in `output`, at most `limit` (0: all); whether there were more."""
    rows = iter(itertools.islice(found.rows, limit) if limit else found.rows)
    {"table": _table, "csv": _csv, "json": _json}[output](found.columns, rows)
    return bool(limit) and next(found.rows, None) is not None


def _table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """In parts of 1000 rows with a head each, so that a long answer is printed as it comes."""
    every = iter(rows)
    first = True
    while (part := list(itertools.islice(every, 1000))) or first:
        numbers = [
            all(v is None or isinstance(v, _NUMBERS) for v in column)
            for column in zip(*part, strict=True)
        ]
        cells = [
            [moment(v) if c in _TIMES else cell(v) for c, v in zip(columns, row, strict=True)]
            for row in part
        ]
        print("\n".join(table(columns, cells, numbers)))
        if not part:
            print("(no rows)")
        first = False


def cell(value: Any) -> str:
    """One value in a table."""
    if value is None:
        return "-"
    if isinstance(value, bytes | memoryview):
        return f"<{len(value)} bytes>"
    if isinstance(value, float | decimal.Decimal):
        return f"{value:.6g}"
    return str(value)


def moment(value: Any) -> str:
    """Seconds since the epoch as a date of this machine; other values as they are."""
    return (
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value))
        if isinstance(value, float) and value > 1e9
        else cell(value)
    )


def _csv(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    clean: Callable[[str], str] = safe if on_terminal() else str
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow(
            [
                clean(v)
                if isinstance(v, str)
                else plain_value(v)
                if isinstance(v, bytes | memoryview)
                else v
                for v in row
            ]
        )


def _json(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """An array with one object a line; a second column of the same name gets a number."""
    names: list[str] = []
    for name in columns:
        names.append(name if name not in names else f"{name}_{names.count(name) + 1}")
    print("[", end="")
    between = "\n"
    for row in rows:
        print(between + as_json(dict(zip(names, row, strict=True)), indent=None), end="")
        between = ",\n"
    print("\n]")


# ------------------------------------------------------------ stats


def stats(facts: dict[str, Any]) -> Iterator[str]:
    """`facts` of `rft.buffer.inspect.collect` for people."""
    waiting = facts["waiting"]
    uses = facts["uses"]
    size = facts["bytes"]
    states = ", ".join(f"{n} {state}" for state, n in facts["states"].items()) or "none"
    yield (
        f"buffer       {safe(facts['buffer'])}, storage {facts['storage']}, ledger "
        f"{safe(facts['ledger'])}"
    )
    yield f"experiences  {facts['experiences']} in {facts['groups']} groups: {states}"
    if facts["reasons"]:
        yield "explained    " + ", ".join(
            f"{n} {safe(str(reason))}" for reason, n in facts["reasons"].items()
        )
    if waiting["experiences"]:
        batches = f"batches {waiting['first_batch']} to {waiting['last_batch']}"
        yield (
            f"waiting      {waiting['experiences']} in {waiting['groups']} groups, "
            f"{waiting['tokens']} tokens, {batches}"
        )
    yield (
        f"uses         {uses['uses']} of {uses['experiences']} experiences, the last in step "
        f"{uses['last'] or '-'}"
    )
    if facts["rejected"]:
        yield "refused      " + ", ".join(
            f"{n} {safe(reason)}" for reason, n in facts["rejected"].items()
        )
    if facts["edits"]:
        yield f"edits        {facts['edits']} of rewards (table reward_edits)"
    yield "bytes        " + ", ".join(f"{name} {human(n)}" for name, n in size.items())
    for name, head in (("tasksets", "taskset"), ("versions", "version")):
        if found := facts[name]:
            yield ""
            yield from _counts(head, found[-20:])
            if len(found) > 20:
                yield f"({len(found) - 20} before them; --json gives all)"


def _counts(head: str, found: Sequence[dict[str, Any]]) -> Iterator[str]:
    keys = list(found[0])
    rows = [
        ["none" if r[head] is None else str(r[head]), *(_short(r[k]) for k in keys[1:])]
        for r in found
    ]
    return table([k.replace("_", " ") for k in keys], rows, [False, *([True] * (len(keys) - 1))])


def _short(value: Any) -> str:
    return "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)


def human(num_bytes: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} B"


# ------------------------------------------------------------ sample


def experience(x: Shown, words: TokenTexts | None, *, colour: bool) -> Iterator[str]:
    """One experience for people."""
    row = x.row
    state = row["state"] + (f" ({safe(str(row['explained']))})" if row["explained"] else "")
    yield _bold(f"experience   {row['id']}", colour)
    yield (
        f"task         {safe(row['taskset'])}[{row['task_index']}], run {row['run']}, workflow "
        f"{safe(row['workflow'])}"
    )
    yield (
        f"state        {state}; {row['status']}"
        + (f", {safe(row['reason'])}" if row["reason"] else "")
        + _ended(row)
    )
    parts = json.loads(row["reward_parts"] or "{}")
    yield f"reward       {cell(row['reward'])}" + (
        "" if not parts else "  = " + ", ".join(f"{safe(k)} {v:g}" for k, v in parts.items())
    )
    yield f"group        {row['group_id']}" + _compared(x)
    for name, value in ({} if x.payload is None else x.payload.info).items():
        yield from _text(
            _INFO.get(name, safe(name)[:12]),
            value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False),
        )
    yield from _lineage(x)
    if x.payload is not None and len(x.payload.messages) > 2:
        from rft.buffer.inspect import conversation

        for said in conversation(x):
            yield from _text(
                safe(said["role"])[:12], "\n".join(filter(None, (said["text"], said["calls"])))
            )
    else:
        yield from _text("prompt", row["prompt_text"])
        yield from _text("response", row["response_text"])
    if words is not None:
        yield from _tokens(x, words, colour)
    yield ""


def _compared(x: Shown) -> str:
    """The mean reward of its group and its advantage: the trainer's where it is kept, else the
    distance to the mean.
    """
    if x.group_mean is None:
        return ""
    kept = (
        []
        if x.payload is None or x.trainer is None
        else x.trainer.advantages[x.payload.loss_mask].tolist()
    )
    known = [a for a in kept if math.isfinite(a)]
    said = f", mean reward {x.group_mean:.4g} of {x.group_scored}"
    if known:
        return f"{said}, mean advantage {sum(known) / len(known):+.4g}"
    return (
        said
        if x.row["reward"] is None
        else f"{said}, this one {x.row['reward'] - x.group_mean:+.4g}"
    )


def _ended(row: dict[str, Any]) -> str:
    return f"; {row['num_tokens']} tokens, {row['num_response_tokens']} trained" + (
        f", ended by {row['finish_reason']}" if row["finish_reason"] else ""
    )


def _lineage(x: Shown) -> Iterator[str]:
    from rft.buffer.inspect import written_by

    if x.payload is not None and x.payload.version_spans:
        spans = ", ".join(
            f"{s.version} tokens {s.start} to {s.end}" for s in x.payload.version_spans
        )
        yield f"written by   weights {spans}"
    elif versions := written_by(x.row):
        yield f"written by   weights {versions}"
    for use in x.uses:
        if not use.counts:
            after = "of no current weights: the run resumed from before it"
        elif use.checkpoint is None:
            after = "in no checkpoint yet"
        else:
            after = f"first in checkpoint {use.checkpoint}" + (
                "" if use.there else ", which was deleted"
            )
        yield f"trained in   step {use.version}, {after}"
    if not x.uses:
        yield "trained in   no step"


def _text(name: str, text: str) -> Iterator[str]:
    first, *rest = safe(text, lines=True).split("\n")
    yield f"{name:12} {first}"
    for line in rest:
        yield f"{'':12} {line}"


def _tokens(x: Shown, words: TokenTexts, colour: bool) -> Iterator[str]:
    """All tokens in a row: those of the prompt as they are, trained ones with their log-prob, and
    the trainer's where it is kept.
    """
    if x.payload is None:
        yield f"tokens       {safe(x.gone)}"
        return
    p = x.payload
    out = []
    kept = [None] * len(p.tokens) if x.trainer is None else x.trainer.logprobs.tolist()
    for token, trained, logprob, ours in zip(
        p.tokens.tolist(), p.loss_mask.tolist(), p.logprobs.tolist(), kept, strict=True
    ):
        word = safe(words(token))
        shade = _shade(logprob) if p.has_logprobs else 39
        said = f"{logprob:.2f}" if p.has_logprobs else "-"
        said += "" if ours is None or math.isnan(ours) else f"/{ours:.2f}"
        if not trained:
            out.append(f"\x1b[2m{word}\x1b[0m" if colour else word)
        else:
            out.append(
                f"\x1b[{shade}m{word}\x1b[0m\x1b[2m{said}\x1b[0m" if colour else f"⟦{word} {said}⟧"
            )
    yield "tokens       " + "·".join(out)


def _shade(logprob: float) -> int:
    """Green for what the model was sure of, yellow, red for what it hardly expected."""
    return 32 if logprob > -0.1 else 33 if logprob > -1.5 else 31


def _bold(text: str, colour: bool) -> str:
    return f"\x1b[1m{text}\x1b[0m" if colour else text


def plain(x: Shown, *, tokens: bool) -> dict[str, Any]:
    """One experience as plain values."""
    from rft.buffer.experience_export import unpacked

    uses = [
        {"step": str(u.version), "checkpoint": u.checkpoint, "counts": u.counts} for u in x.uses
    ]
    payload = unpacked(x.payload, x.trainer) if x.payload is not None else {"gone": x.gone}
    if not tokens:
        payload = {
            k: v for k, v in payload.items() if k in ("version_spans", "metrics", "info", "gone")
        }
    return {**x.row, **payload, "uses": uses}


CELL = 60  # widest cell of a table, in columns of the terminal


def width(text: str) -> int:
    """Columns of the terminal that `text` takes."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


def cut(text: str, most: int = CELL) -> str:
    """`text`, or its beginning and an ellipsis, in at most `most` columns."""
    if len(text) <= most // 2 or width(text) <= most:
        return text
    kept = []
    used = 1
    for char in text:
        used += width(char)
        if used > most:
            break
        kept.append(char)
    return "".join(kept) + "…"


def table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[bool] = ()
) -> Iterator[str]:
    """Lines of a table; cells are made safe and cut, columns of numbers (`right`) are aligned to
    the right.
    """
    cells = [[cut(safe(c)) for c in row] for row in (heads, *rows)]
    wide = [max(width(row[i]) for row in cells) for i in range(len(heads))]
    side = [*right, *([False] * (len(heads) - len(right)))]
    for row in cells:
        parts = [
            (" " * (w - width(c)) + c) if r else (c + " " * (w - width(c)))
            for c, w, r in zip(row, wide, side, strict=True)
        ]
        yield "  ".join(parts).rstrip()
