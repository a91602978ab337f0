#!/usr/bin/env bash
# transformers 5.23.0, torch 2.13.0: rope_type "dynamic" computes frequencies from a text's length where that is beyond
# max_position_embeddings. Seen: a model, in eval and without a cache, gives a text of 20 tokens (16 positions) other hidden
# states after it has read one of 40 than before: it goes on with the frequencies of the longest text so far, until a text of
# fewer than 16 tokens comes, also as another row or request. After it, the text has its first states again, bit for bit.
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
from transformers import LlamaConfig, LlamaModel

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=32, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, initializer_range=0.3,
    max_position_embeddings=16, rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
)  # fmt: skip
model = LlamaModel(config).eval()
short, text, long = (torch.randint(0, 32, (1, length)) for length in (8, 20, 40))


@torch.no_grad()
def states(ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, use_cache=False).last_hidden_state


first, again = states(text), states(text)
states(long)
after_long = states(text)
states(short)
after_short = states(text)
print(f"the same text again: equal {torch.equal(first, again)}")
print(f"after a longer text: differs by at most {(first - after_long).abs().max():.2g}")
print(f"after a short text: equal {torch.equal(first, after_short)}")
assert torch.equal(first, again)
assert (first - after_long).abs().max() > 1e-2
assert torch.equal(first, after_short)
PYTHON
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 environment/bin/python shown.py
