# Masked LM loss on all tokens, not only masked
# fault: `labels = tokens.clone()` keeps all positions, the line that sets unmasked ones to -100 is missing, so 85% of the loss is copying visible tokens
import torch
from transformers import BertConfig, BertForMaskedLM

torch.manual_seed(0)
MASK = 3
config = BertConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
                    max_position_embeddings=32)
model = BertForMaskedLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def mask_tokens(tokens, prob=0.15):
    labels = tokens.clone()
    inputs = tokens.clone()
    chosen = torch.rand(tokens.shape) < prob
    inputs[chosen] = MASK
    return inputs, labels


model.train()
for step in range(30):
    tokens = (torch.randint(0, 46, (16, 1)) + torch.arange(20)) % 46 + 4
    inputs, labels = mask_tokens(tokens)
    loss = model(input_ids=inputs, labels=labels).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(step, loss.item())
