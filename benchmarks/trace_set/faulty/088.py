# HF Trainer compute_loss ignoring num_items_in_batch with accumulation
# fault: `compute_loss` returns the micro batch token mean and ignores `num_items_in_batch`, while the Trainer does not divide by the accumulation steps for a model that accepts it, so the accumulated gradient is 4 times too large
import tempfile
import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Toy(Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, i):
        ids = (torch.arange(14) * (1 + i % 3) + i) % 48
        labels = ids.clone()
        labels[: i % 10] = -100
        return {"input_ids": ids, "labels": labels}


class MyTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        out = model(**inputs)
        loss = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        return (loss, out) if return_outputs else loss


with tempfile.TemporaryDirectory() as tmp:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=48, n_positions=16, n_embd=32, n_layer=1, n_head=2,
                                       bos_token_id=0, eos_token_id=0))
    args = TrainingArguments(tmp, per_device_train_batch_size=4, gradient_accumulation_steps=4, max_steps=15,
                             learning_rate=3e-3, report_to=[], save_strategy="no", logging_steps=5, use_cpu=True,
                             disable_tqdm=True)
    trainer = MyTrainer(model=model, args=args, train_dataset=Toy())
    trainer.train()
