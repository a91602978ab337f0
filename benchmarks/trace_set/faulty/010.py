# Loss counted on padding tokens
# fault: `nn.CrossEntropyLoss()` has no `ignore_index=PAD`, so the many pad positions are learned and dominate the loss
import random
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

PAD, VOC = 0, 25
random.seed(0)
torch.manual_seed(0)
corpus = []
for _ in range(300):
    s = random.randint(1, VOC - 1)
    corpus.append(torch.tensor([(s + k - 1) % (VOC - 1) + 1 for k in range(random.randint(3, 20))]))


def collate(batch):
    inp = pad_sequence([b[:-1] for b in batch], batch_first=True, padding_value=PAD)
    out = pad_sequence([b[1:] for b in batch], batch_first=True, padding_value=PAD)
    return inp, out


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(VOC, 24, padding_idx=PAD)
        self.gru = nn.GRU(24, 48, batch_first=True)
        self.head = nn.Linear(48, VOC)

    def forward(self, x):
        h, _ = self.gru(self.emb(x))
        return self.head(h)


model = Net()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
for epoch in range(2):
    for inp, out in DataLoader(corpus, batch_size=15, shuffle=True, collate_fn=collate):
        optimizer.zero_grad()
        logits = model(inp)
        loss = criterion(logits.reshape(-1, VOC), out.reshape(-1))
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
