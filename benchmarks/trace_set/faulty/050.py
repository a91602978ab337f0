# GAN: discriminator zero_grad only before the loop, generator gradients leak into its steps
# fault: `opt_d.zero_grad()` is called only once before the loop, so the gradients that the generator's backward leaves in D (pushing it to call fakes real) and all earlier ones are added to each discriminator step
import torch
from torch import nn

torch.manual_seed(0)
G = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
D = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
opt_g, opt_d = (torch.optim.Adam(n.parameters(), lr=1e-3, betas=(0.5, 0.99)) for n in (G, D))
crit = nn.BCEWithLogitsLoss()
one, zero = torch.ones(64, 1), torch.zeros(64, 1)
opt_d.zero_grad()
for it in range(40):
    real = torch.randn(64, 2) * 0.3 + torch.tensor([2.0, -1.0])
    fake = G(torch.randn(64, 4))
    d_loss = crit(D(real), one) + crit(D(fake.detach()), zero)
    d_loss.backward()
    opt_d.step()
    opt_g.zero_grad()
    g_loss = crit(D(fake), one)
    g_loss.backward()
    opt_g.step()
    if it % 10 == 0:
        print(it, d_loss.item(), g_loss.item())
