#!/usr/bin/env bash
# peft 0.21.2: add_weighted_adapter of one adapter with use_rslora=True and the weight 1, which should be a copy.
# Seen: what it adds to the logits is sqrt(r) times that of the adapter, in every kind of combination; saved and loaded
# again, too. Without use_rslora it is a copy.
# Run on 2026-11-29.
# Status 0: it still behaves so. Any other: it changed, or could not be installed.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/environment"
"$room/environment/bin/python" -m pip install -q torch==2.13.0 transformers==5.23.0 peft==0.21.2
cd "$room"
cat > shown.py <<'PYTHON'
import tempfile

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

TINY = LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2
)
X = torch.arange(8)[None]


def base() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(TINY).eval()


def times(logits: torch.Tensor, added: torch.Tensor) -> float:
    more = logits - base()(X).logits
    return round(((more * added).sum() / added.square().sum()).item(), 2)


def seen(rslora: bool, kind: str) -> tuple[float, float]:
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], init_lora_weights=False, use_rslora=rslora)
    model = get_peft_model(base(), config).eval()
    added = model(X).logits - base()(X).logits
    model.add_weighted_adapter(["default"], [1.0], "copy", combination_type=kind)
    model.set_adapter("copy")
    folder = tempfile.mkdtemp(dir=".")
    model.save_pretrained(folder, selected_adapters=["copy"])
    again = PeftModel.from_pretrained(base(), f"{folder}/copy").eval()
    return times(model(X).logits, added), times(again(X).logits, added)


for kind in ("linear", "cat", "svd"):
    plain, rslora = seen(False, kind), seen(True, kind)
    print(f"{kind}: without rslora {plain[0]} times what the adapter adds, with it {rslora[0]} (saved and loaded {rslora[1]})")
    assert all(abs(each - 1) < 0.1 for each in plain)
    assert all(abs(each - 2) < 0.1 for each in rslora)
PYTHON
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 environment/bin/python shown.py
