# Seq2seq GRU with teacher forcing and right-shifted decoder inputs
import torch
import torch.nn as nn

PAD, BOS, EOS, BASE = 0, 1, 2, 3
torch.manual_seed(0)


class Seq2Seq(nn.Module):
    def __init__(self, v=20, h=48):
        super().__init__()
        self.emb = nn.Embedding(v, 24, padding_idx=PAD)
        self.encoder = nn.GRU(24, h, batch_first=True)
        self.decoder = nn.GRU(24, h, batch_first=True)
        self.proj = nn.Linear(h, v)

    def forward(self, src, src_len, dec_in):
        packed = nn.utils.rnn.pack_padded_sequence(self.emb(src), src_len, batch_first=True, enforce_sorted=False)
        _, h = self.encoder(packed)
        out, _ = self.decoder(self.emb(dec_in), h)
        return self.proj(out)


def make(n):
    """task: reverse the source"""
    lens = torch.randint(2, 8, (n,))
    src = torch.full((n, 7), PAD)
    tgt = torch.full((n, 8), PAD)
    for i, k in enumerate(lens.tolist()):
        s = torch.randint(BASE, 20, (k,))
        src[i, :k] = s
        tgt[i, :k] = s.flip(0)
        tgt[i, k] = EOS
    dec_in = torch.cat([torch.full((n, 1), BOS), tgt[:, :-1]], 1)
    return src, lens, dec_in, tgt


model = Seq2Seq()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
criterion = nn.CrossEntropyLoss(ignore_index=PAD)
for step in range(50):
    src, lens, dec_in, tgt = make(32)
    out = model(src, lens, dec_in)
    loss = criterion(out.flatten(0, 1), tgt.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(step, loss.item())
