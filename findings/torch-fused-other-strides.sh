#!/usr/bin/env bash
# torch 2.13.0: fused optimizers on a CPU go through weight, gradient and state as they lie in memory, and do not look at
# strides. A convolution is trained, its optimizer's state saved, the model moved to channels_last, and the state loaded:
# the next fused step gives each weight another weight's momentum. AdamW, SGD with momentum and Adagrad do so; without
# fused=True they are right. A gradient that is assigned with other strides than its weight's is applied to other weights.
# CUDA's fused kernels raise an error for it (pytorch issues 106951, 110758).
# Run on 2026-11-29.
# Status 0: it still behaves so. Any other: it changed, or could not be installed.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/environment"
"$room/environment/bin/python" -m pip install -q torch==2.13.0 numpy==2.4.6
cd "$room"
cat > shown.py <<'PYTHON'
import torch


def resumed(name: str, fused: bool, *, channels_last: bool, **options: float) -> torch.Tensor:
    torch.manual_seed(0)
    layer, images = torch.nn.Conv2d(3, 4, 3), torch.randn(2, 3, 8, 8)
    make = getattr(torch.optim, name)

    def step(optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        layer(images).square().mean().backward()
        optimizer.step()

    optimizer = make(layer.parameters(), lr=0.1, fused=fused, **options)
    for _ in range(3):
        step(optimizer)
    if channels_last:
        layer.to(memory_format=torch.channels_last)
    again = make(layer.parameters(), lr=0.1, fused=fused, **options)
    again.load_state_dict(optimizer.state_dict())
    step(again)
    return layer.weight.detach().contiguous()


for name, options in {"AdamW": {}, "SGD": {"momentum": 0.9}, "Adagrad": {}}.items():
    plain = resumed(name, False, channels_last=False, **options)
    off = {
        (fused, layout): (resumed(name, fused, channels_last=layout, **options) - plain).abs().max().item()
        for fused in (False, True)
        for layout in (False, True)
    }
    print(name, {f"fused={fused} channels_last={layout}": round(value, 6) for (fused, layout), value in off.items()})
    assert all((value > 0.01) == (key == (True, True)) for key, value in off.items())

weight = torch.nn.Parameter(torch.zeros(2, 3).t())
weight.grad = torch.arange(6.0).view(3, 2)
torch.optim.SGD([weight], lr=1.0, fused=True).step()
print("gradient", weight.grad.tolist(), "zeros minus it", weight.tolist())
assert weight.tolist() == [[0.0, -3.0], [-1.0, -4.0], [-2.0, -5.0]]
PYTHON
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 environment/bin/python shown.py
