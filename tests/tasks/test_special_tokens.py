"""Tokenizers that a family cannot be used with, and precisions, are refused before a process starts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from lockstep.config.run import Run
from lockstep.tasks.models import config_checks, heads, model_configs, models
from lockstep.tasks.models.model_configs import ModelChoice
from lockstep.training.resolve import Machine, resolve
from support.harness import tiny
from support.messages import raises

BART = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
BART |= {"d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "vocab_size": 20}
LAYERS = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 16}


def a_run(kind: str, config: dict[str, Any], *overrides: str) -> Run:
    return tiny(*overrides, model={"type": kind, "config": config})


def a_tokenizer(pad: int, end: int | None, separator: int, around: list[int]) -> Any:
    """Return a stub of a tokenizer. `around`: its tokens for two empty texts."""

    class Tokenizer(SimpleNamespace):
        def __call__(self, *texts: str) -> dict[str, list[int]]:
            return {"input_ids": list(around), "token_type_ids": [0, *[1] * (len(texts) - 1)]}

    names = ["input_ids", "token_type_ids"]
    return Tokenizer(
        model_input_names=names, pad_token_id=pad, pad_token="</s>", eos_token_id=end, sep_token_id=separator
    )


@pytest.mark.parametrize(("end", "separator"), [(2, 2), (None, 2)])
def test_a_classifier_that_reads_at_the_end_does_not_pad_with_it(end: int | None, separator: int) -> None:
    run = a_run("bart", BART)
    models.check_tokenizer(run.model, heads.CLASSIFICATION, a_tokenizer(1, end, separator, []))
    with raises("LS3190"):
        models.check_tokenizer(run.model, heads.CLASSIFICATION, a_tokenizer(2, end, separator, []))
    models.check_tokenizer(run.model, heads.SEQ2SEQ, a_tokenizer(2, end, separator, []))


def test_a_classifier_that_reads_at_the_end_needs_an_end() -> None:
    model = a_run("bart", BART).model
    models.check_encoded(model, heads.CLASSIFICATION, a_tokenizer(1, 2, 2, [0, 5, 2]), 1)
    with raises("LS3192", "2"):
        models.check_encoded(model, heads.CLASSIFICATION, a_tokenizer(1, 2, 2, [0, 5]), 1)
    models.check_encoded(model, heads.QUESTION_ANSWERING, a_tokenizer(1, 2, 2, [0, 5]), 2)


def test_pairs_need_two_token_types() -> None:
    """transformers fails with an IndexError; DeBERTa, the control, ignores types that it does not have."""
    tok = a_tokenizer(1, 2, 2, [0, 5, 2])
    for family, types in (("roberta", 2), ("deberta", 0)):
        models.check_encoded(a_run(family, LAYERS | {"type_vocab_size": types}).model, heads.CLASSIFICATION, tok, 2)
    one = a_run("roberta", LAYERS | {"type_vocab_size": 1}).model
    models.check_encoded(one, heads.CLASSIFICATION, tok, 1)
    with raises("LS3193", "roberta"):
        models.check_encoded(one, heads.CLASSIFICATION, tok, 2)


def test_masked_models_predict_each_token_at_its_place() -> None:
    perceiver = {"num_latents": 8, "d_latents": 16, "d_model": 16, "num_self_attends_per_block": 1, "num_blocks": 1}
    perceiver |= {"num_self_attention_heads": 2, "num_cross_attention_heads": 2, "max_position_embeddings": 64}
    config_checks.check_masked(a_run("bert", LAYERS).model, heads.MASKED)
    for family, entries, code in (("bart", BART, "LS3065"), ("perceiver", perceiver, "LS3066")):
        with raises(code, family):
            config_checks.check_masked(a_run(family, entries).model, heads.MASKED)


def test_transformers_refuses_such_padding_too() -> None:
    """The judge of the refusal."""
    config = transformers.BartConfig(**BART, pad_token_id=2, eos_token_id=2, bos_token_id=0, decoder_start_token_id=2)
    model = transformers.BartForSequenceClassification(config).eval()
    model(torch.tensor([[0, 5, 2], [0, 6, 2]]))
    with pytest.raises(Exception, match="number of <eos> tokens"):
        model(torch.tensor([[0, 5, 6, 2], [0, 6, 2, 2]]))


def test_all_families_that_read_at_the_end_are_known() -> None:
    files = Path(str(transformers.__file__)).parent.glob("models/*/modeling_*.py")
    said = "must have the same number of <eos> tokens"
    assert {file.parent.name for file in files if said in file.read_text()} == {*models._CLASSIFIED_AT_END}


def test_longformer_answers_with_three_separators_alone() -> None:
    run = a_run("longformer", LAYERS)
    models.check_tokenizer(run.model, heads.QUESTION_ANSWERING, a_tokenizer(1, 2, 2, [0, 2, 2, 2]))
    for around, count in ([101, 102, 102], 0), ([0, 2, 2], 2):
        with raises("LS3191", str(count)):
            models.check_tokenizer(run.model, heads.QUESTION_ANSWERING, a_tokenizer(1, 2, 2, around))
    models.check_tokenizer(run.model, heads.CLASSIFICATION, a_tokenizer(1, 2, 2, [0, 2, 2]))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize(
    ("family", "entries", "error"),
    [
        ("xmod", {"languages": ["en_XX"], "default_language": "en_XX"}, "dtypes match"),
        ("deberta", {}, "without overflow"),
    ],
)
def test_families_are_refused_under_autocast(family: str, entries: dict, error: str, precision: str) -> None:
    """transformers' own layers fail under autocast."""
    entries = LAYERS | entries
    with raises("LS3143", family):
        models.check_arithmetic(a_run(family, entries).model, heads.CLASSIFICATION, precision, True)
    config = transformers.AutoConfig.for_model(family, **entries, vocab_size=20)
    model = transformers.AutoModel.from_config(config).eval()
    ids = torch.tensor([[0, 5, 2]])
    low = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    with torch.autocast("cpu", low), pytest.raises(RuntimeError, match=error):
        model(ids)
    model.bfloat16()(ids)  # what the refusal names
    run = a_run(family, entries, "precision=bf16", "model.dtype=bfloat16")
    models.check_arithmetic(run.model, heads.CLASSIFICATION, "bf16", True)


def test_precision_checks_apply_to_cached_data(tmp_path: Path) -> None:
    """Their key holds no precision: what prepared them is not called again."""
    run = tiny("task.name=classification", model={"type": "deberta", "config": LAYERS}, output=str(tmp_path))
    resolve(run, Machine(), 1)
    with raises("LS3143", "deberta"):
        resolve(run.model_copy(update={"precision": "bf16"}), Machine(), 1)


YOUTU = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "q_lora_rank": 16, "kv_lora_rank": 16}


FUNNEL = {"hidden_size": 32, "num_attention_heads": 2}  # as BERT, its control, names them, too
FUNNEL |= {"block_sizes": [1, 1], "d_head": 16, "d_inner": 32, "num_decoder_layers": 1}


@pytest.mark.parametrize(
    ("head", "family", "entries"), [("causal", "youtu", LAYERS | YOUTU), ("masked", "funnel", FUNNEL)]
)
def test_an_embedding_zeroed_on_load_is_not_trained(
    head: str, family: str, entries: dict[str, Any], tmp_path: Path
) -> None:
    """transformers zeroes the row when it loads this family; another family is the control. An untied output has its
    own rows."""
    auto = getattr(transformers, heads.of(head).auto)
    for of, row in ((family, 0.0), ("llama" if head == "causal" else "bert", 1.0)):
        config = transformers.AutoConfig.for_model(
            of, **entries, vocab_size=20, pad_token_id=0, tie_word_embeddings=True
        )
        model = auto.from_config(config)
        with torch.no_grad():
            model.get_output_embeddings().weight[0] = 1.0
        model.save_pretrained(tmp_path / of)
        loaded = auto.from_pretrained(tmp_path / of).get_output_embeddings().weight[0]
        assert torch.equal(loaded, torch.full_like(loaded, row))
    with raises("LS3151", family):
        models.check(ModelChoice.of(a_run(family, entries)), head)
    models.check(ModelChoice.of(a_run(family, entries | {"tie_word_embeddings": False})), head)


def test_per_layer_config_entries_are_read() -> None:
    """Gemma 4 has another `head_dim` in layers of full attention, and transformers refuses to read the entry."""
    entries = LAYERS | {"num_key_value_heads": 2, "head_dim": 16, "layer_types": ["full_attention"]}
    config = model_configs.load_config((run := a_run("gemma4_text", entries)).model)
    with pytest.raises(RuntimeError, match="per-layer"):
        config.head_dim  # noqa: B018
    assert model_configs.entry(config, "head_dim") == 16
    config_checks.notes(run.model, heads.CAUSAL)
