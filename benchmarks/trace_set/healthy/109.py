# Prefix/prompt tuning with frozen LM and learned soft prompts
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel


class PromptTuned(nn.Module):
    def __init__(self, lm, n=6):
        super().__init__()
        self.lm = lm.requires_grad_(False)
        self.prompt = nn.Parameter(lm.transformer.wte.weight[:n].detach().clone())

    def train(self, mode=True):
        super().train(mode)
        self.lm.eval()
        return self

    def forward(self, ids, labels):
        e = self.lm.transformer.wte(ids)
        p = self.prompt.expand(len(ids), -1, -1)
        pad = torch.full((len(ids), p.size(1)), -100)
        return self.lm(inputs_embeds=torch.cat([p, e], 1), labels=torch.cat([pad, labels], 1)).loss


torch.manual_seed(0)
lm = GPT2LMHeadModel(GPT2Config(vocab_size=30, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0))
pre = torch.optim.AdamW(lm.parameters(), lr=3e-3)
for _ in range(15):  # stands for the pretraining
    ids = (torch.randint(0, 30, (16, 1)) + torch.arange(12)) % 30
    loss = lm(input_ids=ids, labels=ids).loss
    pre.zero_grad()
    loss.backward()
    pre.step()
model = PromptTuned(lm)
model.train()
opt = torch.optim.Adam([model.prompt], lr=3e-2)
for step in range(25):
    ids = (torch.randint(0, 30, (16, 1)) + 2 * torch.arange(12)) % 30
    loss = model(ids, ids)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 8 == 0:
        print(step, loss.item())
