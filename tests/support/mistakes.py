"""The fifty most frequent mistakes with a run file or a command, each in a fresh folder."""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import yaml

RUN: dict[str, Any] = {
    "data": {"train": "train.csv", "validation": "train.csv", "max_length": 32},
    "model": {"type": "gpt2", "config": {"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 32}},
    "tokenizer": {"train": "bpe", "vocab_size": 300},
    "steps": 2,
    "batch_size": 8,
    "micro_batches": 4,
    "launch": {"device": "cpu", "threads": 1},
    "output": "out",
}


class Mistake(NamedTuple):
    """A mistake, and the message that reports it."""

    name: str
    code: str
    shown: str  # a value in the message
    words: str  # of the command, after `lockstep`; the run file is run.yaml
    change: Callable[[Path], object] | None = None  # applied to a folder with a valid run.yaml and train.csv
    environment: dict[str, str] | None = None

    def arguments(self) -> list[str]:
        """Words of the command; braces group one word."""
        return re.findall(r"(?:[^\s{]|\{[^}]*\})+", self.words)


def prepare(folder: Path) -> None:
    """Write a valid run file and data."""
    rows = [f"a text of number {n} here,{('joy', 'anger')[n % 2]}" for n in range(40)]
    (folder / "train.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    (folder / "run.yaml").write_text(yaml.safe_dump(RUN))


def text(name: str, content: str | bytes) -> Callable[[Path], object]:
    """Write a file of the folder."""
    return lambda folder: (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def table(*rows: str) -> Callable[[Path], object]:
    """Replace the rows of train.csv."""
    return text("train.csv", "".join(f"{row}\n" for row in ("text,label", *rows)))


def line(old: str, new: str) -> Callable[[Path], object]:
    """Replace a part of run.yaml."""

    def change(folder: Path) -> None:
        path = folder / "run.yaml"
        assert old in path.read_text(), old
        path.write_text(path.read_text().replace(old, new))

    return change


def inside(folder_name: str, file: str, content: str = "{}") -> Callable[[Path], object]:
    """Create a folder with one file."""

    def change(folder: Path) -> None:
        (folder / folder_name).mkdir()
        (folder / folder_name / file).write_text(content)

    return change


BROKEN = gzip.compress(b"text,label\na,b\n" * 999)[:-9]
TOKEN = "hf_" + "abcdefghijklmnopqrstuvwxyzabcdefgh"
OF_FOLDER = "model={source: ./model} tokenizer={}"
MISTAKES = [
    Mistake("an unknown key", "LS1000", "learnin_rate", "plan run.yaml optim.learnin_rate=1"),
    Mistake("a key in the wrong section", "LS1000", "optim.learning_rate", "plan run.yaml learning_rate=1e-3"),
    Mistake("a text for a number", "LS1002", "sixteen", "plan run.yaml data.max_length=sixteen"),
    Mistake("a number out of range", "LS1002", "steps", "plan run.yaml steps=-1"),
    Mistake("a tab in YAML", "LS1106", "line 3", "plan run.yaml", line("  max_length", "\tmax_length")),
    Mistake("a key twice", "LS1106", "steps", "plan run.yaml", line("steps: 2", "steps: 2\nsteps: 3")),
    Mistake("a list for a run file", "LS1107", "run.yaml", "plan run.yaml", text("run.yaml", "- data\n")),
    Mistake("a run file that is not there", "LS1105", "run.yaml", "train rum.yaml"),
    Mistake("a file in place of an output folder", "LS1122", "run.yaml: not a folder", "status run.yaml"),
    Mistake("a run to compare that is not there", "LS1122", "none: no such folder", "diff none none"),
    Mistake("an override without =", "LS1113", "steps", "plan run.yaml steps"),
    Mistake("an unknown command", "LS8420", "train", "trian run.yaml"),
    Mistake("an unknown option", "LS1000", "launch.device", "plan run.yaml --devise cpu"),
    Mistake("steps and epochs", "LS1102", "epochs", "plan run.yaml", line("steps: 2", "steps: 2\nepochs: 1")),
    Mistake("no data", "LS1119", "data", "plan run.yaml", text("run.yaml", "model: gpt2\n")),
    Mistake(
        "a secret in the run file",
        "LS1118",
        "hub.token",
        "plan run.yaml",
        line("output:", f"hub: {{token: {TOKEN}}}\noutput:"),
    ),
    Mistake("a data file that is not there", "LS2250", "trian.csv", "plan run.yaml data.train=trian.csv"),
    Mistake("an empty data file", "LS2195", "train.csv", "plan run.yaml", text("train.csv", "")),
    Mistake("a header without rows", "LS2195", "train.csv", "plan run.yaml", table()),
    Mistake("a column that is not there", "LS2312", "sentence", "plan run.yaml task.text=sentence"),
    Mistake(
        "a CSV with semicolons",
        "LS2312",
        "data.separator",
        "plan run.yaml",
        text("train.csv", "text;label\na b;joy\nc d;anger\n"),
    ),
    Mistake(
        "a cell with a comma and no quotes", "LS2073", "line 3", "plan run.yaml", table("hello,joy", "well, yes,anger")
    ),
    Mistake("a row without a label", "LS2323", "row 1", "plan run.yaml", table("hello,joy", "bad day,", "well,anger")),
    Mistake("one label only", "LS2102", "joy", "plan run.yaml", table("hello,joy", "good day,joy")),
    Mistake(
        "a label that is a fraction",
        "LS2105",
        "0.5",
        "plan run.yaml data.train=t.jsonl data.validation=t.jsonl",
        text("t.jsonl", '{"text": "a", "label": 0.5}\n{"text": "b", "label": 1.5}\n'),
    ),
    Mistake(
        "a label that training lacks",
        "LS2103",
        "sadness",
        "plan run.yaml data.validation=v.csv",
        text("v.csv", "text,label\nhello,sadness\n"),
    ),
    Mistake(
        "a file that is not UTF-8",
        "LS2065",
        "data.encoding",
        "plan run.yaml",
        text("train.csv", "text,label\ncaf\xe9,joy\nb,anger\n".encode("latin-1")),
    ),
    Mistake("a broken .gz", "LS2062", "t.csv.gz", "plan run.yaml data.train=t.csv.gz", text("t.csv.gz", BROKEN)),
    Mistake(
        "broken JSON lines",
        "LS2226",
        "line 2",
        "plan run.yaml data.train=t.jsonl",
        text("t.jsonl", '{"text": "a", "label": 1}\n{"text": \n'),
    ),
    Mistake(
        "a format that is not read", "LS2251", "t.xlsx", "plan run.yaml data.train=t.xlsx", text("t.xlsx", b"PK\3\4")
    ),
    Mistake(
        "data of the Hub while offline", "LS8082", "fancyzhx/ag_news", "plan run.yaml data={source: fancyzhx/ag_news}"
    ),
    Mistake(
        "a model of the Hub while offline",
        "LS3131",
        "google-bert",
        "train run.yaml model={source: google-bert/bert-base-uncased} tokenizer={}",
    ),
    Mistake(
        "a model folder without config.json",
        "LS3133",
        "config.json",
        f"plan run.yaml {OF_FOLDER}",
        inside("model", "model.safetensors"),
    ),
    Mistake(
        "a model folder without a tokenizer",
        "LS3131",
        "model.source",
        f"plan run.yaml {OF_FOLDER}",
        inside("model", "config.json"),
    ),
    Mistake(
        "a tokenizer's folder that is not there",
        "LS2088",
        "tokenizer.source: the folder",
        "plan run.yaml tokenizer={source: ./gone}",
    ),
    Mistake("a new model without a tokenizer", "LS2301", "tokenizer.train", "plan run.yaml tokenizer={}"),
    Mistake("max_length above the model's positions", "LS3142", "512", "plan run.yaml data.max_length=512"),
    Mistake("an unknown type of model", "LS3130", "gpt2", "plan run.yaml model.type=gtp2"),
    Mistake("an unknown entry of a model's config", "LS3135", "n_layer", "plan run.yaml model.config.n_layers=2"),
    Mistake("sizes of a model that do not divide", "LS3144", "17", "plan run.yaml model.config.n_embd=17"),
    Mistake(
        "the name that transformers has for a task",
        "LS1098",
        "'classification'",
        "plan run.yaml task.name=text-classification",
    ),
    Mistake("an unknown strategy", "LS1121", "fsdp2", "plan run.yaml strategy.name=fsdp"),
    Mistake("an unknown optimizer", "LS1098", "adamw", "plan run.yaml optim.name=adamv"),
    Mistake("an unknown schedule", "LS1071", "cosine", "plan run.yaml optim.schedule=cosin"),
    Mistake("more micro-batches than examples", "LS1103", "batch_size", "plan run.yaml micro_batches=16"),
    Mistake(
        "more processes than micro-batches",
        "LS1104",
        "launch.processes",
        "plan run.yaml launch.processes=8 strategy.name=allreduce",
    ),
    Mistake("several processes under single", "LS4260", "ddp", "plan run.yaml launch.processes=2 strategy.name=single"),
    Mistake("CUDA without a GPU", "LS5250", "launch.device=cpu", "train run.yaml launch.device=cuda"),
    Mistake("flash attention on a processor", "LS3127", "sdpa", "plan run.yaml model.attention=flash_attention_2"),
    Mistake(
        "the best checkpoint without evaluations",
        "LS1063",
        "evaluate.every",
        "plan run.yaml export=best evaluate.every=0",
    ),
    Mistake("a push to the Hub without a token", "LS6015", "HF_TOKEN", "train run.yaml hub.push_to=me/model"),
    Mistake("an output folder with other files", "LS7346", "thesis.txt", "train run.yaml", inside("out", "thesis.txt")),
    Mistake(
        "an output folder that is a file",
        "LS1115",
        "out",
        "train run.yaml",
        text("out", "mine"),
    ),
    Mistake("a report of no run", "LS1123", "run.yaml", "report model", inside("model", "config.json")),
    Mistake("a prediction from a folder that is not there", "LS1122", "outputs/rum", "predict outputs/rum hello"),
    Mistake(
        "a rendezvous without a port", "LS7020", "node1", "plan run.yaml launch.name=torchrun launch.rendezvous=node1"
    ),
    Mistake(
        "a secret that can be guessed",
        "LS7027",
        "openssl",
        "train run.yaml launch.processes=2",
        None,
        {"LOCKSTEP_SECRET": "abc"},
    ),
]
