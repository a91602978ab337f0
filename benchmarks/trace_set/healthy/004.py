# Gradient accumulation with loss divided by the number of micro batches, leftover micro batch group scaled rightly
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(7)
feats = torch.randn(420, 12)
target = feats[:, :3].sum(1, keepdim=True).sin()
loader = DataLoader(TensorDataset(feats, target), batch_size=16, shuffle=True)
ACC = 4
model = torch.nn.Sequential(torch.nn.Linear(12, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
n_batches = len(loader)
for epoch in range(4):
    model.train()
    total, seen = 0.0, 0
    micro = list(loader)
    for start in range(0, n_batches, ACC):
        group = micro[start:start + ACC]
        n_rows = sum(len(x) for x, _ in group)  # the last group is smaller and has a short batch
        optimizer.zero_grad()
        for x, y in group:
            loss = ((model(x) - y) ** 2).sum() / n_rows
            loss.backward()
            total += loss.item() * n_rows
        seen += n_rows
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    print(f"epoch {epoch} mse {total / seen:.4f}")
