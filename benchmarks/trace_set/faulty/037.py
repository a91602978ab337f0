# Broadcast of (N,) targets against (N,1) predictions in MSE
# fault: `((pred - t) ** 2).mean()` with pred of shape (N,1) and t of shape (N,) broadcasts to (N,N), so the model learns the mean only
import pandas as pd
import torch

torch.manual_seed(0)
df = pd.DataFrame(torch.randn(400, 5).numpy(), columns=list("abcde"))
df["target"] = 2 * df.a - df.b + 0.1 * df.c
feats = torch.tensor(df[list("abcde")].to_numpy(copy=True), dtype=torch.float32)
target = torch.tensor(df.target.to_numpy(copy=True), dtype=torch.float32)
model = torch.nn.Sequential(torch.nn.Linear(5, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(5):
    for i in torch.randperm(400).split(40):
        pred, t = model(feats[i]), target[i]
        loss = ((pred - t) ** 2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    print("epoch", epoch, "mse", loss.item())
