"""Images: a small convolutional net on squares, rings and crosses that are drawn here, each read with new noise."""

import random

import torch
from torch import nn
from torch.utils.data import Dataset

SIDE, KINDS = 16, ("square", "ring", "cross")


def draw(kind, row, column, size):
    rows, columns = torch.meshgrid(torch.arange(SIDE) - row, torch.arange(SIDE) - column, indexing="ij")
    far = torch.maximum(rows.abs(), columns.abs())
    return {"square": far <= size, "ring": far == size, "cross": (rows.abs() == columns.abs()) & (far <= size)}[kind]


class Shapes(Dataset):
    def __init__(self, count):
        self.labels = [random.randrange(3) for _ in range(count)]  # seeded with the run's seed
        places = [[random.randrange(4, 12), random.randrange(4, 12), random.randrange(2, 5)] for _ in range(count)]
        self.images = [draw(KINDS[k], *place).float()[None] for k, place in zip(self.labels, places, strict=True)]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        image = self.images[i].flip(2) if random.random() < 0.5 else self.images[i]
        return {"image": image + 0.5 * torch.randn(1, SIDE, SIDE), "label": self.labels[i]}  # seeded for every item


def data():
    return {"train": Shapes(2000), "validation": Shapes(300), "test": Shapes(300)}


def block(inside, outside):
    return nn.Sequential(nn.Conv2d(inside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU(), nn.MaxPool2d(2))


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.blocks = nn.Sequential(block(1, width), block(width, 2 * width), block(2 * width, 4 * width))
        self.head = nn.Sequential(nn.Flatten(), nn.Dropout(0.1), nn.Linear(16 * width, len(KINDS)))

    def forward(self, image):  # of a batch that is a mapping, what goes by this name
        return self.head(self.blocks(image))


def loss(outputs, batch):
    return nn.functional.cross_entropy(outputs, batch["label"])


def metrics(outputs, batch):
    return {"accuracy": (outputs.argmax(-1) == batch["label"]).float()}
