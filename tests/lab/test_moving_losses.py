"""`lockstep init --from`: loss divisors of scripts other than the targets of a step."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, GPT2Config, LlamaConfig, Trainer, TrainingArguments

from support.moving_scripts import SCRIPT, TRAINER, USUAL, changed, encoder, in_loop, moved

CLASSIFIER = (
    TRAINER.replace('NAME = "acme/encoder"', 'NAME = "encoder"').replace(", num_labels=5", "").replace("256", "32")
)
BATCH = f"{USUAL}, per_device_train_batch_size=4"
STEPS = f"{BATCH}, gradient_accumulation_steps=4"
ADDED = "Trainer of transformers"
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
STEP = "        optimizer.step()\n        optimizer.zero_grad()\n"
EACH = "        if (i + 1) % 4 == 0:\n            optimizer.step()\n            optimizer.zero_grad()\n"
LANGUAGE = (
    changed((STEP, EACH), (".loss\n        loss.b", ".loss / 4\n        loss.b"), ("    score()\n", ""))
    .replace("DataCollatorWithPadding(tokenizer)", "DataCollatorForLanguageModeling(tokenizer, mlm=False)")
    .replace("DataCollatorWithPadding", "DataCollatorForLanguageModeling")
    .replace("SequenceClassification", "CausalLM")
)


def change(folder: Path, **settings: Any) -> torch.Tensor:
    """Return the change of a weight by one Trainer step over four examples, with plain SGD and without clipping. All
    examples have one label, so that their gradients do not cancel to rounding."""
    torch.manual_seed(0)  # the head is drawn
    model = AutoModelForSequenceClassification.from_pretrained("encoder", **NO_DROPOUT)
    before = model.classifier.weight.detach().clone()
    rows = [{"input_ids": [2, 5 + k % 2, 3], "attention_mask": [1, 1, 1], "labels": 1} for k in range(4)]
    usual = {"optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    usual |= {"max_steps": 1, "use_cpu": True, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    Trainer(model, TrainingArguments(str(folder), **usual, **settings), train_dataset=rows).train()
    return model.classifier.weight.detach() - before


def test_trainer_adds_up_the_gradients_of_some_models(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    encoder()
    whole = change(here, per_device_train_batch_size=4)
    summed = change(here, per_device_train_batch_size=1, gradient_accumulation_steps=4)
    adds = torch.allclose(summed, 4 * whole, rtol=1e-3, atol=1e-7)
    assert adds or torch.allclose(summed, whole, rtol=1e-3, atol=1e-7)
    moved("train.py", CLASSIFIER.replace("ARGUMENTS", STEPS))
    said = "adds up the gradients of the 4 micro-batches of BertForSequenceClassification"
    assert (said in capsys.readouterr().out) is adds  # what the installed release does
    for none in (BATCH, f"{STEPS}, label_smoothing_factor=0.1"):
        moved("train.py", CLASSIFIER.replace("ARGUMENTS", none))
        assert ADDED not in capsys.readouterr().out


def test_divisor_counts_tokens_that_are_not_predicted(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    encoder()
    GPT2Config(
        vocab_size=7, n_embd=8, n_layer=1, n_head=2, n_positions=64, architectures=["GPT2LMHeadModel"]
    ).save_pretrained("encoder")
    script = """
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

args = SFTConfig("out", max_length=32, bf16=False)
data = load_dataset("acme/notes", split="train")
SFTTrainer(model="encoder", args=args, train_dataset=data, processing_class=AutoTokenizer.from_pretrained("encoder"))
"""
    moved("sft.py", script, "task.text=text")
    said = capsys.readouterr().out
    assert "divides the loss of GPT2LMHeadModel by all tokens of a row" in said
    assert "lockstep trains on the rest as further examples" in said
    moved("sft.py", script, "task.prompt=prompt", "task.response=completion")
    assert "divides the loss" not in capsys.readouterr().out
    sizes = {"vocab_size": 7, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    LlamaConfig(num_attention_heads=2, architectures=["LlamaForCausalLM"], **sizes).save_pretrained("encoder")
    moved("sft.py", script, "task.text=text")  # Trainer counts its labels from the second on
    assert "divides the loss" not in capsys.readouterr().out


def test_a_loop_over_texts(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    moved("loop.py", LANGUAGE.replace('"encoder"', '"acme/decoder"'), "epochs=3")
    said = capsys.readouterr().out
    assert "averages the mean losses of its 4 micro-batches" in said
    assert "a text of line 9 has it only if the tokenizer writes it" in said
    assert "lockstep trains on the rest as further examples" in said
    moved("loop.py", SCRIPT.replace('"encoder"', '"acme/encoder"'))
    assert "micro-batches;" not in capsys.readouterr().out


PLAIN = (
    ('from_pretrained("encoder")\noptimizer', 'from_pretrained("encoder", num_labels=3)\noptimizer'),
    ("loss = model(**batch).loss", "out = model(**batch)\n        loss = criterion(out.logits, batch['labels'])"),
    ("optimizer = ", "criterion = torch.nn.CrossEntropyLoss()\noptimizer = "),
)
NAMED = "model(batch['input_ids'], batch['attention_mask'], labels=batch['labels']).loss"


def test_equivalent_forms_of_the_models_loss_are_read() -> None:
    def lines(*pairs: tuple[str, str]) -> set[str]:
        return {re.sub(r"line \d+", "line", each) for each in in_loop(changed(*pairs)).splitlines()}

    same = lines(PLAIN[0])
    assert lines(*PLAIN) == same
    for pair, part in {
        ("CrossEntropyLoss()", "CrossEntropyLoss(label_smoothing=0.1)"): "not understood",
        ("out.logits, ", "2 * out.logits, "): "it changes an input of the loss",
        ("num_labels=3", "num_labels=1"): "not understood",
    }.items():
        assert part in in_loop(changed(*PLAIN, pair)), pair
    assert lines(PLAIN[0], ("model(**batch).loss", NAMED)) == same
    swapped = NAMED.replace("input_ids", "x").replace("attention_mask", "input_ids")
    assert "not understood" in in_loop(changed(("model(**batch).loss", swapped)))
    loaders = ("optimizer = ", 'loaders = {"train": train, "dev": dev}\noptimizer = ')
    by_key = ("enumerate(train)", 'enumerate(loaders["train"])')
    assert lines(PLAIN[0], loaders, by_key) == same
    assert "the loop may go through" in in_loop(changed(loaders, ("enumerate(train)", 'enumerate(loaders["dev"])')))
