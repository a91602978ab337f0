"""`lockstep init --from`: each argument of a known call is read, on a list of those without effect, or refused."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import peft
import pytest
import transformers
from transformers.modeling_utils import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from lockstep.lab.import_config import call_arguments, import_config
from lockstep.lab.import_config.script import Script
from lockstep.lab.import_config.table import RunDraft

TEXT = """
from datasets import load_dataset
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import *

set_seed(42)
data = load_dataset("acme/reviews")
data = data["train"].train_test_split(test_size=0.1)
tokenizer = AutoTokenizer.from_pretrained("acme/encoder")
data = data.map(lambda rows: tokenizer(rows["text"], truncation=True, max_length=64), batched=True)
data = data.shuffle(seed=1).flatten_indices().rename_column("stars", "labels").remove_columns(["text"])
data.set_format("torch", columns=["input_ids", "attention_mask", "labels"])
bits = BitsAndBytesConfig(load_in_4bit=True)
model = AutoModelForSequenceClassification.from_pretrained("acme/encoder", quantization_config=bits)
model = prepare_model_for_kbit_training(model)
model = get_peft_model(model, LoraConfig(r=8, task_type="SEQ_CLS"))
model.gradient_checkpointing_enable()
collate = DataCollatorWithPadding(tokenizer)
stop = EarlyStoppingCallback(early_stopping_patience=2)
args = TrainingArguments(output_dir="out")
trainer = Trainer(model=model, args=args, train_dataset=data["train"], data_collator=collate, callbacks=[stop])
trainer.train()
"""
ROWS = datasets.Dataset
REAL: dict[str, tuple[str, Callable[..., Any]]] = {  # name in the table -> the call without its last bracket, and it
    "set_seed": ("set_seed(42", transformers.set_seed),
    "rows.train_test_split": ("train_test_split(test_size=0.1", ROWS.train_test_split),
    "tokenizer.__call__": ('rows["text"], truncation=True, max_length=64', PreTrainedTokenizerBase.__call__),
    "rows.map": ("batched=True", ROWS.map),
    "rows.shuffle": ("shuffle(seed=1", ROWS.shuffle),
    "rows.flatten_indices": ("flatten_indices(", ROWS.flatten_indices),
    "rows.rename_column": ('"stars", "labels"', ROWS.rename_column),
    "rows.remove_columns": ('remove_columns(["text"]', ROWS.remove_columns),
    "rows.set_format": ('"attention_mask", "labels"]', ROWS.set_format),
    "BitsAndBytesConfig": ("load_in_4bit=True", transformers.BitsAndBytesConfig),
    "prepare_model_for_kbit_training": ("training(model", peft.prepare_model_for_kbit_training),
    "get_peft_model": ('task_type="SEQ_CLS")', peft.get_peft_model),
    "model.gradient_checkpointing_enable": ("checkpointing_enable(", PreTrainedModel.gradient_checkpointing_enable),
    "DataCollatorWithPadding": ("DataCollatorWithPadding(tokenizer", transformers.DataCollatorWithPadding),
    "EarlyStoppingCallback": ("early_stopping_patience=2", transformers.EarlyStoppingCallback),
    "trainer.train": ("trainer.train(", transformers.Trainer.train),
}


def gaps(text: str) -> str:
    draft = RunDraft(by_hand={"data.max_length": 64})
    import_config.script(Script(Path("train.py"), text)).move(draft, 1)
    return "\n".join(map(str, draft.deciding()))


def test_each_argument_of_the_real_signatures_is_on_a_list_or_refused_by_its_name() -> None:
    usual, text, unread = gaps(TEXT), TEXT, {}
    for name, (call, function) in REAL.items():
        row, parameters = call_arguments.TRAINERS[name], inspect.signature(function).parameters.values()
        listed = {each for part in ("order", "code", "quiet", "told") for each in row.get(part, ())}
        names = [each.name for each in parameters if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)]
        off = {each.name: each.default is True for each in parameters}
        unread[name] = [each for each in names if each not in listed and each != "self"] + ["of_no_release"]
        words = ", ".join(f"{each}={not off.get(each, False)}" for each in unread[name])
        assert call in text, call
        text = text.replace(call, f"{call}, {words}".replace("(, ", "("), 1)
    assert "no such setting" not in usual
    refused = gaps(text)
    for name, arguments in unread.items():
        for each in arguments:
            assert f"{name.rpartition('.')[2].replace('__call__', 'tokenizer')}({each}=" in refused, (name, each)
    assert len(unread) == 16


OBJECTS = {  # what is changed -> a part of the gap; None: nothing is refused
    ("data_collator=collate", "processing_class=other"): "processing_class=other (the line that creates it",
    ("data_collator=collate", "processing_class=tokenizer"): None,
    ("data_collator=collate", "peft_config=other"): "peft_config=other (the line that creates it",
    ("model=model,", "model_init=other,"): "model_init=other (the line that creates it",
    ("quantization_config=bits", "quantization_config=other"): "quantization_config=other (the line that creates it",
    ("quantization_config=bits", "config=other"): "config=other (the line that creates it",
    ("r=8,", "r=8, inference_mode=True,"): "inference_mode (an adapter",
    ("max_length=64)", "max_length=64, **more)"): "tokenizer(**more)",
    ("max_length=64)", "max_length=64, is_split_into_words=True)"): "is_split_into_words (texts",
    ("test_size=0.1", "train_size=0.9"): None,
    ("test_size=0.1", "test_size=0.1, train_size=0.5"): "train_size=0.5 (all rows",
    ("trainer.train()", "trainer.remove_callback(EarlyStoppingCallback)\ntrainer.train()"): "it removes a callback",
    ("trainer.train()", "trainer.pop_callback(EarlyStoppingCallback)\ntrainer.train()"): "it removes a callback",
    ("trainer.train()", "trainer.train()\ntrainer.remove_callback(EarlyStoppingCallback)"): None,
    ("trainer.train()", "trainer.train()\nmodel.merge_and_unload().save_pretrained('m')"): None,
    ("trainer.train()", "model = model.merge_and_unload()\ntrainer.train()"): "merge_and_unload() (its effect",
    ("trainer.train()", "with torch.autocast('cuda'):\n    trainer.train()"): "the effect of torch.autocast('cuda')",
    ("args = T", "class Own(Trainer):\n    pass\nOwn.compute_loss = f\nargs = T"): "Own.compute_loss = f (its",
    ("args = T", "class Own(Trainer):\n    pass\nsetattr(Own, 'compute_loss', f)\nargs = T"): "setattr(Own,",
    ("args = T", "import sys\nsys.modules['torch'] = f\nargs = T"): "sys.modules['torch'] = f (its",
    ("trainer.train()", "def go():\n    trainer.label_smoother = 1\ngo()\ntrainer.train()"): "trainer.label_smoother",
    ("trainer.train()", "def go(t=trainer):\n    t.label_smoother = 1\ngo()\ntrainer.train()"): "t.label_smoother",
    ("trainer.train()", "with mlflow.start_run():\n    trainer.train()"): None,
}


@pytest.mark.parametrize("pair", OBJECTS, ids=" ".join)
def test_objects_and_contexts_of_a_trainer_are_read_or_refused(pair: tuple[str, str]) -> None:
    assert pair[0] in TEXT
    refused, part = gaps(TEXT.replace(*pair)), OBJECTS[pair]
    assert part in refused if part else refused == gaps(TEXT)


VALUES = {  # what is changed -> the length that is read; None: it is not known
    ("s(rows", "s(rows, most=9"): 9,
    ("s(rows", "s(rows, most=9", "batched=True", "batched=True, fn_kwargs={'most': 7}"): 7,
    ("s(rows", "s(rows, most=9", "batched=True", "batched=True, fn_kwargs=more"): None,
    ("s(rows", "s(rows, most=9", "args = T", "tokens(0, 8)\nargs = T"): None,
    ("s(rows", "s(rows, most=9", "args = T", "print(tokens)\nargs = T"): None,
}


def test_parameters_have_the_values_of_their_functions_only_call() -> None:
    function = "def tokens(rows):\n    return tokenizer(rows['text'], truncation=True, max_length=most)\n"
    text = TEXT.replace('lambda rows: tokenizer(rows["text"], truncation=True, max_length=64)', "tokens")
    text = text.replace("data = data.map", f"{function}data = data.map")
    for pairs, length in VALUES.items():
        changed = text
        for old, new in zip(pairs[::2], pairs[1::2], strict=True):
            changed = changed.replace(old, new, 1)
        draft = RunDraft()
        import_config.script(Script(Path("train.py"), changed)).move(draft, 1)
        assert draft.keys.get("data.max_length") == length, pairs
