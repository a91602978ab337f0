#!/usr/bin/env bash
# peft 0.21.2: an adapter of GPT-2's head with ensure_weight_tying, saved and loaded. The head's part is lost: the file holds
# it, and the loaded model has none, because peft knows an embedding by the names embed_tokens and lm_head alone, and GPT-2
# calls its own wte. Seen as a loss of 1.31 before and 4.00 after; no warning names a weight (one says, before training too,
# that no tied module is a target). A Llama, whose embedding is called embed_tokens, loads what was saved.
# Run on 2026-11-29.
# Status 0: it still behaves so. Any other: it changed, or could not be installed.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/environment"
"$room/environment/bin/python" -m pip install -q torch==2.13.0 transformers==5.23.0 peft==0.21.2 accelerate==1.15.0
cd "$room"
cat > shown.py <<'PYTHON'
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

IDS = torch.arange(8)[None]


def gpt2():
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2)).eval()


def llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, tie_word_embeddings=True, **sizes)).eval()


def loss(model) -> torch.Tensor:
    return model(input_ids=IDS, labels=IDS).loss


def losses(base, layer: str) -> tuple[float, float, float]:
    """Of the base model, of the trained adapter, and of the adapter that is loaded."""
    config = LoraConfig(r=4, target_modules=[layer, "lm_head"], ensure_weight_tying=True, task_type="CAUSAL_LM")
    model = get_peft_model(base(), config).eval()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.003)
    for _ in range(40):
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()
    model.save_pretrained(layer)
    loaded = PeftModel.from_pretrained(base(), layer).eval()
    return loss(base()).item(), loss(model).item(), loss(loaded).item()


seen = {"gpt2": losses(gpt2, "c_attn"), "llama": losses(llama, "q_proj")}
print({name: tuple(round(each, 3) for each in row) for name, row in seen.items()})
saved = load_file("c_attn/adapter_model.safetensors")
assert "base_model.model.lm_head.lora_A.weight" in saved
before, trained, loaded = seen["gpt2"]
assert loaded > trained + 1
before, trained, loaded = seen["llama"]
assert trained < before - 1 and abs(loaded - trained) < 1e-4
PYTHON
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 environment/bin/python shown.py
