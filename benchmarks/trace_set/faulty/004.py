# zero_grad within the micro batch loop, so accumulation keeps only the last
# fault: `optim.zero_grad()` stands inside the micro batch loop before each backward, so each step has only the last micro batch's gradient
import torch
import torch.nn.functional as F

torch.manual_seed(5)
K = 4
data = torch.randn(60, K, 8, 6)
wt = torch.randn(6, 1)
model = torch.nn.Sequential(torch.nn.Linear(6, 24), torch.nn.ELU(), torch.nn.Linear(24, 1))
optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(40):
    big = data[step]
    acc_loss = 0.0
    for micro in big:
        optim.zero_grad()
        target = torch.sin(micro @ wt)
        loss = F.mse_loss(model(micro), target) / K
        loss.backward()
        acc_loss += loss.item()
    optim.step()
    if step % 10 == 0:
        print(step, acc_loss)
