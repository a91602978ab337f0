# Contrastive learning with a MoCo-like queue and momentum encoder
import copy
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
DIM, K, M, T = 16, 256, 0.97, 0.1
base = torch.randn(1024, 20)


def augment(x):
    return x + 0.2 * torch.randn_like(x)


def encoder():
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, DIM))


enc_q = encoder()
enc_k = copy.deepcopy(enc_q)
enc_k.requires_grad_(False)
queue = F.normalize(torch.randn(K, DIM), dim=1)
ptr = 0
opt = torch.optim.SGD(enc_q.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
for epoch in range(2):
    for idx in torch.randperm(len(base)).split(64):
        x = base[idx]
        with torch.no_grad():
            for pk, pq in zip(enc_k.parameters(), enc_q.parameters()):
                pk.lerp_(pq, 1 - M)
            k = F.normalize(enc_k(augment(x)), dim=1)
        q = F.normalize(enc_q(augment(x)), dim=1)
        pos = (q * k).sum(1, keepdim=True)
        neg = q @ queue.T
        logits = torch.cat([pos, neg], 1) / T
        loss = F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))
        opt.zero_grad()
        loss.backward()
        opt.step()
        queue[ptr:ptr + len(k)] = k
        ptr = (ptr + len(k)) % K
    print(epoch, loss.item())
