# Gradient clipping by value and by norm
import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

torch.manual_seed(0)
rnn = torch.nn.RNN(3, 32, batch_first=True)
fc = torch.nn.Linear(32, 1)
params = list(rnn.parameters()) + list(fc.parameters())
opt = torch.optim.SGD(params, lr=0.05, momentum=0.9)
for step in range(50):
    x = torch.randn(32, 15, 3)
    y = x[:, -5:, 0].sum(1, keepdim=True)
    loss = torch.nn.functional.mse_loss(fc(rnn(x)[0][:, -1]), y)
    opt.zero_grad()
    loss.backward()
    clip_grad_value_(params, 0.5)       # first single outliers,
    norm = clip_grad_norm_(params, 1.0)  # then the whole
    opt.step()
    if step % 10 == 0:
        print(step, loss.item(), norm.item())
