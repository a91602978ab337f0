"""Linear regression: the smallest training there is. A model, data and a loss; the rest is in linear.yaml."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

TRUE = torch.tensor([[2.0, -3.0, 0.5]])


def build():
    return nn.Linear(3, 1)


def data():
    inputs = torch.randn(2000, 3)  # drawn with the run's seed
    answers = inputs @ TRUE.T + 4 + 0.1 * torch.randn(2000, 1)
    return TensorDataset(inputs[:1800], answers[:1800]), TensorDataset(inputs[1800:], answers[1800:])


loss = nn.MSELoss()  # a mean, which is found out
