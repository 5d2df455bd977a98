"""Read the verdict in a judge's reply: one JSON object at its end, on lines of its own, every field
on its scale.  Anything else is unreadable.

Depends on no model.
Invariant: a verdict without the key of the call, a second verdict, or a verdict followed by text is
never accepted.
"""

from __future__ import annotations

import json
import re
from typing import Any

from rft.files.strict_json import no_key_twice
from rft.reward.delimiters import PromptDelimiters
from rft.types.thoughts import split_thought

_OPENERS = re.compile(
    r"(?:(?:sure|okay|ok|certainly)\W*)?"
    r"(?:(?:my |the )?(?:thought process|thinking|reasoning|solution|explanation|(?:final "
    r")?answer)(?: is)?"
    r"|let'?s (?:think|solve|work)(?: \w+){0,4} step by step|here is (?:the|my) \w+|thinking "
    r"process|step by step"
    r"|(?:la |mi |el |meine? |die |der |ma |il |a |o "
    r")?(?:soluci[oó]n|respuesta|razonamiento|pensamiento|l[oö]sung|antwort|begr[uü]ndung"
    r"|denkprozess|r[eé]ponse|raisonnement|r[eé]flexion|soluzione|risposta|ragionamento|solu[cç][aã]o|resposta|racioc[ií]nio)"
    r"|решение|ответ|рассуждение|ход мыслей|解|解答|解析|答案|答|回答|思考过程|思考過程|推理过程|让我们一步一步(?:地)?思考"
    r"|かいせつ|解説|答え|풀이|정답|답|해설|الحل|الجواب|उत्तर|हल)\W*",
    re.IGNORECASE,
)


_OBJECT = re.compile(r"^[ \t]*\{", re.MULTILINE)


class UnreadableVerdict(Exception):
    """A reply without a readable verdict; the message gives the reason."""


def read(reply: str, delimit: PromptDelimiters) -> dict[str, Any]:
    """Return the verdict's fields.  Raises UnreadableVerdict."""
    text = split_thought(reply).answer.strip()
    if text.endswith("```"):  # a fenced block at the very end
        text = text[:-3].rstrip()
    if not text:
        raise UnreadableVerdict("the reply is empty")
    if len(re.findall(rf"\bkey\W{{1,8}}{re.escape(delimit.key)}", text)) > 1:
        raise UnreadableVerdict("the reply has more than one verdict")
    opened = [line.start() for line in _OBJECT.finditer(text)]
    last = text[opened[-1] :] if opened and text.endswith("}") else text.splitlines()[-1].strip()
    try:
        verdict = json.loads(last, object_pairs_hook=no_key_twice, parse_constant=_no_constant)
    except (ValueError, RecursionError) as e:
        raise UnreadableVerdict(
            f"the last line is no verdict ({str(e)[:80]}): {last[:120]!r}"
        ) from None
    if not isinstance(verdict, dict) or verdict.pop("key", None) != delimit.key:
        raise UnreadableVerdict(f"the last line does not have the key of this call: {last[:120]!r}")
    if verdict.keys() != delimit.fields.keys():
        raise UnreadableVerdict(
            f"the verdict has {', '.join(map(str, verdict)) or 'nothing'} instead of "
            f"{', '.join(delimit.fields)}"
        )
    try:
        return {name: field.check(verdict[name]) for name, field in delimit.fields.items()}
    except ValueError as e:
        raise UnreadableVerdict(str(e)[:200]) from None


def says_nothing(answer: str) -> bool:
    """Return whether an answer has no letter or digit, or is only an opening phrase; such texts can
    talk a judge into full marks.
    """
    text = answer.strip()
    return not any(c.isalnum() for c in text) or _OPENERS.fullmatch(text) is not None


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is not a number")
