#!/usr/bin/env bash
# transformers 5.23.0: DataCollatorForLanguageModeling with a seed, read by the workers of a DataLoader. Each worker makes its
# generator from the seed when it starts, and workers start anew with each epoch: every epoch masks the same places, and
# masking is dynamic no longer. Without workers the epochs differ.
# Run on 2026-11-29.
# Status 0: it still behaves so. Any other: it changed, or could not be installed.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/environment"
"$room/environment/bin/python" -m pip install -q torch==2.13.0 transformers==5.23.0
cd "$room"
cat > shown.py <<'PYTHON'
import torch
from tokenizers import Tokenizer, models
from torch.utils.data import DataLoader
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast

words = {"[PAD]": 0, "[MASK]": 1, "[UNK]": 2} | {f"word{number}": 3 + number for number in range(20)}
special = {"pad_token": "[PAD]", "mask_token": "[MASK]", "unk_token": "[UNK]"}
tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="[UNK]")), **special)
texts = [{"input_ids": list(range(3, 23))} for _ in range(8)]

if __name__ == "__main__":
    for workers in (0, 1, 2):
        collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.5, seed=7)
        loader = DataLoader(texts, batch_size=2, collate_fn=collator, num_workers=workers)
        first, second = (torch.cat([batch["labels"] != -100 for batch in loader]) for _ in range(2))
        print("workers", workers, "the same masks in two epochs:", torch.equal(first, second))
        assert torch.equal(first, second) == (workers > 0)
PYTHON
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 environment/bin/python shown.py
