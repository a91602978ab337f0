#!/usr/bin/env bash
# ema-pytorch 0.8.3: `EMA` follows parameters and buffers of floating point only. Buffers of integers and booleans (counts of
# BatchNorm, "is initialized" flags, masks of pruned heads) keep the value that they had at the first update: neither averaged
# nor copied. The averaged model, and its state dict, mixes averaged weights with those old values.
# Run on 2026-11-30.
# Status 0: it still behaves so. Any other: it changed, or could not be installed.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/environment"
"$room/environment/bin/python" -m pip install -q torch==2.13.0 ema-pytorch==0.8.3 numpy==2.4.6
cd "$room"
cat > shown.py <<'PYTHON'
import torch
from ema_pytorch import EMA


class Pruned(torch.nn.Module):
    """A layer whose mask of used inputs changes during training."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))
        self.register_buffer("used", torch.ones(4, dtype=torch.bool))
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("scale", torch.tensor(0.0))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (inputs * self.weight * self.used).sum()


model = Pruned()
average = EMA(model, beta=0.9, update_after_step=0, update_every=1)
average.update()
model.used[2:] = False
for _ in range(100):
    model.steps += 1
    model.scale.fill_(1.0)
    average.update()
held = average.ema_model
print(f"output: model {model(torch.ones(4)).item()}, averaged {held(torch.ones(4)).item()}")
print(f"steps: model {model.steps}, averaged {held.steps}; scale: model {model.scale}, averaged {held.scale:.2f}")
assert model(torch.ones(4)) == 2 and held(torch.ones(4)) == 4
assert model.steps == 100 and held.steps == 0
assert held.scale > 0.99
PYTHON
OMP_NUM_THREADS=1 environment/bin/python shown.py
