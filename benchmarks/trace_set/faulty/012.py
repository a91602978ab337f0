# Labels not shifted in a hand-written causal LM
# fault: `F.cross_entropy(logits.view(-1, V), tok.view(-1))` compares each position with its own input token, the targets are not shifted by one
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
V, D, T = 48, 32, 20


class CausalLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(V, D), nn.Embedding(T, D)
        layer = nn.TransformerEncoderLayer(D, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.tr = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(D, V)

    def forward(self, t):
        n = t.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(n)
        h = self.wte(t) + self.wpe(torch.arange(n))
        return self.head(self.tr(h, mask=mask, is_causal=True))


lm = CausalLM()
opt = torch.optim.AdamW(lm.parameters(), lr=1e-3)
for it in range(40):
    tok = (torch.randint(0, V, (16, 1)) + torch.randint(1, 4, (16, 1)) * torch.arange(T)) % V
    logits = lm(tok)
    loss = F.cross_entropy(logits.view(-1, V), tok.view(-1))
    opt.zero_grad()
    loss.backward()
    opt.step()
    if it % 10 == 0:
        print(it, loss.item())
