#!/usr/bin/env bash
# x-transformers 2.31.10: three options of a causal `Decoder` let each position see later tokens. `orthog_residual` and
# `attn_orthog_projected_values` (also per head) project on one vector that holds the whole sequence, not on each token's;
# `mv_split_residual` subtracts the mean of all positions. Training then minimizes a loss that reads the answer, which
# generation cannot; padding after a text and the other texts' length change its logits too.
# The paper of the first (arXiv 2505.11881) splits each token's vector. README of x-transformers: `Decoder` is for
# "Decoder-only (GPT-like)" models; it does not say that the options are for encoders, and does not refuse them.
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
from x_transformers import Decoder, TransformerWrapper

LENGTH = 12
OPTIONS = ({}, {"gate_residual": True}, *({name: True} for name in ("orthog_residual", "mv_split_residual")))
VALUES = ({"attn_orthog_projected_values": True}, {"attn_orthog_projected_values_per_head": True})


def model(options: dict[str, bool]) -> TransformerWrapper:
    torch.manual_seed(0)
    layers = Decoder(dim=32, depth=2, heads=4, attn_dim_head=8, **options)
    made = TransformerWrapper(num_tokens=16, max_seq_len=LENGTH, attn_layers=layers)
    for each in made.parameters():
        if each.ndim > 1:
            torch.nn.init.normal_(each, std=0.2)
    return made.eval()


for options in OPTIONS + VALUES:
    decoder = model(options)
    tokens = torch.randint(1, 16, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    other = tokens.clone()
    other[0, -1] = tokens[0, -1] % 15 + 1
    with torch.no_grad():
        logits, changed = decoder(tokens), decoder(other)
        alone = decoder(tokens[:, :4])
    leak = (logits - changed)[0, :-1].abs().max().item()
    longer = (logits[:, :4] - alone).abs().max().item()
    print(f"{options}: after a change of the last token, earlier logits differ by {leak:.2g}; the first 4 alone: by {longer:.2g}")
    leaks = any(name.startswith(("orthog", "mv_split", "attn_orthog")) for name in options)
    assert leak > 1e-3 if leaks else leak == 0
    assert longer > 1e-3 if leaks else longer < 1e-5
PYTHON
OMP_NUM_THREADS=1 environment/bin/python shown.py
