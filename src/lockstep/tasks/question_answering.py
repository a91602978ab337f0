"""Extractive question answering with any model that `AutoModelForQuestionAnswering` knows: the answer is a span of
a text.

In: questions, contexts and answers, in SQuAD's format; long contexts are read in overlapping windows. Out: the loss,
and exact matches and F1 of words as in SQuAD's script, all from sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from pydantic import Field

from lockstep.config.run import Run, RunError
from lockstep.config.sections import Section
from lockstep.data import qa_features, tokenizer
from lockstep.data.arrow_cache import Columns
from lockstep.data.batch import MicroBatch, Sums
from lockstep.data.token_checks import Limit
from lockstep.tasks import own_metrics
from lockstep.tasks.models import heads
from lockstep.tasks.own_metrics import listed
from lockstep.tasks.task import Forward, Generate, GivesPredictions, Predicts, Streams
from lockstep.tasks.text_task import Arrays, Encoder, TextData, TextTask

if TYPE_CHECKING:
    from datasets import Dataset, Features
    from torch import Tensor, nn

    from lockstep.tasks.models.qa_spans import Span

_SHARP = 2.0**20  # sums are rounded to multiples of 1 / _SHARP: scores keep a precision of 2^-40


class QuestionAnsweringOptions(Section):
    """The task's own keys in the run file."""

    question: str = Field("question", description="column of the question")
    context: str = Field("context", description="column of the context that contains the answer")
    answers: str = Field(
        "answers", description="column of the answers: {text: [...], answer_start: [...]}; the first is learned"
    )
    unanswerable: bool = Field(
        False,
        description="questions and predictions may have no answer (SQuAD 2); false: every question has one",
    )
    stride: int = Field(128, ge=0, description="tokens shared by two adjacent windows of a long context")
    answer_tokens: int = Field(30, ge=1, description="maximum number of tokens of an answer")
    samples: int = Field(3, ge=0, description="questions shown after each evaluation")

    @property
    def text_columns(self) -> dict[str, str]:
        """Key of the run file -> text column."""
        return {"task.question": self.question, "task.context": self.context}


class QuestionAnswering(TextTask, Streams, Predicts, GivesPredictions):
    """Extractive answers: the span of a context that answers a question."""

    Options = QuestionAnsweringOptions
    head = heads.QUESTION_ANSWERING
    column_keys = ("question", "context", "answers")
    input_keys = ("question", "context")
    default_model = "distilbert/distilbert-base-cased"
    small_model = "bert"
    pipeline = "question-answering"
    plain_columns: ClassVar[Mapping[str, str]] = {
        "question": qa_features.QUESTION,
        "context": qa_features.CONTEXT,
        "answers": qa_features.TEXTS,
    }
    cache_name = ("questions",)
    row_is_example = True
    display_keys = ("answer_tokens", "samples")
    metric_inputs = ("spans",)
    metric_names = ("exact_match", "f1")

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

    @property
    def example_input(self) -> str:
        return "a question\ta text that holds the answer"

    # -- before any process ------------------------------------------------------------------------------------------

    def plain_rows(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        texts, start = qa_features.TEXTS, qa_features.START  # only the first of several answers is learned
        answers = [[{"text": text, "answer_start": row[start]} for text in row[texts]] for row in rows]
        return [row | {texts: answer} for row, answer in zip(rows, answers, strict=True)]

    def encodes_token_types(self, tok: Any) -> bool:
        return True

    @classmethod
    def columns_to_read(cls, options: QuestionAnsweringOptions) -> dict[str, str]:
        return options.text_columns | {"task.answers": options.answers}

    @classmethod
    def valid_rows(cls, rows: Dataset, options: QuestionAnsweringOptions, split: str, name: str, drop: bool) -> Dataset:
        columns, answers, unanswerable = options.text_columns, options.answers, options.unanswerable
        return qa_features.whole(rows, columns, answers, unanswerable, split, name, drop)

    @classmethod
    def dedup_columns(cls, options: QuestionAnsweringOptions) -> tuple[list[str], list[str]]:
        return [qa_features.QUESTION, qa_features.CONTEXT], [qa_features.TEXTS, qa_features.START]

    def check(self, data: TextData, folder: Path, tok: Any) -> None:
        from lockstep.tasks.models import models

        if not tok.is_fast:
            raise RunError(
                "LS3340",
                "tokenizer: it does not report the characters of its tokens (no fast tokenizer); choose a "
                "model with a fast tokenizer",
            )
        models.check_encoded(self.run.model, str(self.head), tok, 2)
        super().check(data, folder, tok)

    def fit_defaults(self) -> tuple[Run, list[str]]:
        run, notes = super().fit_defaults()
        stride, most = self.options.stride, run.data.max_length
        if run.wrote("task.stride") or stride <= most // 2:
            return run, notes
        note = f"task.stride is {most // 2}, half of a window of {most} tokens; its default is {stride}"
        task = run.task.model_copy(update={"stride": most // 2})
        return run.model_copy(update={"task": task}), [*notes, note]

    def limits(self, read_by: Mapping[str, Any]) -> dict[str, Limit]:
        return {}  # `encoder` refuses questions that leave no room for context, by row

    def key_parts(self, data: TextData, tok: Any, rows: Dataset | None) -> list[Any]:
        return [self.run.data.max_length, *astuple(self.stride)]

    @property
    def stride(self) -> qa_features.Stride:
        return qa_features.Stride(self.options.stride, not self.run.wrote("task.stride"))

    def encoder(self, folder: str, labels: Any, split: str, name: str) -> tuple[Encoder, Features]:
        tok = tokenizer.load(folder, self.run.model.trust_remote_code)
        return qa_features.encoder_of(tok, self.run.data.max_length, self.stride, split, name)

    def facts(self, data: TextData, files: Mapping[str, str]) -> dict[str, Any]:
        usual, notes = self.options.stride, list[str]()
        for split, file in files.items():
            shared = np.concatenate([part for _, part in Columns(file).flat("shared").parts()])
            if few := int((shared < usual).sum()):
                notes.append(
                    f"task.stride is down to {shared.min()} for {few:,} of {len(shared):,} {split} questions, which "
                    f"leave {usual} tokens or fewer of data.max_length for the context"
                )
        return {"notes": notes} if notes else {}

    # -- in every process --------------------------------------------------------------------------------------------

    def model(self, empty: bool = False) -> nn.Module:
        from lockstep.tasks.models import qa_spans

        return qa_spans.install(super().model(empty))

    def tensors(self, columns: Columns, rows: np.ndarray) -> Arrays:
        """All windows of the rows, concatenated [R, T]; targets are the first and last token of the answer [R, 2]."""
        windows = [window for each in qa_features.parts_of(columns, rows) for window in each]
        answer_spans = [
            np.concatenate([columns.ragged(name).row(int(row)) for row in rows]) for name in ("starts", "stops")
        ]
        return _inputs(windows, int(self.tokenizer.pad_token_id)), np.stack(answer_spans, 1).astype(np.int64)  # [R, 2]

    def padded(self, columns: Columns, rows: np.ndarray, groups: Sequence[np.ndarray]) -> int:
        windows, widths = (columns.flat(name)[rows] for name in ("windows", "width"))
        return sum(int(windows[group].sum()) * int(widths[group].max()) for group in groups if len(group))

    def count_targets(self, columns: Columns, rows: np.ndarray) -> int:
        return 2 * int(columns.flat("windows")[rows].sum())

    def loss_sum(self, outputs: Any, targets: Tensor) -> Tensor:
        from torch.nn.functional import cross_entropy

        return cross_entropy(outputs.logits.float().transpose(1, 2).flatten(0, 1), targets.flatten(), reduction="sum")

    def score(self, forward: Forward, batch: MicroBatch) -> Sums:
        return self._sums(forward(batch.inputs), batch.targets)

    def _sums(self, logits: Tensor, targets: Tensor) -> Sums:
        from transformers.modeling_outputs import TokenClassifierOutput

        loss = self.loss_sum(TokenClassifierOutput(logits=logits), targets)
        return {"loss": loss.double(), "targets": (targets >= 0).sum().double()}

    def score_at(self, forward: Forward, batch: MicroBatch, columns: Columns, rows: np.ndarray) -> Sums:
        import torch

        from lockstep.tasks.models import qa_spans

        logits = forward(batch.inputs)
        spans = self._spans(logits, columns, rows)
        right = columns.texts(qa_features.TEXTS, rows)
        each = [
            qa_spans.scores(answer, references)
            for answer, references in zip(_texts(spans, columns, rows), right, strict=True)
        ]
        exact, f1 = torch.tensor(each, dtype=torch.float64).reshape(-1, 2).sum(0).to(logits.device) * _SHARP
        words = [len(qa_spans.normal(references[0] if references else "").split()) for references in right]
        by_words = torch.from_numpy(own_metrics.binned(words, [f1 for _, f1 in each])).to(logits.device)  # [bins, 3]
        placed = torch.tensor([[span.start, span.end] for span in spans], dtype=torch.int32).reshape(-1, 2)
        gathered = {"spans": placed.to(logits.device)} if self.per_example_outputs else {}
        examples = torch.tensor(float(len(rows)), dtype=torch.float64, device=logits.device)
        results = {"examples": examples, "exact": exact, "f1": f1, "by_words": by_words}
        return self._sums(logits, batch.targets) | results | gathered

    def predictions(self, sums: Sums, columns: Columns, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Answer texts [N], empty if there is none; and lists of all correct answers, empty likewise."""
        from lockstep.tasks.models.qa_spans import Span

        spans = [Span(*place) for place in sums["spans"].tolist()]
        right = [[each for each in answers if each] for answers in columns.texts("answers", rows)]
        return listed(_texts(spans, columns, rows)), listed(right)

    def dummy_predictions(self) -> tuple[np.ndarray, np.ndarray]:
        none: list[str] = [] if self.options.unanswerable else ["a third"]
        return listed(["a text", "another", ""]), listed([["a text", "text"], ["a second one"], none])

    def _spans(self, logits: Tensor, columns: Columns, rows: np.ndarray) -> list[Span]:
        """Predicted answer spans of the questions at these rows, from the logits of all their windows."""
        from lockstep.tasks.models import qa_spans

        if len(rows) == 0:
            return []
        windows = qa_features.parts_of(columns, rows)
        return qa_spans.best(logits, windows, self.options.answer_tokens, self.options.unanswerable)

    def metrics(self, sums: Sums) -> dict[str, float]:
        """`exact_match` and `f1` range from 0 to 100, as in SQuAD's script."""
        count = float(sums["examples"]) * _SHARP
        scores = {"loss": float(sums["loss"]) / float(sums["targets"])}
        return scores | {name: 100 * float(sums[key]) / count for name, key in (("exact_match", "exact"), ("f1", "f1"))}

    def tables(self, sums: Sums) -> dict[str, Any]:
        """Plot of F1 by the number of words of the correct answer."""
        counts = sums["by_words"].numpy()
        line = own_metrics.curve(counts, lambda b: 100 * float(counts[b, 2] / counts[b, 0]))
        return {"plots": [{"title": "F1", "x": "words of the right answer", "lines": {"F1": line}}]}

    def sample_texts(
        self, columns: Columns, rows: np.ndarray, batch: MicroBatch, generate: Generate, forward: Forward
    ) -> list[dict[str, str]]:
        answers = _texts(self._spans(forward(batch.inputs), columns, rows), columns, rows)
        questions, right = columns.texts(qa_features.QUESTION, rows), columns.texts("answers", rows)
        return [
            {"question": question, "answer": answer or "(none)", "right": " / ".join(dict.fromkeys(each)) or "(none)"}
            for question, answer, each in zip(questions, answers, right, strict=True)
        ]

    def predict(self, folder: Path, rows: Sequence[Sequence[str]]) -> Iterator[dict[str, Any]]:
        """Yield the `answer` and its start and end character in the context; empty if there is none."""
        from lockstep.tasks.models import inference, models, qa_spans

        options = self.options
        model, tok = models.exported(self.head, folder, self.run.model)
        stride, most = self.stride, self.run.data.max_length

        def windows_of(place: int, row: Sequence[str]) -> list[qa_features.TokenWindow]:
            try:
                return qa_features.windows(tok, row[0], row[1], most, stride.for_question(tok, row[0], most))
            except ValueError as error:
                raise RunError("LS3341", f"predict: text {place}, {row[0][:60]!r}: {error}") from None

        for place, row in enumerate(rows, 1):
            windows_of(place, row)

        def answer(rows: list[Sequence[str]]) -> list[dict[str, Any]]:
            windows = [windows_of(place, row) for place, row in enumerate(rows, 1)]
            batch = _inputs([window for each in windows for window in each], int(tok.pad_token_id))
            logits = qa_spans.numbers(model(**batch), batch["attention_mask"])
            spans = qa_spans.best(logits, windows, options.answer_tokens, options.unanswerable)
            return [
                {"answer": row[1][span.start : span.end], "start": span.start, "end": span.end}
                for row, span in zip(rows, spans, strict=True)
            ]

        return inference.answers(rows, answer, at_once=8)

    @classmethod
    def format_prediction(cls, row: Sequence[str], answer: Mapping[str, Any]) -> str:
        return f"{answer['answer'] or '(no answer)'}  {row[0]}"


def _texts(spans: Sequence[Span], columns: Columns, rows: np.ndarray) -> list[str]:
    """Texts of the spans in the contexts of these rows."""
    contexts = columns.texts(qa_features.CONTEXT, rows)
    return [text[span.start : span.end] for text, span in zip(contexts, spans, strict=True)]


def _inputs(windows: Sequence[qa_features.TokenWindow], pad: int) -> dict[str, Tensor]:
    """Model inputs of windows, padded on the right: [R, T] each."""
    from lockstep.tasks.models import inference

    encoded = [{"input_ids": w.ids} | ({"token_type_ids": w.types} if w.types else {}) for w in windows]
    return inference.padded(encoded, {"input_ids": pad, "token_type_ids": 0})
