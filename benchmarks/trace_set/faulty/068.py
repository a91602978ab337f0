# Pad token equal to eos token masked out, so eos is never learned
# fault: pad_token is eos_token and `labels[ids == EOS] = -100` hides the true eos at the end of each text too, so the model never learns to stop
import torch
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
EOS = PAD = 0
V = 40


def make_batch(n=16):
    texts = []
    for _ in range(n):
        k = int(torch.randint(4, 12, ()))
        s = int(torch.randint(1, V, ()))
        texts.append([(s + j - 1) % (V - 1) + 1 for j in range(k)] + [EOS])
    longest = max(map(len, texts))
    ids = torch.tensor([t + [PAD] * (longest - len(t)) for t in texts])
    attn = torch.tensor([[1] * len(t) + [0] * (longest - len(t)) for t in texts])
    labels = ids.clone()
    labels[ids == EOS] = -100
    return {"input_ids": ids, "attention_mask": attn, "labels": labels}


model = GPT2LMHeadModel(GPT2Config(vocab_size=V, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=EOS,
                                   eos_token_id=EOS, pad_token_id=PAD))
opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
for step in range(30):
    loss = model(**make_batch()).loss
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 10 == 0:
        print(step, loss.item())
