# Clip before GradScaler unscale
# fault: `clip_grad_norm_` is applied to scaled gradients because `scaler.unscale_(opt)` is missing before it
import torch

torch.manual_seed(0)
dev = "cpu"
net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4)).to(dev)
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler(dev, init_scale=2.0 ** 14)
X = torch.randn(600, 16)
Y = X[:, :4].argmax(1)
loss_fn = torch.nn.CrossEntropyLoss()
for epoch in range(3):
    for idx in torch.randperm(600).split(60):
        opt.zero_grad(set_to_none=True)
        with torch.autocast(dev, dtype=torch.bfloat16):
            out = net(X[idx].to(dev))
            loss = loss_fn(out.float(), Y[idx].to(dev))
        scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
    print(epoch, loss.item())
