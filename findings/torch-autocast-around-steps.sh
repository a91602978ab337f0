#!/usr/bin/env bash
# torch 2.13.0: one torch.autocast region around whole training steps, the optimizer's included, in place of one around each
# forward pass. Seen: the weights are cast once and the cast copies kept until the outermost region ends, so the forward pass
# never sees an update: the loss stays where it was for all steps, while the weights move. Nothing is said. An outer region
# that is disabled (enabled=False) does the same to regions within it.
# Run on 2026-11-28.
# Status 0: it still behaves so. Any other: it changed, or could not be installed.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/environment"
"$room/environment/bin/python" -m pip install -q torch==2.13.0
cd "$room"
cat > shown.py <<'PYTHON'
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.nn import Linear
from torch.nn.functional import mse_loss


def losses(around: AbstractContextManager[object]) -> tuple[list[float], float]:
    torch.manual_seed(0)
    model = Linear(4, 1)
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(8, 4), torch.randn(8, 1)
    seen = []
    with around:
        for _ in range(5):
            with torch.autocast("cpu", torch.bfloat16):
                loss = mse_loss(model(x).float(), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append(round(loss.item(), 4))
    return seen, (model.weight - before).norm().item()


for enabled in (True, False):
    seen, moved = losses(torch.autocast("cpu", torch.bfloat16, enabled=enabled))
    print(f"a region around all, enabled={enabled}:", seen, f"while the weights moved by {moved:.2f}")
    assert len(set(seen)) == 1 and moved > 0.1
seen, _ = losses(nullcontext())
print("one around each forward:", seen)
assert seen == sorted(seen, reverse=True) and len(set(seen)) == 5
PYTHON
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 environment/bin/python shown.py
