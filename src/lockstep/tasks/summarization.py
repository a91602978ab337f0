"""Summaries, and whatever else is one text written for another (headlines, corrections, questions): as `translation`,
with ROUGE instead of BLEU.

In: two columns of texts. Out: loss and perplexity per target token, ROUGE-1, -2 and -L of what the model writes, all
from sums.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from lockstep.tasks.models import rouge
from lockstep.tasks.translation import Translation, WritingOptions


class SummarizationOptions(WritingOptions):
    """The task's own keys in the run file."""

    source: str = Field("text", description="column of the text")
    target: str = Field("summary", description="column of its summary, or of what else is written for it")
    rouge: bool = Field(True, description="write texts at each evaluation, and score them by ROUGE-1, -2 and -L")


class Summarization(Translation):
    """One text for another, shorter or not."""

    Options = SummarizationOptions
    pipeline = "summarization"
    display_keys = ("rouge", "beams", "samples")
    answer = "summary"
    metric_names = ("accuracy", "perplexity", *rouge.NAMES)

    @classmethod
    def overlap_of(cls, options: Any) -> Any:
        return rouge.Rouge() if options.rouge else None
