"""Weights that the files of a pretrained model lack, or hold under other names: refused or noted before training."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from lockstep.config.run import Run, RunError, load
from lockstep.config.sections import ModelSection
from lockstep.tasks.models import adapters, heads, model_configs, models, source_files, source_ties
from support import own_heads
from support.command import LOCKSTEP, CommandJob, ended, start
from support.harness import TINY
from support.hub_server import Hub
from support.messages import mentions, raises
from support.task_runs import WORDS

Weights = Mapping[str, Tensor]
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
GROUPED = SIZES | {"num_key_value_heads": 2, "head_dim": 16}


def rewrite(folder: Path, change: Callable[[Weights], Weights]) -> None:
    """Write the weights of a saved model anew."""
    file = folder / "model.safetensors"
    save_file({n: t.contiguous().clone() for n, t in change(load_file(file)).items()}, file, {"format": "pt"})


def without(*parts: str) -> Callable[[Weights], Weights]:
    return lambda weights: {n: t for n, t in weights.items() if not any(part in n for part in parts)}


def under(prefix: str) -> Callable[[Weights], Weights]:
    return lambda weights: {f"{prefix}{n}": t for n, t in weights.items()}


def run_of(folder: Path, task: str = "classification", *overrides: str) -> Run:
    rows = [{"text": " ".join(WORDS[(n + k) % 15] for k in range(6 + n % 7)), "label": "ab"[n % 2]} for n in range(40)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    values = TINY | {
        "data": {"source": str(folder / "rows.jsonl"), "max_length": 24},
        "model": {"source": str(folder / "model")},
        "task": {"name": task} | ({"block_size": 24, "samples": 0} if task == "language_modeling" else {}),
        "output": str(folder / "out"),
        "steps": 2,
    }
    values.pop("tokenizer", None)
    return load(None, list(overrides), values)


WRONG = {
    "ddp": ("bert", under("module."), "LS3490", ["'module.'", "DistributedDataParallel", "module.bert.embeddings"]),
    "compiled": ("gpt2", under("_orig_mod."), "LS3490", ["'_orig_mod.'", "torch.compile"]),
    "own wrapper": ("gpt2", under("model."), "LS3490", ["'model.'", "transformer.wte.weight"]),
    "peft": ("llama", under("base_model.model."), "LS3490", ["'base_model.model.'", "peft"]),
    "none": ("bert", lambda weights: {"a": torch.zeros(1)}, "LS3490", ["a;", "save_pretrained"]),
    "layer": ("bert", without("layer.1.attention.self.query"), "LS3491", ["layer.1.attention.self.query.weight"]),
    "bias": ("bert", without("layer.1.output.dense.bias"), "LS3491", ["layer.1.output.dense.bias of BertFor"]),
    "norm": ("gpt2", without("ln_f"), "LS3491", ["transformer.ln_f.weight, transformer.ln_f.bias of"]),
    "embedding": ("gpt2", without("wte", "lm_head"), "LS3491", ["transformer.wte.weight"]),
}
HEADS = {"bert": heads.CLASSIFICATION, "gpt2": heads.CAUSAL, "llama": heads.CAUSAL}
AUTOS = {"bert": "AutoModelForSequenceClassification", "gpt2": "AutoModelForCausalLM", "llama": "AutoModelForCausalLM"}


@pytest.mark.parametrize("name", WRONG)
def test_a_base_that_would_be_random_is_refused(name: str, tmp_path: Path) -> None:
    kind, change, code, words = WRONG[name]
    own_heads.save(tmp_path / "model", kind, apart=False)
    run = run_of(tmp_path)
    source_files.check(run.model, HEADS[kind])  # as it was saved
    rewrite(tmp_path / "model", change)
    with raises(code, "model.source", *words):
        source_files.check(run.model, HEADS[kind])
    auto = getattr(transformers, AUTOS[kind])
    model, info = auto.from_pretrained(tmp_path / "model", output_loading_info=True)
    with raises(code, "model.source"):  # files that were not there before the start
        source_files.check_loaded(run.model, HEADS[kind], model, info)


@pytest.mark.processes
@pytest.mark.parametrize("strategy", ["single", "fsdp2"])
def test_changed_weights_are_refused_although_the_data_is_cached(
    strategy: str, tmp_path: Path, job: CommandJob
) -> None:
    own_heads.save(tmp_path / "model", "bert", apart=False)
    run = run_of(tmp_path, "classification", f"strategy.name={strategy}", "launch.processes=1")
    (tmp_path / "run.yaml").write_text(run.dump())
    assert "lack bert.pooler.dense.weight" in job.finish()
    rewrite(tmp_path / "model", under("module."))
    for command in ("train", "plan"):
        status, _, err = ended(start([*LOCKSTEP, command, "run.yaml", "output=other"], tmp_path, job.cache))
        assert status == 2
        mentions(err, "LS3490", "'module.'")
    assert not (tmp_path / "other").exists()


def test_heads_and_poolers_are_noted_where_they_are_used(tmp_path: Path) -> None:
    own_heads.save(tmp_path / "model", "bert", apart=False)  # of a masked language model, without a pooler
    run = run_of(tmp_path)
    (note,) = source_files.notes(run.model, heads.CLASSIFICATION)
    assert "bert.pooler.dense.weight, bert.pooler.dense.bias: initialized at random" in note
    assert "classifier" not in note  # a new head is what the task is for
    for head in (heads.MASKED, heads.EMBEDDING, heads.TOKEN_CLASSIFICATION):
        assert source_files.notes(run.model, head) == []
    rewrite(tmp_path / "model", without("cls."))
    (note,) = source_files.notes(run.model, heads.MASKED)
    assert "cls.predictions.bias" in note


def test_weights_that_the_model_lacks_are_noted(tmp_path: Path) -> None:
    own_heads.save(tmp_path / "model", "gpt2", apart=False)
    run = run_of(tmp_path)
    layer = without("h.1.")
    rewrite(tmp_path / "model", lambda weights: {**weights, "transformer.h.0.attn.bias": torch.ones(1)})
    assert source_files.notes(run.model, heads.CAUSAL) == []  # a mask that older versions saved
    own = load_file(tmp_path / "model/model.safetensors")
    for other in ("transformer.h.0.attn.q_norm.weight", "transformer.h.1.mlp.c_fc.lora_A.weight"):
        rewrite(tmp_path / "model", lambda weights, name=other: {**own, name: torch.ones(1)})  # type: ignore[misc]
        (note,) = source_files.notes(run.model, heads.CAUSAL)
        assert f"hold {other}, which the model" in note
    rewrite(tmp_path / "model", lambda _: {**own, "v_head.summary.weight": torch.ones(1, 32)})  # TRL's value head
    (note,) = source_files.notes(run.model, heads.CAUSAL)
    assert "hold v_head.summary.weight, which the model" in note
    rewrite(tmp_path / "model", lambda _: own)
    config = tmp_path / "model/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"n_layer": 1}))
    (note,) = source_files.notes(run.model, heads.CAUSAL)
    assert "hold transformer.h.1." in note
    assert "config.json" in note
    source_files.check(run.model, heads.CAUSAL)
    chosen = run_of(tmp_path, "classification", "model.config.n_layer=1")
    assert source_files.notes(chosen.model, heads.CAUSAL) == []  # so it was asked for
    config.write_text(json.dumps(json.loads(config.read_text()) | {"n_layer": 2}))
    rewrite(tmp_path / "model", layer)
    with raises("LS3491", "transformer.h.1.ln_1.weight"):
        source_files.check(run.model, heads.CAUSAL)
    with raises("LS3491", "model.config (n_layer)"):
        source_files.check(run_of(tmp_path, "classification", "model.config.n_layer=3").model, heads.CAUSAL)


def labelled(folder: Path, change: Callable[[Weights], Weights]) -> Run:
    """A run from a sequence classifier whose weights were changed, and which its config names still."""
    own_heads.save(folder / "model", "bert", apart=False)
    (folder / "model/model.safetensors").unlink()
    config = transformers.RobertaConfig(**SIZES, vocab_size=40, max_position_embeddings=64, num_labels=3)
    transformers.RobertaForSequenceClassification(config).save_pretrained(folder / "model")
    rewrite(folder / "model", change)
    return run_of(folder)


def test_a_missing_head_for_labels_is_noted(tmp_path: Path) -> None:
    def labels(count: int) -> dict[str, Any]:
        return models.named([*"abc"[:count]])

    run = labelled(tmp_path, dict)
    assert source_files.notes(run.model, heads.CLASSIFICATION, labels(3)) == []  # as it was saved
    source_files.check_export(run.model, heads.CLASSIFICATION)
    (note,) = source_files.notes(run.model, heads.CLASSIFICATION, labels(1))  # a reward, from a classifier
    assert "classifier.out_proj.weight, classifier.out_proj.bias for another number of labels" in note
    assert "[3, 32], here [1, 32]" in note
    own = load_file(tmp_path / "model/model.safetensors")
    for lacking in ("classifier", "out_proj"):  # all of it, or a half
        rewrite(tmp_path / "model", lambda _, part=lacking: without(part)(own))  # type: ignore[misc]
        (note,) = source_files.notes(run.model, heads.CLASSIFICATION, labels(3))
        assert "lack classifier." in note
        assert "initialized at random" in note
        source_files.check(run.model, heads.CLASSIFICATION, labels(3))
        with raises("LS3492", "classifier."):  # an export, by `evaluate`
            source_files.check_export(run.model, heads.CLASSIFICATION)
    for size in ("classifier.dense.weight", "classifier.out_proj.weight"):  # not the number of labels
        rewrite(tmp_path / "model", lambda _, name=size: {**own, name: torch.ones(2, 16)})  # type: ignore[misc]
        with raises("LS3442", size, "[2, 16]"):
            source_files.check(run.model, heads.CLASSIFICATION, labels(3))
        with raises("LS3494", size):
            source_files.check_export(run.model, heads.CLASSIFICATION)
        auto = transformers.AutoModelForSequenceClassification
        model, info = auto.from_pretrained(tmp_path / "model", output_loading_info=True, ignore_mismatched_sizes=True)
        with raises("LS3442", size):
            source_files.check_loaded(run.model, heads.CLASSIFICATION, model, info)


def test_head_with_another_base_name_is_refused_with_a_remedy(tmp_path: Path) -> None:
    """transformers' Llama for question answering looks for `transformer.`, and finds nothing in `model.`."""
    own_heads.save(tmp_path / "model", "llama", apart=False)
    run = run_of(tmp_path)
    with raises("LS3490", "LlamaForQuestionAnswering", "AutoModel.from_pretrained", "model.source=FOLDER"):
        source_files.check(run.model, heads.QUESTION_ANSWERING)
    transformers.AutoModel.from_pretrained(tmp_path / "model").save_pretrained(tmp_path / "base")
    advised = run.model_copy(update={"model": run.model.model_copy(update={"source": str(tmp_path / "base")})})
    source_files.check(advised.model, heads.QUESTION_ANSWERING)
    assert source_files.notes(advised.model, heads.QUESTION_ANSWERING) == []


# Families whose weights are merged, split or renamed when they are read, and one that computes its positions.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("AutoModelForCausalLM", GROUPED | {"num_local_experts": 2}),
    "qwen2_moe": ("AutoModelForCausalLM", GROUPED | {"num_experts": 2, "moe_intermediate_size": 16}),
    "phi3": ("AutoModelForCausalLM", GROUPED),
    "deberta-v2": ("AutoModelForMaskedLM", SIZES),
    "t5": ("AutoModelForSeq2SeqLM", {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 1, "num_heads": 2}),
    "marian": (
        "AutoModelForSeq2SeqLM",
        {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}
        | {"decoder_attention_heads": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48},
    ),
}
ALL_HEADS = [heads.EMBEDDING, heads.MASKED, heads.CAUSAL, heads.SEQ2SEQ, heads.CLASSIFICATION]


@pytest.mark.parametrize("family", FAMILIES)
def test_missing_weights_match_from_pretrained(family: str, tmp_path: Path) -> None:
    auto, entries = FAMILIES[family]
    special = {"vocab_size": 60, "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3, "decoder_start_token_id": 1}
    config = transformers.CONFIG_MAPPING[family](**entries | special)
    getattr(transformers, auto).from_config(config).save_pretrained(tmp_path / "model")
    run, tried = run_of(tmp_path), 0
    for head in ALL_HEADS:
        try:
            kind = getattr(transformers, head.auto)
            model, info = kind.from_pretrained(tmp_path / "model", output_loading_info=True)
        except ValueError:  # the family has no such head
            continue
        built: Any = source_files._build(run.model, head)
        places = source_ties.places(built.model, source_ties.stored_names(run.model))
        tied: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            tied.setdefault(id(parameter), []).append(name)
        missed = {names[0] for names in tied.values() if {*names} <= {*info["missing_keys"]}}
        computed = {n for n, p in built.model.named_parameters(remove_duplicate=False) if not p.requires_grad}
        assert {*built.lacking(places)} == missed - computed, head
        if head.auto == auto:
            assert not built.lacking(places)
            source_files.check(run.model, head)
            assert source_files.notes(run.model, head) == []
        tried += 1
    assert tried > 1


@pytest.mark.processes
def test_an_export_without_all_its_weights_is_not_used(tmp_path: Path) -> None:
    own_heads.save(tmp_path / "model", "bert", apart=False)
    run = run_of(tmp_path)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    model.save_pretrained(tmp_path / "export")
    models.exported_model(heads.CLASSIFICATION, tmp_path / "export", run.model)
    rewrite(tmp_path / "export", without("classifier.weight"))
    with raises("LS3492", "classifier.weight", "BertForSequenceClassification"):
        models.exported_model(heads.CLASSIFICATION, tmp_path / "export", run.model)


ADAPTER_NAMES = {
    "of more layers": (lambda w: {n.replace("layer.1", "layer.7"): t for n, t in w.items()}, "lacks"),
    "incomplete": (without("layer.0.attention.self.query.lora_B"), "lacks"),
    "with more": (
        lambda w: {**w, "base_model.model.bert.encoder.layer.5.x.lora_A.weight": torch.ones(1)},
        "weights that this one lacks",
    ),
}


@pytest.mark.parametrize("name", ADAPTER_NAMES)
def test_an_adapter_of_another_model_is_not_used(name: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    own_heads.save(tmp_path / "model", "bert", apart=False)
    adapter = {"r": 2, "target_modules": ["query"], "export": "adapter"}
    run = run_of(tmp_path, "classification", f"model.adapter={json.dumps(adapter)}")
    base = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    config = peft.LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS")
    model = peft.get_peft_model(base, config)
    model.save_pretrained(tmp_path / "export")
    base.config.save_pretrained(tmp_path / "export")
    models.exported_model(heads.CLASSIFICATION, tmp_path / "export", run.model)
    adapters.load(model, tmp_path / "export")
    change, words = ADAPTER_NAMES[name]
    file = tmp_path / "export/adapter_model.safetensors"
    save_file({n: t.clone() for n, t in change(load_file(file)).items()}, file, {"format": "pt"})
    with raises("LS3493", words, "lora_"):
        models.exported_model(heads.CLASSIFICATION, tmp_path / "export", run.model)
    with raises("LS3493", words, "lora_"):
        adapters.load(model, tmp_path / "export")


@pytest.mark.processes
def test_names_on_the_hub_are_read_before_a_start(tmp_path: Path, job: CommandJob) -> None:
    own_heads.save(tmp_path / "model", "bert", apart=False)
    run = run_of(tmp_path)
    (tmp_path / "run.yaml").write_text(run.dump())
    rewrite(tmp_path / "model", under("module."))
    files = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    with Hub() as hub:
        hub.put("models", "user/wrapped", files)
        command = [*LOCKSTEP, "plan", "run.yaml", "model.source=user/wrapped"]
        status, _, err = ended(start(command, tmp_path, job.cache, **hub.environment(tmp_path / "home")))
    assert status == 2
    mentions(err, "LS3490", "'module.'")
    assert not list((tmp_path / "home").rglob("*.safetensors"))  # nor downloaded


def test_an_edited_config_that_names_another_type_than_its_class_is_refused(tmp_path: Path) -> None:
    for model_type in ("gptj", "nosuch"):  # gptj loads the files of a gpt2; nosuch is unknown to transformers
        config = {"architectures": ["GPT2ForSequenceClassification"], "model_type": model_type}
        (tmp_path / "config.json").write_text(json.dumps(config))
        with raises("LS3496", "GPT2ForSequenceClassification", "gpt2", model_type):
            source_files.check_edited(tmp_path)


def test_a_source_with_an_adapter_is_refused_and_not_called_an_adapter_alone(tmp_path: Path) -> None:
    """`from_pretrained` would load the adapter's base instead of the weights beside it."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(RunError, match=r"holds an adapter \(adapter_config\.json\); name the model"):
        model_configs.local_or_id(ModelSection(source=str(tmp_path)))
