"""Answers that reasoning-gym's scorers would run as code, or take for an answer that they are not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from reasoning_gym.factory import create_dataset

from rft.extras.worlds.gym_reward import POOL
from rft.plugins import load_all
from rft.reward.base import score
from rft.reward.build_reward import build
from tests.attacks.table import attack
from tests.helpers.answers import make_transcript as said
from tests.helpers.answers import task

pytestmark = pytest.mark.e2e  # seconds: the worker imports SymPy
EVALUATING = (
    "binary_matrix",
    "countdown",
    "intermediate_integration",
    "n_queens",
    "number_sorting",
    "polynomial_multiplication",
    "puzzle24",
    "simple_integration",
    "spiral_matrix",
    "string_insertion",
)
SPOIL = (
    "import reasoning_gym.factory as f\nfor d, _ in f.DATASETS.values(): d.score_answer = "
    "lambda *a, **k: 1.0"
)


def spelled(code: str) -> str:
    """The text without a quote or a dot."""
    return "+".join(f"chr({ord(c)})" for c in code)


CODE = (
    f"exec({spelled(SPOIL)})",
    f"eval({spelled('exec(' + repr(SPOIL) + ')')})",
    f"sympify({spelled('1')})",
    f"S({spelled('1')})",
    repr(f"exec({SPOIL!r})"),
    f"[{f'exec({SPOIL!r})'!r}]",
    f"[exec({SPOIL!r})]",
    f"(exec({SPOIL!r}),)",
    f"x + exec({SPOIL!r})",
    f"(exec)({SPOIL!r})",
    f"x\n+exec({SPOIL!r})",
    f"(x\r+exec({SPOIL!r}))",
    f"x if exec({SPOIL!r}) else x",
    f"(lambda: exec({SPOIL!r}))()",
    f"[exec({SPOIL!r}) for _ in (1,)]",
    f"f'{{exec({spelled('1')})}}'",
    f"ｅｘｅｃ({SPOIL!r})",
    f"(y := exec({SPOIL!r}))",
    f"3 == exec({SPOIL!r})",
    f"3=exec({SPOIL!r})",
    f"x # {SPOIL}",
    f"getattr(x, {spelled('func')})",
    "setattr(Symbol, x, 1)",
    f"globals()[{spelled('eval')}]",
    "x.__class__",
    "x.func",
    "1 .real",
    "1.0.real",
    "1..real",
    "sin.x",
    "Lambda(x, x)(1)",
    "(sin)(x)(x)",
    "sin(x)(x)",
    "sin(*x)",
    "sin(**x)",
    "sin(evaluate=x)",
    "sin(eval)",
    "sin(exec, open)",
    "Symbol",
    "open(0)",
    "input()",
    "breakpoint()",
    "exit()",
    "quit",
    "print(x)",
    "preview(x)",
    "source(sin)",
    "plot(x)",
    "init_printing()",
    "var(x)",
    "lambdify(x, x)",
    "__builtins__",
    "5!",
    "0.2[1]",
    "True",
    "None",
    "...",
    "1j",
    "x; x",
    "(" * 1500 + "x" + ")" * 1500,
    "-" * 1999 + "x",
    "9" * 5000,
    "a" * 3000,
    "\x00",
    "\ud800",
    "\u202ex",
    "x\\\n+x",
)


@pytest.fixture(scope="module", autouse=True)
def worker() -> Iterator[None]:
    load_all()
    yield
    POOL.close()


def rows(name: str, count: int) -> list[Any]:
    data = create_dataset(name, size=count, seed=3)
    made = [dict(data[i]) for i in range(count)]
    return [msgspec.structs.replace(task(row["answer"]), row=row) for row in made]


async def given(name: str, of: Any, answer: str) -> float:
    scored = await score(
        build("reasoning_gym", {"timeout_s": 60}), of, said(f"<answer>{answer}</answer>")
    )
    assert scored.value is not None
    return scored.value


@attack(
    "–",
    f"an answer to a data set whose scorer evaluates it is code: {len(CODE)} ways, of which some "
    f"change the scorers",
    "read as data or as a formula, or not at all; answers that come later are scored as if nothing "
    "had been",
)
@pytest.mark.parametrize("name", EVALUATING)
async def test_no_answer_runs(name: str) -> None:
    first, second = rows(name, 2)
    right = second.row["answer"]
    wrong = await given(name, second, "17 x")
    workers = POOL.pids()
    for i, code in enumerate(CODE):
        assert await given(name, first, code) < 0.1, code
        assert await given(name, second, f"17 x{'y' * i}") == wrong < 0.1, code  # not from memory
    assert POOL.pids() == workers  # none has ended
    assert "Integral(" in right or await given(name, second, right) == 1.0


@attack(
    "–",
    "the question is given back as its answer, or numbers are made of nothing",
    "wrong: functions are elementary, numbers whole",
)
@pytest.mark.parametrize(
    ("name", "entry", "answers"),
    [
        (
            "simple_integration",
            {"answer": "x**3/3 + C", "metadata": {"integrand": "x**2", "variable": "x"}},
            [
                "Integral(x**2, x)",
                "integrate(x**2, x)",
                "Sum(x**2, x)",
                "Derivative(x**4/12, x)",
                "Add(x**3/3, 0)",
            ],
        ),
        (
            "polynomial_multiplication",
            {"answer": "x**2 + 3*x + 2", "metadata": {}},
            [
                "expand((x + 1)*(x + 2))",
                "(x + 1)*(x + 2)",
                "simplify((x + 1)*(x + 2))",
                "Poly((x + 1)*(x + 2))",
            ],
        ),
        (
            "countdown",
            {"answer": "6*4", "metadata": {"numbers": [6], "target": 24}},
            [
                "6*floor(pi + 1)",
                "6 + 0x12",
                "6*(E/E + pi/pi + I/I + E/E)",
                "6 + 1_8",
                "6 + 18.0",
                "6*len({})",
                "6*int(pi)",
                "6*2.e0*2.e0",
            ],
        ),
        (
            "puzzle24",
            {"answer": "6*4*1*1", "metadata": {"numbers": [6, 4, 1, 1]}},
            [
                "6 + 6 + 6 + 6*pi/pi + 0x0",
                "24*1**1*1",
                "floor(6*pi) + 6 + 6 - 6",
                "6*4 + sin(1 - 1)*0",
            ],
        ),
    ],
)
async def test_no_answer_is_free(name: str, entry: dict[str, Any], answers: list[str]) -> None:
    row = {"question": "?", **entry, "metadata": {"source_dataset": name, **entry["metadata"]}}
    of = msgspec.structs.replace(task(row["answer"]), row=row)
    for answer in answers:
        assert await given(name, of, answer) < 0.1, answer


@attack("–", "a formula without end", "the worker is ended at the deadline; the run is not scored")
async def test_a_tower_is_over_in_time() -> None:
    (of,) = rows("simple_integration", 1)
    with pytest.raises(TimeoutError):
        await score(build("reasoning_gym", {"timeout_s": 1}), of, said("9**9**9**9"))
    assert await given("simple_integration", of, of.row["answer"]) == 1.0
