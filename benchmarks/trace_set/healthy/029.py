# Length-bucketed batches shuffled by bucket with padding ignored in the loss
import random
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

PAD = 0
random.seed(0)
torch.manual_seed(0)


def sentence():
    n, s = random.randint(4, 30), random.randint(1, 19)
    return torch.tensor([(s + 2 * k - 1) % 19 + 1 for k in range(n)])


def bucket_batches(sents, tokens_per_batch=200, width=40):
    order = list(range(len(sents)))
    random.shuffle(order)
    batches = []
    for c in range(0, len(order), width):
        chunk = sorted(order[c:c + width], key=lambda i: len(sents[i]))
        cur = []
        for i in chunk:
            if cur and len(sents[i]) * (len(cur) + 1) > tokens_per_batch:
                batches.append(cur)
                cur = []
            cur.append(i)
        batches.append(cur)
    random.shuffle(batches)
    return batches


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(20, 24, padding_idx=PAD)
        self.rnn = nn.GRU(24, 32, batch_first=True)
        self.out = nn.Linear(32, 20)

    def forward(self, t):
        return self.out(self.rnn(self.emb(t))[0])


sents = [sentence() for _ in range(300)]
lm = LM()
opt = torch.optim.Adam(lm.parameters(), lr=5e-3)
for epoch in range(2):
    s, n = 0.0, 0
    for b in bucket_batches(sents):
        t = pad_sequence([sents[i] for i in b], batch_first=True, padding_value=PAD)
        tgt = t[:, 1:]
        k = (tgt != PAD).sum().item()
        loss = nn.functional.cross_entropy(lm(t[:, :-1]).transpose(1, 2), tgt, ignore_index=PAD)
        opt.zero_grad()
        loss.backward()
        opt.step()
        s, n = s + loss.item() * k, n + k
    print(epoch, "nats per token", s / n)
