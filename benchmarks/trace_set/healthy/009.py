# Accelerate loop with accumulate() and gradient clipping under sync_gradients
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset


def training_function():
    set_seed(13)
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    xs = torch.randn(320, 10)
    ys = (xs[:, 0] * xs[:, 1] > 0).long()
    dl = DataLoader(TensorDataset(xs, ys), batch_size=16, shuffle=True)
    model = torch.nn.Sequential(torch.nn.Linear(10, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    sched = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=3 * len(dl) // 2)
    model, optimizer, dl, sched = accelerator.prepare(model, optimizer, dl, sched)
    for epoch in range(3):
        model.train()
        for x, y in dl:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                sched.step()
                optimizer.zero_grad()
        accelerator.print(epoch, loss.item(), sched.get_last_lr())
    accelerator.end_training()


if __name__ == "__main__":
    training_function()
