"""Sudoku, some cells in every turn: the model is shown the board as it is and writes where which
number goes.

explorer_input:
  taskset: {path: boards.jsonl, default_workflow_type: sudoku_workflow}                         # {"puzzle": [[5, 3, 0, ...], ...]}
  taskset: {path: "rft.taskset.generated_tasks:seeds", default_workflow_type: sudoku_workflow}  # a
  board for each seed

Every call is a row with its own reward: 1 for the one that fills the board, -1 for one that breaks
a rule and ends the run, else 0.
"""

import random
from typing import Any, Literal

from pydantic import BaseModel, Field, field_validator

from rft import EnvWorkflow, Step, Task, register
from rft.workflow.turns import StepArgs, row_seed

Board = list[list[int]]
HOLES = {"easy": 1 / 3, "medium": 1 / 2, "hard": 2 / 3}
_SIDE = {4: 2, 9: 3}  # size of a board -> of its blocks


class SudokuArgs(StepArgs):
    """As StepArgs; how much of a board is open, and how much of it one answer may fill."""

    max_turns: int = Field(20, ge=1, description="answers at most")
    history: int | None = Field(
        0,
        ge=0,
        description="steps: how many earlier turns the model is shown; the board holds all it "
        "needs",
    )
    max_moves: int = Field(5, ge=1, description="cells that one answer may fill")
    size: int = Field(9, description="size of boards that rows do not bring: 4 or 9")
    difficulty: Literal["easy", "medium", "hard"] = Field(
        "medium", description="a third, half or two thirds of such a board is open"
    )

    @field_validator("size")
    @classmethod
    def _square(cls, size: int) -> int:
        if size not in _SIDE:
            raise ValueError(f"a board has size 4 or 9, not {size}")
        return size


@register.workflow("sudoku_workflow", args=SudokuArgs)
class SudokuWorkflow(EnvWorkflow):
    """A row has its board as `puzzle`, lists of numbers with 0 for what is open; else its `seed`
    makes one.  Any solution is right.
    """

    Args: type[BaseModel] = SudokuArgs
    scores_itself = True

    def reset(self, task: Task) -> str:
        puzzle = task.row.get("puzzle")
        if puzzle is None:
            puzzle = made(self.args.size, HOLES[self.args.difficulty], seed=row_seed(task))
        self.board = _board(puzzle, f"task {task.taskset}[{task.index}]")
        return self.shown()

    def instruction(self, task: Task) -> str:
        size = len(self.board)
        return task.system_prompt or (
            f"You solve a Sudoku of {size} by {size}. Every row, column and block of {_SIDE[size]} "
            f"by {_SIDE[size]} must have each number "
            f"from 1 to {size} once; 0 is an open cell. Answer with one to {self.args.max_moves} "
            f"lines of three numbers and nothing else: "
            f"row, column, number. Rows and columns count from 0. Fill open cells only."
        )

    def step(self, action: str) -> Step:
        moves = self._moves(action)
        for row, column, number in moves:
            if self.board[row][column]:
                return self._over(False, f"Cell {row} {column} is filled.")
            self.board[row][column] = number
        if not moves or not sound(self.board):
            return self._over(False, "These are no moves by the rules.")
        if all(map(all, self.board)):
            return self._over(True, "Solved.")
        return Step(self.shown(), reward=0.0, info={"success": False})

    def shown(self) -> str:
        return "\n".join(" ".join(map(str, line)) for line in self.board)

    def _over(self, success: bool, said: str) -> Step:
        return Step(said, reward=1.0 if success else -1.0, done=True, info={"success": success})

    def _moves(self, action: str) -> list[tuple[int, int, int]]:
        """The moves of an answer; none where a line is no move, or where there are too many."""
        size = len(self.board)
        found = []
        for line in action.split("\n", self.args.max_moves * 4):
            if not (parts := line.split(maxsplit=3)):
                continue
            if len(parts) != 3 or not all(
                p.isascii() and p.isdigit() and len(p) == 1 for p in parts
            ):
                return []
            row, column, number = map(int, parts)
            if row >= size or column >= size or not 1 <= number <= size:
                return []
            found.append((row, column, number))
        return found if len(found) <= self.args.max_moves else []


def sound(board: Board) -> bool:
    """Whether no row, column or block has a number twice."""
    size = len(board)
    side = _SIDE[len(board)]
    cells = [(r, c) for r in range(size) for c in range(size)]
    groups = [[(r, c) for c in range(size)] for r in range(size)] + [
        [(r, c) for r in range(size)] for c in range(size)
    ]
    groups += [
        [p for p in cells if (p[0] // side, p[1] // side) == b]
        for b in {(r // side, c // side) for r, c in cells}
    ]
    filled = [[board[r][c] for r, c in group if board[r][c]] for group in groups]
    return all(len(set(numbers)) == len(numbers) for numbers in filled)


def made(size: int, holes: float, *, seed: int) -> Board:
    """A board with this share of its cells open: a known solution whose numbers, rows and columns
    are shuffled within the rules.
    """
    draw = random.Random(seed)
    side = _SIDE[size]

    def order() -> list[int]:
        bands = draw.sample(range(side), side)
        return [band * side + line for band in bands for line in draw.sample(range(side), side)]

    rows = order()
    columns = order()
    numbers = draw.sample(range(1, size + 1), size)
    board = [[numbers[(side * (r % side) + r // side + c) % size] for c in columns] for r in rows]
    for cell in draw.sample(range(size * size), round(size * size * holes)):
        board[cell // size][cell % size] = 0
    return board


def _board(given: Any, where: str) -> Board:
    lines = given if isinstance(given, list) else []
    size = len(lines)
    if size not in _SIDE or any(not isinstance(line, list) or len(line) != size for line in lines):
        raise ValueError(f"{where}: its puzzle must be 4 lists of 4 numbers, or 9 of 9")
    if any(type(n) is not int or not 0 <= n <= size for line in lines for n in line):
        raise ValueError(f"{where}: its puzzle must have numbers from 0 to {size}")
    board = [list(line) for line in lines]
    if not sound(board) or all(map(all, board)):
        raise ValueError(f"{where}: its puzzle breaks the rules, or has no open cell")
    return board
