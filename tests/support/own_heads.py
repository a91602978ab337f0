"""Tiny pretrained models whose files hold a separate head although `tie_word_embeddings: true`."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from support.task_runs import WORDS

SIZE = 40  # tokens
HEADS = {
    "gpt2": "lm_head.weight",
    "llama": "lm_head.weight",
    "bert": "cls.predictions.decoder.weight",
    "t5": "lm_head.weight",
}


def save(folder: Path, kind: str, apart: bool = True, rows: int = SIZE) -> None:
    """Save a model and its tokenizer. `apart`: the file has a separate head with `rows` rows; else the tied one."""
    torch.manual_seed(0)
    if kind == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=SIZE, n_positions=64))
    elif kind == "llama":
        model = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=2,
                vocab_size=SIZE,
                max_position_embeddings=64,
                tie_word_embeddings=True,
            )
        )
    elif kind == "t5":
        model = T5ForConditionalGeneration(
            T5Config(d_model=32, d_kv=16, d_ff=48, num_layers=1, num_heads=2, vocab_size=SIZE)
        )
    else:
        model = BertForMaskedLM(
            BertConfig(
                hidden_size=32,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=48,
                vocab_size=SIZE,
                max_position_embeddings=64,
            )
        )
    assert model.config.tie_word_embeddings
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    head = model.get_output_embeddings().weight.detach()
    weights[HEADS[kind]] = torch.randn(rows, 32) * 0.2 if apart else head.clone()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    special = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]", "<eos>"]
    vocabulary = {word: at for at, word in enumerate([*special, *WORDS, ".", "!"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        unk_token="[UNK]",
        bos_token="[CLS]",
        eos_token="<eos>",
    ).save_pretrained(folder)
