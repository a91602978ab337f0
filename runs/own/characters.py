"""Characters: a recurrent net that learns to spell short sentences, and writes some."""

import random

import torch
from torch import nn

LETTERS = " abcdefghijklmnopqrstuvwxyz.\n"
BLOCK = 48


def sentence():
    one, other = random.sample(["cat", "dog", "hen", "fox", "goat", "mouse"], 2)
    how = random.choice(["slowly", "gladly", "often", "never"])
    does = random.choice(["sees", "follows", "hears", "greets"])
    return f"the {random.choice(['old', 'small', 'grey'])} {one} {how} {does} the {other}.\n"


class Blocks:
    """Anything with a length and items by number is a data set."""

    def __init__(self, sentences):
        text = "".join(sentence() for _ in range(sentences))
        self.codes = torch.tensor([LETTERS.index(letter) for letter in text])

    def __len__(self):
        return (len(self.codes) - 1) // BLOCK

    def __getitem__(self, i):
        block = self.codes[i * BLOCK : (i + 1) * BLOCK + 1]
        return block[:-1], block[1:]  # a pair: the model sees the first, the loss the second


def data():
    return Blocks(3000), Blocks(200)


class Characters(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(len(LETTERS), 32)
        self.memory = nn.GRU(32, 96, batch_first=True)
        self.head = nn.Linear(96, len(LETTERS))

    def forward(self, codes):
        return self.head(self.memory(self.embedding(codes))[0])  # begins anew with every block


def loss(outputs, following):
    return nn.functional.cross_entropy(outputs.flatten(0, 1), following.flatten(), reduction="none")


def generate(model, batch):
    codes = batch[0][:, :12]
    for _ in range(30):
        codes = torch.cat([codes, model(codes)[:, -1:].argmax(-1)], dim=1)
    return ["".join(LETTERS[i] for i in row).replace("\n", " / ") for row in codes.tolist()]
