#!/usr/bin/env bash
# torch 2.13.0: flex_attention with a BlockMask that was made of blocks (BlockMask.from_kv_blocks) without a mask_mod.
# Seen: compiled, a query attends to the blocks named for it; not compiled, to everything, as if there were no mask. So a
# model that is checked on a CPU, or debugged without torch.compile, computes something else.
# Run on 2026-11-29.
# Status 0: it still behaves so. Any other: it changed, or could not be installed.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/environment"
"$room/environment/bin/python" -m pip install -q torch==2.13.0 numpy==2.4.6
cd "$room"
cat > shown.py <<'PYTHON'
import warnings

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

warnings.simplefilter("ignore")
torch.manual_seed(0)
q, k, v = (torch.randn(1, 1, 256, 32) for _ in range(3))
# Each of two blocks of 128 queries attends to one block of keys, its own.
count = torch.tensor([[[1, 1]]], dtype=torch.int32)
index = torch.tensor([[[[0, 1], [1, 0]]]], dtype=torch.int32)
mask = BlockMask.from_kv_blocks(count, index, BLOCK_SIZE=128)

halves = slice(0, 128), slice(128, 256)
own = torch.cat([scaled_dot_product_attention(q[:, :, half], k[:, :, half], v[:, :, half]) for half in halves], 2)
everything = scaled_dot_product_attention(q, k, v)
eager = flex_attention(q, k, v, block_mask=mask)
compiled = torch.compile(flex_attention)(q, k, v, block_mask=mask)
print(mask)
for name, out in (("compiled", compiled), ("not compiled", eager)):
    print(f"{name}: {(out - own).abs().max():.4f} from attention in blocks, {(out - everything).abs().max():.4f} from full")
assert not torch.allclose(own, everything, atol=0.1)
assert torch.allclose(compiled, own, atol=1e-4)
assert torch.allclose(eager, everything, atol=1e-4)
PYTHON
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 environment/bin/python shown.py
