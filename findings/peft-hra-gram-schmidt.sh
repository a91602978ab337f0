#!/usr/bin/env bash
# peft 0.21.2: HRA multiplies weights by reflections that come in equal pairs at first, so that each pair undoes itself
# and a new adapter changes nothing. apply_GS=True makes the vectors orthogonal before.
# Seen: of the second vector of each pair only the rounding error is left, which is then scaled to length 1. A new
# adapter changes the model, by what rounding decides; where no error is left, the output is NaN.
# Run on 2026-11-29.
# Status 0: it still behaves so. Any other: it changed, or could not be installed.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/environment"
"$room/environment/bin/python" -m pip install -q torch==2.13.0 transformers==5.23.0 peft==0.21.2
cd "$room"
cat > shown.py <<'PYTHON'
import torch
from peft import HRAConfig, get_peft_model
from torch import nn


def change(kind: torch.dtype, seed: int, **options: bool) -> float:
    torch.manual_seed(seed)
    base, rows = nn.Sequential(nn.Linear(12, 6)), torch.randn(4, 12)
    plain = base(rows).detach()
    model = get_peft_model(base, HRAConfig(r=4, target_modules=["0"], **options)).to(kind)
    return (model(rows.to(kind)).detach() - plain).abs().max().item()


for options in ({}, {"apply_GS": True}):
    for kind in (torch.float32, torch.float64):
        changes = [change(kind, seed, **options) for seed in range(4)]
        print(options, kind, "new adapters off by", [round(each, 4) for each in changes])
        assert all(each < 1e-5 if not options else not each < 0.01 for each in changes)
PYTHON
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 environment/bin/python shown.py
