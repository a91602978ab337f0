#!/usr/bin/env bash
# torch 2.13.0: `nn.TransformerEncoderLayer` with `activation=nn.GELU(approximate="tanh")`. In evaluation its fast path knows
# one GELU, the exact one: the layer's output is bitwise that of a layer with `nn.GELU()`. In training, and with the fast path
# off, the layer uses the approximation. The documentation of the fast path requires "`activation` is one of: "relu", "gelu",
# torch.functional.relu, or torch.functional.gelu"; any other activation than this one does turn it off.
# Run on 2026-11-30.
# Status 0: it still behaves so. Any other: it changed, or could not be installed.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/environment"
"$room/environment/bin/python" -m pip install -q torch==2.13.0 numpy==2.4.6
cd "$room"
cat > shown.py <<'PYTHON'
import torch
from torch import nn

x = torch.randn(8, 6, 16, generator=torch.Generator().manual_seed(1))


def outputs(activation: nn.Module) -> dict[str, torch.Tensor]:
    """The layer's output in training, in evaluation, and in evaluation without the fast path."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 64, dropout=0.0, activation=activation, batch_first=True)
    layer.linear1.weight.data.mul_(3)
    out = {}
    with torch.no_grad():
        out["training"] = layer(x)
        layer.eval()
        out["evaluation"] = layer(x)
        torch.backends.mha.set_fastpath_enabled(False)
        out["without the fast path"] = layer(x)
        torch.backends.mha.set_fastpath_enabled(True)
    return out


exact, tanh, silu = (outputs(each) for each in (nn.GELU(), nn.GELU(approximate="tanh"), nn.SiLU()))
for name, each in (("exact GELU", exact), ("tanh GELU", tanh), ("SiLU", silu)):
    apart = {mode: (value - each["training"]).abs().max().item() for mode, value in each.items() if mode != "training"}
    print(f"{name}: differs from training by", {mode: f"{number:.1e}" for mode, number in apart.items()})
    assert apart["without the fast path"] < 5e-6
    assert apart["evaluation"] > 1e-4 if each is tanh else apart["evaluation"] < 5e-6
print("in evaluation, tanh GELU is exact GELU:", torch.equal(tanh["evaluation"], exact["evaluation"]))
assert torch.equal(tanh["evaluation"], exact["evaluation"])
assert not torch.equal(tanh["training"], exact["training"])
PYTHON
OMP_NUM_THREADS=1 environment/bin/python shown.py
