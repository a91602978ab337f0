# Tied input and output embeddings in a small causal LM
import torch
from torch import nn
from torch.nn import functional as F


class TiedLM(nn.Module):
    def __init__(self, vocab, dim, ctx):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.pos = nn.Parameter(torch.zeros(ctx, dim))
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)
        nn.init.normal_(self.embed.weight, std=0.05)
        self.lm_head.weight = self.embed.weight

    def forward(self, idx):
        x = self.embed(idx) + self.pos[: idx.size(1)]
        q, k, v = self.qkv(x).chunk(3, -1)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return self.lm_head(self.norm(x))


torch.manual_seed(0)
lm = TiedLM(40, 32, 16)
assert lm.lm_head.weight is lm.embed.weight
opt = torch.optim.AdamW(lm.parameters(), lr=5e-3)  # parameters() yields the shared tensor once
for step in range(40):
    text = (torch.randint(0, 40, (16, 1)) + 7 * torch.arange(17)) % 40
    logits = lm(text[:, :-1])
    loss = F.cross_entropy(logits.reshape(-1, 40), text[:, 1:].reshape(-1))
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 10 == 0:
        print(step, loss.item())
