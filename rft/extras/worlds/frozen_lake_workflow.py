"""Crossing a frozen lake: one move per turn, until the goal, a hole, or the last turn.

Needs gymnasium.

explorer_input:
  taskset: {path: "rft.taskset.generated_tasks:frozen_lake_maps", split: train,
            default_workflow_type: frozen_lake_workflow}

A row gives its map as `desc` (lines of S, F, H, G) or as `size`, `p` and `seed` of gymnasium's
random maps.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from rft import Task, register
from rft.extras.worlds.adapters import GymArgs, GymWorkflow, gymnasium
from rft.workflow.turns import row_seed

MOVES = {"Left": (0, -1), "Down": (1, 0), "Right": (0, 1), "Up": (-1, 0)}
ASKED = "Left, Down, Right or Up"
CELLS = {"S", "F", "H", "G"}


class FrozenLakeArgs(GymArgs):
    """GymArgs for the lake; `desc`, `size` and `p` apply to rows without their own."""

    max_turns: int = Field(8, ge=1, description="moves at most")
    agent_max_steps: int | None = Field(None, ge=1, description="Trinity-RFT's name of max_turns")
    env_max_steps: int | None = Field(
        None, ge=1, description="moves of the environment at most; null: as max_turns"
    )
    max_turn_tokens: int | None = Field(16, ge=1, description="tokens of one answer at most")
    is_slippery: bool = Field(False, description="moves go astray in two of three cases")
    desc: list[str] | None = Field(None, description="map of all rows, lines of S, F, H, G")
    size: int = Field(4, ge=2, le=16, description="size of random maps")
    p: float = Field(0.8, gt=0, le=1, description="share of ice on random maps")
    view: Literal["map", "words", "both"] = Field(
        "both",
        description="show the map with P for the player, say where goal and holes are, or both",
    )

    def model_post_init(self, _: Any) -> None:
        if self.agent_max_steps is not None:
            object.__setattr__(self, "max_turns", self.agent_max_steps)


@register.workflow("frozen_lake_workflow", args=FrozenLakeArgs)
class FrozenLake(GymWorkflow):
    """Reward 1 for reaching the goal, else 0."""

    env_id = "FrozenLake-v1"
    needs: ClassVar[Mapping[str, str]] = {"gymnasium": "gymnasium"}
    actions: ClassVar[Mapping[str, int]] = {"Left": 0, "Down": 1, "Right": 2, "Up": 3}

    def make(self, task: Task) -> Any:
        self.lake = self._map(task)
        # the start may be anywhere, not only in the upper left corner: gymnasium accepts any S
        return gymnasium().make(
            self.env_id,
            desc=self.lake,
            is_slippery=self.args.is_slippery,
            max_episode_steps=self.args.env_max_steps,
        )

    def instruction(self, task: Task) -> str:
        return task.system_prompt or "You cross a frozen lake. Never step into a hole."

    def describe(self, observation: Any) -> str:
        at = divmod(int(observation), len(self.lake[0]))
        rows = [
            "".join("P" if (r, c) == at else cell for c, cell in enumerate(line))
            for r, line in enumerate(self.lake)
        ]
        holes = [
            name.lower()
            for name, (dr, dc) in MOVES.items()
            if self._cell(at[0] + dr, at[1] + dc) == "H"
        ]
        goal = next((r, line.index("G")) for r, line in enumerate(self.lake) if "G" in line)
        words = f"Goal: {_towards(at, goal)}. Holes: {', '.join(holes) or 'none'}."
        shown = [
            *(rows if self.args.view != "words" else []),
            *([words] if self.args.view != "map" else []),
        ]
        return "\n".join(shown) + f" Reply with {ASKED} only."

    def _cell(self, row: int, column: int) -> str:
        inside = 0 <= row < len(self.lake) and 0 <= column < len(self.lake[0])
        return self.lake[row][column] if inside else ""

    def _map(self, task: Task) -> list[str]:
        desc = task.row.get("desc") or self.args.desc
        if desc is None:
            from gymnasium.envs.toy_text.frozen_lake import generate_random_map

            size = int(task.row.get("size", self.args.size))
            p = float(task.row.get("p", self.args.p))
            desc = generate_random_map(size=size, p=p, seed=row_seed(task))
        lake = [str(line) for line in desc]
        if (
            len({len(line) for line in lake}) != 1
            or set("".join(lake)) - CELLS
            or "S" not in "".join(lake)
            or "G" not in "".join(lake)
        ):
            raise ValueError(
                f"task {task.taskset}[{task.index}]: {lake} is no lake; equally long lines of S, "
                f"F, H and G with an S and a G"
            )
        return lake


def _towards(at: tuple[int, int], goal: tuple[int, int]) -> str:
    down = goal[0] - at[0]
    right = goal[1] - at[1]
    ways = [f"{abs(down)} {'down' if down > 0 else 'up'}"] * (down != 0) + [
        f"{abs(right)} {'right' if right > 0 else 'left'}"
    ] * (right != 0)
    return " and ".join(ways) or "here"
