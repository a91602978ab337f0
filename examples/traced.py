"""Find a fault in a loop that raises no error: `python examples/traced.py`, half a minute.

`loop` is an ordinary training loop; with `--forgetful` it does not zero its gradients. The script traces itself twice
and compares: what `lockstep trace -o a -- python train.py` and `lockstep diff a b` do with a script of yours.
"""

import subprocess
import sys

import torch
from torch import nn


def loop(forgetful: bool) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(256, 8)
    labels = (inputs.sum(dim=1) > 0).long()
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for start in range(0, 256, 32):
        part = slice(start, start + 32)
        loss = nn.functional.cross_entropy(model(inputs[part]), labels[part])
        loss.backward()
        optimizer.step()
        if not forgetful:
            optimizer.zero_grad()


def lockstep(*words: str) -> int:
    return subprocess.run([sys.executable, "-m", "lockstep", *words]).returncode


if __name__ == "__main__":
    if "loop" in sys.argv:
        loop("--forgetful" in sys.argv)
        sys.exit()
    right, wrong = "outputs/examples/right", "outputs/examples/wrong"
    lockstep("trace", "-o", right, "--", sys.executable, __file__, "loop")
    lockstep("trace", "-o", wrong, "--", sys.executable, __file__, "loop", "--forgetful")
    sys.exit(0 if lockstep("diff", right, wrong) == 1 else "the fault was not found")
