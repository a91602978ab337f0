#!/usr/bin/env bash
# adam-atan2-pytorch 0.4.1: `MuonAdamAtan2(muon_params, params)` takes the Muon parameters out of `params` with Python sets, so
# the order of the others depends on memory addresses. A state dict numbers parameters by their order: a resumed run gives
# moments to other parameters. With equal shapes that is silent (other shapes raise an error at the first step).
# torch's documentation of optimizers: "Parameters need to be specified as collections that have a deterministic ordering that
# is consistent between runs. Examples of objects that don't satisfy those properties are sets".
# `remove_muon_params_from_params=False`, with `params` that hold no Muon parameters, keeps their order.
# Run on 2026-11-30.
# Status 0: it still behaves so. Any other: it changed, or could not be installed.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/environment"
"$room/environment/bin/python" -m pip install -q torch==2.13.0 adam-atan2-pytorch==0.4.1 numpy==2.4.6
cd "$room"
cat > shown.py <<'PYTHON'
import copy

import torch
from adam_atan2_pytorch import MuonAdamAtan2
from torch import nn


def start(removes: bool) -> tuple[nn.Module, MuonAdamAtan2]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(16)))
    matrices = [each for each in model.parameters() if each.ndim == 2]
    others = [each for each in model.parameters() if each.ndim != 2]
    params = list(model.parameters()) if removes else others
    return model, MuonAdamAtan2(matrices, params, lr=1e-2, remove_muon_params_from_params=removes)


def train(model: nn.Module, optimizer: MuonAdamAtan2, steps: range) -> None:
    for step in steps:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        (model(x) - x).square().mean().backward()
        optimizer.step()


for removes in (True, False):
    model, optimizer = start(removes)
    train(model, optimizer, range(5))
    weights = {name: each.clone() for name, each in model.state_dict().items()}
    moments = {name: optimizer.state[each]["exp_avg"].clone() for name, each in model.named_parameters()}
    saved = copy.deepcopy(optimizer.state_dict())
    kept, misplaced = [], []
    for _ in range(5):
        other, resumed = start(removes)
        other.load_state_dict(weights)
        resumed.load_state_dict(copy.deepcopy(saved))
        kept.append((other, resumed))
        loaded = {name: resumed.state[each]["exp_avg"] for name, each in other.named_parameters()}
        misplaced.append(sum(not torch.equal(loaded[name], each) for name, each in moments.items()))
    print(f"parameters removed by sets {removes}: in five resumed runs, {misplaced} of 32 moments are another parameter's")
    assert (max(misplaced) > 0) == removes
    train(model, optimizer, range(5, 8))
    worst = max(range(5), key=misplaced.__getitem__)
    train(*kept[worst], range(5, 8))
    apart = max((a - b).abs().max().item() for a, b in zip(model.parameters(), kept[worst][0].parameters()))
    print(f"three steps later, its weights differ from those of the run that went on by {apart:.2g}")
    assert (apart > 1e-3) == removes
PYTHON
OMP_NUM_THREADS=1 environment/bin/python shown.py
