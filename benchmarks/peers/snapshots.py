"""Peer: a training loop on DDP that torchrun starts again after a loss, from a snapshot each so many steps, as in
PyTorch's tutorial on torchrun writes it. The model and the batches have the sizes of the job of
`tests/support/command.py`. In: --every N. Out: `out/metrics.jsonl`, a line a step, and `out/events.jsonl`, a line a
start, as lockstep's. Example: torchrun --standalone --nproc_per_node=3 --max-restarts=100 snapshots.py --every 20"""

import argparse
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2ForSequenceClassification

BATCH, LENGTH, VOCABULARY, LABELS = 22, 32, 400, 6
OUT = Path("out")
SNAPSHOT = OUT / "snapshot.pt"


def tell(name: str, **values: object) -> None:
    with open(OUT / name, "a", encoding="utf-8") as file:
        file.write(json.dumps(values) + "\n")


def main() -> None:
    own = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    own.add_argument("--every", type=int, default=20)
    every = own.parse_args().every
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    OUT.mkdir(exist_ok=True)
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": LENGTH, "vocab_size": VOCABULARY}
    model = GPT2ForSequenceClassification(GPT2Config(**sizes, num_labels=LABELS, pad_token_id=0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    step = 0
    if SNAPSHOT.exists():
        kept = torch.load(SNAPSHOT, weights_only=True)
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        step = kept["step"]
    network = DistributedDataParallel(model)
    if rank == 0:
        tell("events.jsonl", event="start", step=step, processes=size)
    while True:
        drawn = torch.Generator().manual_seed(step)
        tokens = torch.randint(1, VOCABULARY, (BATCH, LENGTH), generator=drawn)[rank::size]
        labels = torch.randint(0, LABELS, (BATCH,), generator=drawn)[rank::size]
        loss = network(input_ids=tokens, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if rank == 0:
            tell("metrics.jsonl", step=step, split="train", loss=float(loss.detach()))
            if step % every == 0:
                aside = SNAPSHOT.with_suffix(".new")
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, aside)
                os.replace(aside, SNAPSHOT)


if __name__ == "__main__":
    main()
