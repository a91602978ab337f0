# Resume with the data order started from zero, first rows seen twice
# fault: `fit` seeds its shuffle with the constant 5 and begins at batch 0 after the restart, so the resumed job repeats the first rows and never sees the rest
import io
import torch

torch.manual_seed(0)
X = torch.randn(2000, 6)
Y = X.pow(3).sum(1, keepdim=True) / 5


def fit(model, opt, start_step, n_steps):
    g = torch.Generator().manual_seed(5)
    order = torch.randperm(2000, generator=g).split(40)
    it = iter(order)
    for step in range(start_step, start_step + n_steps):
        i = next(it)
        loss = torch.nn.functional.mse_loss(model(X[i]), Y[i])
        opt.zero_grad()
        loss.backward()
        opt.step()
    print("step", step, loss.item())
    return step + 1


def fresh():
    m = torch.nn.Sequential(torch.nn.Linear(6, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    return m, torch.optim.Adam(m.parameters(), lr=3e-3)


m, o = fresh()
s = fit(m, o, 0, 20)
buf = io.BytesIO()
torch.save([m.state_dict(), o.state_dict(), s], buf)
buf.seek(0)
m, o = fresh()
a, b, s = torch.load(buf)
m.load_state_dict(a)
o.load_state_dict(b)
fit(m, o, s, 25)
