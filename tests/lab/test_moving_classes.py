"""`lockstep init --from` reads loops in methods and closures, and writes the run file of the equivalent plain loop."""

from pathlib import Path

import pytest

from lockstep.config.run import Run
from support.moving_scripts import moved, refused

HEAD = """
import torch
from datasets import load_dataset
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding
"""
PLAIN = (
    HEAD
    + """
tokenizer = AutoTokenizer.from_pretrained("acme/encoder")
model = AutoModelForSequenceClassification.from_pretrained("acme/encoder", num_labels=5)
data = load_dataset("acme/reviews")["train"]
data = data.map(lambda rows: tokenizer(rows["text"], truncation=True, max_length=64), batched=True)
loader = DataLoader(data, batch_size=16, shuffle=True, collate_fn=DataCollatorWithPadding(tokenizer))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5)
for epoch in range(3):
    model.train()
    for step, batch in enumerate(loader):
        loss = model(**batch).loss / 4
        loss.backward()
        if (step + 1) % 4 == 0 or step + 1 == len(loader):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
"""
)
METHODS = (
    HEAD
    + """
class Settings:
    name = "acme/encoder"
    epochs = 3
    rate = 3e-5

class Base:
    accumulate = 4

    def log(self, epoch, loss):
        print(epoch, loss)

    def reader(self):
        return AutoTokenizer.from_pretrained(self.settings.name)

class Trainer(Base):
    def __init__(self, settings, size=16, *, norm=1.0):
        self.settings = settings
        self.norm = norm
        self.tokenizer = self.reader()
        self.model = AutoModelForSequenceClassification.from_pretrained(settings.name, num_labels=5)
        self.loader = self.load(size)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=settings.rate)

    def tokens(self, rows):
        return self.tokenizer(rows["text"], truncation=True, max_length=64)

    def load(self, size):
        data = load_dataset("acme/reviews")["train"].map(self.tokens, batched=True)
        return DataLoader(data, batch_size=size, shuffle=True, collate_fn=DataCollatorWithPadding(self.tokenizer))

    def forward(self, batch):
        return self.model(**batch).loss

    def step(self, number, batch):
        loss = self.forward(batch) / self.accumulate
        loss.backward()
        if (number + 1) % self.accumulate == 0 or number + 1 == len(self.loader):
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.norm)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss.item()

    def train(self):
        for epoch in range(self.settings.epochs):
            self.model.train()
            for number, batch in enumerate(self.loader):
                loss = self.step(number, batch)
            self.log(epoch, loss)

if __name__ == "__main__":
    Trainer(Settings(), norm=0.5).train()
"""
)
CLOSURES = (
    HEAD
    + """
def main(epochs, rate=3e-5):
    tokenizer = AutoTokenizer.from_pretrained("acme/encoder")
    model = AutoModelForSequenceClassification.from_pretrained("acme/encoder", num_labels=5)

    def tokens(rows):
        return tokenizer(rows["text"], truncation=True, max_length=64)

    data = load_dataset("acme/reviews")["train"].map(tokens, batched=True)
    loader = DataLoader(data, batch_size=16, shuffle=True, collate_fn=DataCollatorWithPadding(tokenizer))
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)

    def update(norm):
        torch.nn.utils.clip_grad_norm_(model.parameters(), norm)
        optimizer.step()
        optimizer.zero_grad()

    def step(number, batch):
        loss = model(**batch).loss / 4
        loss.backward()
        if (number + 1) % 4 == 0 or number + 1 == len(loader):
            update(0.5)
        return loss.item()

    for epoch in range(epochs):
        model.train()
        for number, batch in enumerate(loader):
            step(number, batch)

main(epochs=3)
"""
)
GIVEN = (
    HEAD
    + """
class Trainer:
    def __init__(self, model, loader, optimizer, device):
        self.device = device
        self.model = model.to(device)
        self.loader = loader
        self.optimizer = optimizer
        self.model = DDP(self.model, device_ids=[device])

    def _run_batch(self, step, batch):
        loss = self.model(**batch).loss / 4
        loss.backward()
        if (step + 1) % 4 == 0 or step + 1 == len(self.loader):
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def _run_epoch(self, epoch):
        self.loader.sampler.set_epoch(epoch)
        self.model.train()
        for step, batch in enumerate(self.loader):
            self._run_batch(step, batch.to(self.device))

    def train(self, epochs):
        for epoch in range(epochs):
            self._run_epoch(epoch)

def objects():
    tokenizer = AutoTokenizer.from_pretrained("acme/encoder")
    model = AutoModelForSequenceClassification.from_pretrained("acme/encoder", num_labels=5)
    data = load_dataset("acme/reviews")["train"]
    data = data.map(lambda rows: tokenizer(rows["text"], truncation=True, max_length=64), batched=True)
    return data, model, torch.optim.AdamW(model.parameters(), lr=3e-5), DataCollatorWithPadding(tokenizer)

def batches(data, size, collate):
    return DataLoader(data, batch_size=size, sampler=DistributedSampler(data), collate_fn=collate)

def main(device, epochs, size):
    data, model, optimizer, collate = objects()
    trainer = Trainer(model, batches(data, size, collate), optimizer, device)
    trainer.train(epochs)

if __name__ == "__main__":
    main(0, 3, 16)
"""
)


def _compared(run: Run) -> dict:
    values: dict = run.model_dump(exclude={"output"})
    return values


@pytest.mark.parametrize("script", [METHODS, CLOSURES, GIVEN], ids=["methods", "closures", "given"])
def test_a_loop_in_methods_is_read_as_the_plain_one(script: str, here: Path) -> None:
    plain = moved("train.py", PLAIN)
    assert (plain.batch_size, plain.micro_batches, plain.epochs, plain.optim.max_grad_norm) == (64, 4, 3, 0.5)
    assert (plain.optim.learning_rate, plain.data.max_length, plain.model.source) == (3e-5, 64, "acme/encoder")
    assert _compared(moved("train.py", script)) == _compared(plain)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("loss.backward()", "(loss * 2).backward()", "(loss * 2).backward()"),
        ("loss = self.forward(batch)", "loss = number * self.forward(batch)", "loss = number * self.forward(batch)"),
        ("loss.backward()", "loss.backward()\n        self.shrink()", "p.data.mul_(0.9)"),
        ("self.log(epoch, loss)", "self.settings.rate = self.settings.rate / 2", "self.settings.rate = "),
        ("self.log(epoch, loss)", "self.optimizer.param_groups[0]['lr'] = 0.0", "self.optimizer.param_groups[0]"),
        ("self.log(epoch, loss)", "self.norm = 2 * self.norm", "clip_grad_norm_"),
        ("self.log(epoch, loss)", "self.tokenizer.padding_side = 'left'", "self.tokenizer.padding_side = 'left'"),
        ("self.norm = norm", "self.norm = norm\n        self.step = self.other", "loss.backward()"),
        (
            "Trainer(Settings(), norm=0.5).train()",
            "t = Trainer(Settings(), norm=0.5)\n    t.train()\n    t.train()",
            "second",
        ),
        (
            "Trainer(Settings(), norm=0.5).train()",
            "t = Trainer(Settings())\n    change(t)\n    t.train()",
            "loss.backward()",
        ),
        ("    def step(self", "    @torch.compile\n    def step(self", "loss.backward()"),
        (
            "loss = self.forward(batch)",
            "if number > 9:\n            return 0\n        loss = self.forward(batch)",
            "backward()",
        ),
        (
            "    def forward(self",
            "    def forward(self, batch):\n        return 0\n\n    def forward(self",
            "loss.backward()",
        ),
    ],
)
def test_further_statements_of_methods_are_refused(
    old: str, new: str, says: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = "    def shrink(self):\n        for p in self.model.parameters():\n            p.data.mul_(0.9)\n\n"
    more += "    def forward("
    assert old in METHODS
    said = refused("train.py", METHODS.replace(old, new, 1).replace("    def forward(", more, 1), capsys)
    assert says in said.partition("would be lost:")[2]


def test_lines_equal_those_of_the_script(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = METHODS.replace("loss.backward()", "loss = loss + penalty(self.model)\n        loss.backward()")
    number = next(n for n, line in enumerate(text.splitlines(), 1) if "penalty" in line)
    assert f"line {number}: loss = loss + penalty(self.model)" in refused("train.py", text, capsys)


def test_methods_of_own_classes_are_judged_by_their_statements(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kind = (
        "class Meter:\n    def __init__(self):\n        self.sum = 0\n\n    def update(self, value):\n        BODY\n\n"
    )
    text = PLAIN.replace("tokenizer =", kind + "meter = Meter()\ntokenizer =", 1)
    text = text.replace("        loss.backward()\n", "        loss.backward()\n        meter.update(loss.item())\n")
    changing = text.replace("BODY", "optimizer.param_groups[0]['lr'] = value")
    assert "meter.update(loss.item())" in refused("train.py", changing, capsys)
    assert _compared(moved("train.py", text.replace("BODY", "self.sum += value"))) == _compared(
        moved("train.py", PLAIN)
    )
