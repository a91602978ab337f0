"""What `lockstep init` asks and says.

In: a question with the answer that an empty line stands for, and a check of answers. Out: an answer that is good: a
person is asked again until it is; where nobody can be asked, the default, and a note that says what was taken.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from lockstep.config.run import RunError
from lockstep.track.console import Console

Ask = Callable[[str, str], str]  # a question and the answer that an empty line stands for
MOST = 10  # wrong answers to a question, after which a person gave up, or is none

Answer = TypeVar("Answer")


class NoAnswerMends(RunError):
    """Something else is wrong than the answer: it is not asked for again."""


@dataclass
class Prompter:
    """With a person, or with nobody (`ask` is None)."""

    ask: Ask | None
    console: Console
    notes: list[str] = field(default_factory=list)  # for the file's header

    def note(self, text: str) -> None:
        """Something that was taken to be so, and what to do if it is not."""
        if text not in self.notes:
            self.notes.append(text)
            self.console.note(text)

    def answer(self, question: str, default: str, check: Callable[[str], Answer]) -> Answer:
        """What `check` makes of the answer; it raises `RunError` for one that is wrong, which is said, and asked again.

        Errors: `RunError` of the default where nobody is asked, when the answers end, and of the last of many that
        were wrong."""
        if self.ask is None:
            return check(default)
        for tries in range(MOST):
            try:
                given = self.ask(question, default)
            except EOFError:
                raise RunError(
                    "the answers ended; give --data, --task and --model, or --yes for what is guessed"
                ) from None
            try:
                return check(given)
            except NoAnswerMends:
                raise
            except RunError as error:
                if tries + 1 == MOST:
                    raise
                self.console.say(str(error))
        raise AssertionError

    def sure(self, question: str, default: bool) -> bool:
        """Yes or no."""
        return self.answer(f"{question} (yes/no)", "yes" if default else "no", _yes)


def _yes(text: str) -> bool:
    if text.lower() in ("yes", "y", "no", "n"):
        return text.lower().startswith("y")
    raise RunError(f"{text!r} is neither yes nor no")


def one_of(names: list[str], what: str) -> Callable[[str], str]:
    """A check of answers that have to be one of these."""

    def check(answer: str) -> str:
        if answer not in names:
            raise RunError(f"{answer!r} is no {what}; there are {', '.join(names)}")
        return answer

    return check


def terminal(question: str, default: str) -> str:
    """Ask a person on the terminal; an empty line takes the default. Errors: `EOFError` when the answers end."""
    return input(f"{question} [{default}]: " if default else f"{question}: ").strip() or default


def can_ask() -> bool:
    """Whether a person sits at the terminal."""
    return sys.stdin.isatty() and sys.stdout.isatty()
