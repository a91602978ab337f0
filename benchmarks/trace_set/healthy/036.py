# 5-fold cross validation with a new model and optimizer for each fold
import numpy as np
import torch

rs = np.random.RandomState(0)
X = rs.randn(250, 8).astype(np.float32)
y = (X[:, 0] + X[:, 1] * X[:, 2] > 0).astype(np.int64)
folds = np.array_split(rs.permutation(len(X)), 5)


def fit_and_score(tr, va, seed):
    torch.manual_seed(seed)
    mu, sd = X[tr].mean(0), X[tr].std(0)
    A, B = torch.from_numpy((X[tr] - mu) / sd), torch.from_numpy(y[tr])
    net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
    opt = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(3):
        for i in torch.randperm(len(A)).split(50):
            opt.zero_grad()
            torch.nn.functional.cross_entropy(net(A[i]), B[i]).backward()
            opt.step()
    with torch.no_grad():
        p = net(torch.from_numpy((X[va] - mu) / sd)).argmax(1).numpy()
    return (p == y[va]).mean()


scores = []
for k in range(5):
    va = folds[k]
    tr = np.concatenate([f for j, f in enumerate(folds) if j != k])
    scores.append(fit_and_score(tr, va, seed=k))
print("cv accuracy %.3f +- %.3f" % (np.mean(scores), np.std(scores)))
