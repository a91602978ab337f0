# HF Trainer subclass with compute_loss override on a tiny GPT-2
import tempfile
import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Counting(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.start = torch.randint(0, 50, (n,), generator=g)
        self.stride = torch.randint(1, 4, (n,), generator=g)

    def __len__(self):
        return len(self.start)

    def __getitem__(self, i):
        ids = (self.start[i] + self.stride[i] * torch.arange(12)) % 50
        return {"input_ids": ids, "labels": ids.clone()}


class SmoothTrainer(Trainer):
    """shifted cross entropy with label smoothing"""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        out = model(**inputs)
        logits = out.logits[:, :-1].reshape(-1, out.logits.size(-1))
        tgt = labels[:, 1:].reshape(-1)
        loss = torch.nn.functional.cross_entropy(logits, tgt, label_smoothing=0.05)
        return (loss, out) if return_outputs else loss


with tempfile.TemporaryDirectory() as tmp:
    cfg = GPT2Config(vocab_size=50, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    args = TrainingArguments(output_dir=tmp, per_device_train_batch_size=16, max_steps=20, learning_rate=3e-3,
                             report_to=[], save_strategy="no", logging_steps=5, use_cpu=True, disable_tqdm=True,
                             seed=3)
    tr = SmoothTrainer(model=GPT2LMHeadModel(cfg), args=args, train_dataset=Counting(320, 0),
                       eval_dataset=Counting(64, 1))
    tr.train()
    print(tr.evaluate())
