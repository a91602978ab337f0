"""User modules as files, and runs of them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from lockstep.config.plugins import find
from lockstep.config.run import Run, load
from lockstep.data.prepare import prepare

TOY = """
import random

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset


def build():
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 2))


def data():
    inputs = torch.randn(57, 3)
    answers = torch.stack([inputs.sum(-1), inputs[:, 0]], -1) + 3
    return TensorDataset(inputs, answers)


def loss(outputs, answers):
    return LOSS
"""
MEAN = TOY.replace("LOSS", "torch.nn.functional.mse_loss(outputs, answers)")


def job(here: Path, code: str, *overrides: str, functions: tuple[str, ...] = (), **values: Any) -> Run:
    """A run of a module with this code, under a unique name, because it is imported once per process. `functions`: keys
    of the task that name a function of the same name, besides model, data and loss."""
    module = f"mine_{hashlib.sha256(code.encode()).hexdigest()[:12]}"
    (here / f"{module}.py").write_text(code)
    names = {"model": "build", "data": "data", "loss": "loss"} | {name: name for name in functions}
    run = {
        "name": "mine",
        "output": str(here / "out"),
        "task": {"name": "module"} | {key: f"{module}.{name}" for key, name in names.items()},
        "steps": 6,
        "batch_size": 15,
        "micro_batches": 4,
        "optim": {"learning_rate": 1e-2, "warmup_steps": 2, "max_grad_norm": 0.5},
        "launch": {"device": "cpu", "threads": 1},
    }
    return load(None, list(overrides), run | values)


def found_of(run: Run) -> dict[str, Any]:
    """Facts found about a run's functions."""
    return prepare(run, find("tasks", run.task.name)).facts  # type: ignore[arg-type]


NET = '''
import random

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset


class Pictures(Dataset):
    """Each with noise, by all three generators, that is drawn anew whenever it is read."""

    def __init__(self, count):
        self.labels = torch.randint(3, (count,))
        self.pixels = torch.randn(count, 1, 6, 6) + self.labels[:, None, None, None]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        noise = torch.rand(1, 6, 6) + random.random() + torch.from_numpy(np.random.rand(1, 6, 6)).float()
        return {"pixels": self.pixels[i] + 0.1 * noise, "label": self.labels[i]}


def data():
    return {"train": Pictures(57), "val": Pictures(10)}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(i, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.1))
            for i in (1, 4, 4)
        )
        self.head = nn.Linear(4, 3)

    def forward(self, pixels):
        for block in self.blocks:
            pixels = block(pixels)
        return self.head(pixels.mean((2, 3)))


def loss(outputs, batch):
    return nn.functional.cross_entropy(outputs, batch["label"])


def metrics(outputs, batch):
    right = outputs.argmax(-1) == batch["label"]
    return {"accuracy": right.float(), "right": (right.sum(), len(right))}


def generate(model, batch):
    return [{"label": int(a), "guess": int(b)} for a, b in zip(batch["label"], model(batch["pixels"]).argmax(-1))]


build = Net
'''
NET_FUNCTIONS = ("metrics", "generate")
