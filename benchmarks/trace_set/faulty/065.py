# Last padded step of a packed RNN output read instead of the last valid step
# fault: `out[:, -1]` after `pad_packed_sequence` reads the last padded position, which is zero for all but the longest row (should be the last valid step)
import torch
import torch.nn as nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


class SentimentRNN(nn.Module):
    def __init__(self, vocab=30, dim=16, hid=32):
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim, padding_idx=0)
        self.gru = nn.GRU(dim, hid, batch_first=True)
        self.fc = nn.Linear(hid, 1)

    def forward(self, text, lengths):
        packed = pack_padded_sequence(self.embedding(text), lengths, batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(self.gru(packed)[0], batch_first=True)
        return self.fc(out[:, -1]).squeeze(1)


torch.manual_seed(0)
N, T = 320, 12
lengths = torch.randint(3, T + 1, (N,))
text = torch.randint(1, 30, (N, T))
text[torch.arange(T)[None] >= lengths[:, None]] = 0
label = torch.stack([(text[i, :n] > 15).float().mean() for i, n in enumerate(lengths.tolist())]).gt(0.5).float()
net = SentimentRNN()
opt = torch.optim.Adam(net.parameters(), lr=5e-3)
for epoch in range(3):
    for i in torch.randperm(N).split(32):
        loss = nn.functional.binary_cross_entropy_with_logits(net(text[i], lengths[i]), label[i])
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(epoch, loss.item())
