"""`lockstep init --from` of scripts and command lines: what is read, what is refused, and that nothing is run."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep.cli import main
from lockstep.config.run import Run, load
from lockstep.config.schedules import learning_rate

TRAINER = """
import numpy as np
from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding
from transformers import EarlyStoppingCallback, Trainer, TrainingArguments

NAME = "acme/encoder"
data = load_dataset("acme/reviews", "small")
tokenizer = AutoTokenizer.from_pretrained(NAME)

def tokenize(rows):
    return tokenizer(rows["review"], truncation=True, max_length=256)

data = data.map(tokenize, batched=True).rename_column("stars", "labels")
model = AutoModelForSequenceClassification.from_pretrained(NAME, num_labels=5)

def compute_metrics(p):
    return {"accuracy": (np.argmax(p.predictions, -1) == p.label_ids).mean()}

args = TrainingArguments(output_dir="out", ARGUMENTS)
trainer = Trainer(model=model, args=args, train_dataset=data["train"], eval_dataset=data["test"],
    data_collator=DataCollatorWithPadding(tokenizer), compute_metrics=compute_metrics,
    callbacks=[EarlyStoppingCallback(early_stopping_patience=2, early_stopping_threshold=0.01)])
trainer.train()
raise SystemExit("executed")
"""
USUAL = "eval_strategy='epoch', save_strategy='epoch', load_best_model_at_end=True, metric_for_best_model='accuracy'"

QLORA = """
import torch
from datasets import load_dataset
from peft import LoraConfig, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer

model_id = "acme/model-3b"
bnb = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
tokenizer = AutoTokenizer.from_pretrained(model_id)
tokenizer.pad_token = tokenizer.eos_token
model = AutoModelForCausalLM.from_pretrained(model_id, quantization_config=bnb, device_map="auto")
model.config.use_cache = False
model = prepare_model_for_kbit_training(model)
dataset = load_dataset("acme/notes", split="train").train_test_split(test_size=0.05, seed=1)
peft_config = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.05, target_modules=["q_proj"], task_type="CAUSAL_LM")
args = SFTConfig(output_dir="out", per_device_train_batch_size=4, gradient_accumulation_steps=4,
    lr_scheduler_type="cosine", max_length=512, dataset_text_field="text", optim="paged_adamw_32bit", MORE)
trainer = SFTTrainer(model=model, args=args, train_dataset=dataset["train"], eval_dataset=dataset["test"],
    peft_config=peft_config, processing_class=tokenizer)
trainer.train()
trainer.save_model("out/final")
"""

DPO = """
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

model = AutoModelForCausalLM.from_pretrained("acme/chat")
train = load_dataset("acme/pairs", split="train")
args = DPOConfig(output_dir="dpo", beta=0.2, loss_type="ipo", logging_steps=5)
DPOTrainer(model=model, args=args, train_dataset=train, processing_class=AutoTokenizer.from_pretrained("acme/chat"))
"""

DDP = """
import argparse
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 3))

    def forward(self, x):
        return self.layers(x)


class Points(Dataset):
    def __init__(self, count=1000):
        self.x = torch.randn(count, 4, generator=torch.Generator().manual_seed(7))
        self.y = (self.x.sum(-1) > 0).long()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--epochs", type=int, default=4)
    args = parser.parse_args()
    torch.distributed.init_process_group("gloo")
    model = DDP(Net(32))
    data = Points(600)
    loader = DataLoader(data, batch_size=20, sampler=DistributedSampler(data))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(args.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            out = model(x)
            loss = criterion(out, y)
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    main()
"""

ACCELERATE = """
import torch
from accelerate import Accelerator
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer, get_linear_schedule_with_warmup, set_seed

accelerator = Accelerator(gradient_accumulation_steps=4, mixed_precision="bf16")
set_seed(3)
tokenizer = AutoTokenizer.from_pretrained("acme/encoder")
raw = load_dataset("acme/pairs")
data = raw.map(lambda rows: tokenizer(rows["first"], rows["second"], truncation=True, max_length=64), batched=True)
train = DataLoader(data["train"], shuffle=True, batch_size=8)
dev = DataLoader(data["validation"], batch_size=16)
model = AutoModelForSequenceClassification.from_pretrained("acme/encoder")
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
schedule = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=100, num_training_steps=len(train) * 3)
model, optimizer, train, dev, schedule = accelerator.prepare(model, optimizer, train, dev, schedule)
for epoch in range(3):
    for batch in train:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
"""

LIGHTNING = """
import lightning as L
import torch
from torch.utils.data import DataLoader

class Tagger(L.LightningModule):
    def training_step(self, batch, index):
        return self.loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-5)

trainer = L.Trainer(max_epochs=5, devices=2, strategy="ddp", precision="bf16-mixed", accumulate_grad_batches=2,
    gradient_clip_val=1.0)
trainer.fit(Tagger(), DataLoader(data, batch_size=16, shuffle=True))
"""

NANO = """
from model import GPT, GPTConfig
batch_size = 12
gradient_accumulation_steps = 5
learning_rate = 6e-4
max_iters = 600
grad_clip = 1.0
model = GPT(GPTConfig())
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=1e-1)
while True:
    for param_group in optimizer.param_groups:
        param_group["lr"] = rate_at(iter_num)
    logits, loss = model(*get_batch("train"))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


STOPPING = """,
    callbacks=[EarlyStoppingCallback(early_stopping_patience=2, early_stopping_threshold=0.01)]"""


def moved(path: str, text: str, *words: str) -> Run:
    Path(path).write_text(text)
    assert main(["init", "moved.yaml", "--yes", "--force", "--from", path, *words]) == 0
    return load("moved.yaml", [])


def refused(path: str, text: str, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What is said instead of a file."""
    Path(path).write_text(text)
    assert main(["init", "moved.yaml", "--yes", "--from", path, *words]) == 2
    assert not Path("moved.yaml").exists()
    return capsys.readouterr().err


# -- Trainer ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"learning_rate": 2e-5, "weight_decay": 0.01, "warmup_steps": 10, "lr_scheduler_type": "cosine"},
        {"lr_scheduler_type": "constant", "warmup_steps": 30, "max_grad_norm": 0.5, "num_train_epochs": 2},
        {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 30, "gradient_accumulation_steps": 3},
        {"max_steps": 70, "adam_beta2": 0.98, "adam_epsilon": 1e-6, "bf16": True, "seed": 5, "optim": "adamw_torch"},
        {"label_smoothing_factor": 0.1, "per_device_train_batch_size": 6, "optim": "sgd", "save_steps": 20},
    ],
)
def test_a_trainers_settings_are_those_of_training_arguments(given: dict[str, Any], here: Path) -> None:
    """The judge is transformers: what its arguments hold, and the optimizer's and schedule's rates it makes of them."""
    import torch
    from transformers import TrainingArguments, get_scheduler

    text = TRAINER.replace("ARGUMENTS", ", ".join(f"{k}={v!r}" for k, v in given.items()))
    run = moved("train.py", text.replace(STOPPING, ""))
    args = TrainingArguments("out", **given, use_cpu=True)
    assert (run.batch_size, run.seed) == (args.train_batch_size * args.gradient_accumulation_steps, args.seed)
    assert run.steps == (args.max_steps if args.max_steps > 0 else None)
    assert run.steps or run.epochs == args.num_train_epochs
    assert (run.optim.learning_rate, run.optim.clip) == (args.learning_rate, args.max_grad_norm)
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
        "read: line 14: data.map(tokenize, batched=True) -> line 12: the columns and their length",
        "read: line 23: EarlyStoppingCallback(",
        "no counterpart: line 21: compute_metrics=compute_metrics (metrics takes functions of (predictions, labels)",
    ):
        assert wanted in said


@pytest.mark.parametrize(
    ("old", "new", "wanted"),
    [
        ("model=model,", "model=model, optimizers=(mine, None),", "line 21: optimizers=(mine, None) (optim.name"),
        ("model=model,", "model=model, compute_loss_func=f,", "compute_loss_func=f (the loss is the task's own"),
        ("callbacks=[", "callbacks=[Mine(), ", "the callback Mine() (what it does is not known)"),
        ("max_length=256", "max_length=length", "max_length=length (its value is known when the script runs)"),
        (", max_length=256", "", "it cuts at a length that the tokenizer's files say"),
        ('rows["review"]', '"rate: " + rows["review"]', "the prefix 'rate: '"),
        ('rows["review"]', 'clean(rows["review"])', "tokenizer(clean(rows['review'])) (which column's texts"),
        ('"acme/reviews", "small"', "SOURCE", "load_dataset(path=SOURCE) (its value is known when the script runs)"),
        ("data = data.map", "data = data.map(shorten).map", "what it makes of the rows is not known"),
        ("data = data.map", "data = data.filter(good).map", "data.filter chooses rows by their columns"),
        ("args = Tr", "for w in model.parameters():\n    w.requires_grad = False\nargs = Tr", "model.freeze names"),
        ("args = Tr", "tokenizer.add_tokens(['<new>'])\nargs = Tr", "a tokenizer is used as it is saved"),
        ("args = Tr", "args = Tr", None),
        ("ARGUMENTS", "ARGUMENTS, learning_rate=rate", "learning_rate=rate (its value is known when the script runs"),
        ("ARGUMENTS", "ARGUMENTS, neftune_noise_alpha=5", "neftune_noise_alpha: 5 (no noise"),
        ("ARGUMENTS", "ARGUMENTS, optim='adafactor'", "the rate of adafactor (Trainer's takes the rate as it is"),
        ("ARGUMENTS", "ARGUMENTS, **more", "**more"),
        ("num_labels=5", "hidden_dropout_prob=p", "hidden_dropout_prob=p"),
        ("model = Auto", "if big:\n  model = Auto", "it is called only if big"),
    ],
)
def test_what_would_train_something_else_is_refused(
    old: str, new: str, wanted: str | None, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = TRAINER.replace(old, new, 1).replace("ARGUMENTS", USUAL)
    if wanted is None:  # the control
        moved("train.py", text)
        return
    said = refused("train.py", text, capsys)
    assert "would train something else, so none is written" in said
    assert wanted in said
    moved("train.py", text, "--partial")


def test_a_key_given_by_hand_closes_a_gap(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = TRAINER.replace("max_length=256", "max_length=length").replace("ARGUMENTS", USUAL)
    assert "data.max_length=..." in refused("train.py", text, capsys)
    assert moved("train.py", text, "data.max_length=99").data.max_length == 99


def test_a_loss_of_a_trainer_of_its_own_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = "class Mine(Trainer):\n    def compute_loss(self, model, inputs):\n        return 0\n\nargs = "
    text = TRAINER.replace("args = ", own).replace("trainer = Trainer(", "trainer = Mine(").replace("ARGUMENTS", USUAL)
    assert "Mine.compute_loss (a loss, or a step, of the script's own" in refused("train.py", text, capsys)


def test_a_language_model_in_blocks(here: Path) -> None:
    text = """
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
    run = moved("lm.py", text.replace("MLM", "mlm=False"))
    assert (run.task.name, run.task.options["block_size"], run.task.options["packing"]) == (
        "language_modeling",
        64,
        True,
    )
    assert (run.data.train, run.data.validation) == ("a.txt", "b.txt")
    masked = moved(
        "lm.py", text.replace("AutoModelForCausalLM", "AutoModelForMaskedLM").replace("MLM", "mlm_probability=0.2")
    )
    assert (masked.task.name, masked.task.options["masked"]) == ("masked_language_modeling", 0.2)
    assert masked.data.max_length == 64


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
        ("load_in_4bit=True", "load_in_8bit=True", "and not in 8"),
        (', dataset_text_field="text"', "", "SFTTrainer takes text, messages, or prompt and completion"),
        ("processing_class=tokenizer", "formatting_func=f", "formatting_func=f (columns are read as they are)"),
        ("model = prepare", "model.add_module('x', y)\nmodel = prepare", "what it changes of the model is not known"),
    ],
)
def test_what_a_qlora_script_cannot_keep_is_refused(
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
    """The judge is TRL."""
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
    assert "give --task language_modeling (SFT)" in refused("t.yaml", yaml.safe_dump(values), capsys)
    run = moved("t.yaml", yaml.safe_dump({**values, "beta": 0.3, "max_length": 300}))
    assert (run.task.name, run.task.options["beta"], run.data.max_length) == ("preference", 0.3, 300)
    assert (run.model.adapter["r"], run.model.adapter["lora_alpha"], run.model.quantization) == (4, 32, "nf4")


@pytest.mark.parametrize("name", ["KTOConfig", "ORPOConfig", "GRPOConfig"])
def test_a_way_of_learning_that_there_is_none_of(name: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"{name} has no counterpart" in refused(
        "a.py", f"from trl import {name}\n{name}('o')\n", capsys, "--partial"
    )


# -- loops -----------------------------------------------------------------------------------------------------------


def test_a_plain_loop_becomes_a_module_that_trains(here: Path) -> None:
    run = moved("points.py", DDP)
    assert (run.task.name, run.strategy.name, run.seed) == ("module", "ddp", 0)
    options = {k: run.task.options[k] for k in ("model", "model_arguments", "data", "data_arguments", "loss")}
    assert options == {
        "model": "points.Net",
        "model_arguments": {"width": 32},
        "data": "points.Points",
        "data_arguments": {"count": 600},
        "loss": "torch.nn.CrossEntropyLoss",
    }
    assert (run.epochs, run.batch_size, run.optim.name, run.optim.learning_rate) == (4, 20, "sgd", 0.01)
    assert (run.optim.momentum, run.optim.weight_decay, run.optim.clip, run.optim.schedule) == (0, 0, 0, "constant")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Net(32)", "Net(width)"),
        ("criterion(out, y)", "criterion(out, y) + penalty(model)"),
        ("Points(600)", "Points(n)"),
    ],
)
def test_a_loop_whose_functions_have_no_names_is_said_to_be_one(
    old: str, new: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused("points.py", DDP.replace(old, new), capsys)
    assert "this is a loop of its own" in said
    assert "docs/own-module.md" in said
    run = moved("points.py", DDP.replace(old, new), "--partial")
    assert "FILL-IN" in run.task.options.values()
    assert run.batch_size == 20


def test_a_loop_that_runs_when_it_is_imported_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused("points.py", DDP.replace('if __name__ == "__main__":\n    main()', "main()"), capsys)
    assert ": main() (every process imports the file, and would run this" in said


def test_a_loop_of_accelerate_with_a_model_of_transformers(here: Path) -> None:
    run = moved("acc.py", ACCELERATE)
    assert (run.task.name, run.task.options["text"], run.task.options["text_pair"]) == (
        "classification",
        "first",
        "second",
    )
    assert (run.batch_size, run.micro_batches, run.precision, run.seed) == (32, 4, "bf16", 3)
    assert (run.optim.schedule, run.optim.warmup_steps, run.optim.clip) == ("linear", 100, 0)
    assert run.optim.groups[0].weight_decay == run.optim.weight_decay == 0.01  # of biases and norms, too, as torch's


@pytest.mark.parametrize(("name", "text"), [("pl.py", LIGHTNING), ("nano.py", NANO)])
def test_loops_that_cannot_be_moved_are_read_as_far_as_they_can(
    name: str, text: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "this is a loop of its own" in refused(name, text, capsys)
    run = moved(name, text, "--partial")
    if name == "pl.py":
        assert (run.epochs, run.batch_size, run.micro_batches, run.precision) == (5, 64, 4, "bf16")
        assert (run.launch.processes, run.optim.learning_rate, run.optim.clip) == (2, 3e-5, 1.0)
    else:
        assert (run.steps, run.batch_size, run.micro_batches) == (600, 60, 5)
        assert (run.optim.betas, run.optim.weight_decay, run.optim.clip) == ((0.9, 0.95), 0.1, 1.0)


# -- command lines ---------------------------------------------------------------------------------------------------


def test_an_example_of_transformers_by_its_command(here: Path) -> None:
    text = (
        "#!/bin/bash\nexport TASK=mrpc\nCUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node=2 run_glue.py \\\n"
        "  --model_name_or_path acme/encoder --task_name $TASK \\\n  --do_train --do_eval --max_seq_length 64 \\\n"
        "  --per_device_train_batch_size ${SIZE:-32} --learning_rate 2e-5 --output_dir /tmp/$TASK/\n"
    )
    run = moved("glue.sh", text)
    assert (run.data.source, run.data.config, run.data.max_length) == ("nyu-mll/glue", "mrpc", 64)
    assert (run.task.options["text"], run.task.options["text_pair"]) == ("sentence1", "sentence2")
    assert (run.batch_size, run.micro_batches, run.launch.processes) == (64, 2, 2)
    assert (run.optim.learning_rate, run.output) == (2e-5, "/tmp/mrpc/")


def test_a_script_with_the_options_of_its_command(here: Path) -> None:
    (here / "points.py").write_text(DDP)
    run = moved("run.sh", "torchrun --nproc-per-node 2 points.py --lr 0.5\n")
    assert (run.optim.learning_rate, run.epochs, run.batch_size, run.launch.processes) == (0.5, 4, 40, 2)


def test_a_script_of_dataclasses_needs_its_command(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = TRAINER.replace(
        'NAME = "acme/encoder"', "parser = HfArgumentParser(TrainingArguments)\nNAME = 'acme/encoder'"
    )
    text = text.replace(
        'args = TrainingArguments(output_dir="out", ARGUMENTS)', "(args,) = parser.parse_args_into_dataclasses()"
    )
    text = text.replace("EarlyStoppingCallback,", "EarlyStoppingCallback, HfArgumentParser,")
    assert "takes its settings from its command line" in refused("train.py", text, capsys)
    command = "accelerate launch --num_processes 4 --mixed_precision bf16 train.py --learning_rate 2e-5"
    run = moved("run.sh", f"{command} --eval_strategy epoch\n")
    assert (run.optim.learning_rate, run.batch_size, run.precision, run.launch.processes) == (2e-5, 32, "bf16", 4)


def test_commands_of_trl(here: Path) -> None:
    text = "trl dpo --model_name_or_path a/b --dataset_name c/d --beta 0.4 --use_peft --lora_r 8 --output_dir o\n"
    run = moved("dpo.sh", text)
    assert (run.task.name, run.task.options["beta"], run.model.adapter["r"]) == ("preference", 0.4, 8)


def test_a_command_whose_script_is_elsewhere(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "torchrun --nproc_per_node 2 train.py --learning_rate 2e-5 --output_dir o\n"
    assert "the script is not here" in refused("run.sh", text, capsys)
    assert "starts several programs, on lines 1, 2" in refused("b.sh", "python a.py\npython b.py\n", capsys)
    assert moved("run.sh", text, "--task", "classification").optim.learning_rate == 2e-5


# -- other files -----------------------------------------------------------------------------------------------------


def test_rewards_and_pairs_of_axolotl(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    usual = "base_model: a/b\nsequence_len: 900\ndatasets: [{path: c/d, type: chat_template.default}]\n"
    run = moved("ax.yaml", usual + "rl: simpo\nrl_beta: 2.0\nsimpo_gamma: 1.0\nadapter: qlora\nlora_r: 4\n")
    assert (run.task.name, run.task.options["loss"], run.task.options["gamma"]) == ("preference", "simpo", 1.0)
    assert (run.data.max_length, run.model.quantization, run.task.options["prompt"]) == (900, "nf4", "messages")
    assert (run.optim.weight_decay, run.optim.schedule) == (0.0, "cosine")  # axolotl's defaults
    run = moved("ax.yaml", usual + "reward_model: true\ncenter_rewards_coefficient: 0.01\n")
    assert (run.task.name, run.task.options["center"]) == ("reward", 0.01)
    (here / "moved.yaml").unlink()
    assert "rl: kto has no counterpart" in refused("ax.yaml", usual + "rl: kto\n", capsys, "--partial")


def test_rewards_and_pairs_of_llama_factory(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    usual = "model_name_or_path: a/b\nfinetuning_type: lora\ndataset: mine\ncutoff_len: 700\ntemplate: qwen\n"
    run = moved("lf.yaml", usual + "stage: dpo\npref_beta: 0.2\npref_loss: hinge\nquantization_bit: 4\n")
    assert (run.task.name, run.task.options["loss"], run.task.options["beta"]) == ("preference", "hinge", 0.2)
    assert (run.data.max_length, run.model.quantization, run.task.options["conversations"]) == (700, "nf4", True)
    assert moved("lf.yaml", usual + "stage: rm\n").task.name == "reward"
    run = moved(
        "lf.yaml",
        usual + "stage: sft\npref_beta: 0.2\n",
        "--task",
        "preference",
        "task.conversations=true",
        "--partial",
    )
    assert (run.data.max_length, run.task.options["beta"]) == (700, 0.2)
    (here / "moved.yaml").unlink()
    assert "pref_loss: orpo has no counterpart" in refused("lf.yaml", usual + "stage: dpo\npref_loss: orpo\n", capsys)
    assert "quantization_bit: 8" in refused("lf.yaml", usual + "stage: pt\nquantization_bit: 8\n", capsys)


def test_the_input_column_of_alpaca_is_not_lost_in_silence(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "a.jsonl").write_text('{"instruction": "add", "input": "1 2", "output": "3"}\n' * 40)
    text = QLORA.replace(
        'load_dataset("acme/notes", split="train")', 'load_dataset("json", data_files="a.jsonl")["train"]'
    )
    text = text.replace(', dataset_text_field="text"', "").replace("MORE", "")
    said = refused("sft.py", text, capsys, "--data", "a.jsonl")
    assert "column input of" in said
    run = moved("sft.py", text, "--data", "a.jsonl", "task.prompt=instruction", "task.response=output")
    assert (run.task.options["prompt"], run.task.options["response"]) == ("instruction", "output")


@pytest.mark.processes  # DeepSpeed starts some when it is imported
def test_what_plan_would_refuse_is_not_written(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (
        "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nnum_processes: 2\nmixed_precision: fp16\n"
        "deepspeed_config: {zero_stage: 2}\n"
    )
    said = refused("config.yaml", text, capsys)
    assert "cannot be planned, so nothing is: precision: fp16" in said
    assert moved("config.yaml", text, "precision=bf16").strategy.name == "zero2"
    assert moved("config.yaml", text, "--partial").precision == "fp16"
