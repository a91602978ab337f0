# Position ids not given for left-padded rows, wrong offsets
# fault: rows are left-padded but no `position_ids` are passed, GPT-2 counts positions from the pads, so the same text has another position in each batch
import torch
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
PAD = 0
cfg = GPT2Config(vocab_size=32, n_positions=40, n_embd=32, n_layer=2, n_head=2, bos_token_id=PAD, eos_token_id=PAD)
lm = GPT2LMHeadModel(cfg)
opt = torch.optim.AdamW(lm.parameters(), lr=2e-3)


def left_pad(seqs):
    n = max(len(s) for s in seqs)
    ids = torch.full((len(seqs), n), PAD)
    att = torch.zeros(len(seqs), n, dtype=torch.long)
    for r, s in enumerate(seqs):
        ids[r, n - len(s):] = s
        att[r, n - len(s):] = 1
    return ids, att


for step in range(30):
    # the token depends on its position: position matters here
    seqs = [(torch.arange(int(torch.randint(3, 30, ()))) * 5) % 31 + 1 for _ in range(16)]
    ids, att = left_pad(seqs)
    out = lm(input_ids=ids, attention_mask=att, labels=ids.masked_fill(att == 0, -100))
    opt.zero_grad()
    out.loss.backward()
    opt.step()
    if step % 10 == 0:
        print(step, out.loss.item())
