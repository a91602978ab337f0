#!/usr/bin/env bash
# peft 0.21.2: LoRA with init_lora_weights="pissa_niter_16", the fast form of PiSSA, saved and loaded.
# Seen: loading takes the principal part off the base's weights again, with a randomized SVD from the global random state.
# In another process, or after another random number, that part is another one, and the adapter that was
# trained with the first no longer fits: the logits are others. With "pissa", an exact SVD, the loaded model is the saved one.
# Run on 2026-11-29.
# Status 0: it still behaves so. Any other: it changed, or could not be installed.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/environment"
"$room/environment/bin/python" -m pip install -q torch==2.13.0 transformers==5.23.0 peft==0.21.2
cd "$room"
cat > shown.py <<'PYTHON'
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

TINY = LlamaConfig(
    vocab_size=32, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2
)
X = torch.arange(8)[None]
torch.manual_seed(0)
WEIGHTS = LlamaForCausalLM(TINY).state_dict()


def base() -> LlamaForCausalLM:
    model = LlamaForCausalLM(TINY).eval()
    model.load_state_dict(WEIGHTS)
    return model


for init in ("pissa", "pissa_niter_16"):
    targets = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
    model = get_peft_model(base(), LoraConfig(r=8, lora_alpha=8, target_modules=targets, init_lora_weights=init))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(20):
        model(input_ids=X, labels=X).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    trained = model(X).logits
    model.save_pretrained(init)
    torch.manual_seed(1)
    loaded = PeftModel.from_pretrained(base(), init).eval()
    off = (loaded(X).logits - trained).abs().max().item()
    learned = (trained - base()(X).logits).abs().max().item()
    print(f"{init}: training moved logits by up to {learned:.3f}, saving and loading by {off:.3f}")
    assert off < 1e-4 if init == "pissa" else off > 0.05
PYTHON
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 environment/bin/python shown.py
