"""The weights of a thousand ranks, in one process: every strategy that reduces over the tree, against one process.

In: numbers of ranks and of micro-batches. Out: a line of JSON each: the SHA-256 of the weights after three steps of a
small transformer with dropout, clipping and AdamW, on all ranks, beside that of `single`; messages and bytes sent.
Status 1 if one differs. The ranks are threads of which one runs at a time (`tests/support/simulated.py`): the
strategies' own code, torch's DistributedDataParallel and FSDP2 included, on process groups in memory.
Example: python benchmarks/thousand.py --ranks 96 100 1000 1024 --micro-batches 1024 4096 --out FILE
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import torch

from support.harness import digest
from support.own_modules import job
from support.simulated import SMALL, Job, on_ranks, whole

STRATEGIES = {
    "allreduce": ("strategy.name=allreduce",),
    "ddp": ("strategy.name=ddp",),
    "fsdp2 gather=step": ("strategy.name=fsdp2", "strategy.options.gather=step"),
    "fsdp2 gather=micro_batch": ("strategy.name=fsdp2", "strategy.options.gather=micro_batch"),
}


def hashes(here: Path, micro_batches: int, ranks: int, a_host: int, *words: str) -> tuple[set[str], int, int]:
    """Hashes of the weights on all ranks; messages and bytes."""
    said = (f"micro_batches={micro_batches}", f"batch_size={micro_batches + 3}", *words)
    trained = Job(job(here, SMALL, *said))
    parts, traffic = on_ranks(trained.run, [f"host-{rank // a_host}" for rank in range(ranks)], trained)
    found = {digest(weights) for weights in whole(parts, dict(trained.task.model().named_parameters()))}
    return found, sum(traffic.messages.values()), sum(traffic.bytes.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1024])
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1024])
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--a-host", type=int, default=8, help="ranks of a host")
    parser.add_argument("--out", type=Path, help="lines are added to it")
    args = parser.parse_args()
    torch.set_num_threads(1)
    same = True
    with tempfile.TemporaryDirectory() as room:
        sys.path.insert(0, room)
        for micro_batches in args.micro_batches:
            (alone,), *_ = hashes(Path(room), micro_batches, 1, 1, "strategy.name=single")
            for ranks in args.ranks:
                for name in args.strategies:
                    began = time.process_time()
                    found, messages, sent = hashes(Path(room), micro_batches, ranks, args.a_host, *STRATEGIES[name])
                    same &= found == {alone}
                    line = {
                        "strategy": name,
                        "ranks": ranks,
                        "micro_batches": micro_batches,
                        "a_host": args.a_host,
                        "same": found == {alone},
                        "sha256": sorted(found),
                        "single": alone,
                        "messages": messages,
                        "bytes": sent,
                        "processor_s": round(time.process_time() - began, 1),
                    }
                    print(json.dumps(line), flush=True)
                    if args.out:
                        with args.out.open("a") as file:
                            file.write(json.dumps(line) + "\n")
    if not same:
        raise SystemExit("other weights than those of one process")


if __name__ == "__main__":
    main()
