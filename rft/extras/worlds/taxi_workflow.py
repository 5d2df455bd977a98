"""Driving a taxi on a grid of five by five places (needs gymnasium): pick up a passenger and drive
to their goal.

explorer_input:
  taskset: {path: "rft.taskset.generated_tasks:seeds", split: train,
            default_workflow_type: taxi_workflow}
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from rft import Task, register
from rft.extras.worlds.adapters import GymArgs, GymWorkflow, gymnasium

STANDS = ("Red", "Green", "Yellow", "Blue")


class TaxiArgs(GymArgs):
    """GymArgs for the taxi."""

    max_turns: int = Field(20, ge=1, description="actions at most")
    max_turn_tokens: int | None = Field(16, ge=1, description="tokens of one answer at most")
    scale: float = Field(
        0.05,
        gt=0,
        description="factor of the environment's rewards: -1 a move, -10 a wrong pickup, 20 in the "
        "end",
    )


@register.workflow("taxi_workflow", args=TaxiArgs)
class Taxi(GymWorkflow):
    """Drives a taxi; the rewards are the environment's times `scale`.

    The score's success part says whether the passenger has arrived.
    """

    needs: ClassVar[Mapping[str, str]] = {"gymnasium": "gymnasium"}
    actions: ClassVar[Mapping[str, int]] = {
        "South": 0,
        "North": 1,
        "East": 2,
        "West": 3,
        "Pickup": 4,
        "Dropoff": 5,
    }

    def make(self, task: Task) -> Any:
        library = gymnasium()
        newest = max(
            (name for name in library.registry if name.startswith("Taxi-v")), default="Taxi-v3"
        )
        return library.make(newest, render_mode="ansi")

    def describe(self, observation: Any) -> str:
        taxi = self.env.unwrapped
        row, column, passenger, goal = taxi.decode(int(observation))
        where = (
            "in the taxi"
            if passenger == len(STANDS)
            else f"at {STANDS[passenger]} {_place(taxi.locs[passenger])}"
        )
        ways = [
            name
            for name, action in self.actions.items()
            if action < 4 and _moves(taxi, int(observation), action)
        ]
        return (
            f"Taxi {_place((row, column))}. Passenger {where}. Goal {STANDS[goal]} "
            f"{_place(taxi.locs[goal])}. "
            f"Ways: {', '.join(ways)}. Action?"
        )

    def reward(self, reward: float) -> float:
        return reward * float(self.args.scale)


def _place(at: Any) -> str:
    return f"(row {int(at[0])}, column {int(at[1])})"


def _moves(taxi: Any, state: int, action: int) -> bool:
    """Return whether a move changes the place: no wall blocks it."""
    return bool(taxi.P[state][action][0][1] != state)
