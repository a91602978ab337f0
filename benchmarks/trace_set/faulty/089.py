# Collator pads labels with the pad id instead of -100
# fault: `pad_sequence([r["labels"]...], padding_value=PAD)` pads labels with 0 instead of -100, so the model is trained to predict pads
import tempfile
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

PAD, V = 0, 40


def collate(rows):
    return {
        "input_ids": pad_sequence([r["input_ids"] for r in rows], batch_first=True, padding_value=PAD),
        "attention_mask": pad_sequence([torch.ones_like(r["input_ids"]) for r in rows], batch_first=True),
        "labels": pad_sequence([r["labels"] for r in rows], batch_first=True, padding_value=PAD),
    }


def rows(n):
    out = []
    for i in range(n):
        ids = (torch.arange(4 + i % 13) + 3 * i) % (V - 1) + 1
        out.append({"input_ids": ids, "labels": ids.clone()})
    return out


with tempfile.TemporaryDirectory() as tmp:
    cfg = LlamaConfig(vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
                      num_key_value_heads=2, max_position_embeddings=32, bos_token_id=1, eos_token_id=2, pad_token_id=PAD)
    args = TrainingArguments(output_dir=tmp, per_device_train_batch_size=16, max_steps=20, learning_rate=3e-3,
                             report_to=[], save_strategy="no", logging_steps=5, use_cpu=True, disable_tqdm=True,
                             remove_unused_columns=False)
    Trainer(model=LlamaForCausalLM(cfg), args=args, train_dataset=rows(200), data_collator=collate).train()
