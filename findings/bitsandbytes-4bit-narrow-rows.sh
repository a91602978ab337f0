#!/usr/bin/env bash
# bitsandbytes 0.50.2 on a CPU with AVX-512: quantize_4bit packs a matrix in blocks of 64 numbers, a scale each, over the
# ends of its rows. Seen: dequantize_4bit gives rows of 96 numbers, or of 16, the scales of other blocks: numbers of up to 3
# come back more than 1 apart. Rows of 64 or 128 are right, and so are odd rows, which another function unpacks.
# Needs AVX-512: status 2 without.
# Run on 2026-11-29.
# Status 0: it still behaves so. Any other: it changed, or could not be installed.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/environment"
"$room/environment/bin/python" -m pip install -q torch==2.13.0 numpy==2.4.6 bitsandbytes==0.50.2
cd "$room"
cat > shown.py <<'PYTHON'
import sys

import bitsandbytes.functional as bnb
import torch

if torch.backends.cpu.get_cpu_capability() != "AVX512":
    print("this processor has no AVX-512")
    sys.exit(2)


def apart(columns: int) -> tuple[float, float]:
    torch.manual_seed(0)
    matrix = torch.randn(64, columns)
    packed, state = bnb.quantize_4bit(matrix, quant_type="nf4", blocksize=64)
    codes = torch.stack([packed.flatten() >> 4, packed.flatten() & 15], 1).flatten()[: matrix.numel()]
    by_hand = state.code[codes.long()] * state.absmax.repeat_interleave(64)[: matrix.numel()]
    unpacked = bnb.dequantize_4bit(packed, state)
    return (unpacked - matrix).abs().max().item(), (by_hand.view_as(matrix) - matrix).abs().max().item()


for columns in (16, 64, 96, 97, 128):
    library, by_hand = apart(columns)
    print(f"rows of {columns}: dequantize_4bit is up to {library:.2f} off, the same codes and scales by hand {by_hand:.2f}")
    assert by_hand < 0.7
    assert (library > 1.0) == (columns in (16, 96))
PYTHON
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 environment/bin/python shown.py
