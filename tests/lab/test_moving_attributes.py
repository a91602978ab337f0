"""`lockstep init --from`: attributes that a script sets, and the tokens of its rows that TRL learns."""

import json
from pathlib import Path

import pytest

from support.messages import mentions
from support.moving_scripts import moved, refused

LOOP = """
import torch
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding

def make_tokenizer():
    return AutoTokenizer.from_pretrained("acme/encoder")

tokenizer = make_tokenizer()
model = AutoModelForSequenceClassification.from_pretrained("acme/encoder", num_labels=5)
SET
data = load_dataset("acme/reviews")["train"]
data = data.map(lambda rows: tokenizer(rows["text"], truncation=True, max_length=64), batched=True)
loader = DataLoader(data, batch_size=16, shuffle=True, collate_fn=DataCollatorWithPadding(tokenizer))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5)
for epoch in range(2):
    model.train()
    for batch in loader:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""
TRAINER = """
from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Trainer, TrainingArguments

def make_tokenizer():
    return AutoTokenizer.from_pretrained("acme/encoder")

tokenizer = make_tokenizer()
model = AutoModelForSequenceClassification.from_pretrained("acme/encoder", num_labels=5)
args = TrainingArguments("out", per_device_train_batch_size=16)
SET
data = load_dataset("acme/reviews")
data = data.map(lambda rows: tokenizer(rows["text"], truncation=True, max_length=64), batched=True)
Trainer(model, args, train_dataset=data["train"], processing_class=tokenizer).train()
"""
SIDE = "lockstep pads texts on the right"


@pytest.mark.parametrize("script", [LOOP, TRAINER], ids=["loop", "trainer"])
@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("tokenizer.padding_side = 'left'", SIDE),
        ("tokenizer.padding_side = side()", SIDE),
        ("tokenizer.pad_token, tokenizer.padding_side = tokenizer.eos_token, 'left'", SIDE),
        ("reader = tokenizer\nreader.padding_side = 'left'", SIDE),
        ("if tokenizer.is_fast:\n    tokenizer.padding_side = 'left'", SIDE),
        ("tokenizer.truncation_side = 'left'", "tokenizers are used as saved"),
        ("tokenizer.do_lower_case = False", "tokenizers are used as saved"),
        ("model.config.problem_type = 'regression'", "model.config sets entries"),
        ("model.config.use_cache, model.config.dropout = False, 0.0", "model.config sets entries"),
        ("model.config.pad_token_id = 7", "takes ids of special tokens from the tokenizer"),
        ("model.dropout.p = 0.5", "its effect on the model is unknown"),
    ],
)
def test_attributes_that_change_the_training_are_refused(
    script: str, line: str, why: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused("train.py", script.replace("SET", line), capsys)
    wanted = line.splitlines()[-1].strip()
    number = next(n for n, text in enumerate(script.replace("SET", line).splitlines(), 1) if text.strip() == wanted)
    assert f"line {number}: " in said
    assert why in said


@pytest.mark.parametrize("script", [LOOP, TRAINER], ids=["loop", "trainer"])
@pytest.mark.parametrize(
    "line",
    [
        "tokenizer.padding_side = 'right'",
        "tokenizer.pad_token = tokenizer.eos_token",
        "if tokenizer.pad_token is None:\n    tokenizer.pad_token = tokenizer.eos_token",
        "model.config.use_cache = False\nmodel.config.pad_token_id = tokenizer.pad_token_id",
        "model.generation_config.max_new_tokens = 32",
    ],
)
def test_attributes_that_change_nothing_are_taken(script: str, line: str, here: Path) -> None:
    assert moved("train.py", script.replace("SET", line)).batch_size == 16


def test_padding_side_of_from_pretrained_equals_the_attribute(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    left = TRAINER.replace("SET", "").replace('"acme/encoder")\n\ntok', '"acme/encoder", padding_side="left")\n\ntok')
    assert SIDE in refused("train.py", left, capsys)
    assert moved("train.py", left.replace('"left"', '"right"')).batch_size == 16


@pytest.mark.parametrize("script", [LOOP, TRAINER], ids=["loop", "trainer"])
def test_the_length_that_a_script_gives_its_tokenizer_is_read(
    script: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = script.replace(", max_length=64", "").replace("SET", "tokenizer.model_max_length = 48")
    assert "data.max_length" in refused("train.py", text.replace("48", "longest()"), capsys)
    assert "data.max_length" in refused("train.py", text.replace("48", "48\ntokenizer.model_max_length = 32"), capsys)
    assert moved("train.py", text).data.max_length == 48


def test_a_setting_under_a_condition_that_is_not_known_is_refused(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = TRAINER.replace("SET", "if torch.cuda.is_available():\n    args.learning_rate = 1e-3")
    assert "it is set only if torch.cuda.is_available()" in refused("train.py", text, capsys)
    assert moved("train.py", TRAINER.replace("SET", "args.learning_rate = 1e-3")).optim.learning_rate == 1e-3
    assert moved(
        "train.py", TRAINER.replace("SET", "if 1 > 2:\n    args.learning_rate = 1e-3")
    ).optim.learning_rate == (5e-5)


SFT = """
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
args = SFTConfig(output_dir="out", per_device_train_batch_size=4, max_length=128, MORE)
SFTTrainer(model="acme/model", args=args, train_dataset=load_dataset("json", data_files="rows.jsonl")["train"]).train()
"""
TURNS = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": "an answer"}]


@pytest.mark.parametrize(
    ("row", "more", "key", "why"),
    [
        ({"messages": TURNS}, "assistant_only_loss=True", "messages", ""),
        ({"messages": TURNS}, "assistant_only_loss=True, packing=True", "messages", ""),
        ({"messages": TURNS}, "assistant_only_loss=True, completion_only_loss=True", "messages", ""),
        ({"messages": TURNS}, "completion_only_loss=True", "", "lockstep learns only the assistant's messages"),
        ({"text": "a text"}, "assistant_only_loss=True", "", "TRL applies it only to conversations"),
        ({"text": "a text"}, "completion_only_loss=False", "text", ""),
        ({"text": "a text"}, "completion_only_loss=True", "text", ""),
        ({"prompt": "a", "completion": "b"}, "completion_only_loss=True", "prompt", ""),
        ({"prompt": "a", "completion": "b"}, "completion_only_loss=False", "", "the response is learned"),
        ({"prompt": "a", "completion": "b"}, "assistant_only_loss=True", "", "TRL applies it only to conversations"),
    ],
)
def test_tokens_that_trl_trains_on(
    row: dict, more: str, key: str, why: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for _ in range(40)))
    text = SFT.replace("MORE", more)
    if not key:
        assert why in refused("train.py", text, capsys)
        return
    run = moved("train.py", text)
    assert run.task.options[key] == key  # the columns are those of the file that the script names
    assert run.task.options.get("packing") is ("packing" in more)


def test_unknown_columns_are_the_only_gap(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused("train.py", SFT.replace("MORE", "assistant_only_loss=True"), capsys)
    assert mentions(said, "LS8209", "the columns")
    assert "conversations alone" not in said


def test_loader_recreated_after_its_loop_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = LOOP.replace("SET", "")
    other = text + "    loader = DataLoader(data, batch_size=8, shuffle=True)\n"
    assert "loader = DataLoader(data, batch_size=8" in refused("train.py", other, capsys)
    anew = text.replace("for batch in loader", "bar = tqdm(loader)\n    for batch in bar")
    assert moved("train.py", f"from tqdm import tqdm\n{anew}    bar = tqdm(range(3))\n").batch_size == 16


def test_unknown_batch_size_with_known_rows(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = "".join(json.dumps({"text": f"text {n}", "label": n % 2}) + "\n" for n in range(40))
    Path("rows.jsonl").write_text(rows)
    text = LOOP.replace("SET", "").replace(
        'load_dataset("acme/reviews")', 'load_dataset("json", data_files="rows.jsonl")'
    )
    text = text.replace("batch_size=16", "batch_size=size()").replace(
        "        optimizer.zero", "        s.step()\n        optimizer.zero"
    )
    text = text.replace("for epoch", "s = get_linear_schedule_with_warmup(optimizer, 3, 60)\nfor epoch", 1)
    text = f"from transformers import get_linear_schedule_with_warmup{text}"
    assert mentions(refused("train.py", text, capsys), "LS8209", "DataLoader(batch_size=size())")
