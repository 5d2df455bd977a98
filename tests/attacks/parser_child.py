"""Gives every parser of model text each kind of hostile text.  `python -m
tests.attacks.parser_child CHARACTERS`.

Prints a line of JSON in front of each call, and "done".  A call gets `limit_s` of processor time,
which a busy machine does not use up; then the process is ended, and the last line says which parser
was slow with which text.
"""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from rft.extras.sandbox import repair_workflow as repair
from rft.extras.sandbox.code_reward import program_of
from rft.extras.sandbox.remote_sandbox import _compared, _read
from rft.extras.worlds import calibration_reward, dapo_reward, tool_call_workflow
from rft.extras.worlds.adapters import chosen
from rft.extras.worlds.countdown_reward import evaluated
from rft.plugins import import_file, shipped_workflows
from rft.reward import answer_values, extract, math, measures, search_qa, verdict
from rft.reward.delimiters import PromptDelimiters, Scale, inert
from rft.secrets import redact, safe
from rft.types import thoughts
from rft.workflow import endpoint_wire
from rft.workflow import tools as toolcalls

sql = import_file(shipped_workflows() / "sql.py")
agent = import_file(shipped_workflows() / "agent.py")
sudoku = import_file(shipped_workflows() / "sudoku.py").SudokuWorkflow()
sudoku.board = [[0] * 9] * 9


def _verdict(text: str) -> Any:
    delimit = PromptDelimiters()
    delimit.ask(score=Scale(1, 10))
    return verdict.read(text.replace("KEY", delimit.key), delimit)


def _delimited(text: str) -> Any:
    delimit = PromptDelimiters()
    return delimit.outside(f"{delimit('a', text)}\n{delimit('b', text)}")


PARSERS: dict[str, Callable[[str], Any]] = {
    "last_boxed": extract.last_boxed,
    "answer tags": lambda t: extract.blocks(t, "answer"),
    "action tags": lambda t: extract.blocks(t, "action", ignore_case=True),
    "fences": lambda t: list(extract.fenced(t)),
    "shape": extract.has_shape,
    "thinks first": extract.thinks_first,
    "last value": answer_values.last_value,
    "whole value": answer_values.whole_value,
    "unit": measures.unit_of,
    "first value": answer_values.first_value,
    "conclusion": lambda t: (math.result_of(t), math._as_text(t), math._formula(t)),
    "thought": lambda t: thoughts.split_thought(t, opened=True),
    "stated confidence": lambda t: (calibration_reward._read(t), extract.blocks(t, "confidence")),
    "sudoku": sudoku._moves,
    "dapo": lambda t: dapo_reward.stated_answer(t),
    "search_qa": search_qa.without_articles,
    "countdown": lambda t: evaluated(t),
    "program": lambda t: program_of(t, "def f():\n", "f"),
    "judge verdict": _verdict,
    "says nothing": lambda t: verdict.says_nothing(inert(t)),
    "delimiters": _delimited,
    "tool calls": lambda t: toolcalls.in_text(t),
    "tool calls, hermes": lambda t: toolcalls.in_text(t, "hermes"),
    "tool arguments": lambda t: toolcalls._with("f", t),
    "request body": lambda t: endpoint_wire.parse(t.encode("utf-8", "surrogatepass")),
    "chosen action": lambda t: chosen(t, {"left": 0, "right": 1, "up and down": 2}),
    "sql": sql._blocks,
    "files to repair": repair.BLOCK.findall,
    "react": lambda t: (agent._ACTION.search(t), agent._ANSWER.findall(t)),
    "calculator": lambda t: agent.calculate(t),
    "tool thought": tool_call_workflow._THOUGHT.match,
    "remote sandbox": lambda t: _read(t.encode("utf-8", "surrogatepass")),
    "remote result": lambda t: _compared(t, [1], True),
    "log": redact,
    "terminal": safe,
}

PIECES = (
    "<confidence>",
    "<answer></answer><analysis></analysis><confidence>0.5</confidence>",
    "1 1 1\n",
    "\\boxed{",
    "\\boxed{}",
    "{",
    "}",
    "\\fbox{{}",
    "<answer>",
    "</answer>",
    "<answer></think>",
    "<think>",
    "<think></think>",
    "<action>",
    "```",
    "```\n",
    "```json\n",
    "```python",
    "`",
    "<tool_call>",
    "<tool_call>{}",
    "</tool_call>",
    "Action:",
    "Action:\n",
    "Answer: ",
    "Answer:\n",
    "#### ",
    "####",
    "-",
    ".,",
    "1,111",
    "1",
    "9e",
    "-1",
    "def f",
    "def ",
    "the ",
    "Okay, ",
    "let's solve ",
    "a",
    "A.",
    "a+",
    "x://",
    "a://b:",
    "a://b:c@",
    "bearer ",
    "&key=",
    "eyJ",
    "sk-",
    "-----BEGIN PRIVATE KEY-----",
    "<<<end",
    "<|",
    "[INST]",
    "\x00",
    "\ud800",
    "\u202e",
    "İ",
    "\n",
    " ",
    "\t",
    "\r\n",
    "[",
    "]",
    "[[",
    '{"a":',
    '"',
    '"\\"',
    '\\"',
    "\\",
    ",",
    "[],",
    '{"key": "KEY", "score": ',
    "rft-result:",
    "sk_",
    "left ",
    "a.",
    "-a",
    "(",
    "((1)",
    "1+",
    "=",
    "1/",
    "1 1/",
    "1 or ",
    "1, ",
    "1^",
    "½",
    "²",
    "$1",
    "$a$ or ",
    "\\frac{1",
    "\\text{",
    "\\(",
    "\\[",
    "answer is ",
    "答案",
    "~~~",
    "~~~ \n",
    "   ```\n",
    "may 1, 2024 ",
    "2024-1-",
    "1 km/",
    "\\boxed{1} or ",
    "*a",
    "_a",
)
HEADS = (
    "",
    "<think>",
    "<answer>",
    "```",
    "```json\n",
    "[",
    '{"a":"',
    "#### ",
    "Answer: ",
    "answer:",
    "http://u:",
    "def ",
    "<tool_call>",
)


def texts(size: int) -> dict[str, str]:
    """Each piece over and over, behind nothing; a few behind each head; and pairs that open and
    close in turn.
    """
    found = {f"{p!r} x n": p * (size // len(p)) for p in PIECES}
    for head in HEADS[1:]:
        for fill in (" ", "\n", "a", "1", "`", "\\"):
            found[f"{head!r} + {fill!r} x n"] = head + fill * size
    half = size // 2
    for first, second in (
        ("\\boxed{", "}"),
        ("[", "]"),
        ("<answer>", "</answer>"),
        ("```\n", "```"),
        (" ", "```"),
        ("1", "."),
    ):
        found[f"{first!r} x n + {second!r} x n"] = first * (half // len(first)) + second * (
            half // len(second)
        )
    return found


def limit_s(size: int) -> float:
    """Return three quarters of the processor time that the plainest quadratic pattern takes for 60 kB
    on this machine, in proportion to `size`.
    """
    began = time.process_time()
    re.search("a+b", "a" * 60_000)
    return 0.75 * (time.process_time() - began) * size / 60_000


def main(size: int) -> None:
    import warnings

    warnings.simplefilter("ignore")  # programs of models warn of their syntax
    hostile = texts(size)
    cpu_s = limit_s(size)
    for name, parser in PARSERS.items():
        for what, text in hostile.items():
            print(json.dumps([name, what]), flush=True)
            # from now on; RLIMIT_CPU counts ticks, more than `process_time` says
            signal.setitimer(signal.ITIMER_PROF, cpu_s)
            try:
                parser(text)
            except (ValueError, verdict.UnreadableVerdict, endpoint_wire.ApiError):
                continue  # it said no, in time
    print("done")


if __name__ == "__main__":
    main(int(sys.argv[1]))
