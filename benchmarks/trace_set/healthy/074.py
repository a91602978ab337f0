# Layer-wise learning rate decay with no weight decay on norms and biases
import torch
from torch import nn


class Enc(nn.Module):
    def __init__(self, depth=3, d=24):
        super().__init__()
        self.emb = nn.Linear(10, d)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(d, 2, 48, 0.1, batch_first=True) for _ in range(depth))
        self.head = nn.Linear(d, 3)

    def forward(self, x):
        x = self.emb(x)
        for l in self.layers:
            x = l(x)
        return self.head(x.mean(1))


def layer_id(name, depth):
    if name.startswith("emb"):
        return 0
    if name.startswith("layers."):
        return int(name.split(".")[1]) + 1
    return depth + 1


def param_groups(model, depth, lr, decay, wd):
    groups = {}
    for n, p in model.named_parameters():
        lid, w = layer_id(n, depth), (0.0 if p.ndim == 1 else wd)
        groups.setdefault((lid, w), {"params": [], "lr": lr * decay ** (depth + 1 - lid), "weight_decay": w})["params"].append(p)
    return list(groups.values())


torch.manual_seed(0)
net = Enc()
opt = torch.optim.AdamW(param_groups(net, 3, 3e-3, 0.75, 0.05))
assert sum(len(g["params"]) for g in opt.param_groups) == len(list(net.parameters()))
for step in range(40):
    x = torch.randn(32, 5, 10)
    y = x.mean(1)[:, :3].argmax(1)
    loss = nn.functional.cross_entropy(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 10 == 0:
        print(step, loss.item())
