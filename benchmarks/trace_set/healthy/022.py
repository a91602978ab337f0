# Checkpoint and resume in one program with model, optimizer, scheduler, rng and sampler state
import os
import random
import tempfile
import numpy as np
import torch
from torch import nn

EPOCHS, BS, N = 6, 32, 256


def seed_all(s):
    random.seed(s)
    np.random.seed(s)
    torch.manual_seed(s)


class Run:
    def __init__(self):
        self.model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))
        self.opt = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.sched = torch.optim.lr_scheduler.CosineAnnealingLR(self.opt, T_max=EPOCHS)
        self.gen = torch.Generator().manual_seed(77)
        self.epoch = 0

    def state(self):
        return {"model": self.model.state_dict(), "opt": self.opt.state_dict(), "sched": self.sched.state_dict(),
                "gen": self.gen.get_state(), "torch": torch.get_rng_state(), "epoch": self.epoch}

    def load(self, path):
        s = torch.load(path)
        self.model.load_state_dict(s["model"])
        self.opt.load_state_dict(s["opt"])
        self.sched.load_state_dict(s["sched"])
        self.gen.set_state(s["gen"])
        torch.set_rng_state(s["torch"])
        self.epoch = s["epoch"]

    def fit(self, x, y, until):
        while self.epoch < until:
            self.model.train()
            for i in torch.randperm(N, generator=self.gen).split(BS):
                loss = nn.functional.mse_loss(self.model(x[i]), y[i])
                self.opt.zero_grad()
                loss.backward()
                self.opt.step()
            self.sched.step()
            self.epoch += 1
        return loss.item()


def data():
    g = torch.Generator().manual_seed(1)
    x = torch.randn(N, 8, generator=g)
    return x, x.norm(dim=1, keepdim=True)


with tempfile.TemporaryDirectory() as tmp:
    ck = os.path.join(tmp, "last.pt")
    seed_all(0)
    x, y = data()
    first = Run()
    first.fit(x, y, 3)
    torch.save(first.state(), ck)
    seed_all(999)  # the new process begins with another rng state
    second = Run()
    second.load(ck)
    a = second.fit(x, y, EPOCHS)
    seed_all(0)
    whole = Run()
    b = whole.fit(x, y, EPOCHS)
    print("resumed", a, "uninterrupted", b)
