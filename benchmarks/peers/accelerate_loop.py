"""Peer: a training loop on Accelerate, as its documentation writes it: prepare, backward, clip, step.
The scheduler is not prepared: a prepared one steps once per process at every optimizer step.
The command line is common.py's, and `--by-length`: batches of like length, from 50 batches sorted at once."""

import argparse
import sys
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from common import (
    BETAS,
    EPS,
    Meter,
    accuracy,
    check_world,
    load,
    parameter_groups,
    parse_arguments,
    report,
    sort_fifty_batches,
)
from torch.utils.data import DataLoader
from transformers import DataCollatorWithPadding, get_scheduler
from transformers.trainer_pt_utils import LengthGroupedSampler


def batches(loader: Any) -> Iterator[dict[str, torch.Tensor]]:
    """Epoch after epoch, each in its own order."""
    epoch = 0
    while True:
        loader.set_epoch(epoch)
        yield from loader
        epoch += 1


def train(args: argparse.Namespace, by_length: bool) -> tuple[Meter, float | None]:
    # cpu=True: without it, two processes under torchrun silently train as two worlds of one
    accelerator = Accelerator(cpu=args.device == "cpu", mixed_precision="bf16" if args.precision == "bf16" else "no")
    check_world(accelerator.num_processes)
    model, tokenizer, training, validation = load(args)
    meter = Meter(model, args, training, validation)
    collate = DataCollatorWithPadding(tokenizer)
    optimizer = torch.optim.AdamW(
        parameter_groups(model, args.weight_decay), lr=args.learning_rate, betas=BETAS, eps=EPS, fused=True
    )
    scheduler = get_scheduler(args.schedule, optimizer, args.warmup_steps, args.steps)
    lengths = [len(row) for row in training.columns["input_ids"]]
    one_order = torch.Generator().manual_seed(args.seed)  # on every rank, in every epoch
    order: dict[str, Any] = {"shuffle": True}
    if by_length:
        sort_fifty_batches()
        order = {"sampler": LengthGroupedSampler(args.batch_size, lengths=lengths, generator=one_order)}
    network, optimizer, train_loader, validation_loader = accelerator.prepare(
        model,
        optimizer,
        DataLoader(training, batch_size=args.per_process, collate_fn=collate, **order),
        DataLoader(validation, batch_size=args.per_process, collate_fn=collate),
    )

    network.train()
    source = batches(train_loader)
    for _ in range(args.steps):
        loss = network(**next(source)).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(network.parameters(), args.clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        meter.step()

    score = None
    if args.evaluate:
        network.eval()
        correct = seen = 0
        for batch in validation_loader:
            with torch.no_grad():
                predicted = network(**batch).logits.argmax(-1)
            predicted, labels = accelerator.gather_for_metrics((predicted, batch["labels"]))
            correct += int((predicted == labels).sum())
            seen += len(labels)
        score = accuracy(correct, seen, validation)
    return meter, score


if __name__ == "__main__":
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--by-length", action="store_true")
    extra, sys.argv[1:] = own.parse_known_args()
    arguments = parse_arguments(__doc__)
    name = "accelerate by length" if extra.by_length else "accelerate"
    pads = "grouped" if extra.by_length else "random"
    report(arguments, name, "accelerate", *train(arguments, extra.by_length), pads)
