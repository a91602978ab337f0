"""`lockstep.plain` where libraries behave unexpectedly (tests/assumptions): packed rows, adapters, and heads."""

from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, BertConfig, BertForSequenceClassification, LlamaConfig

from lockstep.plain import losses, train
from lockstep.tasks.models import adapters

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
ROW = {"input_ids": [1, 2, 3, 4, 5, 6], "position_ids": [0, 1, 2, 0, 1, 2]}


class _Tokenizer(SimpleNamespace):
    def __len__(self) -> int:
        return 32


def _job() -> Any:
    tokenizer = _Tokenizer(pad_token_id=0, bos_token_id=1, eos_token_id=2)
    model = {"type": "llama", "config": SIZES, "trust_remote_code": False}
    return SimpleNamespace(
        run={"model": model, "task": {}},
        tokenizer=tokenizer,
        target_tokenizer=tokenizer,
        reads_last=False,
        reads_types=False,
    )


def test_texts_of_a_packed_row_do_not_see_each_other() -> None:
    job = _job()
    config = train._config(job, "ForCausalLM")
    model = AutoModelForCausalLM.from_config(config)
    other = ROW | {"input_ids": [7, 8, 9, 4, 5, 6]}

    def apart() -> bool:
        one, two = (model(**losses.inputs_of(job, [row], "cpu")).logits[:, 3:] for row in (ROW, other))
        return torch.equal(one, two)

    assert apart()
    model.config.use_cache = True
    assert not apart()


def test_all_linear_leaves_a_head_whole_and_trained() -> None:
    """`all-linear` excludes the head if peft gets a task type, or the head's name."""
    for kind in ("SEQ_CLS", None):
        model = BertForSequenceClassification(BertConfig(vocab_size=32, **SIZES))
        adapted = train._adapted(model, {"target_modules": "all-linear", "r": 2}, kind)
        trained = [name for name, weight in adapted.named_parameters() if weight.requires_grad]
        assert any("classifier.modules_to_save" in name for name in trained)
        assert not any("classifier" in name and "lora" in name for name in trained)


def test_plain_trains_the_tied_adapter_of_the_run() -> None:
    """With ensure_weight_tying, peft adapts the head by the embedding's adapter: plain trains what a run trains, and
    merges nothing (`tests/assumptions/test_peft.py`)."""
    adapter = {"target_modules": ["q_proj", "lm_head"], "ensure_weight_tying": True, "init_lora_weights": False, "r": 2}
    run: Any = SimpleNamespace(model=SimpleNamespace(adapter=adapter))
    ways = {"plain": lambda model: train._adapted(model, dict(adapter), "CAUSAL_LM")}
    ways["run"] = lambda model: adapters.wrap(run.model, model, "causal")
    seen = {}
    for name, way in ways.items():
        torch.manual_seed(0)
        config = LlamaConfig(vocab_size=32, tie_word_embeddings=True, **SIZES)
        model: Any = way(AutoModelForCausalLM.from_config(config))
        trained = {each for each, weight in model.named_parameters() if weight.requires_grad}
        seen[name] = trained, model(torch.arange(8)[None]).logits
    assert seen["plain"][0] == seen["run"][0]
    assert any("embed_tokens" in name for name in seen["run"][0])
    assert torch.equal(seen["plain"][1], seen["run"][1])
