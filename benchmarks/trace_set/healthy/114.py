# Tabular model with target encodings fitted on train folds
import numpy as np
import pandas as pd
import torch

rs = np.random.RandomState(0)
df = pd.DataFrame({"city": rs.randint(0, 30, 600), "x": rs.randn(600)})
effect = rs.randn(30)
df["y"] = ((effect[df.city] + df.x + 0.5 * rs.randn(600)) > 0).astype(int)
train, test = df.iloc[:450].reset_index(drop=True), df.iloc[450:].reset_index(drop=True)


def encode(fit, use, prior=10):
    mean = fit.y.mean()
    s = fit.groupby("city").y.agg(["sum", "count"])
    enc = (s["sum"] + prior * mean) / (s["count"] + prior)
    return use.city.map(enc).fillna(mean).to_numpy()


oof = np.zeros(len(train))
folds = rs.randint(0, 5, len(train))
for k in range(5):  # out-of-fold, so that no row sees its own label
    oof[folds == k] = encode(train[folds != k], train[folds == k])


def tensors(d, enc):
    return torch.tensor(np.c_[enc, d.x.to_numpy()], dtype=torch.float32), torch.tensor(d.y.to_numpy().copy(), dtype=torch.float32)


X, Y = tensors(train, oof)
Xt, Yt = tensors(test, encode(train, test))
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
opt = torch.optim.Adam(net.parameters(), lr=2e-2)
for epoch in range(4):
    for i in torch.randperm(len(X)).split(45):
        opt.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(net(X[i]).squeeze(1), Y[i])
        loss.backward()
        opt.step()
    with torch.no_grad():
        print(epoch, loss.item(), ((net(Xt).squeeze(1) > 0).float() == Yt).float().mean().item())
