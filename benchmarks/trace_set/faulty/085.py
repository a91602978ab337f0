# Accelerate: prepared model not used, raw one in the loop
# run: torchrun --standalone --nproc_per_node 2
# fault: `raw(x)` is called in the loop; only `model` returned by `accelerator.prepare` synchronises gradients between the two processes
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True)
set_seed(0)
x = torch.randn(400, 10)
y = x.pow(2).sum(1, keepdim=True) / 10
raw = torch.nn.Sequential(torch.nn.Linear(10, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.Adam(raw.parameters(), lr=5e-3)
loader = DataLoader(TensorDataset(x, y), batch_size=20, shuffle=True)
model, optimizer, loader = accelerator.prepare(raw, optimizer, loader)
for epoch in range(3):
    model.train()
    for a, b in loader:
        loss = torch.nn.functional.mse_loss(raw(a), b)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
    print(accelerator.process_index, epoch, loss.item())
accelerator.end_training()
