#!/usr/bin/env bash
# peft 0.21.2: load_adapter under the name of an adapter that the model has. The new weights are loaded; the settings stay
# those of the adapter before. Seen with lora_alpha 4 and then 32: the second adapter has an eighth of its effect, no warning,
# and what save_pretrained writes is wrong too. Another rank raises an error. After delete_adapter it is right.
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
from torch import nn


def base() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8))


def changed(model: nn.Module) -> torch.Tensor:
    """The adapter's part of the output."""
    ones = torch.ones(1, 8)
    return (model(ones) - base()(ones)).detach()


for alpha in (4, 32):
    model = get_peft_model(base(), LoraConfig(r=4, lora_alpha=alpha, target_modules=["0"]))
    nn.init.ones_(model.base_model.model[0].lora_B["default"].weight)
    model.save_pretrained(f"alpha-{alpha}")

wanted = changed(PeftModel.from_pretrained(base(), "alpha-32"))
model = PeftModel.from_pretrained(base(), "alpha-4")
model.add_adapter("other", LoraConfig(r=4, target_modules=["0"]))
model.load_adapter("alpha-32", "default")
over = changed(model)
model.save_pretrained("saved", selected_adapters=["default"])
saved = changed(PeftModel.from_pretrained(base(), "saved"))
model.set_adapter("other")
model.delete_adapter("default")
model.load_adapter("alpha-32", "default")
model.set_adapter("default")
deleted = changed(model)
shares = {"over": over / wanted, "saved": saved / wanted, "deleted before": deleted / wanted}
print({name: round(share.mean().item(), 4) for name, share in shares.items()})
assert torch.allclose(over, wanted / 8) and torch.allclose(saved, wanted / 8) and torch.allclose(deleted, wanted)
PYTHON
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 environment/bin/python shown.py
