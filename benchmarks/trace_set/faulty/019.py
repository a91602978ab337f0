# Resume without optimizer state
# fault: the resume block loads `ck["model"]` only; the new AdamW starts with empty moments although `ck["opt"]` was saved
import os
import tempfile
import torch

torch.manual_seed(0)
X = torch.randn(640, 9)
Y = (X[:, :3].sum(1) > 0).long()


def new():
    net = torch.nn.Sequential(torch.nn.Linear(9, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
    return net, torch.optim.AdamW(net.parameters(), lr=5e-3)


def run(net, opt, first, last):
    for ep in range(first, last):
        g = torch.Generator().manual_seed(ep)
        for i in torch.randperm(640, generator=g).split(64):
            opt.zero_grad()
            loss = torch.nn.functional.cross_entropy(net(X[i]), Y[i])
            loss.backward()
            opt.step()
        print(ep, loss.item())


with tempfile.TemporaryDirectory() as d:
    path = os.path.join(d, "ck.pt")
    net, opt = new()
    run(net, opt, 0, 2)
    torch.save({"model": net.state_dict(), "opt": opt.state_dict(), "epoch": 2}, path)
    # --- job restarted ---
    net, opt = new()
    ck = torch.load(path)
    net.load_state_dict(ck["model"])
    run(net, opt, ck["epoch"], 4)
