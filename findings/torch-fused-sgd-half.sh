#!/usr/bin/env bash
# torch 2.13.0, CPU: SGD(fused=True) of parameters in bfloat16 or float16, with or without momentum.
# Seen: nothing moves but the last `numel % 16` elements, which the kernel's vectors do not cover: 33 weights after a step
# of -1 are 32 zeros and one -1. No error, no warning. float32 moves; so do fused Adam and AdamW, and SGD that is not fused.
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


def step(kind: str, dtype: torch.dtype, fused: bool, **options: float) -> list[float]:
    weight = torch.nn.Parameter(torch.zeros(33, dtype=dtype))
    weight.grad = torch.ones_like(weight)
    getattr(torch.optim, kind)([weight], lr=1.0, fused=fused, **options).step()
    return weight.tolist()


still = [0.0] * 32 + [-1.0]
for dtype in (torch.bfloat16, torch.float16):
    for options in ({}, {"momentum": 0.9}):
        moved = step("SGD", dtype, True, **options)
        print(f"fused SGD {options}, {dtype}: {moved.count(-1.0)} of 33 moved")
        assert moved == still
        assert step("SGD", dtype, False, **options) == [-1.0] * 33
    assert 0.0 not in step("AdamW", dtype, True)
    assert 0.0 not in step("Adam", dtype, True)
print(f"fused SGD, float32: {step('SGD', torch.float32, True).count(-1.0)} of 33 moved")
assert step("SGD", torch.float32, True) == [-1.0] * 33
PYTHON
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 environment/bin/python shown.py
