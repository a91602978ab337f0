"""Extractive question answering with any model that `AutoModelForQuestionAnswering` knows: the answer is a part of a
text.

In: questions, contexts and answers, as SQuAD has them; long contexts are read in windows that overlap. Out: the loss,
exact matches and F1 of words as of SQuAD's own script, all from sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from lockstep.config.run import Run, RunError
from lockstep.data import apart, documents, questions, source, tokenizer
from lockstep.data.token_counts import TokenCounts
from lockstep.data.tokens import VERSION, Columns, Prepared, content, digest
from lockstep.tasks.task import Task

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lockstep.data.batch import MicroBatch, Sums
    from lockstep.tasks.models.decoding import Decoding

_SHARP = 2.0**20  # sums are rounded to its inverse: scores are kept to 2^-40


class QuestionAnsweringOptions(BaseModel):
    """The task's own keys in the run file."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    question: str = Field("question", description="column of the question")
    context: str = Field("context", description="column of the text that holds the answer")
    answers: str = Field(
        "answers", description="column of the answers: {text: [...], answer_start: [...]}, the first one is learned"
    )
    unanswerable: bool = Field(
        False, description="questions may have no answer (SQuAD 2), and the model may say so; false: each has one"
    )
    stride: int = Field(128, ge=0, description="tokens that two windows of a long context share")
    answer_tokens: int = Field(30, ge=1, description="tokens of an answer, at most")
    samples: int = Field(3, ge=0, description="questions to show after each evaluation")

    @property
    def columns(self) -> dict[str, str]:
        """Key of the run file -> the column of texts that it names."""
        return {"task.question": self.question, "task.context": self.context}


class QuestionAnswering(Task):
    """Where in its context the answer to a question stands."""

    Options = QuestionAnsweringOptions
    head = "question_answering"
    pipeline = "question-answering"
    shown = ("answer_tokens", "samples")

    @property
    def usage(self) -> str:
        return (
            "from transformers import AutoModelForQuestionAnswering, AutoTokenizer\n\n"
            'tokenizer = AutoTokenizer.from_pretrained("PATH_OR_REPO")\n'
            'model = AutoModelForQuestionAnswering.from_pretrained("PATH_OR_REPO")\n'
            'asked = tokenizer("a question", "a text that holds the answer", return_tensors="pt")\n'
            "found = model(**asked)\n"
            'ids = asked["input_ids"][0][found.start_logits.argmax() : found.end_logits.argmax() + 1]\n'
            "tokenizer.decode(ids)"
        )

    # -- before any process ------------------------------------------------------------------------------------------

    @classmethod
    def prepare(cls, run: Run) -> Prepared:
        from lockstep.tasks.models import models

        options = QuestionAnsweringOptions.model_validate(run.task.options)
        data = source.load(
            run.data, run.seed, columns=options.columns | {"task.answers": options.answers}, tokens=TokenCounts.of(run)
        )
        drop = run.data.drop_missing
        splits = {
            split: questions.whole(rows, options.columns, options.answers, options.unanswerable, split, data.name, drop)
            for split, rows in data.splits.items()
        }
        texts = [questions.QUESTION, questions.CONTEXT]
        answer = [questions.TEXTS, questions.START]
        splits, left_out = apart.kept(data, splits, run, texts, answer, documents.cut)
        hashes = {split: content(rows, [*texts, *answer]) for split, rows in splits.items()}
        folder = tokenizer.prepare(run, questions.batches(splits["train"]), hashes["train"])
        known: Any = tokenizer.load(str(folder), run.model.trust_remote_code)
        if not known.is_fast:
            raise RunError("tokenizer: it does not tell which characters its tokens stand for")
        models.check(run, "question_answering")
        files = {}
        for split, rows in splits.items():
            key = digest("questions", VERSION, hashes[split], folder.name, run.data.max_length, options.stride)
            files[split] = questions.encoded(rows, known, run.data.max_length, options.stride, split, data.name, key)
        tokens = sorted((split, Path(file).name) for split, file in files.items())
        return Prepared(digest(tokens), files, str(folder), {"source": data.name} | left_out)

    # -- in every process --------------------------------------------------------------------------------------------

    def __init__(self, run: Run, prepared: Prepared) -> None:
        super().__init__(run, prepared)
        self.tokenizer = tokenizer.load(prepared.tokenizer, run.model.trust_remote_code)
        self.options = QuestionAnsweringOptions.model_validate(run.task.options)

    def model(self, empty: bool = False) -> nn.Module:
        from lockstep.tasks.models import models, spans

        return spans.install(models.build(self.run, "question_answering", self.tokenizer, empty))

    def collate(self, columns: Columns, rows: np.ndarray, index: int) -> MicroBatch:
        """The windows of the rows, one after the other [R, T]; the targets are first and last token of the answer."""
        import torch

        from lockstep.data.batch import IGNORED, MicroBatch

        blank = len(rows) == 0
        rows = np.zeros(1, dtype=np.int64) if blank else rows
        windows = [window for each in questions.parts_of(columns, rows) for window in each]
        held = [np.concatenate([columns.ragged(name).row(int(row)) for row in rows]) for name in ("starts", "stops")]
        targets = torch.from_numpy(np.stack(held, 1).astype(np.int64))  # [R, 2]
        inputs = _inputs(windows, int(self.tokenizer.pad_token_id))
        return MicroBatch(index, inputs, torch.full_like(targets, IGNORED) if blank else targets)

    def padded(self, columns: Columns, rows: np.ndarray, groups: Sequence[np.ndarray]) -> int:
        windows, widths = (columns.flat(name)[rows] for name in ("windows", "width"))
        return sum(int(windows[group].sum()) * int(widths[group].max()) for group in groups if len(group))

    def count_targets(self, columns: Columns, rows: np.ndarray) -> int:
        return 2 * int(columns.flat("windows")[rows].sum())

    def loss_sum(self, outputs: Any, targets: Tensor) -> Tensor:
        from torch.nn.functional import cross_entropy

        return cross_entropy(outputs.logits.float().transpose(1, 2).flatten(0, 1), targets.flatten(), reduction="sum")

    def score(self, forward: Callable[[Mapping[str, Tensor]], Tensor], batch: MicroBatch) -> Sums:
        return self._sums(forward(batch.inputs), batch.targets)

    def _sums(self, logits: Tensor, targets: Tensor) -> Sums:
        from transformers.modeling_outputs import TokenClassifierOutput

        loss = self.loss_sum(TokenClassifierOutput(logits=logits), targets)
        return {"loss": loss.double(), "targets": (targets >= 0).sum().double()}

    def score_at(
        self,
        forward: Callable[[Mapping[str, Tensor]], Tensor],
        batch: MicroBatch,
        columns: Columns,
        rows: np.ndarray,
    ) -> Sums:
        import torch

        from lockstep.tasks.models import spans

        logits = forward(batch.inputs)
        found = np.zeros(2)
        for answer, right in zip(self._answers(logits, columns, rows), columns.texts("answers", rows), strict=True):
            found += spans.scores(answer, right)
        exact, f1 = torch.from_numpy(found * _SHARP).to(logits.device)
        examples = torch.tensor(float(len(rows)), dtype=torch.float64, device=logits.device)
        return self._sums(logits, batch.targets) | {"examples": examples, "exact": exact, "f1": f1}

    def _answers(self, logits: Tensor, columns: Columns, rows: np.ndarray) -> list[str]:
        """What the model answers to the questions at these rows, from the logits of all their windows."""
        from lockstep.tasks.models import spans

        if len(rows) == 0:
            return []
        windows = questions.parts_of(columns, rows)
        found = spans.best(logits, windows, self.options.answer_tokens, self.options.unanswerable)
        contexts = columns.texts(questions.CONTEXT, rows)
        return [context[span.start : span.end] for context, span in zip(contexts, found, strict=True)]

    def metrics(self, sums: Sums) -> dict[str, float]:
        """`exact_match` and `f1` are from 0 to 100, as of SQuAD's script."""
        count = float(sums["examples"]) * _SHARP
        found = {"loss": float(sums["loss"]) / float(sums["targets"])}
        return found | {name: 100 * float(sums[key]) / count for name, key in (("exact_match", "exact"), ("f1", "f1"))}

    def samples(
        self,
        generate: Callable[[Mapping[str, Tensor], Decoding], Tensor],
        forward: Callable[[Mapping[str, Tensor]], Tensor],
    ) -> list[dict[str, str]]:
        columns = self.splits["validation"]
        rows = self.shown_rows(columns, self.options.samples)
        if len(rows) == 0:
            return []
        answers = self._answers(forward(self.collate(columns, rows, 0).inputs), columns, rows)
        asked, right = columns.texts(questions.QUESTION, rows), columns.texts("answers", rows)
        return [
            {"question": question, "answer": answer or "(none)", "right": " / ".join(dict.fromkeys(each)) or "(none)"}
            for question, answer, each in zip(asked, answers, right, strict=True)
        ]

    @classmethod
    def asked(cls, run: Run) -> tuple[str, ...]:
        return tuple(QuestionAnsweringOptions.model_validate(run.task.options).columns.values())

    @classmethod
    def predict(cls, run: Run, folder: Path, rows: Sequence[Sequence[str]]) -> Iterator[dict[str, Any]]:
        """The `answer`, and at which characters of the context it begins and ends; empty where there is none."""
        from lockstep.tasks.models import asking, models, spans

        options = QuestionAnsweringOptions.model_validate(run.task.options)
        model, tok = models.exported("question_answering", folder, run)

        def windows_of(place: int, row: Sequence[str]) -> list[questions.Window]:
            try:
                return questions.windows(tok, row[0], row[1], run.data.max_length, options.stride)
            except ValueError as error:
                raise RunError(f"predict: text {place}, {row[0][:60]!r}: {error}") from None

        for place, row in enumerate(rows, 1):
            windows_of(place, row)

        def answer(rows: list[Sequence[str]]) -> list[dict[str, Any]]:
            windows = [windows_of(place, row) for place, row in enumerate(rows, 1)]
            batch = _inputs([window for each in windows for window in each], int(tok.pad_token_id))
            logits = spans.numbers(model(**batch), batch["attention_mask"])
            found = spans.best(logits, windows, options.answer_tokens, options.unanswerable)
            return [
                {"answer": row[1][span.start : span.end], "start": span.start, "end": span.end}
                for row, span in zip(rows, found, strict=True)
            ]

        return asking.answers(rows, answer, at_once=8)

    @classmethod
    def told(cls, row: Sequence[str], answer: Mapping[str, Any]) -> str:
        return f"{answer['answer'] or '(no answer)'}  {row[0]}"

    def write(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        from lockstep.tasks.models import models

        models.save(self.model(), weights, self.tokenizer, folder, self.run)


def _inputs(windows: Sequence[questions.Window], pad: int) -> dict[str, Tensor]:
    """Windows as a model reads them, padded on the right: [R, T] each."""
    import torch

    width = max(len(window.ids) for window in windows)
    lists = {
        "input_ids": [window.ids + [pad] * (width - len(window.ids)) for window in windows],
        "attention_mask": [[1] * len(window.ids) + [0] * (width - len(window.ids)) for window in windows],
    }
    if windows[0].types:
        lists["token_type_ids"] = [window.types + [0] * (width - len(window.types)) for window in windows]
    return {name: torch.tensor(rows) for name, rows in lists.items()}
