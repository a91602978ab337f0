"""Training of a module by Lightning's Trainer, with dropout and a validation, alone or in DDP.

    python lightning_module.py [--batch N]

It imports torch and lightning.
"""

import argparse
import os

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=8, help="of a process")
a = parser.parse_args()
world = int(os.environ.get("WORLD_SIZE", 1))


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], number: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], number: int) -> None:
        self.log("loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    L.seed_everything(0)
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    rows = TensorDataset(x, x[:, :3].argmax(1))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=world,
        strategy="ddp" if world > 1 else "auto",
        max_epochs=2,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Classifier(), DataLoader(rows, batch_size=a.batch, shuffle=True), DataLoader(rows, batch_size=16))


if __name__ == "__main__":
    main()
