"""What tasks of texts share: a tokenizer, and a model of transformers that reads its tokens.

In: a run, and what `prepare` left in the cache. Out: a task with its options and its tokenizer.
"""

from __future__ import annotations

from typing import Any, ClassVar

from lockstep.config.run import Run
from lockstep.data import tokenizer
from lockstep.data.tokens import Prepared
from lockstep.tasks.task import Task

_UNIGRAM = (
    "tokenizer.train: unigram is not trained alike twice (ties are broken at random): with another cache, or on "
    "another machine, tokens and weights are others. For the same ones give tokenizer.source the export of this run"
)


class TextTask(Task):
    """A task whose examples are tokens of texts."""

    plugin = "tasks"  # a base: it has no name in a run file

    unit: ClassVar[str | None] = "tokens"

    @property
    def usage(self) -> str:
        return f'{super().usage}\nask("some text")'

    def __init__(self, run: Run, prepared: Prepared) -> None:
        super().__init__(run, prepared)
        self.options: Any = self.Options.model_validate(run.task.options)
        self.tokenizer: Any = tokenizer.load(prepared.tokenizer, run.model.trust_remote_code)

    @property
    def padded_because(self) -> str | None:
        if self.head is None:
            return super().padded_because
        from lockstep.tasks.models import padding

        return padding.unsupported_reason(self.run, self.head)

    @property
    def warnings(self) -> list[str]:
        """Of data, and of a tokenizer that is not trained alike twice."""
        return [*super().warnings, *[_UNIGRAM] * (self.run.tokenizer.train == "unigram")]
