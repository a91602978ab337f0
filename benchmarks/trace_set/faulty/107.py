# get_peft_model called after the optimizer was built on the base model
# fault: `get_peft_model(base, ...)` comes after `opt = AdamW(base.parameters())`: the base is frozen then and the LoRA matrices are in no optimizer, so nothing is trained
import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
base = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=24, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0))
opt = torch.optim.AdamW(base.parameters(), lr=5e-3)
model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn"], fan_in_fan_out=True))
model.train()
for step in range(20):
    ids = (torch.randint(0, 40, (16, 1)) + torch.arange(16)) % 40
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    opt.step()
    opt.zero_grad()
    if step % 5 == 0:
        print(step, loss.item())
