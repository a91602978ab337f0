#!/usr/bin/env bash
# peft 0.21.2: OFT, which multiplies weights by rotations that begin as the identity, on a Conv2d.
# Seen: with a kernel of 1 the new adapter changes nothing. With 2 or 3 it changes the output before the first step,
# while merging it would give the base model back: what is trained and what is merged are two models.
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
from peft import OFTConfig, get_peft_model
from torch import nn


def far(one: torch.Tensor, other: torch.Tensor) -> float:
    return (one - other).abs().max().item()


for kernel, padding, stride in ((1, 0, 1), (3, 1, 1), (3, 0, 1), (2, 0, 2)):
    torch.manual_seed(0)
    images, base = torch.randn(2, 12, 16, 16), nn.Sequential(nn.Conv2d(12, 8, kernel, stride, padding)).eval()
    plain = base(images).detach()
    model = get_peft_model(base, OFTConfig(r=0, oft_block_size=3, target_modules=["0"])).eval()
    new = far(model(images), plain)
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    for _ in range(10):
        optimizer.zero_grad()
        model(images).square().mean().backward()
        optimizer.step()
    trained = model(images).detach()
    merged = far(model.merge_and_unload()(images), trained)
    print(f"kernel {kernel}, padding {padding}, stride {stride}: new adapter off by {new:.4f}, merged by {merged:.4f}")
    assert (new < 1e-5 and merged < 1e-4) if kernel == 1 else (new > 0.1 and merged > 0.1)
PYTHON
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 environment/bin/python shown.py
