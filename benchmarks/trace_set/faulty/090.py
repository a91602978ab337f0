# HF: end of the prompt not masked out of the loss, mask length miscounted
# fault: `labels[:, :plen - SEP_LEN - 2] = -100` masks too little (should be `:plen`), the last prompt tokens are trained on as well
import torch
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
V, SEP_LEN = 50, 2
SEP = torch.tensor([48, 49])
model = GPT2LMHeadModel(GPT2Config(vocab_size=V, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0))
opt = torch.optim.AdamW(model.parameters(), lr=2e-3)


def instruction_batch(n=16):
    prompt = torch.randint(1, 48, (n, 8))
    answer = prompt.flip(1)[:, :4]
    ids = torch.cat([prompt, SEP.expand(n, 2), answer], 1)
    plen = prompt.size(1) + SEP_LEN
    labels = ids.clone()
    labels[:, :plen - SEP_LEN - 2] = -100
    return ids, labels


model.train()
for step in range(30):
    ids, labels = instruction_batch()
    loss = model(input_ids=ids, labels=labels).loss
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 10 == 0:
        print(step, loss.item())
