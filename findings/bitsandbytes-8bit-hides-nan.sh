#!/usr/bin/env bash
# bitsandbytes 0.50.2, torch 2.13.0, CPU: quantize_blockwise, 8 bits with a scale for each block, of numbers with a NaN.
# Seen: the scale leaves the NaN out, and dequantize_blockwise gives minus (almost) the largest number of the block in its
# place: a tensor that has diverged looks finite afterwards. quantize_4bit gives NaN for the whole block.
# Run on 2026-11-30.
# Status 0: it still behaves so. Any other: it changed, or could not be installed.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/environment"
"$room/environment/bin/python" -m pip install -q torch==2.13.0 bitsandbytes==0.50.2
cd "$room"
cat > shown.py <<'PYTHON'
import torch
from bitsandbytes import functional

torch.manual_seed(0)
x = torch.randn(512)
x[5] = float("nan")
largest = x[:256].nan_to_num().abs().max().item()
back = functional.dequantize_blockwise(*functional.quantize_blockwise(x, blocksize=256))
four = functional.dequantize_4bit(*functional.quantize_4bit(x, blocksize=64)).flatten()
print(f"8 bits: NaN becomes {back[5]:.3f}, largest number of its block {largest:.3f}, NaNs left {back.isnan().sum()}")
print(f"4 bits: {four.isnan().sum()} NaNs, all in its block of 64: {bool(four[:64].isnan().all())}")
assert back.isfinite().all()
assert -largest * 1.01 < back[5] < -largest * 0.97
assert four.isnan().sum() == 64 == four[:64].isnan().sum()
PYTHON
OMP_NUM_THREADS=1 environment/bin/python shown.py
