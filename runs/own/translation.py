"""Translation: a transformer written out, from English to German number words, letter by letter."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

PAD, BEGIN, END = 0, 1, 2
LETTERS = "...abcdefghijklmnopqrstuvwxyzäöüß- "
ONES = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
ONES = (ONES + "seventeen eighteen nineteen").split()
TENS = ". . twenty thirty forty fifty sixty seventy eighty ninety".split()  # noqa: SIM905
EINER = "null eins zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn fünfzehn sechzehn "
EINER = (EINER + "siebzehn achtzehn neunzehn").split()
ZEHNER = ". . zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig".split()  # noqa: SIM905


def english(n):
    if n < 20:
        return ONES[n]
    if n < 100:
        return TENS[n // 10] + (f"-{ONES[n % 10]}" if n % 10 else "")
    return f"{ONES[n // 100]} hundred" + (f" {english(n % 100)}" if n % 100 else "")


def german(n):
    if n < 20:
        return EINER[n]
    first = lambda k: "ein" if k == 1 else EINER[k]  # noqa: E731
    if n < 100:
        return (f"{first(n % 10)}und" if n % 10 else "") + ZEHNER[n // 10]
    return f"{first(n // 100)}hundert" + (german(n % 100) if n % 100 else "")


def data():
    def coded(text):
        return torch.tensor([BEGIN, *map(LETTERS.index, text), END])

    pairs = [{"source": coded(english(n)), "target": coded(german(n))} for n in torch.randperm(1000).tolist()]
    return {"train": pairs[:900], "validation": pairs[900:]}  # lists are data sets, too


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
    real = batch["target"][:, 1:] != PAD
    right = (outputs.argmax(-1) == batch["target"][:, 1:]) | ~real
    return {"letters": ((right & real).sum(), real.sum()), "words": right.all(-1).float()}


def generate(model, batch):
    source, written = batch["source"], batch["target"][:, :1]
    for _ in range(40):
        padded = torch.cat([written, written[:, :1]], dim=1)  # the last column is what the model does not see
        written = torch.cat([written, model(source, padded)[:, -1:].argmax(-1)], dim=1)
    told = lambda row: "".join(LETTERS[i] for i in row[1:]).partition(LETTERS[END])[0].strip(".")  # noqa: E731
    columns = {"source": source, "written": written, "reference": batch["target"]}
    rows = zip(*(map(told, codes.tolist()) for codes in columns.values()), strict=True)
    return [dict(zip(columns, row, strict=True)) for row in rows]
