#!/usr/bin/env bash
# torch 2.13.0: selective activation checkpointing (create_selective_checkpoint_contexts), whose policy saves the result of
# one random operation and has dropout, which comes later, computed again.
# Seen: the recomputation begins with the random state of the forward pass and skips the saved operation, so that dropout
# draws other zeros than in the forward pass. The loss is right, the gradient is another one, and nothing is said. With
# full checkpointing, and with a policy that saves neither, gradients are right. (Here noise is saved; not run, but like it: on a GPU,
# attention with dropout is one operation that draws, and the one that policies usually save.)
# Run on 2026-11-29.
# Status 0: it still behaves so. Any other: it changed, or could not be installed.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/environment"
"$room/environment/bin/python" -m pip install -q torch==2.13.0 numpy==2.4.6
cd "$room"
cat > shown.py <<'PYTHON'
from functools import partial

import torch
from torch.nn.functional import dropout
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

W = torch.linspace(-1, 1, 64).view(8, 8)
X = torch.linspace(-2, 2, 64).view(8, 8)


def block(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    noisy = x + 0.1 * torch.rand_like(x)
    return torch.sin(dropout(torch.sin(noisy @ w), 0.5) @ w)


def trained(run) -> tuple[float, torch.Tensor]:
    torch.manual_seed(0)
    w = W.clone().requires_grad_()
    loss = run(X, w).sum()
    loss.backward()
    return loss.item(), w.grad


def selective(saved: tuple):
    def policy(context, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    return lambda x, w: checkpoint(block, x, w, use_reentrant=False, context_fn=contexts)


aten = torch.ops.aten
loss, gradient = trained(block)
for name, run, right in (
    ("all recomputed", lambda x, w: checkpoint(block, x, w, use_reentrant=False), True),
    ("products saved", selective((aten.mm.default,)), True),
    ("noise saved", selective((aten.rand_like.default,)), False),
):
    other_loss, other = trained(run)
    off = ((other - gradient).norm() / gradient.norm()).item()
    print(f"{name}: loss {other_loss:.4f} (without checkpointing {loss:.4f}), gradient off by {off:.0%}")
    assert other_loss == loss
    assert off == 0 if right else off > 0.1
PYTHON
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 environment/bin/python shown.py
