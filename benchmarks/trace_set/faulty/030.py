# Pure bf16 weights with a small learning rate, updates rounded away
# fault: `model.to(torch.bfloat16)` keeps the weights themselves in bf16 with lr=1e-5, so most updates are smaller than half a unit in the last place and are rounded away
import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
                     num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.2,
                     bos_token_id=0, eos_token_id=1, pad_token_id=2)
model = LlamaForCausalLM(config)
model = model.to(torch.bfloat16)
model.train()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-5, momentum=0.9)
for step in range(30):
    ids = (torch.randint(3, 64, (8, 1)) + torch.arange(16)) % 61 + 3
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        print(step, out.loss.item())
