"""Special tokens by which a family knows its place in a text, and tokenizers that it cannot be used with.

In: a run, the head of its model, its tokenizer. Out: nothing, or a `RunError`, before any process starts.
"""

from __future__ import annotations

from typing import Any

from lockstep.config.run import Run, RunError
from lockstep.tasks.models import heads, model_configs

# Encoders with decoders whose classifiers read at the last end token, and want as many of them in all texts of a batch.
_CLASSIFIED_AT_END = ("bart", "bigbird_pegasus", "mbart", "mt5", "mvp", "plbart", "t5", "umt5")
_SEPARATORS = 3  # of Longformer: one behind the question, one before the text, one behind it


def check(run: Run, head: str, tokenizer: Any) -> None:
    """Refuse a tokenizer whose special tokens the model would read otherwise. Errors: `RunError`."""
    if head == heads.CLASSIFICATION:
        _check_end(run, tokenizer)
    if head == heads.QUESTION_ANSWERING:
        _check_separators(run, tokenizer)


def _check_end(run: Run, tokenizer: Any) -> None:
    config = model_configs.load_config(run)
    if config.model_type not in _CLASSIFIED_AT_END:
        return
    end = config.eos_token_id
    if run.model.type is not None:  # then the tokenizer decides, as `models.build` has it
        end = tokenizer.sep_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    if end is not None and end == tokenizer.pad_token_id:
        raise RunError(
            "LS3190",
            f"tokenizer: a {config.model_type} classifies at the end token, and this tokenizer pads with its "
            f"end token {tokenizer.pad_token!r}, so padding would be read as the end of a text; add a "
            "separate padding token, set tokenizer.train, or use an encoder such as bert",
        )


def _check_separators(run: Run, tokenizer: Any) -> None:
    config = model_configs.load_config(run)
    if config.model_type != "longformer":
        return
    around = tokenizer("", "")["input_ids"].count(config.sep_token_id)
    if around != _SEPARATORS:
        raise RunError(
            "LS3191",
            f"tokenizer: a longformer finds the question by {_SEPARATORS} tokens with the id "
            f"{config.sep_token_id} (model.config.sep_token_id) in each example, but this tokenizer writes "
            f"{around} around a question and its text; use a tokenizer that writes <s> question </s></s> text "
            "</s>, as allenai/longformer-base-4096 does, or another family",
        )
