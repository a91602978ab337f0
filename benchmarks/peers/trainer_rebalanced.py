"""Peer: transformers.Trainer with `train_sampling_strategy="batch_rebalance"`: every step's examples are cut by length
into groups of equal padded cost, as lockstep's micro-batches are; which examples meet in a step is left to chance.
The groups are the ranks' accumulation steps. The command line is common.py's, and `--groups`: how many a step has."""

import argparse
import sys
from typing import Any

from common import parse_arguments, world_size
from torch import Tensor
from torch.nn.functional import cross_entropy
from trainer import QUICK, main


def loss_of_step(outputs: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
    """This group's share of the step's mean. Groups differ in size, and the mean of their means, which a classifier of
    transformers gives Trainer, would be another loss."""
    return cross_entropy(outputs.logits, labels, reduction="sum") / num_items_in_batch


if __name__ == "__main__":
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--groups", type=int, default=8)
    extra, sys.argv[1:] = own.parse_known_args()
    args = parse_arguments(__doc__)
    if extra.groups % world_size() or args.batch_size % extra.groups:
        raise SystemExit("--groups must be a multiple of the processes and divide --batch-size")
    settings = {
        "train_sampling_strategy": "batch_rebalance",
        "per_device_train_batch_size": args.batch_size // extra.groups,  # times groups: the examples of a step
        "gradient_accumulation_steps": extra.groups // world_size(),
    }
    main(f"trainer_rebalanced {extra.groups}", QUICK | settings, "grouped", args, loss_of_step)
