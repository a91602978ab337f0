# zero_grad forgotten in a plain loop
# fault: the loop never calls `optimizer.zero_grad()` before `loss.backward()`, gradients of all past batches add up
import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset


def get_data():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(480, 20, generator=g)
    y = (x[:, :5].sum(1) > 0).float()
    return TensorDataset(x, y)


def train(model, loader, epochs=3):
    optimizer = optim.SGD(model.parameters(), lr=0.01)
    criterion = nn.BCEWithLogitsLoss()
    model.train()
    for epoch in range(epochs):
        running = 0.0
        for inputs, labels in loader:
            outputs = model(inputs).squeeze(-1)
            loss = criterion(outputs, labels)
            loss.backward()
            optimizer.step()
            running += loss.item()
        print("epoch %d loss %.4f" % (epoch + 1, running / len(loader)))


torch.manual_seed(0)
train(nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 1)), DataLoader(get_data(), 32, shuffle=True))
