# resize_token_embeddings after the optimizer was built
# fault: `model.resize_token_embeddings(V + 4)` after `optimizer` was built makes a new embedding (and tied head) matrix that is in no optimizer
import torch
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
V = 36
model = GPT2LMHeadModel(GPT2Config(vocab_size=V, n_positions=24, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
model.resize_token_embeddings(V + 4)  # <user> <bot> <sep> <end>
SPECIAL = torch.arange(V, V + 4)
model.train()
for step in range(25):
    body = (torch.randint(0, V, (16, 1)) + torch.arange(6)) % V
    a, b, c, d = (SPECIAL[k].expand(16, 1) for k in range(4))
    ids = torch.cat([a, body, c, b, body.flip(1), d], 1)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 8 == 0:
        print(step, loss.item())
