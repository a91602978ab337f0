#!/usr/bin/env bash
# x-transformers 2.31.10: a decoder with `shift_tokens=1`, which gives each token some features of the one before it.
# `generate` caches keys and values by default, and a step with the cache sees no token before the new one: zeros stand in for
# its features. Greedy generation takes other tokens than without the cache, and than the logits of a whole forward pass.
# Without `shift_tokens` all three agree.
# Run on 2026-11-30.
# Status 0: it still behaves so. Any other: it changed, or could not be installed.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/environment"
"$room/environment/bin/python" -m pip install -q torch==2.13.0 x-transformers==2.31.10 numpy==2.4.6
cd "$room"
cat > shown.py <<'PYTHON'
import torch
from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

START, NEW = 6, 20


def agreement(shift: int) -> tuple[float, float]:
    torch.manual_seed(0)
    layers = Decoder(dim=32, depth=2, heads=4, shift_tokens=shift)
    model = AutoregressiveWrapper(TransformerWrapper(num_tokens=50, max_seq_len=32, attn_layers=layers)).eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.normal_(0, 0.3)
    prompt = torch.randint(0, 50, (8, START))
    cached = model.generate(prompt, NEW, temperature=0.0)
    plain = model.generate(prompt, NEW, temperature=0.0, cache_kv=False)
    whole = model.net(torch.cat([prompt, plain], 1)).argmax(-1)[:, START - 1 : -1]
    return (cached == plain).float().mean().item(), (plain == whole).float().mean().item()


for shift in (0, 1):
    cached, whole = agreement(shift)
    print(f"shift_tokens {shift}: of the tokens without the cache, {cached:.0%} are those with it, {whole:.0%} the forward's")
    assert whole > 0.99
    assert cached > 0.99 if shift == 0 else cached < 0.5
PYTHON
OMP_NUM_THREADS=1 environment/bin/python shown.py
