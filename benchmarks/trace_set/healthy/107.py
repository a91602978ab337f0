# HF T5 with labels padded by -100
import torch
from transformers import T5Config, T5ForConditionalGeneration

torch.manual_seed(0)
PAD, EOS = 0, 1
cfg = T5Config(vocab_size=30, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_decoder_layers=2, num_heads=2,
               decoder_start_token_id=PAD, pad_token_id=PAD, eos_token_id=EOS)
t5 = T5ForConditionalGeneration(cfg)
opt = torch.optim.AdamW(t5.parameters(), lr=3e-3)


def batch(n=16):
    src = [torch.randint(2, 30, (int(torch.randint(3, 9, ())),)) for _ in range(n)]
    tgt = [torch.cat([s.sort().values, torch.tensor([EOS])]) for s in src]
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad(src, batch_first=True, padding_value=PAD)
    labels = pad(tgt, batch_first=True, padding_value=-100)
    return dict(input_ids=ids, attention_mask=ids.ne(PAD).long(), labels=labels)  # the model shifts right itself


t5.train()
for step in range(25):
    out = t5(**batch())
    opt.zero_grad()
    out.loss.backward()
    torch.nn.utils.clip_grad_norm_(t5.parameters(), 1.0)
    opt.step()
    if step % 8 == 0:
        print(step, out.loss.item())
