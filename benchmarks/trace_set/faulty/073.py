# NLLLoss on raw logits without log_softmax
# fault: `nn.NLLLoss()` is applied to raw logits (no log_softmax in the model), so the loss goes to minus infinity by growing the logits
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class SmallNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(9, 32), nn.Linear(32, 3)

    def forward(self, x):
        return self.fc2(torch.relu(self.fc1(x)))


torch.manual_seed(0)
x = torch.randn(480, 9)
loader = DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=32, shuffle=True)
net, criterion = SmallNet(), nn.NLLLoss()
optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
for epoch in range(3):
    for a, b in loader:
        optimizer.zero_grad()
        loss = criterion(net(a), b)
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
