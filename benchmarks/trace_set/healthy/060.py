# Federated averaging simulated with four clients
import copy
import torch
from torch import nn

torch.manual_seed(0)
SIZES = [40, 80, 120, 160]
truth = torch.randn(6, 3)


def client_data(k, n):
    x = torch.randn(n, 6) + 0.3 * k
    return x, (x @ truth).argmax(1)


clients = [client_data(k, n) for k, n in enumerate(SIZES)]
server = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 3))


def local_train(model, x, y, epochs=1):
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(epochs):
        for i in torch.randperm(len(x)).split(20):
            opt.zero_grad()
            loss = nn.functional.cross_entropy(model(x[i]), y[i])
            loss.backward()
            opt.step()
    return loss.item()


for rnd in range(4):
    states, losses = [], []
    for x, y in clients:
        local = copy.deepcopy(server)
        losses.append(local_train(local, x, y))
        states.append(local.state_dict())
    total = sum(SIZES)
    avg = {k: sum(s[k] * (n / total) for s, n in zip(states, SIZES)) for k in states[0]}
    server.load_state_dict(avg)
    print("round", rnd, [round(l, 3) for l in losses])
