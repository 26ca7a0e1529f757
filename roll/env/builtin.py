"""Small built-in environments."""

from __future__ import annotations

import random
import re

from roll.env.base import Environment, Step
from roll.env.resolve import register

# A minus after a word or a digit is a dash ("3-5" ends in 5); digits after a decimal point are no number of their own.
_INTEGER = re.compile(r"(?:(?<![\w)])-)?(?<![0-9])(?<![0-9]\.)(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)")


@register("guess")
class Guess(Environment):
    """Find a number from `low` to `high` within `tries` guesses; each is answered with higher or lower."""

    def __init__(self, low: int = 1, high: int = 100, tries: int = 7) -> None:
        if low > high or tries < 1:
            raise ValueError(f"guess: from {low} to {high} in {tries} tries leaves nothing to guess")
        self._low, self._high, self._tries = low, high, tries
        """The range that still contains the number, and the remaining guesses."""
        self._number = low

    def reset(self, seed: int) -> str:
        self._number = random.Random(f"guess/{seed}").randint(self._low, self._high)
        return (
            f"I am thinking of a whole number from {self._low} to {self._high}. "
            f"You have {self._tries} tries to guess it. After each I say whether it is higher or lower."
        )

    def step(self, action: str) -> Step:
        self._tries -= 1
        guess = last_integer(action)
        if guess == self._number:
            return Step("Right.", 1.0, terminated=True, info={"success": 1.0})
        if not self._tries:
            message = f"Wrong: it was {self._number}. You have no tries left."
            return Step(message, terminated=True, info={"success": 0.0})
        answer = self._answer(guess)
        state = f"{self._low} to {self._high}, {self._tries} left"
        return Step(f"{answer} Tries left: {self._tries}.", info={"state": state, "success": 0.0})

    def expert(self) -> str:
        """The middle of the remaining range."""
        return str((self._low + self._high) // 2)

    def _answer(self, guess: int | None) -> str:
        if guess is None:
            return "There is no whole number in what you said."
        if guess < self._number:
            self._low = max(self._low, guess + 1)
            return "Higher."
        self._high = min(self._high, guess - 1)
        return "Lower."


@register("echo_turns")
class EchoTurns(Environment):
    """Repeat the symbol that is shown, `turns` times; each right answer is worth 1 / turns. A toy for models trained from
    scratch."""

    def __init__(self, turns: int = 3, symbols: str = "0123456789") -> None:
        if turns < 1 or not symbols:
            raise ValueError(f"echo_turns: {turns} turns of the symbols {symbols!r} leave nothing to say")
        self._turns, self._symbols = turns, symbols
        self._remaining: list[str] = []
        self._right = 0

    def reset(self, seed: int) -> str:
        self._remaining = random.Random(f"echo_turns/{seed}").choices(self._symbols, k=self._turns)
        return self._remaining[0]

    def step(self, action: str) -> Step:
        right = action.strip() == self._remaining.pop(0)
        self._right += right
        info = {"success": float(self._right == self._turns)}
        is_over = not self._remaining
        return Step("" if is_over else self._remaining[0], right / self._turns, terminated=is_over, info=info)

    def expert(self) -> str:
        """The symbol that is shown."""
        return self._remaining[0]


def last_integer(text: str) -> int | None:
    """The last whole number in the text, or None. More than forty digits count as 10**40."""
    written = _INTEGER.findall(text)
    if not written:
        return None
    digits = written[-1].lstrip("-").replace(",", "")
    size = int(digits) if len(digits) <= 40 else 10**40
    return -size if written[-1].startswith("-") else size
