"""`lockstep init --from`: functions that train, their arguments, and values that a script changes."""

from pathlib import Path

import pytest

from lockstep.cli import main
from support.messages import mentions
from support.moving_scripts import TRAINER, USUAL, moved, refused
from support.trainer_variants import changed

TRAIN = """def train(args, model, loader, device):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.lr)
    for epoch in range(args.epochs):
        optimizer.zero_grad()
        for i, batch in enumerate(loader):
            batch = {k: v.to(device) for k, v in batch.items()}
            loss = model(**batch).loss / 4
            loss.backward()
            if (i + 1) % 4 == 0 or i + 1 == len(loader):
                optimizer.step()
                model.zero_grad()
        print(loss.item())
"""
MAIN = """
import argparse
import math
import torch
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer, default_data_collator


{train}

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained("acme/encoder")
    data = load_dataset("acme/reviews").map(lambda b: tokenizer(b["text"], truncation=True, max_length=64))
    loader = DataLoader(data["train"], batch_size=8, shuffle=True, collate_fn=default_data_collator)
    device = torch.device("cpu")
    model = AutoModelForSequenceClassification.from_pretrained("acme/encoder").train()
    model.to(device)
    train(args, model, loader, device)
    model.save_pretrained("out")


main()
"""
OTHERS = {
    "another model is cleared": ("model.zero_grad()", "model.classifier.zero_grad()", "model.classifier.zero_grad()"),
    "another condition": ("if p.requires_grad", "if p.dim() > 1", "if p.dim() > 1"),
    "another model is saved": (
        "    model.save_pre",
        "    model = averaged(model)\n    model.save_pre",
        "averaged(model)",
    ),
    "not divided": (".loss / 4", ".loss", "not divided by 4"),
}


def test_arguments_of_a_training_function_are_followed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = MAIN.format(train=TRAIN)
    for parameters in (
        "[p for p in model.parameters() if p.requires_grad]",
        "filter(lambda p: p.requires_grad, model.parameters())",
        "list(model.parameters())",
    ):
        run = moved("a.py", text.replace("[p for p in model.parameters() if p.requires_grad]", parameters))
        assert (run.batch_size, run.micro_batches, run.epochs, run.optim.name) == (32, 4, 3, "adamw")
        (here / "moved.yaml").unlink()
    for name, (old, new, wanted) in OTHERS.items():
        assert wanted in refused("a.py", changed(text, (old, new)), capsys), name
    freeze = "    for n, p in model.named_parameters():\n        p.requires_grad = 'head' in n\n    optimizer ="
    run = moved("a.py", changed(text, ("    optimizer =", freeze)), "model.freeze=[bert.*]")
    assert run.model.freeze == ["bert.*"]
    (here / "moved.yaml").unlink()
    said = refused("a.py", changed(text, ("model(**batch).loss / 4", "loss_of(model, batch) / 4")), capsys)
    assert "not divided" not in said  # it is, in a line that was not understood


def test_accumulation_that_processes_share(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loop = (
        "while True:\n    for _ in range(accumulation_steps):\n        loss_of(net).backward()\n    optimizer.step()\n"
    )
    text = "import torch\nbatch_size = 4\nmax_iters = 60\naccumulation_steps = 8\nif ddp:\n    CHANGE\n"
    text += f"optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)\n{loop}"
    shared = text.replace("CHANGE", "accumulation_steps //= ddp_world_size")
    for processes, micro_batches in ((1, 8), (4, 2 * 4)):
        Path("a.py").write_text(shared)
        assert main(["init", "moved.yaml", "--from", "a.py", "--partial", f"launch.processes={processes}"]) == 0
        written = (here / "moved.yaml").read_text()
        assert "batch_size: 32 " in written
        assert f"micro_batches: {micro_batches} " in written
        (here / "moved.yaml").unlink()
    said = refused("a.py", text.replace("CHANGE", "accumulation_steps = other()"), capsys)
    assert "not understood: accumulation_steps" in said


def test_rows_and_settings_of_a_trainer_by_their_names(here: Path) -> None:
    files = "data_files={'train': 'a.jsonl', 'test': 'b.jsonl'}"
    for name in ("a", "b"):
        (here / f"{name}.jsonl").write_text('{"review": "well", "stars": 1}\n{"review": "bad", "stars": 0}\n')
    text = TRAINER.replace("ARGUMENTS", f"learning_rate=args_[0].rate, {USUAL}")
    text = changed(
        text,
        ('load_dataset("acme/reviews", "small")', f'load_dataset("json", {files})'),
        ("import numpy", "from dataclasses import dataclass\nfrom transformers import HfArgumentParser\nimport numpy"),
        ("NAME = ", "@dataclass\nclass Own:\n    rate: float = 3e-4\n\nown = PARSED\nNAME = "),
        ("args_[0]", "own"),
    )
    for parsed in (
        "HfArgumentParser(Own).parse_args_into_dataclasses()[0]",
        "HfArgumentParser((Own,)).parse_args_into_dataclasses(look_for_args_file=False)[0]",
    ):
        run = moved("train.py", text.replace("PARSED", parsed))
        assert (run.data.train, run.data.validation, run.data.test) == ("a.jsonl", "b.jsonl", None)
        assert run.optim.learning_rate == 3e-4


def test_warmup_length_is_rounded_as_in_the_script(here: Path) -> None:
    rows = "".join(f'{{"text": "word {i}", "label": {i % 2}}}\n' for i in range(64))
    (here / "a.jsonl").write_text(rows)
    (here / "b.jsonl").write_text(rows.replace("word", "other"))
    files = '{"train": "a.jsonl", "validation": "b.jsonl"}'
    text = changed(
        MAIN.format(train=TRAIN),
        ('load_dataset("acme/reviews")', f'load_dataset("json", data_files={files})'),
        ("    for epoch", "    total = args.epochs * math.ceil(len(loader) / 4)\n    sched = SCHEDULE\n    for epoch"),
        ("                optimizer.step()\n", "                optimizer.step()\n                sched.step()\n"),
        ("default_data_collator\n", "default_data_collator, get_scheduler\n"),
    )
    for share, warmup in (("int(0.3 * total)", 1), ("round(0.3 * total)", None), ("math.ceil(0.3 * total)", None)):
        schedule = f"get_scheduler('linear', optimizer, {share}, total)"
        optim = moved("a.py", text.replace("SCHEDULE", schedule)).optim
        assert (optim.warmup_steps, optim.warmup_fraction) == ((warmup, 0.0) if warmup else (0, 0.3)), share


def test_imports_of_a_project_are_named_with_their_lines(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("net.py", "pkg/__init__.py", "pkg/rows.py", "fit.py"):
        (here / name).parent.mkdir(exist_ok=True)
        (here / name).touch()
    text = "import torch\nfrom net import build\nfrom pkg import rows\nimport fit as train\ntrain.fit(build(), rows)\n"
    files = "net.py (line 2), pkg/rows.py (line 3), fit.py (line 4)"
    assert mentions(refused("main.py", text, capsys), "LS8207", "init does not follow imports", files)
    text = text.replace("train.fit(build(), rows)", "for x in rows:\n    build().loss(x).backward()")
    assert mentions(refused("main.py", text, capsys), "LS8209", "init does not follow imports", files)
