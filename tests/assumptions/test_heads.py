"""Assumptions about heads, their losses and outputs, and of the files of sentence-transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    GPT2Config,
    GPT2Model,
    LlamaConfig,
    LlamaModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from support.assumed import rests_on_it

IDS = torch.tensor([[2, 5, 6, 3], [2, 7, 3, 0]])
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
WORDS = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4, "a": 5, "b": 6}


def bert(**entries: Any) -> BertConfig:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    return BertConfig(vocab_size=16, max_position_embeddings=8, **sizes, **entries)


def several() -> tuple[nn.Module, ...]:
    """Small BERT, GPT-2, Llama, BART and T5 models."""
    small = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    ends = {"bos_token_id": 2, "eos_token_id": 3}
    bart = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
    t5 = {"d_ff": 8, "d_kv": 4, "num_layers": 1, "num_heads": 2}
    both = {"vocab_size": 16, "d_model": 8, "decoder_start_token_id": 2, "pad_token_id": 0, "eos_token_id": 3}
    return (
        BertModel(bert()),
        GPT2Model(GPT2Config(vocab_size=16, n_embd=8, n_layer=1, n_head=2, **ends)),
        LlamaModel(LlamaConfig(vocab_size=16, num_key_value_heads=2, **small, **ends)),
        BartForConditionalGeneration(BartConfig(encoder_layers=1, decoder_layers=1, **both, **bart)),
        T5ForConditionalGeneration(T5Config(**both, **t5)),
    )


def tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel(WORDS, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    around = [("[CLS]", 2), ("[SEP]", 3)]
    backend.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=around)
    names = {name: f"[{name[:3].upper()}]" for name in ("pad_token", "unk_token", "cls_token", "sep_token")}
    return PreTrainedTokenizerFast(tokenizer_object=backend, mask_token="[MASK]", **names)


@rests_on_it("src/lockstep/data/masking.py", "src/lockstep/data/token_checks.py", "src/lockstep/data/conversations.py")
def test_special_tokens_mask_and_all_special_ids() -> None:
    """special_tokens_mask marks only the tokens that the template adds, not special tokens within a text;
    all_special_ids also has the unknown token, the mask token and extra special tokens, but not tokens of add_tokens.
    """
    tok = tokenizer()
    tok.add_tokens(["plain"])
    tok.add_special_tokens({"extra_special_tokens": ["<x>"]})
    read = tok("a [MASK] plain <x> other", return_special_tokens_mask=True)
    assert read["input_ids"] == [2, 5, 4, 7, 8, 1, 3]
    assert read["special_tokens_mask"] == [1, 0, 0, 0, 0, 0, 1]
    assert sorted(tok.all_special_ids) == [0, 1, 2, 3, 4, 8]
    assert len(tok) == 9


@rests_on_it("src/lockstep/data/masking.py", "src/lockstep/data/tokenizer.py")
def test_how_a_tokenizer_marks_words() -> None:
    """to_str of a tokenizers backend has `pre_tokenizer` and `model` with type and continuing_subword_prefix. Word
    beginnings are marked by U+0120 in byte-level pieces and by U+2581 in Metaspace pieces."""
    pieces = json.loads(Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]")).to_str())["model"]
    assert (pieces["type"], pieces["continuing_subword_prefix"]) == ("WordPiece", "##")
    for kind, sign in ((pre_tokenizers.ByteLevel, "\u0120"), (pre_tokenizers.Metaspace, "\u2581")):
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = kind()
        assert kind.__name__ in str(json.loads(backend.to_str())["pre_tokenizer"])
        assert [piece for piece, _ in kind().pre_tokenize_str("one two")][1].startswith(sign)


@rests_on_it(
    "src/lockstep/tasks/models/qa_spans.py",
    "src/lockstep/tasks/question_answering.py",
    "src/lockstep/plain/losses.py",
    "src/lockstep/tasks/models/config_checks.py",
)
def test_outputs_of_a_question_answering_head() -> None:
    """A question answering head returns start_logits and end_logits [B, T], unmasked at padding; its loss is the mean
    of both cross entropies."""
    model = BertForQuestionAnswering(bert()).eval()
    first, last = torch.tensor([1, 1]), torch.tensor([2, 1])
    output = model(IDS, attention_mask=MASK, start_positions=first, end_positions=last)
    assert output.start_logits.shape == output.end_logits.shape == IDS.shape
    assert output.start_logits[1, 3].abs() < 10
    both = cross_entropy(output.start_logits, first) + cross_entropy(output.end_logits, last)
    assert torch.allclose(output.loss, both / 2)


@rests_on_it(
    "src/lockstep/tasks/masked_language_modeling.py",
    "src/lockstep/tasks/per_token.py",
    "src/lockstep/plain/losses.py",
)
def test_losses_of_tokens_are_means_without_a_shift() -> None:
    """The losses of masked LM and token classification are the mean cross entropy of logits and labels at the same
    position over labels other than -100. Padding counts unless its label is -100."""
    labels = torch.tensor([[-100, 1, -100, 0], [-100, 1, -100, 1]])
    for kind in (BertForMaskedLM, BertForTokenClassification):
        output = kind(bert(num_labels=3)).eval()(IDS, attention_mask=MASK, labels=labels)
        assert torch.allclose(output.loss, cross_entropy(output.logits.flatten(0, 1), labels.flatten()))


@rests_on_it("src/lockstep/tasks/classification.py", "src/lockstep/plain/losses.py")
def test_the_dtype_of_labels_determines_a_classifiers_loss() -> None:
    """A classifier's loss is cross entropy for integer labels, binary cross entropy for rows of floats, and squared
    error for one output. The first batch determines it for all later ones, through the model's config."""
    for outputs, labels, loss in (
        (3, torch.tensor([0, 2]), cross_entropy),
        (3, torch.tensor([[0.0, 1.0, 1.0], [1.0, 0.0, 0.0]]), binary_cross_entropy_with_logits),
        (1, torch.tensor([0.5, -1.0]), lambda logits, right: mse_loss(logits[:, 0], right)),
    ):
        model = BertForSequenceClassification(bert(num_labels=outputs)).eval()
        output = model(IDS, attention_mask=MASK, labels=labels)
        assert torch.allclose(output.loss, loss(output.logits, labels))
        assert model.config.problem_type is not None


@rests_on_it("src/lockstep/tasks/translation.py", "src/lockstep/tasks/summarization.py")
def test_a_decoder_reads_its_labels_shifted_by_the_start_token() -> None:
    """With labels only, BART and T5 feed the decoder decoder_start_token_id followed by the labels without the last
    one, with -100 replaced by padding. The loss compares the logits with the labels, without a shift."""
    labels, read = torch.tensor([[5, 6, 3], [7, 3, -100]]), torch.tensor([[2, 5, 6], [2, 7, 3]])
    for model in several()[3:]:
        output = model.eval()(IDS, attention_mask=MASK, labels=labels)
        logits = model(IDS, attention_mask=MASK, decoder_input_ids=read).logits
        assert torch.equal(output.logits, logits)
        assert torch.allclose(output.loss, cross_entropy(logits.flatten(0, 1), labels.flatten()))


@rests_on_it("src/lockstep/tasks/models/padding.py", "src/lockstep/tasks/models/masks.py")
def test_models_do_not_modify_ids_and_mask() -> None:
    """BERT, GPT-2, Llama, BART and T5 do not modify the input ids and the attention mask."""
    for model in several():
        inputs = {"input_ids": IDS.clone(), "attention_mask": MASK.clone()}
        more = {"labels": IDS.clone()} if model.config.is_encoder_decoder else {}
        model.train()(**inputs, **more)[0].sum().backward()
        assert all(value._version == 0 for value in (*inputs.values(), *more.values()))


@rests_on_it("src/lockstep/strategies/exact/stepper.py")
def test_one_dimensional_weights_are_biases_or_norms() -> None:
    """In BERT, GPT-2, Llama, BART and T5 each one-dimensional parameter is a bias or belongs to a module whose class
    name contains "norm"."""
    with torch.device("meta"):
        kinds = several()
    for model in kinds:
        for module in model.modules():
            vectors = {name for name, each in module.named_parameters(recurse=False) if each.dim() == 1}
            assert vectors <= {"bias"} or "norm" in type(module).__name__.lower()


@pytest.mark.extras
@pytest.mark.parametrize("pooling", ["mean", "cls", "lasttoken"])
@rests_on_it(
    "src/lockstep/tasks/models/pooling.py",
    "src/lockstep/plain/losses.py",
    "src/lockstep/tasks/embedding.py",
    "src/lockstep/tasks/models/chunked_loss.py",
)
def test_a_folder_with_modules_and_pooling_is_a_sentence_transformer(pooling: str, tmp_path: Path) -> None:
    """SentenceTransformer reads modules.json, 1_Pooling/config.json with one pooling_mode_ entry, and max_seq_length in
    sentence_bert_config.json, and returns pooled hidden states of unit length. It saves the same pooling as the entry
    pooling_mode or as one of these entries."""
    library = pytest.importorskip("sentence_transformers")
    model = BertModel(bert()).eval()
    model.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    rows = [
        {"idx": place, "name": str(place), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for place, (path, kind) in enumerate(kinds.items())
    ]
    modes = {"mean": "mean_tokens", "cls": "cls_token", "lasttoken": "lasttoken"}
    entries = {f"pooling_mode_{entry}": name == pooling for name, entry in modes.items()}
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "2_Normalize").mkdir()
    (tmp_path / "modules.json").write_text(json.dumps(rows))
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 8, **entries}))
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 4, "do_lower_case": False}))
    loaded = library.SentenceTransformer(str(tmp_path), device="cpu")
    vectors = loaded.encode(["a b a b", "b"])
    ids, mask = torch.tensor([[2, 5, 6, 3], [2, 6, 3, 0]]), MASK  # the first text has four tokens
    hidden: Tensor = model(ids, attention_mask=mask).last_hidden_state.detach()
    pooled = {
        "mean": (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True),
        "cls": hidden[:, 0],
        "lasttoken": hidden[torch.arange(2), mask.sum(1) - 1],
    }[pooling]
    assert np.allclose(vectors, nn.functional.normalize(pooled, dim=-1).numpy(), atol=1e-5)
    loaded.save_pretrained(str(tmp_path / "again"))
    config = json.loads((tmp_path / "again" / "1_Pooling" / "config.json").read_text())
    assert config.get("pooling_mode") == pooling or config.get(f"pooling_mode_{modes[pooling]}") is True
