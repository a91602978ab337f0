# Masked LM corrupts input in place and labels are the same tensor
# fault: `inputs = batch` is no copy, so masking in place also puts MASK into `labels`; the model learns to predict the MASK id itself
import torch
import torch.nn as nn

torch.manual_seed(0)
MASK, V, L = 0, 30, 14


class Bidir(nn.Module):
    def __init__(self):
        super().__init__()
        self.e, self.g, self.o = nn.Embedding(V, 24), nn.GRU(24, 24, batch_first=True, bidirectional=True), nn.Linear(48, V)

    def forward(self, t):
        return self.o(self.g(self.e(t))[0])


net = Bidir()
opt = torch.optim.Adam(net.parameters(), lr=5e-3)
for step in range(40):
    batch = (torch.randint(0, V - 1, (16, 1)) + torch.arange(L)) % (V - 1) + 1
    labels = batch
    inputs = batch
    chosen = torch.rand(batch.shape) < 0.2
    chosen[:, 0] = True
    inputs[chosen] = MASK
    target = torch.where(chosen, labels, torch.tensor(-100))
    loss = nn.functional.cross_entropy(net(inputs).transpose(1, 2), target, ignore_index=-100)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 10 == 0:
        print(step, loss.item())
