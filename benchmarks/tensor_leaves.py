"""What `strategy.tensor_leaves` costs on one rank: processor time of a forward and backward, in leaves and whole.

In: sizes. Out: a Markdown table, and every number as JSON in --out. A BERT of MiniLM's size (6 layers of 384), with 16
heads of 24 numbers, so that 8 leaves can share them. One thread; interleaved, in an order that turns round each time:
whole, 4, 8, 8, 4, whole, ...; a ratio is of two in one round, and the table has the median of all rounds and
the quartiles. Example: python benchmarks/tensor_leaves.py --out results.json
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from run import processor
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

from lockstep.strategies.engines import tensor_plans
from lockstep.strategies.exact.tensor_leaves import LeafRanks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--leaves", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--batches", nargs="+", default=["16x24", "4x128"], help="examples x tokens")
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for batch in args.batches for precision in args.precisions for row in compared(args, batch, precision)]
    hardware = {"processor": processor(), "date": time.strftime("%Y-%m-%d"), "torch": torch.__version__}
    hardware |= {
        "transformers": transformers.__version__,
        "arguments": {k: str(v) for k, v in vars(args).items() if k != "out"},
    }
    args.out.write_text(json.dumps({"hardware": hardware, "rows": rows}, indent=1) + "\n")
    print("| examples x tokens | precision | leaves | processor time, x whole | quartiles |\n|" + "---|" * 5)
    for row in rows:
        low, middle, high = row["ratios"]
        print(f"| {row['batch']} | {row['precision']} | {row['leaves']} | {middle:.2f} | {low:.2f} to {high:.2f} |")


def compared(args: argparse.Namespace, batch: str, precision: str) -> list[dict[str, Any]]:
    """Return a row per number of leaves."""
    torch.manual_seed(0)
    examples, tokens = map(int, batch.split("x"))
    config = BertConfig(
        num_hidden_layers=6, hidden_size=384, num_attention_heads=16, intermediate_size=1536, num_labels=6
    )
    whole = BertForSequenceClassification(config).train()
    ids, labels = torch.randint(1000, (examples, tokens)), torch.randint(6, (examples,))
    models: dict[int, nn.Module] = {1: whole}
    for leaves in args.leaves:
        models[leaves] = copy.deepcopy(whole)
        tensor_plans.install_leaves(models[leaves], config, LeafRanks(leaves))
    seconds: dict[int, list[float]] = {leaves: [] for leaves in models}
    for model in models.values():
        both(model, ids, labels, precision)
    for turn in range(args.rounds):
        for leaves in list(models) if turn % 2 == 0 else reversed(models):
            begun = time.process_time()
            both(models[leaves], ids, labels, precision)
            seconds[leaves].append(time.process_time() - begun)
    return [
        {
            "batch": batch,
            "precision": precision,
            "leaves": leaves,
            "seconds": seconds[leaves],
            "whole": seconds[1],
            "ratios": statistics.quantiles([a / b for a, b in zip(seconds[leaves], seconds[1], strict=True)], n=4),
        }
        for leaves in args.leaves
    ]


def both(model: nn.Module, ids: Tensor, labels: Tensor, precision: str) -> None:
    """Run forward and backward; gradients exist already, as in all micro-batches of a step but the first."""
    with torch.autocast("cpu", torch.bfloat16, precision == "bf16"):
        loss = model(input_ids=ids, labels=labels).loss
    loss.backward()


if __name__ == "__main__":
    main()
