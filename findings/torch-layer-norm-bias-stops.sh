#!/usr/bin/env bash
# torch 2.13.0, CPU: the gradient of LayerNorm's bias is a sum over rows. If the layer's input is bfloat16, as it is under
# autocast after any Linear, that sum is kept in bfloat16 within a thread, though weight, bias and their gradients are
# float32. Seen: 4096 rows that give 1 each sum to 256, the number at which adding 1 changes nothing any more; on two
# threads to 512. GroupNorm's bias and Linear's sum to 4096; LayerNorm's does, too, if its input is float32.
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
from torch import nn

ROWS = 4096


def gradient(layer: nn.Module, dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(0)
    with torch.autocast("cpu", torch.bfloat16):
        layer(torch.randn(ROWS, 8).to(dtype)).sum().backward()
    assert layer.bias.dtype == layer.bias.grad.dtype == torch.float32
    return layer.bias.grad


for threads in (1, 2):
    torch.set_num_threads(threads)
    stopped = gradient(nn.LayerNorm(8), torch.bfloat16)
    print(f"LayerNorm, {threads} threads: {stopped[0].item():.0f} of {ROWS}")
    assert stopped.tolist() == [256.0 * threads] * 8
    assert gradient(nn.LayerNorm(8), torch.float32).tolist() == [float(ROWS)] * 8
    assert gradient(nn.GroupNorm(2, 8), torch.bfloat16).tolist() == [float(ROWS)] * 8
    assert gradient(nn.Linear(8, 8), torch.bfloat16).tolist() == [float(ROWS)] * 8
PYTHON
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 environment/bin/python shown.py
