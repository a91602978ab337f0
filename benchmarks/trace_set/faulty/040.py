# Attention mask not given for left-padded batch
# fault: `model(input_ids=ids, labels=labels)` leaves out `attention_mask` although the rows are left-padded, so pads are attended to and the positions are shifted
import torch
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
PAD, V = 0, 50


def batch(n=16, longest=20):
    rows = []
    for _ in range(n):
        k = int(torch.randint(4, longest + 1, ()))
        rows.append((torch.randint(0, V - 1, ()) + torch.arange(k)) % (V - 1) + 1)
    ids = torch.full((n, longest), PAD)
    mask = torch.zeros(n, longest, dtype=torch.long)
    for i, r in enumerate(rows):
        ids[i, longest - len(r):] = r
        mask[i, longest - len(r):] = 1
    return ids, mask


model = GPT2LMHeadModel(GPT2Config(vocab_size=V, n_positions=32, n_embd=32, n_layer=2, n_head=2,
                                   bos_token_id=PAD, eos_token_id=PAD, pad_token_id=PAD))
opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
for step in range(30):
    ids, mask = batch()
    labels = ids.masked_fill(mask == 0, -100)
    out = model(input_ids=ids, labels=labels)
    opt.zero_grad()
    out.loss.backward()
    opt.step()
    if step % 10 == 0:
        print(step, out.loss.item())
