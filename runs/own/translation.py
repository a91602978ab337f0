"""Translation: a transformer written out, from English to German number words, letter by letter."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

PAD, BEGIN, END, LETTERS = 0, 1, 2, "...abcdefghijklmnopqrstuvwxyzäöüß- "
ONES = "one two three four five six seven eight nine".split()  # noqa: SIM905
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()  # noqa: SIM905
EINER = "ein zwei drei vier fünf sechs sieben acht neun".split()  # noqa: SIM905
ZEHNER = "zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig".split()  # noqa: SIM905


def pair(i, j, k):  # two hundred forty-one: zweihunderteinundvierzig
    return f"{ONES[i]} hundred {TENS[j]}-{ONES[k]}", f"{EINER[i]}hundert{EINER[k]}und{ZEHNER[j]}"


def data():
    texts = [pair(n // 72, n // 9 % 8, n % 9) for n in torch.randperm(648).tolist()]
    codes = [[torch.tensor([BEGIN, *map(LETTERS.index, text), END]) for text in both] for both in texts]
    pairs = [dict(zip(("source", "target"), both, strict=True)) for both in codes]
    return {"train": pairs[:500], "validation": pairs[500:]}  # lists are data sets, too


def collate(items):
    return {k: nn.utils.rnn.pad_sequence([item[k] for item in items], batch_first=True) for k in ("source", "target")}


def length(item):
    return len(item["source"]) + len(item["target"])


def targets(item):
    return len(item["target"]) - 1  # what the loss below is a sum over


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.query, self.both, self.out = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)

    def forward(self, hidden, seen, mask=None, causal=False):
        split = lambda x: x.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # noqa: E731
        keys, values = self.both(seen).chunk(2, -1)
        mixed = scaled_dot_product_attention(split(self.query(hidden)), split(keys), split(values), mask, 0.0, causal)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, width, heads, crosses):
        super().__init__()
        self.own, self.cross = Attention(width, heads), Attention(width, heads) if crosses else None
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, hidden, mask, encoded=None):
        normed = self.norms[0](hidden)
        hidden = hidden + self.own(normed, normed, mask if encoded is None else None, encoded is not None)
        if encoded is not None:
            hidden = hidden + self.cross(self.norms[1](hidden), encoded, mask)
        return hidden + self.feed(self.norms[2](hidden))


class Transformer(nn.Module):
    def __init__(self, width=64, heads=4, layers=2):
        super().__init__()
        self.letters, self.places = nn.Embedding(len(LETTERS), width), nn.Embedding(64, width)
        self.encoder = nn.ModuleList(Layer(width, heads, crosses=False) for _ in range(layers))
        self.decoder = nn.ModuleList(Layer(width, heads, crosses=True) for _ in range(layers))
        self.head = nn.Linear(width, len(LETTERS))

    def embedded(self, codes):
        return self.letters(codes) + self.places(torch.arange(codes.shape[1], device=codes.device))

    def forward(self, source, target):
        mask = (source != PAD)[:, None, None]  # [B, 1, 1, S]: padding is not looked at
        encoded, hidden = self.embedded(source), self.embedded(target[:, :-1])
        for layer in self.encoder:
            encoded = layer(encoded, mask)
        for layer in self.decoder:
            hidden = layer(hidden, mask, encoded)
        return self.head(hidden)  # [B, T - 1, letters]


def loss(outputs, batch):
    return cross_entropy(outputs.transpose(1, 2), batch["target"][:, 1:], ignore_index=PAD, reduction="sum")


def metrics(outputs, batch):
    right, real = outputs.argmax(-1) == batch["target"][:, 1:], batch["target"][:, 1:] != PAD
    return {"letters": ((right & real).sum(), real.sum()), "words": (right | ~real).all(-1).float()}


def generate(model, batch):
    source, written = batch["source"], batch["target"][:, :1]
    for _ in range(40):
        more = model(source, torch.cat([written, written[:, :1]], 1))  # it does not see the last column
        written = torch.cat([written, more[:, -1:].argmax(-1)], 1)
    columns = {"source": source, "written": written, "reference": batch["target"]}
    texts = [["".join(LETTERS[i] for i in row[1:]).partition(".")[0] for row in c.tolist()] for c in columns.values()]
    return [dict(zip(columns, row, strict=True)) for row in zip(*texts, strict=True)]
