"""What tasks share that write one text for another: their keys, pairs of texts, and the tokens of both.

In: rows of a data set, with two columns of texts or one of {language: text}. Out: columns `source` and `target`, and of
these `input_ids`, `target_ids` and the target as a text, `reference`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from lockstep.config.run import Run, RunError
from lockstep.data import lm_documents, missing_values, source, tokenizer
from lockstep.data.stream import Stream

if TYPE_CHECKING:
    from datasets import Dataset, Features

PAIR = "translation"  # the Hub's column of {language: text}


class WritingOptions(BaseModel):
    """The keys of tasks that write one text for another."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    source: str = Field("source", description="column of the source text, or its language in a translation column")
    target: str = Field("target", description="column of the target text, or its language in a translation column")
    prefix: str = Field("", description="put before every source text, as T5 wants it")
    tokenizers: Literal["shared", "separate"] = Field(
        "shared", description="trained ones: one for both languages, or one each (marian)"
    )
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="of the training loss")
    loss_chunk: Annotated[int, Field(ge=1, strict=True)] | Literal["liger"] | None = Field(
        None,
        description="tokens whose logits are in memory at once: the loss in chunks, without the matrix of logits; "
        "liger: by Liger-Kernel, on CUDA; default: all tokens of a micro-batch",
    )
    target_length: int | None = Field(
        None, ge=1, description="tokens of a target, and of what is written, at most; default: data.max_length"
    )
    beams: int = Field(1, ge=1, description="of the search that writes texts; 1: greedy")
    samples: int = Field(3, ge=0, description="texts to show after each evaluation, with what is written for them")

    @property
    def columns(self) -> dict[str, str]:
        """Key of the run file -> the column that it names, or the language in a column of translations."""
        return {"task.source": self.source, "task.target": self.target}


def pairs(dataset: Dataset, options: WritingOptions, split: str, name: str, drop: bool) -> Dataset:
    """The two sides as columns `source` and `target`. Errors: `RunError`."""
    sides = {"source": options.source, "target": options.target}
    if PAIR in dataset.column_names and not {options.source, options.target} <= set(dataset.column_names):
        dataset = dataset.select_columns([PAIR]).flatten()
        languages = [column.removeprefix(f"{PAIR}.") for column in dataset.column_names]
        for key, language in sides.items():
            if language not in languages:
                raise RunError(
                    f"task.{key}: the {split} split of {name} has no language {language!r}; it has "
                    f"{', '.join(languages)}"
                )
        sides = {key: f"{PAIR}.{language}" for key, language in sides.items()}
    dataset = missing_values.texts(dataset, {f"task.{key}": column for key, column in sides.items()}, split, name, drop)
    if options.source == options.target:
        raise RunError(f"task.target: {options.target!r} is the source already")
    wanted = dataset.select_columns([*sides.values(), *(c for c in dataset.column_names if c == source.SOURCE)])
    return wanted.rename_columns({column: key for key, column in sides.items() if column != key})


def tokenizers(run: Run, train: Dataset | Stream, hashed: str, options: WritingOptions) -> Path:
    """The folder of both. The caller holds the lock. `hashed` stands for the texts. Errors: `RunError`."""

    def batches(*columns: str) -> Iterator[list[str]]:
        def of(some: Dataset) -> Iterator[list[str]]:
            for start in range(0, len(some), 1000):
                rows = some[start : start + 1000]
                yield [text for column in columns for text in rows[column]]

        return train.texts(of) if isinstance(train, Stream) else of(train)

    targets = tokenizer.of_targets(run)
    if targets is not None:  # of a model that was trained with two, whatever task.tokenizers says
        return tokenizer.pair(tokenizer.prepare(run, batches("source"), hashed), targets)
    if options.tokenizers == "shared":
        return tokenizer.prepare(run, batches("source", "target"), hashed, generative=True)
    if run.tokenizer.train is None:
        raise RunError(
            "task.tokenizers: separate ones are trained (set tokenizer.train), or come with the model, the second one "
            f"in its folder {tokenizer.TARGET}/; {run.tokenizer.source or run.model.source or 'a new model'} has none: "
            "leave this out"
        )
    both = [tokenizer.prepare(run, batches(side), f"{hashed} {side}", generative=True) for side in ("source", "target")]
    return tokenizer.pair(*both)


def target_tokenizer(run: Run, folder: Path, shared: Any) -> Any:
    """That of the targets, in the folder of `tokenizers`, where they have one of their own."""
    own = folder / tokenizer.TARGET
    return tokenizer.load(str(own), run.model.trust_remote_code) if own.is_dir() else shared


def encoder_of(
    run: Run, folder: str, options: WritingOptions
) -> tuple[Callable[[dict[str, list]], dict[str, Any]], Features]:
    """What makes tokens of pairs, and what these are."""
    import datasets

    sources: Any = tokenizer.load(folder, run.model.trust_remote_code)
    targets = target_tokenizer(run, Path(folder), sources)
    numbers = datasets.List(datasets.Value("int32"))
    text = datasets.Value("string")
    features = datasets.Features({"input_ids": numbers, "target_ids": numbers, "reference": text})
    limit = {"truncation": True, "max_length": run.data.max_length, "return_attention_mask": False}

    def closed(rows: list[list[int]], known: Any) -> list[list[int]]:
        """A target without any token could not be learned: it has its end token at least."""
        end = lm_documents.end_of(known)
        return [row or [end if end is not None else known.pad_token_id] for row in rows]

    def encoder(rows: dict[str, list]) -> dict[str, list]:
        asked = sources([options.prefix + text for text in rows["source"]], **limit)["input_ids"]
        told = targets(text_target=rows["target"], **limit | {"max_length": most(run, options)})["input_ids"]
        ids = {"input_ids": closed(asked, sources), "target_ids": closed(told, targets)}
        return ids | {"reference": rows["target"]}

    return encoder, features


def most(run: Run, options: WritingOptions) -> int:
    """Tokens of a target."""
    return options.target_length or run.data.max_length
