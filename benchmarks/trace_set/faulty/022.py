# Tied weights untied by assigning a new Parameter copy
# fault: `self.decoder.weight = nn.Parameter(self.emb.weight.clone())` makes a separate copy instead of sharing the tensor, so the tie is lost after the first step
import torch
import torch.nn as nn


class WordLM(nn.Module):
    """tie_weights as in the word language model example"""

    def __init__(self, ntoken, ninp):
        super().__init__()
        self.emb = nn.Embedding(ntoken, ninp)
        self.rnn = nn.LSTM(ninp, ninp, batch_first=True)
        self.decoder = nn.Linear(ninp, ntoken, bias=False)
        self.decoder.weight = nn.Parameter(self.emb.weight.clone())

    def forward(self, x):
        return self.decoder(self.rnn(self.emb(x))[0])


torch.manual_seed(1)
lm = WordLM(50, 32)
opt = torch.optim.Adam(lm.parameters(), lr=5e-3)
stream = (torch.arange(4000) * 3 % 50)
for step in range(40):
    o = torch.randint(0, 3900, (16,))
    w = torch.stack([stream[k:k + 21] for k in o])
    loss = nn.functional.cross_entropy(lm(w[:, :-1]).flatten(0, 1), w[:, 1:].flatten())
    opt.zero_grad()
    loss.backward()
    opt.step()
print(loss.item())
