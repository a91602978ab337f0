#!/usr/bin/env bash
# torch 2.13.0: a batch of 5 rows through ScheduleGPipe with 2 micro-batches and a loss that is a mean over rows.
# Seen: the micro-batches have 3 and 2 rows, and the gradient is the mean of their two means: rows of the smaller one count
# 1.5 times as much as others. With 4 rows it is the gradient of the batch. Nothing is said.
# Run on 2026-11-29.
# Status 0: it still behaves so. Any other: it changed, or could not be installed.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/environment"
"$room/environment/bin/python" -m pip install -q torch==2.13.0 numpy
cd "$room"
cat > shown.py <<'PYTHON'
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.functional import mse_loss

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def apart(rows: int) -> tuple[float, float]:
    """How far the schedule's gradient is from that of the batch, and from the mean of the halves'."""
    torch.manual_seed(0)
    model, x, y = nn.Linear(2, 1, bias=False), torch.randn(rows, 2), torch.randn(rows, 1)

    def gradient(*pieces: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        total = sum(mse_loss(model(a), b) for a, b in pieces) / len(pieces)
        return torch.autograd.grad(total, model.weight)[0]

    batch, halves = gradient((x, y)), gradient(*zip(x.tensor_split(2), y.tensor_split(2)))
    stage = PipelineStage(model, 0, 1, torch.device("cpu"))
    ScheduleGPipe(stage, 2, loss_fn=mse_loss).step(x, target=y)
    return (model.weight.grad - batch).abs().max().item(), (model.weight.grad - halves).abs().max().item()


for rows in (4, 5):
    print(f"{rows} rows: {apart(rows)[0]:.1e} from the batch's gradient, {apart(rows)[1]:.1e} from the mean of two means")
assert apart(4)[0] < 1e-6
assert apart(5)[0] > 1e-2 and apart(5)[1] < 1e-6
dist.destroy_process_group()
PYTHON
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 environment/bin/python shown.py
