#!/usr/bin/env bash
# opacus 1.6.0: the gradient per sample of `nn.Embedding(padding_idx=0)` has a part for the padding row, so a run with
# differential privacy moves it (plain SGD leaves it at zero), and clipping by the norm of a sample's gradient counts it: the
# more padding a text has, the more its other gradients are cut.
# torch's documentation of `padding_idx`: "the entries at `padding_idx` do not contribute to the gradient; therefore, the
# embedding vector at `padding_idx` is not updated during training".
# Run on 2026-11-30.
# Status 0: it still behaves so. Any other: it changed, or could not be installed.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/environment"
"$room/environment/bin/python" -m pip install -q torch==2.13.0 opacus==1.6.0 numpy==2.4.6
cd "$room"
cat > shown.py <<'PYTHON'
import copy

import torch
from opacus import GradSampleModule
from torch import nn


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4, padding_idx=0)
        self.head = nn.Linear(4, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(tokens).sum(1))


torch.manual_seed(0)
plain = Classifier()
private = GradSampleModule(copy.deepcopy(plain), loss_reduction="sum")
tokens = torch.tensor([[1, 2, 0, 0], [3, 0, 0, 0]])
for model in (plain, private):
    nn.functional.cross_entropy(model(tokens), torch.tensor([0, 1]), reduction="sum").backward()
expected, samples = plain.embedding.weight.grad, private.embedding.weight.grad_sample
seen = samples.sum(0)
print("gradient of the padding row: torch", expected[0].tolist(), "opacus", [round(x, 3) for x in seen[0].tolist()])
assert torch.allclose(seen[1:], expected[1:], atol=1e-6)
assert expected[0].abs().sum() == 0 and seen[0].abs().sum() > 0.1
norms = [samples.flatten(1).norm(dim=1).tolist(), samples[:, 1:].flatten(1).norm(dim=1).tolist()]
print("norms per sample with and without that row:", [[round(x, 3) for x in each] for each in norms])
assert norms[0][1] > 3 * norms[1][1]
PYTHON
OMP_NUM_THREADS=1 environment/bin/python shown.py
