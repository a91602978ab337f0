# HF BERT sequence classification in a plain loop with attention mask
import random
import torch
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

random.seed(0)
torch.manual_seed(0)
POS, NEG = list(range(10, 30)), list(range(30, 50))


def example():
    y = random.randint(0, 1)
    words = [random.choice((POS if y else NEG) if random.random() < 0.9 else POS + NEG) for _ in range(random.randint(5, 20))]
    return [1] + words + [2], y


def collate(rows):
    n = max(len(t) for t, _ in rows)
    ids = torch.tensor([t + [0] * (n - len(t)) for t, _ in rows])
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": torch.tensor([y for _, y in rows])}


train, val = [example() for _ in range(256)], [example() for _ in range(64)]
dl = DataLoader(train, 16, shuffle=True, collate_fn=collate)
vl = DataLoader(val, 32, collate_fn=collate)
model = BertForSequenceClassification(BertConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
                                                 intermediate_size=64, max_position_embeddings=32, num_labels=2))
opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
sched = get_linear_schedule_with_warmup(opt, 4, 3 * len(dl))
for epoch in range(3):
    model.train()
    for batch in dl:
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        sched.step()
        opt.zero_grad()
    model.eval()
    hits = 0
    for batch in vl:
        with torch.no_grad():
            hits += (model(**batch).logits.argmax(-1) == batch["labels"]).sum().item()
    print(epoch, loss.item(), hits / len(val))
