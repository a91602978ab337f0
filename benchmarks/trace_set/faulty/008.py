# Gradient clipping after optimizer.step
# fault: `clip_grad_norm_` is called after `opt.step()`, so the clipped gradients are never used
import torch
import torch.nn as nn


class Tagger(nn.Module):
    def __init__(self, vocab=30, tags=5, h=24):
        super().__init__()
        self.emb = nn.Embedding(vocab, h)
        self.lstm = nn.LSTM(h, h, batch_first=True, bidirectional=True)
        self.fc = nn.Linear(2 * h, tags)

    def forward(self, s):
        o, _ = self.lstm(self.emb(s))
        return self.fc(o)


torch.manual_seed(9)
sents = torch.randint(0, 30, (256, 12))
tags = sents % 5
tagger = Tagger()
opt = torch.optim.SGD(tagger.parameters(), lr=1.0)
ce = nn.CrossEntropyLoss()
for ep in range(2):
    for b in torch.randperm(256).split(16):
        opt.zero_grad()
        loss = ce(tagger(sents[b]).flatten(0, 1), tags[b].flatten())
        loss.backward()
        opt.step()
        nn.utils.clip_grad_norm_(tagger.parameters(), max_norm=0.25)
    print(ep, loss.item())
