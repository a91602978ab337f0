# Scheduler built for epochs stepped each batch, learning rate at zero after the first epoch
# fault: `scheduler.step()` is called for every batch although `total_iters=EPOCHS` was meant in epochs, so lr is zero after five batches
import torch
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 5
torch.manual_seed(0)
x = torch.rand(500, 4)
y = x.prod(1, keepdim=True) * 10
dl = DataLoader(TensorDataset(x, y), batch_size=50, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=EPOCHS)
for epoch in range(EPOCHS):
    epoch_loss = 0
    for xb, yb in dl:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(xb), yb)
        loss.backward()
        optimizer.step()
        scheduler.step()
        epoch_loss += loss.item() * len(xb)
    print(f"Epoch {epoch}: {epoch_loss / len(x):.5f}")
