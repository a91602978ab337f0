"""User modules for `task: module`, one per family: from perceptrons to sequences of unequal lengths.

In: a name, and whether it drops something. Out: the code of `mine.py`, and keys of the task, which name its functions.
"""

from __future__ import annotations

from typing import Any

COUNT = 29  # items: three steps of 8, and a short one, where some are for validation
_HEAD = """
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

DROPOUT = {dropout}
COUNT = {count}
"""
_NUMBERS = """
def data():
    draw = torch.Generator().manual_seed(3)
    inputs = torch.randn(COUNT, 6, generator=draw)
    return TensorDataset(inputs, inputs[:, :2] * 2 + 1)
"""
_PICTURES = """
class Pictures(Dataset):
    def __init__(self, count, seed):
        draw = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(3, (count,), generator=draw)
        self.pixels = torch.randn(count, 1, 6, 6, generator=draw) + self.labels[:, None, None, None]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return {"pixels": self.pixels[i], "label": self.labels[i]}


def data():
    return {"train": Pictures(COUNT, 1), "validation": Pictures(7, 2)}


def loss(outputs, batch):
    return functional.cross_entropy(outputs, batch["label"]{reduction})


def metrics(outputs, batch):
    return {"accuracy": (outputs.argmax(-1) == batch["label"]).float()}
"""
_SEQUENCES = """
class Sequences(Dataset):
    def __len__(self):
        return COUNT

    def __getitem__(self, i):
        draw = torch.Generator().manual_seed(i)
        ids = torch.randint(1, 20, (2 + i % 7,), generator=draw)
        return {"ids": ids[:-1], "next": ids[1:]}


def data():
    return Sequences()


def collate(items):
    pad = nn.utils.rnn.pad_sequence
    return {
        "ids": pad([item["ids"] for item in items], True, 0),
        "next": pad([item["next"] for item in items], True, -100),
    }


def targets(item):
    return len(item["next"])


def length(item):
    return len(item["ids"])


def loss(outputs, batch):
    return functional.cross_entropy(outputs.transpose(1, 2), batch["next"], ignore_index=-100, reduction="sum")
"""
# Family -> its code, and the keys of the task beside model, data and loss.
FAMILIES: dict[str, tuple[str, tuple[str, ...]]] = {
    "perceptron": (
        _NUMBERS
        + """
def build():
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(DROPOUT), nn.Linear(16, 8), nn.Linear(8, 2))


def loss(outputs, answers):
    return functional.mse_loss(outputs, answers)
""",
        (),
    ),
    "normed": (
        _NUMBERS
        + """
class build(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(DROPOUT))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(()))
        self.out = nn.Linear(16, 2, bias=False)

    def forward(self, x):
        x = self.inner(x)
        for block in self.blocks:
            x = x + block(x)
        return self.out(x) * self.scale


def loss(outputs, answers):
    return functional.smooth_l1_loss(outputs, answers, reduction="none").sum(-1)
""",
        (),
    ),
    "pictures": (
        _PICTURES.replace("{reduction}", "")
        + """
class build(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(i, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout2d(DROPOUT))
            for i in (1, 4)
        )
        self.head = nn.Linear(4, 3)

    def forward(self, pixels):
        for block in self.blocks:
            pixels = block(pixels)
        return self.head(pixels.mean((2, 3)))
""",
        ("metrics",),
    ),
    "grouped": (
        _PICTURES.replace("{reduction}", ', reduction="none", label_smoothing=0.1')
        + """
class build(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 8, 3), nn.GroupNorm(2, 8), nn.SiLU(), nn.MaxPool2d(2), nn.Flatten())
        self.head = nn.Sequential(nn.Dropout(DROPOUT), nn.Linear(32, 3))

    def forward(self, pixels):
        return self.head(self.body(pixels))
""",
        ("metrics",),
    ),
    "recurrent": (
        _SEQUENCES
        + """
class build(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 12, padding_idx=0)
        self.cells = nn.LSTM(12, 12, num_layers=2, batch_first=True, dropout=DROPOUT)
        self.out = nn.Linear(12, 20)

    def forward(self, ids):
        return self.out(self.cells(self.embed(ids))[0])
""",
        ("collate", "targets"),
    ),
    "attentive": (
        _SEQUENCES
        + """
class build(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=DROPOUT, batch_first=True) for _ in range(2)
        )
        self.out = nn.Linear(16, 20, bias=False)
        self.out.weight = self.embed.weight  # one weight in two places

    def forward(self, ids):
        x, ahead = self.embed(ids), nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        for layer in self.layers:
            x = layer(x, src_mask=ahead, is_causal=True)
        return self.out(x)
""",
        ("collate", "targets", "length"),
    ),
}


def code_of(family: str, dropout: bool) -> str:
    """Return the text of `mine.py`."""
    head = _HEAD.replace("{dropout}", "0.1" if dropout else "0.0").replace("{count}", str(COUNT))
    return head + FAMILIES[family][0]


def task_of(family: str) -> dict[str, Any]:
    """Return the keys of the task."""
    names = {"model": "build", "data": "data", "loss": "loss"} | {key: key for key in FAMILIES[family][1]}
    return {key: f"mine.{name}" for key, name in names.items()}
