#!/usr/bin/env bash
# peft 0.21.2 with torch 2.13.0: LoRA on the layers of `nn.TransformerEncoder`. In evaluation torch's fast path computes an
# encoder layer from `linear1.weight`, `self_attn.out_proj.weight` and so on; on an adapted layer these are the base weights.
# Training uses the adapter; after `eval()` the model's output is that of the model without it, with or without gradients, and
# merging the adapter changes it. The adapter is used again when the fast path is off
# (`torch.backends.mha.set_fastpath_enabled(False)`).
# The cause is reported in a comment of https://github.com/huggingface/peft/issues/761, for targets where it raised an error.
# Run on 2026-11-30.
# Status 0: it still behaves so. Any other: it changed, or could not be installed.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/environment"
"$room/environment/bin/python" -m pip install -q torch==2.13.0 transformers==5.23.0 peft==0.21.2
cd "$room"
cat > shown.py <<'PYTHON'
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

x = torch.randn(4, 5, 16, generator=torch.Generator().manual_seed(1))

for targets in (["linear1", "linear2"], ["self_attn"]):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = get_peft_model(
        nn.Sequential(nn.TransformerEncoder(layer, 2)),
        LoraConfig(r=4, lora_alpha=32, target_modules=targets, init_lora_weights=False),
    )
    with torch.no_grad():
        training = model(x)
        model.eval()
        evaluation = model(x)
        with model.disable_adapter():
            base = model(x)
        torch.backends.mha.set_fastpath_enabled(False)
        slow = model(x)
        torch.backends.mha.set_fastpath_enabled(True)
    with_gradients = model(x).detach()
    merged = model.merge_and_unload().eval()(x).detach()
    print(
        f"{targets}: evaluation differs from training by {(evaluation - training).abs().max():.2g}, from the model without"
        f" adapter by {(evaluation - base).abs().max():.2g}; merged differs from training by"
        f" {(merged - training).abs().max():.2g}"
    )
    assert torch.equal(evaluation, base) and torch.equal(with_gradients, base)
    assert (evaluation - training).abs().max() > 0.5
    assert torch.allclose(merged, training, atol=1e-4) and torch.allclose(slow, training, atol=1e-4)
PYTHON
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 environment/bin/python shown.py
