#!/usr/bin/env bash
# transformers 5.23.0, torch 2.13.0: a model with LongRoPE (Phi-3 and others) has frequencies for texts of at most
# original_max_position_embeddings tokens, and others for longer ones. They are chosen per batch, by the greatest position in
# it. Seen: a text of 8 tokens, padded and masked, has other hidden states beside a text of 40 tokens than alone or beside one
# of 12, by far more than rounding: sorting by length, the batch size, or a single long text change the results of short ones.
# Run on 2026-11-29.
# Status 0: it still behaves so. Any other: it changed, or could not be installed.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/environment"
"$room/environment/bin/python" -m pip install -q torch==2.13.0 transformers==5.23.0 numpy==2.4.6
cd "$room"
cat > shown.py <<'PYTHON'
import torch
from transformers import Phi3Config, Phi3Model

torch.manual_seed(0)
rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
config = Phi3Config(
    vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
    max_position_embeddings=64, original_max_position_embeddings=16, rope_parameters=rope, pad_token_id=0,
    eos_token_id=1, initializer_range=0.3,
)  # fmt: skip
model = Phi3Model(config).eval()
text = torch.randint(1, 32, (1, 8))


def beside(length: int) -> torch.Tensor:
    """The hidden states of the text in a batch with another one of `length` tokens."""
    ids, mask = torch.zeros(2, length, dtype=torch.long), torch.ones(2, length, dtype=torch.long)
    ids[0, :8], ids[1], mask[0, 8:] = text, torch.randint(1, 32, (length,)), 0
    return model(input_ids=ids, attention_mask=mask).last_hidden_state[:1, :8]


with torch.no_grad():
    alone = model(input_ids=text).last_hidden_state
    difference = {length: (beside(length) - alone).abs().max().item() for length in (12, 16, 17, 40)}
for length, most in difference.items():
    print(f"beside a text of {length} tokens: the hidden states of 8 tokens differ by at most {most:.2g}")
assert max(difference[12], difference[16]) < 1e-4
assert min(difference[17], difference[40]) > 1e-2
PYTHON
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 environment/bin/python shown.py
