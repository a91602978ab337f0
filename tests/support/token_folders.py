"""Tiny pretrained models with their tokenizers: of chosen words, and tokens beyond the model's rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from lockstep.config.run import Run, load
from support.harness import TINY

WORDS = [f"w{number}" for number in range(30)]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
NEW = ["<new1>", "<new2>"]
SIZES: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


def tokenizer_of(words: Sequence[str] = WORDS, added: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per word; `[CLS] text [SEP]`."""
    made = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.train_from_iterator([" ".join(words)], trainers.WordLevelTrainer(special_tokens=SPECIAL))
    ids = [(token, made.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    pair = "[CLS] $A [SEP] $B:1 [SEP]:1"
    made.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", pair=pair, special_tokens=ids)
    named = {f"{token.strip('[]').lower()}_token": token for token in SPECIAL}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="[SEP]", bos_token="[CLS]", **named)
    tokenizer.add_tokens(list(added))
    return tokenizer


def save(folder: Path, kind: str = "bert", added: Sequence[str] = (), rows: int | None = None) -> None:
    """Save a model with rows for `WORDS`, or `rows` rows, and a tokenizer of these and `added` words."""
    torch.manual_seed(0)
    tokenizer = tokenizer_of(added=added)
    size = len(WORDS) + len(SPECIAL) if rows is None else rows
    model: Any
    if kind == "bert":
        model = BertForMaskedLM(BertConfig(**SIZES, vocab_size=size, max_position_embeddings=64))
    elif kind == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=size, n_positions=64))
    else:
        model = T5ForConditionalGeneration(
            T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=size, decoder_start_token_id=0)
        )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def run_on(folder: Path, rows: Sequence[dict[str, Any]], *overrides: str, model: str = "model", **task: Any) -> Run:
    """A run of the model in `folder`/`model` on these rows, with the last quarter for validation."""
    cut = len(rows) - len(rows) // 4
    for split, part in (("train", rows[:cut]), ("validation", rows[cut:])):
        lines = "".join(json.dumps(row) + "\n" for row in part)
        (folder / f"{split}.jsonl").write_text(lines, encoding="utf-8")
    data = {"train": str(folder / "train.jsonl"), "validation": str(folder / "validation.jsonl"), "max_length": 32}
    values = {key: value for key, value in TINY.items() if key != "tokenizer"}
    return load(
        None,
        list(overrides),
        values
        | {"data": data, "model": {"source": str(folder / model)}, "output": str(folder / "out")}
        | {"task": {"name": "classification"} | task},
    )


def text_of(number: int, *more: str) -> str:
    """A distinct text of four words for each number."""
    return " ".join([*(WORDS[(number * step + step) % len(WORDS)] for step in (1, 2, 3, 5)), *more])
