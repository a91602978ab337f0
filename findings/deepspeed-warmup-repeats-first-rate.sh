#!/usr/bin/env bash
# deepspeed 0.19.8: `WarmupLR`, `WarmupDecayLR` and `WarmupCosineLR` set the first rate when they are made and again in their first
# `step`, so the first two updates have it: with the usual minimum 0 they change no weight, and the whole schedule is one update
# late. Schedules of torch and transformers with the same numbers use each rate once.
# Run on 2026-12-01.
# Status 0: it still behaves so. Any other: it changed, or could not be installed.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/environment"
"$room/environment/bin/python" -m pip install -q torch==2.13.0 numpy==2.4.6 setuptools==82.0.0
DS_BUILD_OPS=0 "$room/environment/bin/python" -m pip install -q --no-build-isolation deepspeed==0.19.8
cd "$room"
cat > shown.py <<'PYTHON'
import torch
from deepspeed.runtime.lr_schedules import WarmupCosineLR, WarmupDecayLR, WarmupLR


def rates(make):
    """The rate of each of eight updates."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    schedule, used = make(optimizer), []
    for _ in range(8):
        weight.grad = torch.ones(1)
        before = weight.item()
        optimizer.step()
        used.append(round(before - weight.item(), 4))
        schedule.step()
    return used


usual = rates(lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda i: min(1, i / 4)))
print("linear warm-up in 4 updates, torch:   ", usual)
assert usual == [0.0, 0.025, 0.05, 0.075, 0.1, 0.1, 0.1, 0.1]
made = {
    "WarmupLR": lambda o: WarmupLR(o, 0.0, 0.1, 4, "linear"),
    "WarmupDecayLR": lambda o: WarmupDecayLR(o, 100, 0.0, 0.1, 4, "linear"),
    "WarmupCosineLR": lambda o: WarmupCosineLR(o, 100, 0.0, 4, 0.0, "linear"),
}
for name, make in made.items():
    used = rates(make)
    print(f"{name}:".ljust(37), used)
    assert used[:5] == [0.0, 0.0, 0.025, 0.05, 0.075]
PYTHON
OMP_NUM_THREADS=1 environment/bin/python shown.py 2>&1 | grep -v "\[INFO\]\|\[WARNING\]"
