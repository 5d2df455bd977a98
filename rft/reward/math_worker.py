"""The process in which math-verify runs.  `python -m rft.reward.math_worker`, driven by `rft.reward.pool` over its pipes.

math-verify's own time limit uses SIGALRM and must be off; the parent kills this process instead.
"""

from __future__ import annotations

from typing import Any


def main() -> None:
    from rft.reward.pool import serve

    serve(load)


def load() -> Any:
    """Imports math-verify (a second) and gives the function that answers requests {answer, truth} with a bool."""
    import logging

    logging.disable(logging.WARNING)  # math-verify warns that its time limit is off
    from math_verify import parse, verify

    def answer(request: dict[str, str]) -> bool:
        truth = request["truth"]
        gold = parse(truth if "\\boxed" in truth else f"\\boxed{{{truth}}}", parsing_timeout=None) or parse(
            truth, parsing_timeout=None
        )
        if not gold:
            raise ValueError(f"math-verify cannot read the truth {truth!r}")
        return bool(verify(gold, parse(request["answer"], parsing_timeout=None), timeout_seconds=None))

    return answer


if __name__ == "__main__":
    main()
