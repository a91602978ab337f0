"""Training by Accelerate and by the Trainer of transformers, on a tiny model, with one fault of a list.

    python engines.py --engine accelerate|trainer [--fault NAME] [--batch N] [--accumulate N]

It imports torch, transformers and accelerate alone.
"""

import argparse
import tempfile

import torch
from torch.utils.data import Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--engine", default="accelerate")
parser.add_argument("--model", default="bert")
parser.add_argument("--fault", default="")
parser.add_argument("--batch", type=int, default=8, help="of a process")
parser.add_argument("--accumulate", type=int, default=1)
a = parser.parse_args()


class Texts(Dataset):
    """Rows of tokens of unequal length, padded, with a class each."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(2)
        self.ids = torch.randint(5, 60, (64, 10), generator=generator)
        self.lengths = torch.randint(3, 11, (64,), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        mask = (torch.arange(10) < self.lengths[i]).long()
        ids = self.ids[i] * mask
        labels = ids.masked_fill(mask == 0, -100) if a.model == "gpt2" else self.ids[i, 0] % 2
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def model() -> torch.nn.Module:
    from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    if a.model == "gpt2":
        sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
        return GPT2LMHeadModel(GPT2Config(vocab_size=64, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **sizes))
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(BertConfig(vocab_size=64, max_position_embeddings=16, **sizes, **dropout))


def by_trainer() -> None:
    from transformers import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(
            folder,
            per_device_train_batch_size=a.batch,
            gradient_accumulation_steps=a.accumulate,
            num_train_epochs=2,
            learning_rate=1e-3,
            report_to=[],
            save_strategy="no",
            eval_strategy="epoch",
            use_cpu=True,
            disable_tqdm=True,
            logging_strategy="no",
        )
        data = Texts()
        Trainer(model=model(), args=options, train_dataset=data, eval_dataset=data).train()


def by_accelerate() -> None:
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=a.accumulate)
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    loader = DataLoader(Texts(), batch_size=a.batch, shuffle=True, generator=torch.Generator().manual_seed(9))
    test = DataLoader(Texts(), batch_size=24)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=100)
    if a.fault == "not-prepared":
        net, optimizer = accelerator.prepare(net, optimizer)
    else:
        net, optimizer, loader, test, schedule = accelerator.prepare(net, optimizer, loader, test, schedule)
    for _ in range(2):
        net.train()
        for batch in loader:
            with accelerator.accumulate(net):
                loss = net(**batch).loss
                if a.fault == "divided-twice":
                    loss = loss / a.accumulate
                accelerator.backward(loss)
                if accelerator.sync_gradients or a.fault == "clip-always":
                    accelerator.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                if a.fault != "never-zeroed":
                    optimizer.zero_grad()
        if a.fault != "no-eval":
            net.eval()
        with torch.no_grad():
            for batch in test:
                accelerator.gather_for_metrics(net(**batch).logits)
    accelerator.end_training()


by_trainer() if a.engine == "trainer" else by_accelerate()
