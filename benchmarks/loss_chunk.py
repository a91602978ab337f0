"""`task.loss_chunk` against the whole matrix of logits: memory and processor time of one forward and backward.

In: sizes. Out: a Markdown table, and every number as JSON in --out. Memory is the most that tensors took at once beyond
weights and their gradients, counted on live storages after every operation (what a kernel takes inside is not seen).
Processor time is the process's, one thread, interleaved: whole, chunk, chunk, whole, ...; medians.
Example: python benchmarks/loss_chunk.py --out results.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from run import processor
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from lockstep.data.batch import TARGETS
from lockstep.tasks.models import chunked_loss


class Live(TorchDispatchMode):
    """Counts live bytes of storages created inside the context, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        for each in tree_leaves(found):
            if isinstance(each, Tensor):
                self.count(each.untyped_storage())
        return found

    def count(self, storage: Any, given: bool = False) -> None:
        place, size = storage._cdata, storage.nbytes()
        if place in self.known:
            return
        self.known.add(place)
        size = 0 if given else size
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self.gone, place, size)

    def gone(self, place: int, size: int) -> None:
        self.known.discard(place)
        self.now -= size


def measured(model: nn.Module, loss: Callable[[], Tensor], precision: str, count: bool) -> tuple[float, int, float]:
    """CPU seconds, peak bytes and loss of one forward and backward."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)  # as in later steps, or in DDP's buckets
    live = Live()
    for tensor in [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters())]:
        live.count(tensor.untyped_storage(), given=True)
    begun = time.process_time()
    if count:
        with live:
            found = both(loss, precision)
    else:
        found = both(loss, precision)
    return time.process_time() - begun, live.most, found


def both(loss: Callable[[], Tensor], precision: str) -> float:
    with torch.autocast("cpu", torch.bfloat16, precision == "bf16"):
        found = loss()
    found.backward()
    return float(found.detach())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[32_000, 128_000])
    parser.add_argument("--chunks", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--examples", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--targets", type=float, default=1.0, help="share of the positions that have one")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for vocabulary in args.vocabularies:
        for precision in args.precisions:
            rows += compared(args, vocabulary, precision)
    hardware = {"processor": processor(), "date": time.strftime("%Y-%m-%d"), "torch": torch.__version__}
    hardware |= {"transformers": transformers.__version__, "arguments": {k: str(v) for k, v in vars(args).items()}}
    args.out.write_text(json.dumps({"hardware": hardware, "rows": rows}, indent=1))
    print(
        "| vocabulary | precision | logits at once | peak MiB | x whole | processor s | x whole | loss |\n|"
        + "---|" * 8
    )
    for row in rows:
        print(
            f"| {row['vocabulary']} | {row['precision']} | {row['chunk'] or 'all'} | {row['bytes'] / 2**20:.0f} "
            f"| {row['memory_ratio']:.2f} | {row['seconds']:.3f} | {row['time_ratio']:.2f} | {row['loss']:.6f} |"
        )


def compared(args: argparse.Namespace, vocabulary: int, precision: str) -> list[dict[str, Any]]:
    """Return a row for whole logits, and one per chunk size."""
    torch.manual_seed(0)
    sizes = {"n_layer": args.layers, "n_head": 4, "n_embd": args.width, "n_positions": args.length}
    config = AutoConfig.for_model("gpt2", vocab_size=vocabulary, use_cache=False, **sizes)
    model = AutoModelForCausalLM.from_config(config).train()
    ids = torch.randint(vocabulary, (args.examples, args.length))
    targets = torch.where(torch.rand(ids.shape) < args.targets, ids.roll(-1, 1), -100)
    count = int((targets >= 0).sum())

    def whole() -> Tensor:
        logits = model(input_ids=ids).logits.float()
        return cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / count

    ways: dict[int, Callable[[], Tensor]] = {0: whole}
    installed = chunked_loss.install(model, args.chunks[0])
    head = model.get_output_embeddings().forward.__self__  # the owner of the hooks; its size is changed below

    def in_chunks(size: int) -> Callable[[], Tensor]:
        def loss() -> Tensor:
            head.chunk = size
            return installed(input_ids=ids, **{TARGETS: targets}).loss / count

        return loss

    ways |= {size: in_chunks(size) for size in args.chunks}
    found: dict[int, list[tuple[float, int, float]]] = {size: [] for size in ways}
    for number in range(args.rounds + 1):  # the first round measures memory, and warms up
        order = list(ways) if number % 2 else list(reversed(ways))
        for size in order:
            torch.manual_seed(1)
            found[size].append(measured(model, ways[size], precision, count=number == 0))
    rows = []
    for size, runs in found.items():
        seconds = statistics.median(run[0] for run in runs[1:])
        ratio = statistics.median(run[0] / other[0] for run, other in zip(runs[1:], found[0][1:], strict=True))
        row = {"vocabulary": vocabulary, "precision": precision, "chunk": size, "bytes": runs[0][1], "seconds": seconds}
        row |= {"memory_ratio": runs[0][1] / found[0][0][1], "time_ratio": ratio, "loss": runs[-1][2]}
        rows.append(row | {"runs": [run[0] for run in runs[1:]]})
    return rows


if __name__ == "__main__":
    main()
