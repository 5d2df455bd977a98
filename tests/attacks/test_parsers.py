"""M2: what a model writes is parsed in one pass.  The parsers are in `parser_child`; here they are
counted, and given hostile texts.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rft.reward.extract import blocks, fenced, has_shape, last_boxed
from rft.workflow import endpoint_wire
from rft.workflow import tools as toolcalls
from tests.attacks.table import attack

pytestmark = pytest.mark.extra

ROOT = Path(__file__).parents[2]
ELSEWHERE = {  # files with regular expressions that are not tried here, and why
    "rft/extras/worlds/gym_worker.py": "runs in a process that is killed at its deadline",
    "rft/reward/math_worker.py": "the same",
    "rft/reward/delimiters.py": "covered by: delimiters, says nothing",
    "rft/reward/spelling.py": "covered by: last value",
    "rft/reward/math.py": "covered by: conclusion",
    "rft/reward/extract.py": "covered by: last_boxed, answer tags, fences",
}


def _run(size: int, timeout_s: float) -> None:
    command = [sys.executable, "-m", "tests.attacks.parser_child", str(size)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    lines = done.stdout.splitlines()
    assert lines, done.stderr
    assert lines[-1] == "done", (
        f"{lines[-1]} of {size} characters: exit {done.returncode}\n{done.stderr[-2000:]}"
    )
    asked = {json.loads(line)[0] for line in lines[:-1]}
    from tests.attacks import parser_child

    assert asked == set(parser_child.PARSERS)


@attack(
    "M2",
    "60 kB of each kind of hostile text to each parser",
    "done in less time than the plainest quadratic pattern takes",
)
@pytest.mark.e2e
def test_no_text_makes_a_parser_slow() -> None:
    """`parser_child.limit_s` measures what is allowed."""
    _run(60_000, 900)


@attack("M2", "1 MB of each kind to each parser", "done in time that grows as the text")
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_one_megabyte_of_each_kind() -> None:
    _run(1_000_000, 3600)


@attack("M2", "a new regular expression where answers are read", "has to be tried with these texts")
def test_every_parser_of_model_text_is_tried() -> None:
    """A new regular expression where answers are read belongs into `parser_child`."""
    text = (Path(__file__).with_name("parser_child.py")).read_text()
    for folder in ("rft/reward", "rft/workflow", "workflows"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if "re.compile(" in path.read_text() and str(path.relative_to(ROOT)) not in ELSEWHERE:
                assert re.search(rf"\b{path.stem}\b", text), (
                    f"{path} compiles a regular expression; add its parser to PARSERS"
                )


@attack("–", "boxes in boxes, boxes that do not end", "the last complete one is read")
@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("\\boxed{1} then \\boxed{2", "1"),
        ("\\boxed{a\\boxed{b}c}", "b"),
        ("\\boxed{a{b}c} } {", "a{b}c"),
        ("}}\\fbox{x}", "x"),
        ("\\boxed{{{", None),
    ],
)
def test_the_last_box_is_still_the_last_complete_one(text: str, found: str | None) -> None:
    assert last_boxed(text) == found


@attack("–", "blocks and fences, well formed or not", "read in one pass as before")
def test_blocks_and_fences_are_found_as_before() -> None:
    assert blocks("<answer>1<answer>2</answer>3</answer><answer>", "answer") == ["1<answer>2"]
    assert (
        blocks("<ACTION>a</Action>", "action", ignore_case=True) == ["a"]
        and blocks("<ANSWER>a</ANSWER>", "answer") == []
    )
    assert [(f.language, f.body, f.closed) for f in fenced("a```Py x\n1\n```b```\n2")] == [
        ("py", "1\n", True),
        ("", "2", False),
    ]
    assert has_shape(" <think>a</think>\n<answer>b</answer> ") and not has_shape(
        "<think>a</think>x<answer>b</answer>"
    )
    assert not has_shape("<think></think><answer></answer><answer></answer>")
    assert toolcalls.in_text('```python\n1\n```\n```json\n{"name": "f"}\n```')[0].name == "f"


@attack("M8", "a body of 5 MB that closes more than it opens", "refused before it is parsed")
def test_a_body_that_only_closes_is_refused_before_it_is_read() -> None:
    with pytest.raises(endpoint_wire.ApiError, match="closes more"):
        endpoint_wire.parse(b"[" * 100 + b"]" * 5_000_000)
