# PEFT LoRA on tiny GPT-2 in a plain loop
import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
base = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=24, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0))
model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, lora_dropout=0.05, target_modules=["c_attn", "c_proj", "c_fc"],
                                        fan_in_fan_out=True, task_type="CAUSAL_LM"))
model.print_trainable_parameters()
opt = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=5e-3)
model.train()
for step in range(30):
    ids = (torch.randint(0, 39, (16, 1)) + torch.arange(20)) % 39 + 1
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    opt.step()
    opt.zero_grad()
    if step % 10 == 0:
        print(step, loss.item())
