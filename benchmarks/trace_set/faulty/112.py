# Logits viewed instead of transposed for cross entropy over time
# fault: `logits.view(B, V, T)` reinterprets the (B, T, V) memory instead of transposing it, so logits and targets are scrambled
import torch
from torch import nn

torch.manual_seed(0)
B, T, V = 16, 12, 20


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.rnn, self.fc = nn.Embedding(V, 24), nn.GRU(24, 48, batch_first=True), nn.Linear(48, V)

    def forward(self, t):
        return self.fc(self.rnn(self.emb(t))[0])


model = LM()
opt = torch.optim.Adam(model.parameters(), lr=5e-3)
for step in range(60):
    s = (torch.randint(0, V, (B, 1)) + torch.arange(T + 1)) % V
    logits = model(s[:, :-1])
    loss = nn.functional.cross_entropy(logits.view(B, V, T), s[:, 1:])
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 15 == 0:
        print(step, loss.item())
