#!/usr/bin/env bash
# torch 2.13.0: a learning rate that is a tensor, as optimizers accept for capturable and for torch.compile. All parameter
# groups that do not name a rate hold that one tensor, and schedulers write rates into tensors in place: each group ends with
# the rate of the last one. Seen: LambdaLR with one function a group, 1 and 0.01 times 0.1, gives both groups 0.001;
# OneCycleLR with a maximum for each group gives both the second. With the float 0.1 the same lines are right.
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
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR


def rates(rate: float | torch.Tensor, schedule) -> list[float]:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(2))]} for _ in range(2)]
    optimizer = torch.optim.AdamW(groups, lr=rate)
    scheduler = schedule(optimizer)
    optimizer.step()
    scheduler.step()
    return [round(float(group["lr"]), 6) for group in optimizer.param_groups]


schedules = {
    "LambdaLR": lambda optimizer: LambdaLR(optimizer, [lambda epoch: 1.0, lambda epoch: 0.01]),
    "OneCycleLR": lambda optimizer: OneCycleLR(optimizer, max_lr=[0.1, 1.0], total_steps=10),
}
for name, schedule in schedules.items():
    right, seen = rates(0.1, schedule), rates(torch.tensor(0.1), schedule)
    print(name, "float", right, "tensor", seen)
    assert right[0] != right[1] and seen == [right[1], right[1]]
PYTHON
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 environment/bin/python shown.py
