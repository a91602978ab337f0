#!/usr/bin/env bash
# transformers 5.23.0, accelerate 1.15.0: Trainer with train_sampling_strategy="group_by_length", resumed in the middle of
# its second epoch. The order of that epoch is drawn anew from another state of the generator, and the steps that had been
# made are cut off that other order. Seen with 12 rows, batches of 2, resumed after step 9 of 12: the second epoch has read
# two rows twice and two never. Resumed in the first epoch or between epochs, and with the usual random sampling (mended by
# transformers pull request 40691), it goes on as the uninterrupted run.
# Run on 2026-11-29.
# Status 0: it still behaves so. Any other: it changed, or could not be installed.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/environment"
"$room/environment/bin/python" -m pip install -q torch==2.13.0 transformers==5.23.0 accelerate==1.15.0 datasets==5.2.0
cd "$room"
cat > shown.py <<'PYTHON'
import tempfile

import datasets
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
from transformers.utils import logging

logging.set_verbosity_error()
rows = [{"input_ids": [1 + number] * (3 + number % 4), "labels": number % 2} for number in range(12)]
seen: list[int] = []


def collate(batch: list[dict]) -> dict[str, torch.Tensor]:
    seen.extend(row["input_ids"][0] - 1 for row in batch)
    texts = [torch.tensor(row["input_ids"]) for row in batch]
    padded = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    return {"input_ids": padded, "labels": torch.tensor([row["labels"] for row in batch])}


def train(folder: str, strategy: str, resume: str | None = None) -> list[int]:
    """Return the rows that are read after `resume`, in their order."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = BertForSequenceClassification(BertConfig(vocab_size=30, **sizes))
    options = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "steps", "save_steps": 1}
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=2, num_train_epochs=2, train_sampling_strategy=strategy, **options
    )
    trainer = Trainer(model, arguments, train_dataset=datasets.Dataset.from_list(rows), data_collator=collate)
    seen.clear()
    trainer.train(resume_from_checkpoint=resume)
    return seen[-24:]


for strategy in ("random", "group_by_length"):
    with tempfile.TemporaryDirectory() as folder:
        whole = train(f"{folder}/whole", strategy)
        for step in (3, 6, 9):
            rest = train(f"{folder}/{step}", strategy, f"{folder}/whole/checkpoint-{step}")[2 * step - 24 :]
            second = sorted((whole[: 2 * step] + rest)[12:])
            print(strategy, "after step", step, "as the whole run:", rest == whole[2 * step :], "epoch 2 read", second)
            right = strategy == "random" or step < 9
            assert (rest == whole[2 * step :]) == right and (second == list(range(12))) == right
PYTHON
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 environment/bin/python shown.py
