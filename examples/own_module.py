"""Train a module of your own on two processes and load it: `lockstep.fit`. `python examples/own_module.py`, seconds."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs)


def data() -> TensorDataset:
    inputs = torch.randn(1200, 4)
    return TensorDataset(inputs, inputs[:, :3].argmax(dim=1))


def accuracy(outputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"accuracy": (outputs.argmax(dim=1) == labels).float().mean()}


result = lockstep.fit(
    Net, data, nn.functional.cross_entropy, epochs=10, learning_rate=0.01, processes=2, metrics=accuracy
)
print("validation accuracy", result.metrics["validation"]["accuracy"])
model = lockstep.load(result)
print("the largest of 0.1, 0.9, 0.2 is number", model(torch.tensor([[0.1, 0.9, 0.2, 0.0]])).argmax().item())
