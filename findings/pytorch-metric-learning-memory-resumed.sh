#!/usr/bin/env bash
# pytorch-metric-learning 2.9.0: the state dict of `CrossBatchMemory` holds the memory's embeddings and labels, but not how far
# it is filled. A run that loads it takes the full memory for an empty one, without a word: the losses are those of a new memory
# until it has been filled again.
# Run on 2026-11-30.
# Status 0: it still behaves so. Any other: it changed, or could not be installed.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/environment"
"$room/environment/bin/python" -m pip install -q torch==2.13.0 pytorch-metric-learning==2.9.0
cd "$room"
cat > shown.py <<'PYTHON'
import torch
from pytorch_metric_learning.losses import CrossBatchMemory, NTXentLoss


def memory() -> CrossBatchMemory:
    return CrossBatchMemory(NTXentLoss(), embedding_size=8, memory_size=64)


def losses(memory: CrossBatchMemory, batches: range) -> list[float]:
    out = []
    for batch in batches:
        rows = torch.randn(8, 8, generator=torch.Generator().manual_seed(batch))
        out.append(round(memory(rows, torch.arange(8) % 4).item(), 4))
    return out


first = memory()
losses(first, range(20))
resumed = memory()
print(resumed.load_state_dict(first.state_dict()))
same_memory = torch.equal(resumed.embedding_memory, first.embedding_memory)
going_on, after_load, empty = (losses(each, range(20, 23)) for each in (first, resumed, memory()))
print(f"memory loaded: {same_memory}; losses of a run that goes on {going_on}, that loads {after_load}, that starts {empty}")
assert same_memory
assert after_load == empty
assert all(a > b + 0.5 for a, b in zip(going_on, after_load))
PYTHON
OMP_NUM_THREADS=1 environment/bin/python shown.py
