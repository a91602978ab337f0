"""A training loop of a small language model with padding, as scripts for transformers have it, with one fault of a
list.

    python text.py [--fault NAME] [--batch N] [--accumulate N]

It imports torch alone. The loss of a step is the sum over all targets divided by their number, over ranks as well.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--fault", default="")
parser.add_argument("--batch", type=int, default=8, help="of a process")
parser.add_argument("--accumulate", type=int, default=1)
a = parser.parse_args()
world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
PAD, WORDS, LENGTH = 0, 50, 12


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 24)
        self.inner = nn.GRU(24, 24, batch_first=True)
        self.head = nn.Linear(24, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The sum of the losses of all targets."""
        logits = self.head(self.inner(self.embedding(input_ids))[0])
        target = labels[:, 1:].reshape(-1)
        return nn.functional.cross_entropy(
            logits[:, :-1].reshape(-1, WORDS), target, ignore_index=-100, reduction="sum"
        )


def main() -> None:
    if world > 1:
        dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(5)
    texts = torch.randint(1, WORDS, (64, LENGTH), generator=generator)
    lengths = torch.randint(3, LENGTH + 1, (64,), generator=generator)
    lengths[1::2] = lengths[1::2].clamp(max=4)  # ranks with long texts, and ranks with short ones
    past = torch.arange(LENGTH) >= lengths[:, None]
    texts = texts.masked_fill(past, PAD)
    labels = texts.masked_fill(past, PAD if a.fault == "padding-counts" else -100)
    torch.manual_seed(0)
    plain = Language()
    model: nn.Module = DistributedDataParallel(plain) if world > 1 else plain
    if a.fault == "untied":
        plain.head.weight = nn.Parameter(plain.embedding.weight.detach().clone())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    size = a.batch * a.accumulate * world
    for step in range(64 // size):
        if a.fault == "untied-later" and step == 3:
            plain.head.weight = nn.Parameter(plain.embedding.weight.detach().clone())
        rows = torch.arange(step * size, (step + 1) * size)[rank::world].chunk(a.accumulate)
        count = sum(int((labels[r][:, 1:] != -100).sum()) for r in rows)
        total = torch.tensor(float(count))
        if world > 1:
            dist.all_reduce(total)
        optimizer.zero_grad()
        for i, r in enumerate(rows):
            own = (labels[r][:, 1:] != -100).sum()
            loss = model(input_ids=texts[r], labels=labels[r])
            if a.fault == "mean-of-means":
                loss = loss / own / a.accumulate
            elif a.fault == "mean-of-ranks":
                loss = loss / count
            elif a.fault == "world-forgotten":
                loss = loss / total
            elif a.fault == "inflated":  # every rank takes its share of the count for the whole
                loss = loss * world / (total / world)
            elif a.fault == "divided-again":
                loss = loss * world / total / a.accumulate
            elif a.fault == "wider-count":  # of two steps' examples
                wide = labels[step * size : (step + 2) * size]
                loss = loss * world / (wide[:, 1:] != -100).sum()
            elif a.fault == "first-counts":
                loss = loss / (labels[rows[0]][:, 1:] != -100).sum() / a.accumulate
            else:
                loss = loss * world / total
            if not (a.fault == "last-left-out" and i == a.accumulate - 1):
                loss.backward()
        optimizer.step()


main()
