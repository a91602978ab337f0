# Labels shifted by the collator and again by the HF model
# fault: `out["labels"] = ids[:, 1:]` is shifted in `collate` and the HF model shifts once more in its loss, so it learns to predict two tokens ahead
import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
VOCAB = 60


def collate(rows):
    ids = torch.stack(rows)
    out = {"input_ids": ids[:, :-1]}
    out["labels"] = ids[:, 1:].contiguous()
    return out


docs = [(torch.randint(0, VOCAB, ()) + 5 * torch.arange(17)) % VOCAB for _ in range(320)]
model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_positions=32, n_embd=32, n_layer=2, n_head=2,
                                   bos_token_id=0, eos_token_id=0))
opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
model.train()
for epoch in range(2):
    for batch in DataLoader(docs, batch_size=16, shuffle=True, collate_fn=collate):
        out = model(**batch)
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
    print(epoch, out.loss.item())
