"""`lockstep init --from` for scripts with a Trainer: settings are read, others refused, and nothing is run."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep.config.schedules import learning_rate
from support.messages import mentions
from support.moving_scripts import DPO, QLORA, STOPPING, TRAINER, USUAL, moved, refused

# -- Trainer ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"learning_rate": 2e-5, "weight_decay": 0.01, "warmup_steps": 10, "lr_scheduler_type": "cosine"},
        {"lr_scheduler_type": "constant", "warmup_steps": 30, "max_grad_norm": 0.5, "num_train_epochs": 2},
        {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 30, "gradient_accumulation_steps": 3},
        {"max_steps": 70, "adam_beta2": 0.98, "adam_epsilon": 1e-6, "bf16": True, "seed": 5, "optim": "adamw_torch"},
        {"lr_scheduler_type": "polynomial", "learning_rate": 1e-4},
        {"lr_scheduler_type": "inverse_sqrt", "warmup_steps": 20},
        {"label_smoothing_factor": 0.1, "per_device_train_batch_size": 6, "optim": "sgd", "save_steps": 20},
    ],
)
def test_a_trainers_settings_equal_those_of_training_arguments(given: dict[str, Any], here: Path) -> None:
    """The settings are compared with transformers' TrainingArguments, and with the rates of the optimizer and schedule
    that it creates."""
    import torch
    from transformers import TrainingArguments, get_scheduler

    text = TRAINER.replace("ARGUMENTS", ", ".join(f"{k}={v!r}" for k, v in given.items()))
    run = moved("train.py", text.replace(STOPPING, ""))
    args = TrainingArguments("out", **given, use_cpu=True)
    assert (run.batch_size, run.seed) == (args.train_batch_size * args.gradient_accumulation_steps, args.seed)
    assert run.steps == (args.max_steps if args.max_steps > 0 else None)
    assert run.steps or run.epochs == args.num_train_epochs
    assert (run.optim.learning_rate, run.optim.max_grad_norm) == (args.learning_rate, args.max_grad_norm)
    assert (run.optim.weight_decay, run.precision) == (args.weight_decay, "bf16" if args.bf16 else "fp32")
    assert run.task.options.get("label_smoothing", 0) == args.label_smoothing_factor
    if run.optim.name == "adamw":
        betas = (args.adam_beta1, args.adam_beta2)
        assert (run.optim.betas, run.optim.eps) == (betas, args.adam_epsilon)
    # the rate at each of 100 steps
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=args.learning_rate)
    theirs = get_scheduler(args.lr_scheduler_type, optimizer, args.get_warmup_steps(100), 100)
    for step in range(100):
        assert learning_rate(run.optim, step, 100) == pytest.approx(theirs.get_last_lr()[0], rel=1e-9), step
        optimizer.step()
        theirs.step()


def test_a_trainer_script_is_read_line_by_line(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = moved("train.py", TRAINER.replace("ARGUMENTS", USUAL))
    assert (run.task.name, run.task.options["text"], run.task.options["label"]) == ("classification", "review", "stars")
    assert (run.data.source, run.data.config, run.data.max_length) == ("acme/reviews", "small", 256)
    assert (run.data.validation, run.model.source, run.tokenizer.source) == ("test", "acme/encoder", None)
    assert (run.evaluate.patience, run.evaluate.min_delta, run.checkpoint.best) == (2, 0.01, "accuracy")
    said = capsys.readouterr().out
    for wanted in (
        "read: line 8: load_dataset('acme/reviews', 'small') -> data.source",
        "read: line 14: data.map(tokenize, batched=True) -> line 12: columns and maximum length",
        "read: line 23: EarlyStoppingCallback(",
        "no counterpart: line 21: compute_metrics=compute_metrics (the task reports its usual metrics",
    ):
        assert wanted in said


@pytest.mark.parametrize(
    ("old", "new", "wanted"),
    [
        ("model=model,", "model=model, optimizers=(mine, None),", "line 21: optimizers=(mine, None) (set optim.name"),
        ("model=model,", "model=model, compute_loss_func=f,", "compute_loss_func=f (the loss is the task's own"),
        ("callbacks=[", "callbacks=[Mine(), ", "the callback Mine() (its effect is unknown)"),
        ("max_length=256", "max_length=length", "max_length=length (its value is known only when the script runs)"),
        (", max_length=256", "", "it truncates at the tokenizer's model_max_length"),
        ('rows["review"]', '"rate: " + rows["review"]', "the prefix 'rate: '"),
        ('rows["review"]', 'clean(rows["review"])', "tokenizer(clean(rows['review'])) (the column of these texts"),
        (
            '"acme/reviews", "small"',
            "SOURCE",
            "load_dataset(path=SOURCE) (its value is known only when the script runs)",
        ),
        ("data = data.map", "data = data.map(shorten).map", "its effect on the rows is unknown"),
        ("data = data.map", "data = data.filter(good).map", "data.filter chooses rows by their columns"),
        ("args = Tr", "for w in model.parameters():\n    w.requires_grad = False\nargs = Tr", "model.freeze names"),
        ("args = Tr", "tokenizer.add_tokens(['<new>'])\nargs = Tr", "tokenizers are used as saved"),
        ("args = Tr", "args = Tr", None),
        (
            "ARGUMENTS",
            "ARGUMENTS, learning_rate=rate",
            "learning_rate=rate (its value is known only when the script runs",
        ),
        (
            "trainer = Tr",
            "args.learning_rate = rate()\ntrainer = Tr",
            "args.learning_rate = rate() (its value is known",
        ),
        (
            'NAME = "acme/encoder"',
            "NAME = f'acme/{size:>{width}}'",
            "its value is known only when the script runs",
        ),
        ("ARGUMENTS", "ARGUMENTS, neftune_noise_alpha=5", "neftune_noise_alpha: 5 (no noise"),
        (
            "ARGUMENTS",
            "ARGUMENTS, optim='adafactor'",
            "the rate of adafactor (Trainer's takes the rate as an absolute one",
        ),
        ("ARGUMENTS", "ARGUMENTS, **more", "**more"),
        ("num_labels=5", "hidden_dropout_prob=p", "hidden_dropout_prob=p"),
        ("model = Auto", "if big:\n  model = Auto", "it is called only if big"),
    ],
)
def test_scripts_whose_run_file_would_train_something_else_are_refused(
    old: str, new: str, wanted: str | None, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = TRAINER.replace(old, new, 1).replace("ARGUMENTS", USUAL)
    if wanted is None:  # the control
        moved("train.py", text)
        return
    said = refused("train.py", text, capsys)
    assert mentions(said, "LS8209")
    assert wanted in said
    moved("train.py", text, "--partial")


def test_keys_given_by_hand_close_gaps(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = TRAINER.replace("max_length=256", "max_length=int(input())").replace("ARGUMENTS", USUAL)
    assert "data.max_length=..." in refused("train.py", text, capsys)
    assert moved("train.py", text, "data.max_length=99").data.max_length == 99


def test_custom_loss_of_a_trainer_subclass_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = "class Mine(Trainer):\n    def compute_loss(self, model, inputs):\n        return 0\n\nargs = "
    text = TRAINER.replace("args = ", own).replace("trainer = Trainer(", "trainer = Mine(").replace("ARGUMENTS", USUAL)
    assert "Mine.compute_loss (it replaces the loss or the step" in refused("train.py", text, capsys)


BLOCKS = """
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling
from transformers import Trainer, TrainingArguments
from datasets import load_dataset
block = 64
tokenizer = AutoTokenizer.from_pretrained("acme/lm")
def group(rows):
    joined = {k: sum(rows[k], []) for k in rows}
    total_length = len(joined["input_ids"]) // block * block
    return {k: [t[i : i + block] for i in range(0, total_length, block)] for k, t in joined.items()}
data = load_dataset("text", data_files={"train": "a.txt", "dev": "b.txt"})
data = data.map(lambda rows: tokenizer(rows["text"]), batched=True).map(group, batched=True)
model = AutoModelForCausalLM.from_pretrained("acme/lm")
collator = DataCollatorForLanguageModeling(tokenizer, MLM)
Trainer(model=model, args=TrainingArguments("o"), train_dataset=data["train"], data_collator=collator).train()
"""


def test_a_language_model_in_blocks(here: Path) -> None:
    run = moved("lm.py", BLOCKS.replace("MLM", "mlm=False"))
    assert (run.task.name, run.task.options["block_size"], run.task.options["packing"]) == (
        "language_modeling",
        64,
        True,
    )
    assert (run.data.train, run.data.validation) == ("a.txt", "b.txt")
    masked = moved(
        "lm.py", BLOCKS.replace("AutoModelForCausalLM", "AutoModelForMaskedLM").replace("MLM", "mlm_probability=0.2")
    )
    assert (masked.task.name, masked.task.options["mlm_probability"]) == ("masked_language_modeling", 0.2)
    assert masked.data.max_length == 64


QUOTES = """
import transformers
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling, Trainer

tokenizer = AutoTokenizer.from_pretrained("acme/lm")
data = load_dataset("acme/quotes").map(lambda rows: tokenizer(rows["quote"]), batched=True)
trainer = Trainer(model=AutoModelForCausalLM.from_pretrained("acme/lm"), train_dataset=data["train"],
    args=transformers.TrainingArguments("out"), data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False))
trainer.train()
"""


def test_texts_that_no_call_cuts_are_not_laid_in_blocks(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An earlier version split them into blocks of 256 tokens in silence."""
    assert "texts are not truncated: give task.block_size" in refused("quotes.py", QUOTES, capsys)
    run = moved("quotes.py", QUOTES, "task.block_size=99")
    assert (run.task.options["packing"], run.task.options["text"]) == (False, "quote")


TABLE = """
from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Trainer, TrainingArguments

tok = AutoTokenizer.from_pretrained("acme/encoder")
rows = load_dataset("csv", data_files={"train": "a.csv"}, HOW)
rows = rows.map(lambda e: tok(e["text"], truncation=True, max_length=64), batched=True)
model = AutoModelForSequenceClassification.from_pretrained("acme/encoder")
Trainer(model=model, args=TrainingArguments("out"), train_dataset=rows["train"]).train()
"""


def test_how_a_script_reads_tables(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "name the columns" in refused("c.py", TABLE.replace("HOW", "header=None"), capsys)
    wanted = "header=0 (unknown argument)"  # a header whose names are replaced
    assert wanted in refused("d.py", TABLE.replace("HOW", "header=0, names=['text', 'label']"), capsys)
    assert "skiprows=3 (unknown argument" in refused("e.py", TABLE.replace("HOW", "skiprows=3"), capsys)
    run = moved("a.py", TABLE.replace("HOW", "delimiter=';', column_names=['text', 'label'], quotechar=\"'\""))
    assert (run.data.separator, run.data.columns, run.data.quote) == (";", ["text", "label"], "single")
    assert (
        moved("b.py", TABLE.replace("HOW", "sep='\\t', header=0, quoting=3, encoding='latin-1'")).data.quote == "none"
    )
    document = TABLE.replace('"csv"', '"json"').replace("HOW", 'field="data"')
    assert moved("f.py", document).data.layout == "records"


def test_switches_that_are_turned_off(here: Path) -> None:
    run = moved(
        "dpo.sh",
        "trl dpo --model_name_or_path a/b --dataset_name c/d --no_remove_unused_columns --no_gradient_checkpointing\n",
    )
    assert run.model.checkpoint_activations is False
    assert moved("dpo2.sh", "trl dpo --model_name_or_path a/b --dataset_name c/d\n").model.checkpoint_activations


RUN_CLM = """from itertools import chain
def group(examples):
    joined = {k: list(chain(*examples[k])) for k in examples.keys()}
    length = len(joined[list(examples.keys())[0]])
    if length >= block:
        length = (length // block) * block
    result = {k: [t[i : i + block] for i in range(0, length, block)] for k, t in joined.items()}
    result["labels"] = result["input_ids"].copy()
    return result
"""


def test_grouping_into_blocks_is_recognized_by_its_statements(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start, stop = BLOCKS.index("def group"), BLOCKS.index("data = load")
    text = BLOCKS.replace(BLOCKS[start:stop], RUN_CLM).replace("MLM", "mlm=False")
    other = text.replace('"].copy()', '"][::-1]')
    assert "group of data.map" in refused("lm.py", other, capsys)
    assert moved("lm.py", text).task.options["block_size"] == 64
    assert "each followed by the tokenizer's end token" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (" // block * block", ""),  # a last block that is shorter
        ("range(0, total_length, block)", "range(0, total_length, block // 2)"),  # blocks that overlap
        ("t[i : i + block]", "t[i : i + block - 1]"),
        ("sum(rows[k], [])", "sum(rows[k][::-1], [])"),
        ("for k in rows}", "for k in rows if len(rows[k]) > 9}"),
        ("    return {", "    joined['input_ids'][0] = 0\n    return {"),
    ],
)
def test_other_blocks_are_refused(old: str, new: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert old in BLOCKS
    text = BLOCKS.replace("MLM", "mlm=False").replace(old, new)
    assert "group of data.map" in refused("lm.py", text, capsys)


# -- TRL -------------------------------------------------------------------------------------------------------------


def test_a_qlora_script_keeps_its_adapter_its_bits_and_its_split(here: Path) -> None:
    run = moved("qlora.py", QLORA.replace("MORE", "learning_rate=1e-4"))
    adapter = {"type": "lora", "r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "target_modules": ["q_proj"]}
    assert (run.model.adapter, run.model.quantization, run.model.source) == (adapter, "nf4", "acme/model-3b")
    assert (run.task.options["text"], run.task.options["block_size"], run.task.options["packing"]) == (
        "text",
        512,
        False,
    )
    assert (run.data.validation_fraction, run.optim.name, run.optim.learning_rate) == (0.05, "adamw", 1e-4)


@pytest.mark.parametrize(
    ("old", "new", "wanted"),
    [
        ("load_in_4bit=True", "load_in_8bit=True", "but not in 8"),
        (', dataset_text_field="text"', "", "SFTTrainer takes text, messages, or prompt and completion"),
        ("processing_class=tokenizer", "formatting_func=f", "formatting_func=f (columns are read unchanged)"),
        ("model = prepare", "model.add_module('x', y)\nmodel = prepare", "its effect on the model is unknown"),
    ],
)
def test_unsupported_parts_of_a_qlora_script_are_refused(
    old: str, new: str, wanted: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert wanted in refused("qlora.py", QLORA.replace("MORE", "").replace(old, new), capsys)


def test_pairs_of_trl(here: Path) -> None:
    run = moved("dpo.py", DPO)
    assert (run.task.name, run.task.options["loss"], run.task.options["beta"]) == ("preference", "ipo", 0.2)
    assert (run.data.max_length, run.optim.learning_rate, run.precision) == (1024, 1e-6, "bf16")


@pytest.mark.parametrize(
    ("config", "task"), [("SFTConfig", "language_modeling"), ("DPOConfig", "preference"), ("RewardConfig", "reward")]
)
def test_trls_defaults_are_trls(config: str, task: str, here: Path) -> None:
    """The defaults are compared with TRL's."""
    trl = pytest.importorskip("trl")
    theirs = {field.name: field.default for field in dataclasses.fields(getattr(trl, config))}
    columns = ["task.text=text"] if task == "language_modeling" else []
    run = moved(
        "trl.yaml", "model_name_or_path: a/b\ndataset_name: c/d\ndataset_train_split: train\n", "--task", task, *columns
    )
    length = run.task.options["block_size"] if task == "language_modeling" else run.data.max_length
    assert (run.task.name, run.optim.learning_rate) == (task, theirs["learning_rate"])
    assert (length, run.model.checkpoint_activations) == (theirs["max_length"], theirs["gradient_checkpointing"])


def test_trls_yaml(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = {"model_name_or_path": "a/b", "dataset_name": "c/d", "use_peft": True, "lora_r": 4, "load_in_4bit": True}
    assert mentions(refused("t.yaml", yaml.safe_dump(values), capsys), "LS8240")
    run = moved("t.yaml", yaml.safe_dump({**values, "beta": 0.3, "max_length": 300}))
    assert (run.task.name, run.task.options["beta"], run.data.max_length) == ("preference", 0.3, 300)
    assert (run.model.adapter["r"], run.model.adapter["lora_alpha"], run.model.quantization) == (4, 32, "nf4")


@pytest.mark.parametrize("name", ["KTOConfig", "ORPOConfig", "GRPOConfig"])
def test_unsupported_trl_trainers_are_refused(name: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert mentions(refused("a.py", f"from trl import {name}\n{name}('o')\n", capsys, "--partial"), "LS8250", str(name))
    own = "from sentence_transformers import SentenceTransformerTrainer\nSentenceTransformerTrainer('o')\n"
    message = refused("a.py", own, capsys, "--partial")
    assert mentions(message, "LS8250", "--task embedding")
    assert "TRL" not in message
