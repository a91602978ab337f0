# HF Trainer with causal LM collator and eval each epoch on tiny Llama
import tempfile
import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

PAD = 0


def rows(n, seed):
    g = torch.Generator().manual_seed(seed)
    out = []
    for _ in range(n):
        k = int(torch.randint(6, 14, (), generator=g))
        s = int(torch.randint(0, 46, (), generator=g))
        out.append({"input_ids": [(s + 2 * j) % 46 + 2 for j in range(k)] + [1]})
    return Dataset.from_list(out)


class CausalCollator:
    """pads on the right; labels are the inputs with -100 on pads (the model shifts them)"""

    def __call__(self, batch):
        n = max(len(b["input_ids"]) for b in batch)
        ids, att, lab = [], [], []
        for b in batch:
            t, p = b["input_ids"], n - len(b["input_ids"])
            ids.append(t + [PAD] * p)
            att.append([1] * len(t) + [0] * p)
            lab.append(t + [-100] * p)
        return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(att), "labels": torch.tensor(lab)}


set_seed(0)
config = LlamaConfig(vocab_size=48, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
                     num_key_value_heads=1, max_position_embeddings=32, bos_token_id=None, eos_token_id=1, pad_token_id=PAD)
with tempfile.TemporaryDirectory() as out:
    args = TrainingArguments(output_dir=out, per_device_train_batch_size=16, num_train_epochs=2, learning_rate=5e-3,
                             eval_strategy="epoch", save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
                             warmup_steps=2, lr_scheduler_type="cosine")
    Trainer(model=LlamaForCausalLM(config), args=args, train_dataset=rows(160, 0), eval_dataset=rows(40, 1),
            data_collator=CausalCollator()).train()
