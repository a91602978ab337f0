"""Scripts in the style of public ones, for `lockstep init --from`, and their results."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, BertConfig, BertTokenizerFast

from lockstep.cli import main
from lockstep.config.run import Run, load
from lockstep.lab.import_config import import_config
from lockstep.lab.import_config.script import Script
from lockstep.lab.import_config.table import RunDraft

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
        loader.sampler.set_epoch(epoch)
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
schedule = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=100, num_training_steps=len(train) * 3 // 4)
model, optimizer, train, dev, schedule = accelerator.prepare(model, optimizer, train, dev, schedule)
model.train()
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

QUESTIONS = """
from datasets import load_dataset
from transformers import AutoModelForQuestionAnswering, AutoTokenizer, Trainer, TrainingArguments

NAME = "acme/encoder"
data = load_dataset("acme/questions")
tokenizer = AutoTokenizer.from_pretrained(NAME)

def windows(rows):
    asked = [text.strip() for text in rows["question"]]
    tokens = tokenizer(asked, rows["context"], truncation="only_second", max_length=128, stride=32,
        return_overflowing_tokens=True, return_offsets_mapping=True, padding="max_length")
    offsets, owners = tokens.pop("offset_mapping"), tokens.pop("overflow_to_sample_mapping")
    starts, ends = [], []
    for i, spans in enumerate(offsets):
        answer = rows["answers"][owners[i]]
        begin = answer["answer_start"][0]
        stop = begin + len(answer["text"][0])
        which = tokens.sequence_ids(i)
        first = 0
        while which[first] != 1:
            first += 1
        last = len(which) - 1
        while which[last] != 1:
            last -= 1
        if spans[first][0] > begin or spans[last][1] < stop:
            starts.append(0)
            ends.append(0)
        else:
            while first <= last and spans[first][0] <= begin:
                first += 1
            starts.append(first - 1)
            while spans[last][1] >= stop:
                last -= 1
            ends.append(last + 1)
    tokens["start_positions"] = starts
    tokens["end_positions"] = ends
    return tokens

data = data.map(windows, batched=True, remove_columns=data["train"].column_names)
model = AutoModelForQuestionAnswering.from_pretrained(NAME)
args = TrainingArguments(output_dir="out", learning_rate=2e-5)
Trainer(model=model, args=args, train_dataset=data["train"]).train()
"""

STOPPING = """,
    callbacks=[EarlyStoppingCallback(early_stopping_patience=2, early_stopping_threshold=0.01)]"""


MODE = "    model.train()\n"
SCORE = "    score()\n"
AFTER = "        optimizer.zero_grad()\n"
LOOP = "for epoch in"
SCRIPT = f"""
import torch
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding

tokenizer = AutoTokenizer.from_pretrained("encoder")
raw = load_dataset("acme/reviews")
data = raw.map(lambda rows: tokenizer(rows["text"], truncation=True, max_length=32), batched=True)
train = DataLoader(data["train"], shuffle=True, batch_size=8, collate_fn=DataCollatorWithPadding(tokenizer))
dev = DataLoader(data["validation"], batch_size=16, collate_fn=DataCollatorWithPadding(tokenizer))
model = AutoModelForSequenceClassification.from_pretrained("encoder")
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)


def score():
    model.eval()
    right = 0
    with torch.no_grad():
        for batch in dev:
            right += (model(**batch).logits.argmax(-1) == batch["labels"]).sum().item()
    print(right)


for epoch in range(3):
{MODE}    for i, batch in enumerate(train):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
{AFTER}{SCORE}"""


def changed(*pairs: tuple[str, str], text: str = SCRIPT) -> str:
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new, 1)
    return text


def in_loop(text: str) -> str:
    """Return the gaps and notes of a script, one a line."""
    draft = RunDraft()
    import_config.script(Script(Path("train.py"), text)).move(draft, 1)
    for each in draft.at_end:
        each(draft)
    return "\n".join((*map(str, draft.gaps), *draft.notes))


def encoder(dtype: torch.dtype = torch.float32) -> None:
    """A model with dropout and its tokenizer, in a folder of the working directory."""
    torch.manual_seed(0)  # a test that compares gradients has them of a size that is measured
    Path("encoder").mkdir()
    Path("encoder/vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad"]))
    BertTokenizerFast("encoder/vocab.txt").save_pretrained("encoder")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = BertConfig(vocab_size=7, max_position_embeddings=64, **sizes)
    AutoModelForSequenceClassification.from_config(config).to(dtype).save_pretrained("encoder")


def moved(path: str, text: str, *words: str) -> Run:
    Path(path).write_text(text)
    assert main(["init", "moved.yaml", "--yes", "--force", "--from", path, *words]) == 0
    return load("moved.yaml", [])


def refused(path: str, text: str, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Message printed instead of a file."""
    Path(path).write_text(text)
    assert main(["init", "moved.yaml", "--yes", "--from", path, *words]) == 2
    assert not Path("moved.yaml").exists()
    return capsys.readouterr().err


TAGS = """
ids = {label: i for i, label in enumerate(["O", "B", "I"])}

def tokens(rows):
    out = tokenizer(rows["tokens"], truncation=True, max_length=32, is_split_into_words=True)
    labels = []
    for i, tags in enumerate(rows["tags"]):
        words = out.word_ids(batch_index=i)
        previous = None
        row = []
        for word in words:
            if word is None:
                row.append(-100)
            elif word != previous:
                row.append(ids[tags[word]])
            else:
                row.append(-100)
            previous = word
        labels.append(row)
    out["labels"] = labels
    return out
"""
