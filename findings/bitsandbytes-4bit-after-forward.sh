#!/usr/bin/env bash
# bitsandbytes 0.50.2, CPUs with AVX512-BF16: the first forward pass of a bfloat16 `Linear4bit` in eval mode packs the weight
# anew, in place. From then on `dequantize_4bit(weight.data, weight.quant_state)`, which merging and exporting rest on,
# returns other numbers without an error: they miss the weights by as much as these are large.
# The layer's own output stays right, and a state dict turns the packing back.
# Needs AVX512-BF16: status 2 without.
# Run on 2026-11-30.
# Status 0: it still behaves so. Any other: it changed, or could not be installed.
set -euo pipefail
grep -q avx512_bf16 /proc/cpuinfo || exit 2
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/environment"
"$room/environment/bin/python" -m pip install -q torch==2.13.0 bitsandbytes==0.50.2 numpy==2.4.6
cd "$room"
cat > shown.py <<'PYTHON'
import bitsandbytes
import torch
from bitsandbytes.functional import dequantize_4bit

torch.manual_seed(0)
weight = torch.randn(128, 256).bfloat16()
layer = bitsandbytes.nn.Linear4bit(256, 128, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4")
layer.load_state_dict({"weight": weight})
layer.to("cpu").eval()
rows = torch.randn(8, 256).bfloat16()


def error() -> float:
    held = dequantize_4bit(layer.weight.data, layer.weight.quant_state).float()
    return (held.reshape(128, 256) - weight.float()).abs().mean().item()


before = error()
expected = rows.float() @ dequantize_4bit(layer.weight.data, layer.weight.quant_state).float().reshape(128, 256).T
with torch.no_grad():
    output = layer(rows)
after = error()
layer.state_dict()
saved = error()
print(f"mean error of the dequantized weights: {before:.3f}; after a forward pass {after:.3f}; after state_dict() {saved:.3f}")
print(f"largest error of the layer's output: {(output.float() - expected).abs().max().item():.3f} of {expected.std().item():.1f}")
assert before < 0.1
assert after > 0.8 and saved < 0.1
assert (output.float() - expected).abs().max() < 0.5
PYTHON
OMP_NUM_THREADS=1 environment/bin/python shown.py
