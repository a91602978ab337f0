"""Whether a peer did what it says: refused with a sentence where it did not, so that no silent fallback is measured.

In: what the meter sees of each rank. Out: nothing, or a RuntimeError. Looked at are the examples of every step and of
the whole epoch, the padding, the optimizer's steps and kind, the threads, and the loss on held-out examples, which
must fall and be the same bits on every rank.
"""

from __future__ import annotations

import argparse
import contextlib
import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

PROBED = 64  # held-out examples whose loss is taken before and after
LEARNS_AFTER = 8  # steps: with fewer the loss need not fall


def settled(device: str) -> None:
    """Wait for the device: what is timed has been done."""
    if device == "cuda":
        torch.cuda.synchronize()


def memory_baseline(device: str) -> int:
    """Bytes this process holds now, its imports: the peak is counted from here on. Linux. Of a GPU's memory: none."""
    if device == "cuda":
        return 0
    with contextlib.suppress(OSError):  # then the mark of the imports stays, which training passes by far
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark becomes what is held now
    return _of_status("VmRSS")


def peak_memory(device: str) -> int:
    """The most bytes this process has held since: VmHWM, and not getrusage's, which a child inherits. On a GPU the most
    that its tensors took."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return _of_status("VmHWM")


def _of_status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def _fingerprints(ids: Tensor, mask: Tensor) -> Tensor:
    """Of each row's real tokens [B]: int64, the same however far the row is padded."""
    places = torch.arange(1, ids.shape[1] + 1, device=ids.device).square() * 2654435761 + 40503
    return (ids.long() * mask.long() * places).sum(1)


class Checked:
    """Of one rank. `fed` is called with what the model is given, `step` after each optimizer step."""

    def __init__(self, model: nn.Module, args: argparse.Namespace, training: Any, validation: Any) -> None:
        self.model, self.args, self.training, self.validation = model, args, training, validation
        self.seen: list[Tensor] = []
        self.examples = [0] * args.steps  # of each step, here
        self.done = self.updates = 0
        self.fused = True
        self.before = self.loss()
        self.hook = register_optimizer_step_post_hook(self._updated)

    def fed(self, ids: Tensor, mask: Tensor) -> None:
        self.seen.append(_fingerprints(ids, mask))
        self.examples[self.done] += len(ids)

    def step(self) -> None:
        self.done += 1

    def _updated(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.updates += 1
        rule = type(getattr(optimizer, "rule", None))  # lockstep's calls torch's fused kernel
        fused = isinstance(optimizer, torch.optim.AdamW) and all(g.get("fused") for g in optimizer.param_groups)
        self.fused &= fused or (rule.__module__, rule.__name__) == ("lockstep.strategies.optimizers.adamw", "AdamW")

    def loss(self) -> float:
        """Mean cross-entropy of the first held-out examples, without dropout; nothing is drawn."""
        columns, device = self.validation.columns, next(self.model.parameters()).device
        was = self.model.training
        self.model.eval()
        total = 0.0
        with torch.no_grad():
            for i in range(min(PROBED, len(self.validation))):
                fed = {k: torch.tensor(columns[k][i], device=device)[None] for k in ("input_ids", "attention_mask")}
                logits = self.model(**fed).logits.float().cpu()
                total += float(nn.functional.cross_entropy(logits, torch.tensor(columns["label"][i])[None]))
        self.model.train(was)
        return total / min(PROBED, len(self.validation))

    def facts(self) -> dict[str, Any]:
        """For `verify`, of this rank."""
        self.hook.remove()
        names = {"updates": self.updates, "fused": self.fused, "threads": torch.get_num_threads()}
        losses = {"before": self.before, "after": self.loss()}
        return names | losses | {"examples_of_steps": self.examples, "seen": torch.cat(self.seen).tolist()}

    def verify(self, ranks: list[dict[str, Any]], padding: float, pads: str) -> tuple[float, float]:
        """Of all ranks. Returns the loss before and after. Errors: RuntimeError."""
        args = self.args

        def must(true: bool, text: str) -> None:
            if not true:
                raise RuntimeError(f"this peer is not what it says: {text}")

        for number, rank in enumerate(ranks):
            must(rank["threads"] == 1, f"rank {number} has {rank['threads']} threads")
            must(rank["updates"] == args.steps, f"{rank['updates']} updates in {args.steps} steps on rank {number}")
            must(rank["fused"], f"rank {number}'s optimizer is no fused AdamW")
        before, after = ranks[0]["before"], ranks[0]["after"]
        must(all((r["before"], r["after"]) == (before, after) for r in ranks), "its ranks have different weights")
        must(after < before or args.steps < LEARNS_AFTER, f"its loss goes from {before} to {after}")
        if args.whole:
            steps = [sum(counts) for counts in zip(*(r["examples_of_steps"] for r in ranks), strict=True)]
            must(set(steps) == {args.batch_size}, f"steps of {sorted(set(steps))} examples, not {args.batch_size}")
        if args.epochs:
            wanted = sorted(self._all_fingerprints() * args.epochs)
            must(sorted(x for r in ranks for x in r["seen"]) == wanted, "an epoch does not hold every example once")
            low, high = self._random_padding()
            right = low * 0.98 <= padding <= high * 1.02 if pads == "random" else padding - 1 < 0.6 * (low - 1)
            must(right, f"padding {padding:.3f} is not {pads}; at random it is from {low:.3f} to {high:.3f}")
        return before, after

    def _all_fingerprints(self) -> list[int]:
        rows = [torch.tensor(row)[None] for row in self.training.columns["input_ids"]]
        return [int(_fingerprints(row, torch.ones_like(row))) for row in rows]

    def _random_padding(self) -> tuple[float, float]:
        """The least and the most of 100 epochs in batches drawn at random."""
        lengths = [len(row) for row in self.training.columns["input_ids"]]
        size, found, draw = self.args.per_process, [], random.Random(0)
        for _ in range(100):
            draw.shuffle(lengths)
            batches = [lengths[i : i + size] for i in range(0, len(lengths), size)]
            found.append(sum(max(b) * len(b) for b in batches) / sum(lengths))
        return min(found), max(found)
