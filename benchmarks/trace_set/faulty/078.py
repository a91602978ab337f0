# LSTM hidden state carried over shuffled batches
# fault: `state` is carried from batch to batch although `shuffle=True` makes the rows of successive batches unrelated, so each row starts from another row's memory
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
X = torch.randn(320, 12, 3)
Y = X[:, :, 0].cumsum(1)[:, -1:]
loader = DataLoader(TensorDataset(X, Y), batch_size=32, shuffle=True, drop_last=True)
lstm, fc = nn.LSTM(3, 32, batch_first=True), nn.Linear(32, 1)
opt = torch.optim.Adam([*lstm.parameters(), *fc.parameters()], lr=5e-3)
state = None
for epoch in range(4):
    for x, y in loader:
        out, state = lstm(x, state)
        state = tuple(s.detach() for s in state)
        loss = nn.functional.mse_loss(fc(out[:, -1]), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(epoch, loss.item())
