# Accelerate: loss divided by the accumulation steps by hand and again by accelerator.backward
# fault: `accelerator.backward(loss / GA)` divides by hand although backward already divides by gradient_accumulation_steps, so gradients are 4 times too small
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

GA = 4
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=GA)
torch.manual_seed(0)
x = torch.randn(512, 12)
y = (x[:, :6].sum(1) > x[:, 6:].sum(1)).long()
model = torch.nn.Sequential(torch.nn.Linear(12, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2))
opt = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
model, opt, loader = accelerator.prepare(model, opt, loader)
for epoch in range(3):
    for a, b in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.cross_entropy(model(a), b)
            accelerator.backward(loss / GA)
            opt.step()
            opt.zero_grad()
    accelerator.print(epoch, loss.item())
