#!/usr/bin/env bash
# peft 0.21.2: hotswap_adapter gives a running model the weights and the scale of another LoRA adapter; save_pretrained then.
# Seen: the model answers as the new adapter does, and what it saves holds the new weights beside the old lora_alpha: loaded
# again, it answers otherwise (scale 2 in place of 8).
# Run on 2026-11-28.
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
from peft.utils.hotswap import hotswap_adapter
from transformers import LlamaConfig, LlamaForCausalLM

TINY = LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2
)
X = torch.arange(8)[None]


def base() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(TINY).eval()


def adapter(alpha: int) -> tuple[str, torch.Tensor]:
    torch.manual_seed(alpha)
    config = LoraConfig(r=4, lora_alpha=alpha, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = get_peft_model(base(), config).eval()
    folder = tempfile.mkdtemp(dir=".")
    model.save_pretrained(folder)
    return folder, model(X).logits


first, _ = adapter(8)
second, wanted = adapter(32)
model = PeftModel.from_pretrained(base(), first).eval()
hotswap_adapter(model, second, "default")
swapped = (model(X).logits - wanted).abs().max().item()
saved = tempfile.mkdtemp(dir=".")
model.save_pretrained(saved)
again = PeftModel.from_pretrained(base(), saved).eval()
loaded = (again(X).logits - wanted).abs().max().item()
print(f"logits beside the second adapter's: swapped {swapped:.1e} apart, saved and loaded {loaded:.1e}")
print("lora_alpha saved:", again.peft_config["default"].lora_alpha)
assert swapped < 1e-6
assert loaded > 1e-3
assert again.peft_config["default"].lora_alpha == 8
PYTHON
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 environment/bin/python shown.py
