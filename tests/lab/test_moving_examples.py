"""`lockstep init --from` for scripts in the style of transformers' examples, whose options decide their branches."""

import ast
import json
from pathlib import Path

import pytest

from lockstep.lab.import_config.decided_branches import taken
from lockstep.lab.import_config.script import Script
from support.messages import mentions
from support.moving_scripts import moved, refused

CLM = """
import sys
from dataclasses import dataclass, field
from itertools import chain
from typing import Optional
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, Trainer, TrainingArguments
from transformers import default_data_collator, set_seed

@dataclass
class Arguments:
    model_name: Optional[str] = field(default=None)
    train_file: Optional[str] = field(default=None)
    validation_file: Optional[str] = field(default=None)
    block_size: Optional[int] = field(default=None)

def main():
    parser = HfArgumentParser((Arguments, TrainingArguments))
    own, training_args = parser.parse_args_into_dataclasses()
    set_seed(training_args.seed)
    files = {}
    if own.train_file is not None:
        files["train"] = own.train_file
    if own.validation_file is not None:
        files["validation"] = own.validation_file
    kind = own.train_file.split(".")[-1]
    if kind == "txt":
        kind = "text"
    raw = load_dataset(kind, data_files=files)
    tokenizer = AutoTokenizer.from_pretrained(own.model_name)
    model = AutoModelForCausalLM.from_pretrained(own.model_name, revision="main")
    if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(len(tokenizer))
    columns = list(raw["train"].features)
    column = "text" if "text" in columns else columns[0]
    def tokenize(rows):
        return tokenizer(rows[column])
    tokens = raw.map(tokenize, batched=True, remove_columns=columns)
    if own.block_size is None:
        size = tokenizer.model_max_length
    else:
        size = min(own.block_size, tokenizer.model_max_length)
    def group_texts(rows):
        joined = {k: list(chain(*rows[k])) for k in rows.keys()}
        total = len(joined[list(rows.keys())[0]])
        total = (total // size) * size
        result = {k: [t[i : i + size] for i in range(0, total, size)] for k, t in joined.items()}
        result["labels"] = result["input_ids"].copy()
        return result
    blocks = tokens.map(group_texts, batched=True)
    rows = blocks["train"] if training_args.do_train else None
    trainer = Trainer(model=model, args=training_args, train_dataset=rows,
        eval_dataset=blocks["validation"], data_collator=default_data_collator)
    metrics = trainer.train().metrics
    metrics["rows"] = min(10, len(blocks["train"]))
    metrics["perplexity"] = 1.0

if __name__ == "__main__":
    main()
"""

GLUE = """
import argparse
import math
import random
import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from datasets import load_dataset
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding, get_scheduler

logger = get_logger(__name__)

def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--train_file", default=None)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--max_steps", type=int, default=None)
    parser.add_argument("--resume", default=None)
    parser.add_argument("--track", action="store_true")
    return parser.parse_args()

def main():
    args = parse_args()
    accelerator = Accelerator(log_with="all") if args.track else Accelerator()
    data = load_dataset("json", data_files={"train": args.train_file})
    names = data["train"].unique("label")
    names.sort()
    tokenizer = AutoTokenizer.from_pretrained("acme/enc")
    model = AutoModelForSequenceClassification.from_pretrained("acme/enc", num_labels=len(names))
    ids = {v: i for i, v in enumerate(names)}
    def preprocess(rows):
        texts = (rows["a"],) if args.track else (rows["a"], rows["b"])
        result = tokenizer(rows["a"], max_length=32, truncation=True)
        if "label" in rows:
            if ids is not None:
                result["labels"] = [ids[x] for x in rows["label"]]
            else:
                result["labels"] = rows["label"]
        return result
    rows = data.map(preprocess, batched=True)["train"]
    for i in random.sample(range(len(rows)), 3):
        logger.info(rows[i])
    loader = DataLoader(rows, shuffle=True, collate_fn=DataCollatorWithPadding(tokenizer), batch_size=args.batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    overrode = False
    per_epoch = math.ceil(len(loader) / args.every)
    if args.max_steps is None:
        args.max_steps = args.epochs * per_epoch
        overrode = True
    schedule = get_scheduler("linear", optimizer=optimizer, num_warmup_steps=0, num_training_steps=args.max_steps)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    per_epoch = math.ceil(len(loader) / args.every)
    if overrode:
        args.max_steps = args.epochs * per_epoch
    args.epochs = math.ceil(args.max_steps / per_epoch)
    bar = tqdm(range(args.max_steps))
    done = 0
    start = 0
    if args.resume:
        accelerator.load_state(args.resume)
        start = 1
    for epoch in range(start, args.epochs):
        model.train()
        if args.resume and epoch == start:
            active = accelerator.skip_first_batches(loader, 1)
        else:
            active = loader
        for step, batch in enumerate(active):
            loss = model(**batch).loss / args.every
            accelerator.backward(loss)
            if step % args.every == 0 or step == len(loader) - 1:
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                bar.update(1)
                done += 1
            if done >= args.max_steps:
                break

if __name__ == "__main__":
    main()
"""


def command(here: Path, script: str, options: str) -> str:
    (here / "own.py").write_text(script)
    return f"python own.py {options}\n"


def test_the_style_of_run_clm(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("t.txt", "v.txt"):
        (here / name).write_text("a b c\n" * 30)
    options = "--model_name acme/lm --train_file t.txt --validation_file v.txt --do_train --seed 5 --learning_rate 1e-3"
    run = moved("run.sh", command(here, CLM, f"{options} --block_size 16"))
    assert (run.data.train, run.data.validation, run.seed, run.model.revision) == ("t.txt", "v.txt", 5, None)
    assert (run.task.options["block_size"], run.task.options["packing"], run.optim.learning_rate) == (16, True, 1e-3)
    shown = capsys.readouterr().out
    assert "not understood" not in shown
    assert "truncates texts" not in shown
    (here / "moved.yaml").unlink()
    why = refused("run.sh", command(here, CLM, options), capsys)  # the tokenizer's own length, which is not here
    assert mentions(why, "LS8209", "group_texts of")


def test_the_style_of_run_glue_no_trainer(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [json.dumps({"a": f"w{i}", "b": "x", "label": "yn"[i % 2]}) for i in range(40)]
    (here / "t.json").write_text("\n".join(rows))
    run = moved("run.sh", command(here, GLUE, "--train_file t.json --epochs 2"))
    assert (run.epochs, run.batch_size, run.micro_batches, run.optim.schedule) == (2, 8, 1, "linear")
    assert (run.task.options["text"], run.task.options["label"], run.data.train) == ("a", "label", "t.json")
    shown = capsys.readouterr().out
    assert "not understood" not in shown
    assert "log_with" not in shown
    (here / "moved.yaml").unlink()
    text = command(here, GLUE, "--train_file t.json --every 4")
    shown = refused("run.sh", text, capsys)
    assert "the batches per step are unknown" in shown
    assert "divided by" not in shown


def test_early_break_is_kept() -> None:
    def is_left(change: tuple[str, str], **options: object) -> bool:
        assert change[0] in GLUE
        return "break" in ast.unparse(taken(Script(Path("own.py"), GLUE.replace(*change), options)).tree)

    assert not is_left(("", ""))
    assert is_left(("", ""), max_steps=7)
    assert is_left(("done += 1", "done += 2"))
    assert is_left(("range(start, args.epochs)", "range(start, 9)"))
    assert is_left(("len(loader) / args.every", "len(other) / args.every"))


def test_values_changed_by_unread_code_are_not_filled_in() -> None:
    text = "from datasets import load_dataset\nfiles = {}\nfiles['train'] = 'a'\nCHANGE\n"
    text += "load_dataset('json', data_files=files)\n"
    for change, left in (("pass", "{'train': 'a'}"), ("files['train'] = 'b'", "{'train': 'b'}")):
        assert f"data_files={left})" in ast.unparse(taken(Script(Path("a.py"), text.replace("CHANGE", change))).tree)
    for change in ("other(files)", "more = files", "files.update(x)", "for x in y:\n    files[x] = 1", "files = x"):
        assert "data_files=files)" in ast.unparse(taken(Script(Path("a.py"), text.replace("CHANGE", change))).tree)
