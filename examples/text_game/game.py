"""A game of textarena's shape: find a number."""

import random
import re
from typing import Any


class HigherLower:
    """One player guesses a number from 1 to `highest`."""

    def __init__(self, highest: int = 15) -> None:
        self.highest = highest

    def reset(self, num_players: int, seed: int | None = None) -> None:
        self.secret = random.Random(seed).randint(1, self.highest)
        self.told = f"Guess the number from 1 to {self.highest}. Reply with a number only."
        self.won = False

    def get_observation(self) -> tuple[int, str]:
        return 0, self.told

    def step(self, action: str) -> tuple[bool, dict[str, Any]]:
        numbers = re.findall(r"\d+", action)
        guess = int(numbers[-1]) if numbers else None
        self.won = guess == self.secret
        self.told = (
            "A number, please." if guess is None else "Higher." if guess < self.secret else "Lower."
        )
        return self.won, {"reason": "Found."}

    def close(self) -> tuple[dict[int, float], dict[str, Any]]:
        return {0: float(self.won)}, {}
