# key_padding_mask inverted, attention sees only the pads
# fault: `src_key_padding_mask=mask` gets True for real tokens, but True means "ignore" there, so attention looks at the pads only
import torch
from torch import nn


class Encoder(nn.Module):
    def __init__(self, v=40, d=32):
        super().__init__()
        self.emb = nn.Embedding(v, d, padding_idx=0)
        layer = nn.TransformerEncoderLayer(d, 4, 64, dropout=0.1, batch_first=True)
        self.enc = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.out = nn.Linear(d, 2)

    def forward(self, t, mask):
        h = self.enc(self.emb(t), src_key_padding_mask=mask)
        return self.out((h * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


torch.manual_seed(0)
model = Encoder()
opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
for step in range(40):
    lens = torch.randint(4, 15, (32,))  # at least one pad in each row of 15
    t = torch.randint(1, 40, (32, 15))
    mask = torch.arange(15)[None] < lens[:, None]
    t = t * mask
    y = (t == 7).any(1).long()
    loss = nn.functional.cross_entropy(model(t, mask), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 10 == 0:
        print(step, loss.item())
