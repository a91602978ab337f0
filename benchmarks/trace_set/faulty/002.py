# Both ranks read the same data under DDP, no sampler
# run: torchrun --standalone --nproc_per_node 2
# fault: `DataLoader(train_set, batch_size=20, shuffle=True)` has no DistributedSampler and both ranks have the same seed, so both see the same batches
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(123)
X = torch.randn(400, 7)
y = X.abs().sum(1, keepdim=True)
train_set = TensorDataset(X, y)
loader = DataLoader(train_set, batch_size=20, shuffle=True)
model = torch.nn.parallel.DistributedDataParallel(
    torch.nn.Sequential(torch.nn.Linear(7, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(2):
    for xb, yb in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.smooth_l1_loss(model(xb), yb)
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print("epoch", epoch, loss.item())
dist.destroy_process_group()
