#!/usr/bin/env bash
# transformers 5.23.0: BigBird and BigBirdPegasus turn from sparse to full attention for texts too short for it, which is
# documented. They do not turn back: after one short text every longer one is computed with full attention, and its result
# differs from the one before. What a model computes thus depends on what it has read, in training on the order of batches
# and, of several processes, on who met the short one. A warning of the log says that the attention type is changed.
# Run on 2026-11-29.
# Status 0: it still behaves so. Any other: it changed, or could not be installed.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/environment"
"$room/environment/bin/python" -m pip install -q torch==2.13.0 transformers==5.23.0
cd "$room"
cat > shown.py <<'PYTHON'
import torch
from transformers import BigBirdConfig, BigBirdModel

torch.manual_seed(0)
sizes = {"vocab_size": 80, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
config = BigBirdConfig(**sizes, attention_type="block_sparse", block_size=4, num_random_blocks=1, max_position_embeddings=256)
model = BigBirdModel(config).eval()
long, short = torch.randint(0, 80, (1, 128)), torch.randint(0, 80, (1, 16))
with torch.no_grad():
    first, again = model(long).last_hidden_state, model(long).last_hidden_state
    model(short)
    after = model(long).last_hidden_state
print("twice", (first - again).abs().max().item(), "after a short text", (first - after).abs().max().item(), model.attention_type)
assert torch.equal(first, again) and not torch.allclose(first, after, atol=1e-3)
PYTHON
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 environment/bin/python shown.py
