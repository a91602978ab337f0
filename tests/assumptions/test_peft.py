"""Assumptions about PEFT."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from support.assumed import rests_on_it

peft: Any = pytest.importorskip("peft")
IDS = torch.arange(8)[None]


def tied() -> LlamaForCausalLM:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, num_key_value_heads=2, tie_word_embeddings=True, **sizes)).eval()


def adapted(model: nn.Module, **options: Any) -> Any:
    return peft.get_peft_model(model, peft.LoraConfig(r=2, **options)).eval()


def apart(*logits: torch.Tensor) -> float:
    return (logits[0] - logits[1]).abs().max().item()


@pytest.mark.parametrize("ensure", [False, True])
@rests_on_it("src/lockstep/tasks/models/storage_dtype.py")
def test_merging_into_a_tied_weight_changes_the_model(ensure: bool) -> None:
    """merge_and_unload of an adapter on a tied embedding changes the model's outputs, with and without
    ensure_weight_tying."""
    options = {"target_modules": ["embed_tokens"], "init_lora_weights": False, "ensure_weight_tying": ensure}
    model = adapted(tied(), **options, task_type="CAUSAL_LM")
    before = model(IDS).logits
    assert apart(before, model.merge_and_unload()(IDS).logits) > 1


@rests_on_it("src/lockstep/tasks/models/adapters.py", "src/lockstep/plain/train.py")
def test_all_linear_adapts_a_head_without_a_task_type() -> None:
    """all-linear without a task type adapts a classifier's head and leaves it frozen. A head named in modules_to_save,
    or known from the task type, is trained in full."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}

    def trained(**options: Any) -> set[str]:
        model = adapted(BertForSequenceClassification(BertConfig(vocab_size=32, **sizes)), **options)
        names = [name for name, p in model.named_parameters() if p.requires_grad and "classifier" in name]
        return {name.split(".classifier.")[1].split(".")[0] for name in names}

    assert trained(target_modules="all-linear") == {"lora_A", "lora_B"}
    assert trained(target_modules="all-linear", modules_to_save=["classifier"]) == {"modules_to_save"}
    assert trained(target_modules="all-linear", task_type="SEQ_CLS") == {"modules_to_save"}


@rests_on_it("src/lockstep/tasks/models/storage_dtype.py", "src/lockstep/tasks/models/models.py")
def test_unmerging_does_not_restore_the_bits() -> None:
    """merge_adapter followed by unmerge_adapter changes the weight's bits. lockstep's exports merge only models that
    are not trained any further."""
    model = adapted(tied(), target_modules=["q_proj"], init_lora_weights=False)
    (layer,) = (m for n, m in model.named_modules() if n.endswith("q_proj"))
    before = layer.base_layer.weight.clone()
    model.merge_adapter()
    model.unmerge_adapter()
    assert not torch.equal(before, layer.base_layer.weight)
    assert torch.allclose(before, layer.base_layer.weight, atol=1e-5)


@rests_on_it("src/lockstep/tasks/models/adapters.py")
def test_a_new_adapter_changes_no_logits() -> None:
    """get_peft_model does not change the logits, draws from torch's generator, and freezes all weights but the
    adapter's."""
    plain = tied()(IDS).logits
    drawn = []
    for seed in (1, 1, 2):
        model = tied()
        torch.manual_seed(seed)
        wrapped = adapted(model, target_modules=["q_proj"])
        assert torch.equal(wrapped(IDS).logits, plain)
        trained = {name: p for name, p in wrapped.named_parameters() if p.requires_grad}
        assert trained
        assert all("lora_" in name for name in trained)
        drawn.append(next(p for name, p in trained.items() if "lora_A" in name))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


@rests_on_it("src/lockstep/tasks/models/adapters.py")
def test_a_saved_adapter_is_loaded_by_name(tmp_path: Path) -> None:
    """set_peft_model_state_dict takes the names in adapter_model.safetensors, and restores the same logits."""
    from safetensors.torch import load_file

    first = adapted(tied(), target_modules=["q_proj"], init_lora_weights=False)
    first.save_pretrained(tmp_path)
    second = adapted(tied(), target_modules=["q_proj"])
    result = peft.set_peft_model_state_dict(second, load_file(tmp_path / "adapter_model.safetensors"))
    assert not result.unexpected_keys
    assert torch.equal(first(IDS).logits, second(IDS).logits)


@rests_on_it("src/lockstep/tasks/models/adapters.py")
def test_loading_an_adapter_of_a_tied_head(tmp_path: Path) -> None:
    """With ensure_weight_tying, an adapter of a tied head is loaded as saved if the embedding is called embed_tokens.
    For a GPT-2, whose embedding is called wte, the head's part is silently lost. peft 0.18 ties no adapter, and loads
    both."""

    def gpt2() -> nn.Module:
        torch.manual_seed(0)
        sizes = {"vocab_size": 32, "n_embd": 16, "n_layer": 1, "n_head": 2}
        return GPT2LMHeadModel(GPT2Config(bos_token_id=1, eos_token_id=2, **sizes)).eval()

    options = {"target_modules": ["lm_head"], "init_lora_weights": False, "ensure_weight_tying": True}
    for base, loads in ((tied, True), (gpt2, False)):
        model = adapted(base(), **options, task_type="CAUSAL_LM")
        model.save_pretrained(tmp_path / base.__name__)
        loaded = peft.PeftModel.from_pretrained(base(), tmp_path / base.__name__).eval()
        ties: bool = getattr(model.active_peft_config, "target_modules_to_tie", None) is not None
        assert (apart(model(IDS).logits, loaded(IDS).logits) < 1e-5) is (loads or not ties)


@rests_on_it("src/lockstep/tasks/models/adapters.py", "src/lockstep/tasks/models/storage_dtype.py")
def test_errors_state_and_warnings_of_adapters(tmp_path: Path) -> None:
    """Modules that a model lacks, and a rank of 0, raise ValueError; an unknown option raises TypeError.
    get_peft_model_state_dict of a new adapter has the names of adapter_model.safetensors, with the prefix of its type
    in PEFT_TYPE_TO_PREFIX_MAPPING. get_base_model and get_base_layer return the wrapped module. Loading an adapter that
    lacks weights of the model warns "Found missing adapter keys"; a loaded adapter is trainable only with is_trainable.
    Adapting a tied layer warns with texts that lockstep recognizes."""
    from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
    from peft.mapping import PEFT_TYPE_TO_PREFIX_MAPPING
    from peft.tuners.tuners_utils import BaseTunerLayer

    def model(**options: Any) -> Any:
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        return LlamaForCausalLM(LlamaConfig(vocab_size=32, **{**sizes, **options}))

    for options in ({"target_modules": ["nope"]}, {"target_modules": ["q_proj"], "r": 0}):
        with pytest.raises(ValueError):
            get_peft_model(model(), LoraConfig(**options))
    with pytest.raises(TypeError):
        LoraConfig(nope=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = model()
        adapted: Any = get_peft_model(plain, LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
        adapted.save_pretrained(tmp_path)
    names = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    with safe_open(tmp_path / "adapter_model.safetensors", "pt") as file:
        assert {*names} == {*file.keys()}
    prefix = PEFT_TYPE_TO_PREFIX_MAPPING[adapted.active_peft_config.peft_type]
    assert all(f".{prefix}" in name for name in names)
    (layer,) = (module for module in adapted.modules() if isinstance(module, BaseTunerLayer))
    assert (adapted.get_base_model(), type(layer.get_base_layer())) == (plain, torch.nn.Linear)
    with pytest.warns(UserWarning, match="Found missing adapter keys"):
        loaded = [
            PeftModel.from_pretrained(model(num_hidden_layers=2), tmp_path, is_trainable=t) for t in (False, True)
        ]
    assert [any(p.requires_grad for p in each.parameters()) for each in loaded] == [False, True]
    known = r"Model has `tie_word_embeddings=True` and a tied layer|Model with `tie_word|Input and output embeddings"
    with pytest.warns(UserWarning, match=known):
        get_peft_model(model(tie_word_embeddings=True), LoraConfig(target_modules=["lm_head"])).merge_and_unload()
