#!/usr/bin/env bash
# peft 0.21.2: AdaLoRA gives ranks to layers by an importance that it averages over the steps. That average is in no state dict:
# it is a Python dictionary of the allocator. A run that loads all weights and the optimizer's state in the middle starts
# it from zero, without a word: between two allocations it prunes other ranks than the run that went on, and ends elsewhere.
# Run on 2026-11-30.
# Status 0: it still behaves so. Any other: it changed, or could not be installed.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/environment"
"$room/environment/bin/python" -m pip install -q torch==2.13.0 transformers==5.23.0 peft==0.21.2
cd "$room"
cat > shown.py <<'PYTHON'
import copy

import torch
from peft import AdaLoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
BASE = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
)
PLAN = {"init_r": 4, "target_r": 2, "tinit": 2, "tfinal": 4, "deltaT": 4, "total_step": 24, "beta1": 0.95, "beta2": 0.95}


def start() -> tuple[PeftModel, torch.optim.Optimizer]:
    torch.manual_seed(1)
    config = AdaLoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj", "down_proj"], **PLAN)
    model = get_peft_model(copy.deepcopy(BASE), config)
    return model, torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=1e-2)


def train(model: PeftModel, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        batch = torch.randint(0, 32, (4, 8), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        model.base_model.update_and_allocate(step)


def difference(one: PeftModel, other: PeftModel) -> float:
    pairs = zip(one.state_dict().values(), other.state_dict().values())
    return max((a - b).abs().max().item() for a, b in pairs)


def ranks(model: PeftModel) -> dict[str, int]:
    return {name: sum(kept) for name, kept in model.peft_config["default"].rank_pattern.items()}


model, optimizer = start()
train(model, optimizer, range(9))
resumed, its_optimizer = start()
print(resumed.load_state_dict(model.state_dict()))
its_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
before = difference(model, resumed)
train(model, optimizer, range(9, 24))
train(resumed, its_optimizer, range(9, 24))
after = difference(model, resumed)
again, again_optimizer = start()
train(again, again_optimizer, range(24))
repeated = difference(model, again)
other = {name.removeprefix("model.layers."): (rank, ranks(resumed)[name]) for name, rank in ranks(model).items()}
other = {name: pair for name, pair in other.items() if pair[0] != pair[1]}
print(f"largest difference: loaded {before}, at the end {after:.3f}; a second whole run {repeated}")
print(f"ranks of the run that went on and of the resumed one, where they differ: {other}")
assert before == repeated == 0
assert after > 0.01
assert other
PYTHON
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 environment/bin/python shown.py
