"""Check that a model's embedding has a row for each token of its tokenizer.

In: sections, tokenizers, and encoded examples. Out: notes, or a `RunError` that names the tokens without a row, which
torch's error would not. Imports torch only if a row seems to be missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.config.run import RunError
from lockstep.config.sections import ModelSection, TokenizerSection
from lockstep.data.arrow_cache import Columns, Make
from lockstep.data.tokenizer import highest_id
from lockstep.tasks.models import heads, model_configs

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset

_NAMED = 3  # tokens listed in a message
_FEW = 0.5  # note a tokenizer with fewer tokens than this share of the model's rows
_OTHER = 0.01  # note if more than this share of the ids mean other tokens
# Token column -> entries of configs with two vocabularies; other configs have one `vocab_size`.
_OWN_SIZES = {"input_ids": ("src_vocab_size",), "target_ids": ("decoder_vocab_size", "tgt_vocab_size")}

Tokenizers = Mapping[str, Any]  # column of tokens, one of `SIDES` -> its tokenizer


def rows_of(section: ModelSection, head: str, column: str) -> int | None:
    """Number of embedding rows of a pretrained model for a token column, from its config. None if the model is built
    from scratch with a matching size, or if the config does not say. Errors: `RunError`."""
    if section.source is None or not heads.of(head).reads_texts:
        return None
    config = model_configs.load_config(section)
    for part in reversed(model_configs.texts(config)):  # in a multimodal model, the text part
        for name in (*_OWN_SIZES[column], "vocab_size"):
            size = model_configs.entry(part, name)
            if isinstance(size, int) and size > 0:
                return size
    return None


def missing(section: ModelSection, head: str, column: str, tokenizer: Any) -> int | None:
    """Number of embedding rows if the tokenizer produces ids beyond them; None if every id has a row. Errors:
    `RunError`."""
    rows = rows_of(section, head, column)
    if rows is None or highest_id(tokenizer) < rows:
        return None
    built = _built_rows(section, head) if column == "input_ids" else None
    rows = max(rows, built or 0)
    return None if highest_id(tokenizer) < rows else rows


def _built_rows(section: ModelSection, head: str) -> int | None:
    """Input embedding rows of the built model, which may exceed its config; None if unknown."""
    import torch
    import transformers

    config = model_configs.with_architectures(model_configs.load_config(section))
    with suppress(Exception), torch.device("meta"):  # code from the Hub, or a family that needs memory to be built
        auto = getattr(transformers, heads.of(head).auto)
        model = auto.from_config(config, trust_remote_code=section.trust_remote_code)
        return int(model.get_input_embeddings().weight.shape[0])
    return None


def check_padding(rows: Any, tokenizer: Any) -> None:
    """Check that the padding token has one of the model's `rows` embedding rows. Errors: `RunError`."""
    if isinstance(rows, int) and 0 < rows <= tokenizer.pad_token_id:
        raise RunError(
            "LS3145",
            f"tokenizer: the id of its padding token {tokenizer.pad_token!r} is {tokenizer.pad_token_id}, "
            f"but the model has embeddings for {rows} tokens only; use the tokenizer that the model was "
            "trained with, or set its pad_token to a token with an embedding",
        )


def _check_adapter(section: ModelSection, rows: int) -> None:
    """Check that the tokens that an adapter trains have one of `rows` embedding rows. Errors: `RunError`."""
    tokens = section.adapter.get("trainable_token_indices") or []
    for ids in tokens.values() if isinstance(tokens, dict) else [tokens]:
        if absent := [id_ for id_ in ids if not (isinstance(id_, int) and 0 <= id_ < rows)]:
            raise RunError(
                "LS3443",
                f"model.adapter.trainable_token_indices: {absent[0]} is not the id of a token with an embedding row: "
                f"the embedding of {section.source} has rows 0 to {rows - 1:,}",
            )


def check(section: ModelSection, head: str, tokenizers: Tokenizers) -> list[str]:
    """Notes on vocabularies that do not match the model's embedding. Errors: `RunError` if a token that training needs
    for any text has no row."""
    notes = []
    for column, tokenizer in tokenizers.items():
        rows = rows_of(section, head, column)
        if rows is None:
            continue
        _check_adapter(section, max(rows, _built_rows(section, head) or 0) if section.adapter else rows)
        if (short := missing(section, head, column, tokenizer)) is None:
            if (size := len(tokenizer)) < _FEW * rows:
                notes.append(
                    f"the tokenizer has {size:,} tokens, and the model's embedding {rows:,} rows: is it the tokenizer "
                    "that the model was trained with?"
                )
            continue
        check_padding(short, tokenizer)
        if head == heads.MASKED:  # one in ten masked tokens is replaced by a random one
            raise _refusal(
                section, tokenizer, short, "masking draws from all tokens of the vocabulary", _beyond(tokenizer, short)
            )
        names = _named(tokenizer, _beyond(tokenizer, short))
        notes.append(
            f"the tokenizer makes ids up to {highest_id(tokenizer):,}, and the model's embedding has {short:,} rows: "
            f"none for {names}. Texts must not contain them"
        )
    return notes


def other_tokens(model: ModelSection, section: TokenizerSection, tokenizer: Any) -> list[str]:
    """A note if ids of the run's tokenizer mean other tokens than in the pretrained model's. Empty if the model has no
    tokenizer that can be loaded."""
    key = next((f"tokenizer.{name}" for name in ("train", "source") if getattr(section, name)), None)
    if model.source is None or key is None or section.source == model.source:
        return []
    from transformers import AutoTokenizer

    options = {"revision": model.revision, "trust_remote_code": model.trust_remote_code}
    try:
        known = AutoTokenizer.from_pretrained(model_configs.local_or_id(model), **options).get_vocab()
    except Exception:  # no tokenizer, or no network
        return []
    there = {id_: token for token, id_ in known.items()}
    shared = {id_: token for token, id_ in tokenizer.get_vocab().items() if id_ in there}
    other = sum(there[id_] != token for id_, token in shared.items())
    if other <= _OTHER * len(shared):
        return []
    return [
        f"{key}: {other:,} of {len(shared):,} ids stand for other tokens than in the tokenizer of "
        f"{model.source}, so the pretrained embeddings do not fit them"
    ]


def check_split(section: ModelSection, head: str, tokenizers: Tokenizers, split: str, columns: Columns) -> None:
    """Check that all tokens in the examples of a split have a row. Errors: `RunError`."""
    for column, tokenizer in tokenizers.items():
        if column not in columns.names or (rows := missing(section, head, column, tokenizer)) is None:
            continue
        ids: set[int] = set()
        for values in columns.ragged(column).values():
            ids |= set(np.unique(values[values >= rows]).tolist())
        if ids:
            raise _refusal(section, tokenizer, rows, f"the {split} split holds tokens without a row", sorted(ids))


def bounded(section: ModelSection, head: str, tokenizers: Tokenizers, make: Make) -> tuple[Make, list[int]]:
    """Make `make` refuse tokens without a row in streamed rows. Returns it and the row counts that it depends on (empty
    if every token has a row). Errors: `RunError`, from this function and the returned one."""
    known = {column: missing(section, head, column, tokenizer) for column, tokenizer in tokenizers.items()}
    limits = {column: rows for column, rows in known.items() if rows is not None}
    if not limits:
        return make, []

    def checked(dataset: Dataset) -> pa.RecordBatch:
        examples = make(dataset)
        for column, rows in limits.items():
            values = np.asarray(examples.column(column).flatten()) if column in examples.schema.names else np.zeros(0)
            if len(ids := np.unique(values[values >= rows])):
                what = "the train split holds tokens without a row"
                raise _refusal(section, tokenizers[column], rows, what, ids.tolist())
        return examples

    return checked, [*limits.values()]


def guard(model: Any, tokenizer: Any) -> None:
    """Make an exported model raise `RunError` for a token without a row, instead of torch's indexing error."""
    embedding = model.get_input_embeddings()
    rows = getattr(getattr(embedding, "weight", None), "shape", (0,))[0]
    if not rows or highest_id(tokenizer) < rows:
        return

    def refuse(_: Any, inputs: tuple[Any, ...]) -> None:
        ids = inputs[0][inputs[0] >= rows].unique().tolist()
        if ids:
            raise RunError(
                "LS3441",
                f"predict: a text holds {_named(tokenizer, ids)}, and the model's embedding has {rows:,} rows, none "
                "for it; write the text without it",
            )

    embedding.register_forward_pre_hook(refuse)


def _beyond(tokenizer: Any, rows: int) -> list[int]:
    return sorted(id_ for id_ in tokenizer.get_vocab().values() if id_ >= rows)


def _named(tokenizer: Any, ids: list[int]) -> str:
    names = [f"{tokenizer.convert_ids_to_tokens(id_)!r} (id {id_})" for id_ in ids[:_NAMED]]
    return ", ".join(names) + (f" and {len(ids) - _NAMED:,} more" if len(ids) > _NAMED else "")


def _refusal(section: ModelSection, tokenizer: Any, rows: int, why: str, ids: list[int]) -> RunError:
    adapter = ""
    if section.adapter:
        adapter = (
            ". An adapter does not train new rows: name the embedding in model.adapter.modules_to_save, or "
            "the tokens in model.adapter.trainable_token_indices (with model.dtype=float32)"
        )
    return RunError(
        "LS3440",
        f"tokenizer: it makes ids up to {highest_id(tokenizer):,}, but the embedding of {section.source} has "
        f"{rows:,} rows, and {why}: {_named(tokenizer, ids)}. Use the tokenizer that the model was trained with; or "
        "add rows (model.resize_token_embeddings(len(tokenizer)) of transformers), save model and tokenizer in one "
        f"folder, and set model.source to it{adapter}",
    )
