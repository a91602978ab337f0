#!/usr/bin/env bash
# safetensors 0.8.0, torch 2.13.0: save_file of a tensor that torch negates or conjugates when it is read.
# Seen: the file holds the numbers without that: i in place of its conjugate -i, and 1 in place of -1 (`.imag` of a conjugate).
# torch.save keeps them, and after resolve_conj() so does save_file.
# Run on 2026-11-29.
# Status 0: it still behaves so. Any other: it changed, or could not be installed.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/environment"
"$room/environment/bin/python" -m pip install -q torch==2.13.0 safetensors==0.8.0 numpy packaging
cd "$room"
cat > shown.py <<'PYTHON'
import io

import torch
from safetensors.torch import load, save

ones = torch.complex(torch.zeros(2), torch.ones(2))
lazy = {"conjugate": ones.conj(), "negated": torch.complex(torch.zeros(1), torch.ones(1)).conj().imag}
loaded = load(save(lazy))
for name, tensor in lazy.items():
    kept = io.BytesIO()
    torch.save(tensor, kept)
    kept.seek(0)
    assert torch.equal(torch.load(kept), tensor)
    print(f"{name}: is {tensor.tolist()}, in the file {loaded[name].tolist()}")
    assert torch.equal(loaded[name], -tensor)
assert torch.equal(load(save({"resolved": ones.conj().resolve_conj()}))["resolved"], ones.conj())
PYTHON
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 environment/bin/python shown.py
