# Accelerate: prepared scheduler steps world-size times a step but its length was counted in local steps
# run: torchrun --standalone --nproc_per_node 2
# fault: `total_iters=STEPS` counts local steps, but the prepared scheduler advances num_processes times per step, so the lr is zero after half of the training
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 4
acc = Accelerator(cpu=True)
set_seed(1)
x = torch.randn(480, 8)
y = x[:, :4].argmax(1)
net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
opt = torch.optim.AdamW(net.parameters(), lr=5e-3)
dl = DataLoader(TensorDataset(x, y), batch_size=20, shuffle=True)
net, opt, dl = acc.prepare(net, opt, dl)
STEPS = EPOCHS * len(dl)  # len after prepare: steps of one process
sched = torch.optim.lr_scheduler.LinearLR(opt.optimizer, 1.0, 0.0, total_iters=STEPS)
sched = acc.prepare(sched)
for epoch in range(EPOCHS):
    for a, b in dl:
        loss = torch.nn.functional.cross_entropy(net(a), b)
        acc.backward(loss)
        opt.step()
        sched.step()
        opt.zero_grad()
    acc.print(epoch, loss.item(), sched.get_last_lr())
acc.end_training()
