# Optimizer step fused in backward by register_post_accumulate_grad_hook
import torch
import torch.nn as nn

torch.manual_seed(4)
model = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5))
optimizers = {p: torch.optim.AdamW([p], lr=2e-3) for p in model.parameters()}


def step_now(p):
    optimizers[p].step()
    optimizers[p].zero_grad()


for p in model.parameters():
    p.register_post_accumulate_grad_hook(step_now)

x = torch.randn(800, 12)
y = (x[:, :5] + 0.1 * torch.randn(800, 5)).argmax(1)
for epoch in range(2):
    for ids in torch.randperm(800).chunk(20):
        loss = nn.functional.cross_entropy(model(x[ids]), y[ids])
        loss.backward()  # updates happen inside, no optimizer.step here
    print("epoch", epoch, "loss", loss.item())
