"""Tables, JSON, and the output of `rft buffer`.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len, set_cell_size

from rft.secrets import safe

if TYPE_CHECKING:
    from rft.buffer.inspect import Shown
    from rft.buffer.query import QueryResult, Questions
    from rft.buffer.token_texts import TokenTexts


FORMATS = ("table", "csv", "json")
_NUMBERS = (int, float, decimal.Decimal)
_TIMES = ("created", "leased", "used", "trained")  # columns of the views
_INFO = {"reward_reason": "reason"}  # shorter names of entries of info
_QUESTION = 160  # characters of a message to a judge; `rft view` shows all
# characters that JSON would print unescaped
_HIDDEN = re.compile("[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def on_terminal() -> bool:
    return sys.stdout.isatty()


def in_colour() -> bool:
    """Return whether the output is a terminal with colours (see no-color.org)."""
    return on_terminal() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def progress() -> Callable[[str], None]:
    """Return a function that prints a status at most every two seconds; on a terminal in one line."""
    last = time.monotonic()
    end = "\r" if sys.stderr.isatty() else "\n"

    def tell(text: str) -> None:
        nonlocal last
        if time.monotonic() - last >= 2:
            last = time.monotonic()
            print(f"{text:70}", end=end, file=sys.stderr, flush=True)

    return tell


def as_json(value: Any, *, indent: int | None = 1) -> str:
    """Format JSON without control characters; numbers that are not finite become null."""
    text = json.dumps(_finite(value), indent=indent, default=json_value, ensure_ascii=False)
    return _HIDDEN.sub(lambda m: f"\\u{ord(m[0]):04x}", text)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value


def json_value(value: Any) -> Any:
    """Convert values of databases and arrays to JSON values."""
    if isinstance(value, decimal.Decimal):
        if value == value.to_integral_value():
            return int(value)
        return float(value)
    if isinstance(value, bytes | memoryview):
        return base64.b64encode(value).decode("ascii")
    if hasattr(value, "tolist"):
        return value.tolist()
    return str(value)


# ------------------------------------------------------------ query


def views(questions: Questions) -> Iterator[str]:
    """List the documented views and their columns."""
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


def print_rows(result: QueryResult, output: str, limit: int) -> bool:
    """Print at most `limit` rows (0: all) in format `output`; return whether there are more."""
    rows = iter(itertools.islice(result.rows, limit) if limit else result.rows)
    {"table": _table, "csv": _csv, "json": _json}[output](result.columns, rows)
    return bool(limit) and next(result.rows, None) is not None


def _table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print parts of at most 1000 rows, each with a head, while the query runs."""
    from rft.buffer.query import row_portions

    portions = row_portions(rows)
    first = True
    while (part := next(portions, [])) or first:
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
    """Format a value for a table."""
    if value is None:
        return "-"
    if isinstance(value, bytes | memoryview):
        return f"<{len(value)} bytes>"
    if isinstance(value, float | decimal.Decimal):
        return f"{value:.6g}"
    return str(value)


def moment(value: Any) -> str:
    """Format seconds since the epoch as a local time, and other values as `cell`."""
    if isinstance(value, float) and value > 1e9:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value))
    return cell(value)


def _csv(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    clean: Callable[[str], str] = safe if on_terminal() else str
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(columns)

    def field(value: Any) -> Any:
        if isinstance(value, str):
            return clean(value)
        if isinstance(value, bytes | memoryview):
            return json_value(value)
        return value

    for row in rows:
        writer.writerow(map(field, row))


def _json(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print an array with one object per line; repeated column names get a number."""
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
    """Format `facts` of `rft.buffer.inspect.collect`."""
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
        if counts := facts[name]:
            yield ""
            yield from _counts(head, counts[-20:])
            if len(counts) > 20:
                yield f"({len(counts) - 20} before them; --json gives all)"


def _counts(head: str, counts: Sequence[dict[str, Any]]) -> Iterator[str]:
    keys = list(counts[0])
    rows = [
        ["none" if r[head] is None else str(r[head]), *(_short(r[k]) for k in keys[1:])]
        for r in counts
    ]
    return table([k.replace("_", " ") for k in keys], rows, [False, *([True] * (len(keys) - 1))])


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    return cell(value)


def human(num_bytes: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} B"


# ------------------------------------------------------------ sample


def experience(x: Shown, words: TokenTexts | None, *, colour: bool) -> Iterator[str]:
    """Format one experience: what was asked and answered, how it was judged, where it went."""
    from rft.buffer.inspect import conversation

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
    if x.payload is not None and len(x.payload.messages) > 2:
        for message in conversation(x):
            text = "\n".join(filter(None, (message["text"], message["calls"])))
            yield from _text(safe(message["role"])[:12], text)
    else:
        yield from _text("prompt", row["prompt_text"])
        yield from _text("response", row["response_text"])
    yield from _judged(x)
    yield f"group        {row['group_id']}" + _compared(x)
    yield from _lineage(x)
    if words is not None:
        yield from _tokens(x, words, colour)
    yield ""


def _judged(x: Shown) -> Iterator[str]:
    """Format the gold answer, the reward with its parts, other records, and what judges replied."""
    from rft.buffer.inspect import equation, judge_exchanges

    info = {} if x.payload is None else dict(x.payload.info)
    if "gold_answer" in info:
        yield from _text("gold_answer", str(info.pop("gold_answer")))
    yield f"reward       {cell(x.row['reward'])}{safe(equation(x))}"
    info.pop("reward_weights", None)
    exchanges = judge_exchanges(info)
    for name, value in info.items():
        yield from _text(
            _INFO.get(name, safe(name)[:12]),
            value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False),
        )
    for exchange in exchanges:
        yield from _text("judge", f"{exchange['judge']}: {exchange['reply'] or exchange['why']}")
        for message in exchange["question"]:
            shown = " ".join(message["content"].split())
            cut = f"… ({len(shown)} characters)" if len(shown) > _QUESTION else ""
            yield from _text(f"  {message['role']}"[:12], shown[:_QUESTION] + cut)


def _compared(x: Shown) -> str:
    """Format its group's mean reward, and the trainer's advantage or the distance to the mean."""
    if x.group_mean is None:
        return ""
    advantages: list[float] = []
    if x.payload is not None and x.trainer is not None:
        advantages = x.trainer.advantages[x.payload.loss_mask].tolist()
        advantages = [a for a in advantages if math.isfinite(a)]
    text = f", mean reward {x.group_mean:.4g} of {x.group_scored}"
    if advantages:
        return f"{text}, mean advantage {sum(advantages) / len(advantages):+.4g}"
    if x.row["reward"] is None:
        return text
    return f"{text}, this one {x.row['reward'] - x.group_mean:+.4g}"


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
                "" if use.exists else ", which was deleted"
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
    """Format all tokens, trained ones with their log-prob and the trainer's, if stored."""
    if x.payload is None:
        yield f"tokens       {safe(x.missing_reason)}"
        return
    p = x.payload
    out = []
    nan = [math.nan] * len(p.tokens)
    by_trainer = nan if x.trainer is None else x.trainer.logprobs.tolist()
    for token, trained, logprob, new in zip(
        p.tokens.tolist(), p.loss_mask.tolist(), p.logprobs.tolist(), by_trainer, strict=True
    ):
        word = safe(words(token))
        if not trained:
            out.append(f"\x1b[2m{word}\x1b[0m" if colour else word)
            continue
        numbers = f"{logprob:.2f}" if p.has_logprobs else "-"
        numbers += "" if math.isnan(new) else f"/{new:.2f}"
        shade = _shade(logprob) if p.has_logprobs else 39
        coloured = f"\x1b[{shade}m{word}\x1b[0m\x1b[2m{numbers}\x1b[0m"
        out.append(coloured if colour else f"⟦{word} {numbers}⟧")
    yield "tokens       " + "·".join(out)


def _shade(logprob: float) -> int:
    """Return the colour code of a log-prob: green for likely, then yellow, then red."""
    if logprob > -0.1:
        return 32
    if logprob > -1.5:
        return 33
    return 31


def _bold(text: str, colour: bool) -> str:
    if colour:
        return f"\x1b[1m{text}\x1b[0m"
    return text


def to_json(x: Shown, *, tokens: bool) -> dict[str, Any]:
    """Convert one experience to JSON values."""
    from rft.buffer.experience_export import unpacked

    uses = [
        {"step": str(u.version), "checkpoint": u.checkpoint, "counts": u.counts} for u in x.uses
    ]
    payload = (
        unpacked(x.payload, x.trainer) if x.payload is not None else {"gone": x.missing_reason}
    )
    if not tokens:
        payload = {
            k: v for k, v in payload.items() if k in ("version_spans", "metrics", "info", "gone")
        }
    return {**x.row, **payload, "uses": uses}


CELL = 60  # widest cell of a table, in columns of the terminal


def cut(text: str, most: int = CELL) -> str:
    """Shorten `text` to `most` columns of the terminal, with an ellipsis."""
    if len(text) <= most // 2 or cell_len(text) <= most:
        return text
    return set_cell_size(text, most - 1).rstrip() + "…"


def table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[bool] = ()
) -> Iterator[str]:
    """Format lines of a table, with safe and shortened cells; `right` aligns columns of numbers.

    `rich.table` takes sixteen times as long, too long for the rows of a query.
    """
    cells = [[cut(safe(c)) for c in row] for row in (heads, *rows)]
    widths = [max(map(cell_len, column)) for column in zip(*cells, strict=True)]
    sides = [*right, *([False] * (len(heads) - len(right)))]
    for row in cells:
        parts = []
        for text, width, is_right in zip(row, widths, sides, strict=True):
            pad = " " * (width - cell_len(text))
            parts.append(pad + text if is_right else text + pad)
        yield "  ".join(parts).rstrip()
