"""Entries of `model.config`: unknown ones are refused, legal ones are taken in all families, what a family derives from
them follows as transformers has it, and those that change nothing are named."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto import modeling_auto

from lockstep.cli import main
from lockstep.config.run import Run, RunError
from lockstep.tasks.models import config_checks, model_configs, models, small_models
from lockstep.tasks.models.heads import BUILT_IN
from lockstep.tasks.models.heads import of as head_of
from lockstep.training import startup
from support.family_configs import BERT, GROUPED
from support.harness import tiny
from support.marks import slow
from support.messages import raises

GPT2 = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 32}
DEEPSEEK = {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "head_dim": 8}
T5 = {"d_model": 32, "num_layers": 1, "d_ff": 32, "d_kv": 8, "num_heads": 2}


WITHIN = [(family, "text_config") for family in ("gemma3", "llava", "mistral3", "mllama", "paligemma", "qwen2_vl")]
WITHIN += [(family, "vision_config") for family in ("clip", "gemma3", "idefics2", "llama4", "qwen3_vl")]
WITHIN += [("gemma4", "vision_config"), ("gemma4", "audio_config")]  # none, unless entries make one
WITHIN += [("dia", "decoder_config"), ("llama4", "text_config"), ("siglip", "text_config")]


def run_of(family: str, config: dict[str, Any]) -> Run:
    return tiny(model={"type": family, "config": config})


@pytest.mark.parametrize(
    ("family", "config", "code", "values"),
    [
        ("gpt2", {"resid_dropout": 0.1}, "LS3135", ["'resid_dropout'", "'resid_pdrop'?"]),
        ("gpt2", {"nLayer": 2}, "LS3135", ["'n_layer'?"]),
        ("gpt2", {"zzz": 2}, "LS3135", ["'gpt2'", "'zzz'"]),
        ("gpt2", {"to_dict": 1}, "LS3135", ["'to_dict'"]),  # a method
        ("gpt2", {"use_return_dict": False}, "LS3135", ["'use_return_dict'"]),  # cannot be set
        ("gpt2", {"attention_dropout": 0.1}, "LS3135", ["'attention_dropout'"]),  # of other families
        ("gpt2", {"model_type": "bert"}, "LS3120", ["model.config.model_type: invalid value 'bert'", "'gpt2'"]),
        ("gpt2", {"dtype": "bfloat16"}, "LS3121", ["model.config.dtype: ", "'bfloat16'", "model.dtype"]),
        ("gpt2", {"return_dict": False}, "LS3121", ["model.config.return_dict: ", "False"]),
        ("gpt2", {"n_layer": "two"}, "LS3123", ["model.config.n_layer: ", "'two'"]),
        ("t5gemma", {"encoder": {"dropout": 0.1}}, "LS3135", ["model.config.encoder: ", "'dropout'", "'dropout_rate'"]),
        *((family, {part: {"zzz": 1}}, "LS3135", [f"model.config.{part}: ", "'zzz'"]) for family, part in WITHIN),
    ],
)
def test_an_entry_that_the_class_does_not_know_is_refused(
    family: str, config: dict[str, Any], code: str, values: list[str]
) -> None:
    with raises(code, *values):
        model_configs.load_config(run_of(family, config).model)


@pytest.mark.parametrize(
    ("family", "config", "code", "text"),
    [
        ("gpt2", {"n_layer": 2.5}, "LS3123", "invalid value 2.5; Field 'n_layer' expected int, got float"),
        ("llama", {"num_attention_heads": 0}, "LS3124", "num_attention_heads is 0"),
        ("llama", {"hidden_size": 32, "num_attention_heads": 3}, "LS3124", "invalid entries: The hidden size (32)"),
        ("gpt2", {**GPT2, "n_head": 0}, "LS3144", "cannot build this gpt2: n_head is 0: "),
        ("gpt2", {**GPT2, "n_embd": -4}, "LS3144", "cannot build this gpt2: n_embd is -4: "),
        ("gpt2", {**GPT2, "activation_function": "relux"}, "LS3144", "activation_function: 'relux' is unknown"),
    ],
)
def test_rejected_entries_are_named_without_exceptions(
    family: str, config: dict[str, Any], code: str, text: str
) -> None:
    def check() -> None:
        section = run_of(family, config).model
        models._check_buildable(section, model_configs.load_config(section), "classification")

    with pytest.raises(RunError) as refused:
        check()
    assert refused.value.code == code
    assert text in str(refused.value)
    assert "Error" not in str(refused.value)


def test_entries_that_are_rightly_zero_are_not_accused() -> None:
    entries = {"attn_pdrop": 0.0, "resid_pdrop": 0, "pad_token_id": 0, "n_head": 0}
    assert model_configs.rejected(RuntimeError("sizes 3 and 4 differ"), entries) == "sizes 3 and 4 differ"
    divided = ZeroDivisionError("integer modulo by zero")
    assert model_configs.rejected(divided, entries) == "n_head is 0: integer modulo by zero"


def test_a_model_with_few_positions_is_tried() -> None:
    config = model_configs.load_config(run_of("gpt2", {**GPT2, "n_positions": 8}).model)
    assert [each.n_positions for each in small_models.smaller(config, "classification")] == [small_models.ROOM] * 2


def text_families(*heads: str) -> list[str]:
    named = {name for head in heads for name in getattr(modeling_auto, head_of(head).families)}
    return sorted(named & set(CONFIG_MAPPING))


def all_entries_taken(family: str) -> int:
    """Return the number of entries of a config created from all its own entries; 0 if a config needs some."""
    kind = CONFIG_MAPPING[family]
    try:
        usual = kind()
    except Exception:
        return 0
    entries = {
        name: value
        for name, value in vars(usual).items()
        if isinstance(value, bool | int | float | str) and name != "model_type" and not name.startswith("_")
    }
    try:
        wanted = kind(**entries).to_dict()
    except Exception:  # its own values do not fit each other
        return 0
    found = model_configs.from_scratch(kind, entries).to_dict()
    assert found == wanted, family
    return len(entries)


@pytest.mark.parametrize("heads", [("seq2seq",), slow(tuple(BUILT_IN))])
def test_no_legal_entry_is_refused_in_any_family(heads: tuple[str, ...]) -> None:
    counts = {family: all_entries_taken(family) for family in text_families(*heads)}
    assert sum(count > 8 for count in counts.values()) > 0.8 * len(counts), counts


DERIVED = [
    ("llama", {"hidden_size": 32, "num_attention_heads": 4}, {"head_dim": 8, "num_key_value_heads": 4}),
    ("deepseek_v3", DEEPSEEK, {"qk_head_dim": 16}),
    ("t5", T5 | {"feed_forward_proj": "gated-gelu"}, {"is_gated_act": True, "num_decoder_layers": 1}),
    ("mamba", {"hidden_size": 32, "expand": 4}, {"intermediate_size": 128, "time_step_rank": 2}),
    ("qwen2", {"num_hidden_layers": 2}, {"layer_types": ["full_attention"] * 2}),
]


@pytest.mark.parametrize(("family", "entries", "derived"), DERIVED)
def test_derived_config_entries_follow_the_given_ones(
    family: str, entries: dict[str, Any], derived: dict[str, Any]
) -> None:
    kind: Any = CONFIG_MAPPING[family]
    found = model_configs.load_config(run_of(family, entries).model)
    assert found.to_dict() == kind(**entries).to_dict()
    assert {name: getattr(found, name) for name in derived} == derived
    model_configs.set_entries(one_by_one := kind(), entries)
    assert {name: getattr(one_by_one, name) for name in derived} != derived  # what was made before


def test_a_model_from_scratch_computes_what_transformers_computes() -> None:
    """T5 1.1 has gates in its layers, which its config derives from `feed_forward_proj`."""
    config = T5 | {"feed_forward_proj": "gated-gelu"}
    kind: Any = CONFIG_MAPPING["t5"]
    run = run_of("t5", config)
    model_configs.set_entries(one_by_one := kind(), config)
    one_by_one.num_decoder_layers = 1
    inputs = small_models.examples("seq2seq", *small_models.BATCHES[0])
    found = []
    for wanted in (model_configs.load_config(run.model), kind(**config), one_by_one):
        wanted.vocab_size, wanted.decoder_start_token_id = small_models.TOKENS, small_models.START
        model: Any = small_models.small(run.model, "seq2seq", wanted, None)
        with torch.no_grad():
            found.append((model(**inputs).logits, any("wi_1" in name for name in model.state_dict())))
    (ours, gated), (theirs, gated_too), (before, none) = found
    assert torch.equal(ours, theirs)
    assert not torch.equal(ours, before)  # was trained in silence
    assert (gated, gated_too, none) == (True, True, False)


NOTES = [
    ("gpt2", "causal", GPT2 | {"resid_pdrop": 0.1, "attn_pdrop": 0.0, "embd_pdrop": 0.2}, []),
    ("gpt2", "causal", GPT2 | {"resid_pdrop": 0.2, "summary_first_dropout": 0.3}, ["summary_first_dropout"]),
    ("bert", "classification", BERT | {"classifier_dropout": 0.3}, []),
    ("bert", "masked", BERT | {"classifier_dropout": 0.3, "layer_norm_eps": 1e-3}, ["classifier_dropout"]),
    ("mixtral", "causal", GROUPED | {"num_local_experts": 4, "router_aux_loss_coef": 0.5}, ["router_aux_loss_coef"]),
    ("gpt2", "causal", GPT2 | {"use_cache": False, "pad_token_id": 7}, ["use_cache", "pad_token_id"]),
    ("bert", "classification", BERT | {"num_labels": 7}, ["num_labels"]),
    ("opt", "causal", {"num_hidden_layers": 4, "layerdrop": 0.01, "dropout": 0.0}, []),
    ("t5", "seq2seq", T5 | {"classifier_dropout": 0.2, "dropout_rate": 0.2}, ["classifier_dropout"]),
]


@pytest.mark.parametrize(("family", "head", "config", "named"), NOTES)
def test_an_entry_that_changes_nothing_is_named(
    family: str, head: str, config: dict[str, Any], named: list[str]
) -> None:
    said = config_checks.notes(run_of(family, config).model, head)
    assert sorted(text.split()[0] for text in said) == sorted(f"model.config.{name}" for name in named)
    assert all(" has no effect" in text for text in said)


def test_an_entry_that_the_class_changes_is_named() -> None:
    said = config_checks.notes(run_of("hrm_text", {"num_hidden_layers": 2}).model, "causal")
    assert said == ["model.config.num_hidden_layers: the config of hrm_text changes 2 to 16"]


def test_entries_are_not_judged_if_no_small_model_can_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: Any) -> Any:
        raise ValueError("no such model")

    monkeypatch.setattr(small_models, "small", unknown)
    assert config_checks.acts(run_of("gpt2", GPT2 | {"resid_pdrop": 0.1}).model, "causal", "resid_pdrop", 0.1)


def test_plan_notes_entries_without_effect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model.config.summary_first_dropout=0.3", "data.limit=60", f"output={tmp_path / 'out'}"]
    assert main(["plan", *words]) == 0
    assert "model.config.summary_first_dropout has no effect on this gpt2" in " ".join(capsys.readouterr().out.split())


def test_layers_that_a_family_cannot_leave_out_are_refused() -> None:
    """The encoder of Pegasus-X goes on with None; its decoder and BART's layers can be left out."""
    sizes = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    sizes |= {"d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "vocab_size": 64}
    for family, key in (("pegasus_x", "decoder_layerdrop"), ("bart", "encoder_layerdrop")):
        section = tiny(model={"type": family, "config": sizes | {key: 0.1}}).model
        assert config_checks.fails_without_layers(section, "seq2seq", model_configs.load_config(section)) is None
    refused = sizes | {"encoder_layerdrop": 0.1, "decoder_layerdrop": 0.1}
    with raises("LS3112", "model.config.encoder_layerdrop", "pegasus_x"):
        config_checks.check(tiny(model={"type": "pegasus_x", "config": refused}).model, "seq2seq")


def test_the_entries_of_a_config_are_its_own() -> None:
    config = transformers.GPT2Config()
    assert {"n_layer", "num_hidden_layers", "num_labels", "tie_word_embeddings"} <= {*model_configs.names(config)}
    assert not {"to_dict", "save_pretrained", "attribute_map", "model_type"} & {*model_configs.names(config)}
    assert all(hasattr(PreTrainedConfig, name) for name in ("to_dict", "save_pretrained", "model_type"))


def test_longrope_is_noted_where_texts_are_on_both_sides_of_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
    config = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
    run = run_of("llama", config | {"rope_parameters": rope | factors})
    assert config_checks.longrope_limit(run.model, "classification") == 16
    assert config_checks.longrope_limit(run_of("llama", config).model, "classification") is None
    assert config_checks.longrope_limit(run.model, None) is None
    job: Any = SimpleNamespace(run=run, task=SimpleNamespace(head="classification"))
    columns = MagicMock(spec=startup.Columns)
    monkeypatch.setattr(startup, "make_task", lambda _: SimpleNamespace(splits={"train": columns}))
    for lengths, noted in (([3, 16, 17], 1), ([3, 16], 0), ([17, 40], 0)):
        columns.lengths, columns.__len__.return_value = lengths, len(lengths)
        notes = startup.beyond_longrope(job)
        assert len(notes) == noted
        assert all("more than 16 tokens" in note and "1 of 3" in note for note in notes)
