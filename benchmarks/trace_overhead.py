"""What tracing costs: processor time of a step with and without, in turns, and bytes a step.

    python benchmarks/trace_overhead.py [--only MiniLM] [--device cuda]     prints the rows of a table

On a GPU it is the time of the clock, from one wait for the device to the next, each after `--group` steps.

In: a model of MiniLM's size (6 layers of 384, a vocabulary of 30,522; 8 texts of 64 tokens), GPT-2 of two sizes, the
quick start's size (2 layers of 64), and one of over 300 tensors. Out: medians of a step's seconds, the ratio of
the means, of the medians and of the least, and bytes of trace a step. Runs without and with alternate: ABBA. The first
`FIRST` steps of each run are not counted: more is measured in them. So is in each eighth step, which the mean includes.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

from lockstep_trace import tracer
from lockstep_trace.tracer import Settings

SIZES = {
    "MiniLM, 22.7M parameters": (384, 6, 12, 30522, 8, 64),
    "MiniLM, 16 texts of 128 tokens": (384, 6, 12, 30522, 16, 128),
    "GPT-2, 6 layers of 384": (384, 6, 6, 50257, 8, 64),
    "GPT-2, 124M parameters": (768, 12, 12, 50257, 4, 128),
    "2 layers of 64": (64, 2, 4, 4000, 32, 64),
    "19 layers of 64": (64, 19, 4, 4000, 8, 64),
}
FIRST = 9


def now(device: str) -> float:
    """CPU seconds; on a GPU wall-clock seconds after synchronizing the device."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def model_of(name: str, sizes: tuple[int, ...]) -> torch.nn.Module:
    width, layers, heads, words = sizes[:4]
    if name.startswith("GPT-2"):
        return GPT2LMHeadModel(GPT2Config(vocab_size=words, n_embd=width, n_layer=layers, n_head=heads))
    config = BertConfig(
        vocab_size=words,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
    )
    return BertForSequenceClassification(config)


def measured(
    name: str, sizes: tuple[int, ...], rounds: int, steps: int, device: str, group: int
) -> tuple[list[float], list[float], int, int]:
    """Seconds per step without and with the tracer (means over `group` steps), bytes per step, number of tensors."""
    words, batch, length = sizes[3:]
    torch.manual_seed(0)
    model = model_of(name, sizes).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    ids = torch.randint(0, words, (batch, length), device=device)
    labels = ids if name.startswith("GPT-2") else torch.randint(2, (batch,), device=device)
    times: dict[bool, list[float]] = {False: [], True: []}
    size = 0
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(2 * rounds):
            traced = turn % 4 in (1, 2)  # plain, traced, traced, plain
            if traced:
                tracer.begin(Settings(f"{folder}/{turn}"))
            for number in range(steps + FIRST):
                began = now(device)
                for _ in range(group):
                    optimizer.zero_grad()
                    model(input_ids=ids, labels=labels).loss.backward()
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                if number >= FIRST:
                    times[traced].append((now(device) - began) / group)
            if traced:
                tracer.end()
                size = sum(f.stat().st_size for f in Path(folder, str(turn)).glob("*.jsonl")) // (
                    group * (steps + FIRST)
                )
    tensors = sum(1 for _ in model.parameters())
    return times[False], times[True], size, tensors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--only", help="a part of a row's name")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--group", type=int, default=1, help="steps between two looks at the clock")
    known = parser.parse_args()
    where = torch.cuda.get_device_name() if known.device == "cuda" else f"threads: {torch.get_num_threads()}"
    print(f"torch {torch.__version__}, {where}")
    print("| model | tensors | seconds a step | traced | times, mean | median | least | kB a step |")
    print("|---|---|---|---|---|---|---|---|")
    for name, sizes in SIZES.items():
        if known.only and known.only not in name:
            continue
        every, all_traced, size, tensors = measured(name, sizes, known.rounds, known.steps, known.device, known.group)
        plain, traced, least = statistics.median(every), statistics.median(all_traced), min(all_traced) / min(every)
        row = (
            name,
            tensors,
            f"{plain:.4f}",
            f"{traced:.4f}",
            f"{statistics.mean(all_traced) / statistics.mean(every):.3f}",
            f"{traced / plain:.3f}",
            f"{least:.3f}",
            f"{size / 1e3:.0f}",
        )
        print("| " + " | ".join(map(str, row)) + " |", flush=True)


if __name__ == "__main__":
    main()
