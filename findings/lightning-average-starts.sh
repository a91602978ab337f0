#!/usr/bin/env bash
# lightning 2.6.6, `EMAWeightAveraging`:
# 1. `update_starting_at_epoch=3` does not start then: the average is updated after every step from the first on, and from that
#    epoch on also once more at the end of each epoch.
# 2. `update_starting_at_step=3` does, but until then the average is a copy of the weights before training, which Lightning
#    swaps in all the same: earlier validations measure the model as it was initialized, checkpoints hold it as `state_dict`,
#    and a run that ends before has its trained weights replaced by the initial ones.
# Documentation: "During validation and after the training finishes, the current model parameters will be replaced with the
# averaged values"; in 2, nothing has been averaged.
# Run on 2026-11-30.
# Status 0: it still behaves so. Any other: it changed, or could not be installed.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/environment"
"$room/environment/bin/python" -m pip install -q torch==2.13.0 lightning==2.6.6 numpy==2.4.6
cd "$room"
cat > shown.py <<'PYTHON'
import logging
import warnings
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
START = 3  # an epoch has one step


class Slope(lightning.LightningModule):
    """Learns the slope 1, beginning at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.losses: list[float] = []

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        return (batch * (self.weight - 1)).square().mean()

    def validation_step(self, batch: torch.Tensor, _: int) -> None:
        self.losses.append(round((self.weight - 1).square().item(), 3))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(epochs: int, **options: Any) -> tuple[list[float], float, float, int]:
    """Losses of the validations, the weight at the end, that in the checkpoint, and the number of updates of the average."""
    model = Slope()
    average = EMAWeightAveraging(decay=0.5, **options)
    save = ModelCheckpoint(f"checkpoints-{epochs}-{'-'.join(options)}")
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        callbacks=[average, save],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(model, *(torch.utils.data.DataLoader(torch.ones(1, 1)) for _ in range(2)))
    saved = torch.load(save.best_model_path, weights_only=False)
    return (
        model.losses,
        round(model.weight.item(), 3),
        round(saved["state_dict"]["weight"].item(), 3),
        int(saved["averaging_state"]["n_averaged"]),
    )


for epochs in (START, 2 * START):
    plain, by_epoch, by_step = (
        train(epochs, **options) for options in ({}, {"update_starting_at_epoch": START}, {"update_starting_at_step": START})
    )
    for name, seen in (("from the first step", plain), (f"from epoch {START}", by_epoch), (f"from step {START}", by_step)):
        print(f"{epochs} epochs, {name}: validation losses {seen[0]}, weight {seen[1]}, saved {seen[2]}, updates {seen[3]}")
    assert plain[0][0] < 1 and plain[1] > 0.3 and plain[3] == epochs
    assert by_epoch[0][:START] == plain[0][:START]
    assert by_epoch[3] == (START if epochs == START else 3 * START)
    assert by_step[0][:START] == [1.0] * START
    assert by_step[1:] == (0.0, 0.0, 0) if epochs == START else by_step[1] > 0.5
PYTHON
OMP_NUM_THREADS=1 environment/bin/python shown.py
