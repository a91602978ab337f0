# Memmapped token stream sampled at random offsets like nanoGPT
import os
import tempfile
import numpy as np
import torch
import torch.nn as nn
from torch.nn import functional as F

batch_size, block_size, n_embd, vocab = 12, 24, 32, 65
torch.manual_seed(1337)


def get_batch(path):
    data = np.memmap(path, dtype=np.uint16, mode="r")
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([torch.from_numpy(data[i:i + block_size].astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy(data[i + 1:i + 1 + block_size].astype(np.int64)) for i in ix])
    return x, y


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, n_embd), nn.Embedding(block_size, n_embd)
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.ln_f, self.lm_head = nn.LayerNorm(n_embd), nn.Linear(n_embd, vocab)

    def forward(self, idx, targets=None):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        q, k, v = self.c_attn(x).split(n_embd, dim=2)
        x = x + self.c_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        logits = self.lm_head(self.ln_f(x))
        return logits, None if targets is None else F.cross_entropy(logits.view(-1, vocab), targets.view(-1))


@torch.no_grad()
def estimate_loss(model, paths):
    model.eval()
    out = {k: np.mean([model(*get_batch(p))[1].item() for _ in range(3)]) for k, p in paths.items()}
    model.train()
    return out


with tempfile.TemporaryDirectory() as d:
    toks = (np.cumsum(np.random.RandomState(0).randint(1, 3, 6000)) % vocab).astype(np.uint16)
    paths = {"train": os.path.join(d, "train.bin"), "val": os.path.join(d, "val.bin")}
    toks[:5000].tofile(paths["train"])
    toks[5000:].tofile(paths["val"])
    model = Head()
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    for it in range(40):
        if it % 20 == 0:
            print(it, estimate_loss(model, paths))
        _, loss = model(*get_batch(paths["train"]))
        opt.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
