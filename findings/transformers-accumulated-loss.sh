#!/usr/bin/env bash
# transformers 5.24.0, `Trainer` with models whose forward() takes any keyword argument but whose loss ignores
# `num_items_in_batch`: BERT's and most other masked models, BART, T5, the sequence and token classifiers of BERT, Llama and
# others. Trainer concludes from the signature that the model divides its loss by the targets of the whole step, and divides
# nothing itself: with 4 micro-batches, loss and gradient are 4 times as large as those of the same rows in one batch.
# `max_grad_norm`, 1 by default, hides some of it. GPT-2's language model, which passes the number on, is right.
# Documentation of Trainer: the loss counts as scaled "when it was normalized by `num_items_in_batch`, i.e. when the model
# accepts loss kwargs"; these accept them and do not use them.
# Reported in https://github.com/huggingface/transformers/issues/47688.
# Run on 2026-11-30.
# Status 0: it still behaves so. Any other: it changed, or could not be installed.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/environment"
"$room/environment/bin/python" -m pip install -q torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 numpy==2.4.6
cd "$room"
cat > shown.py <<'PYTHON'
import torch
import transformers as t

t.logging.set_verbosity_error()
generator = torch.Generator().manual_seed(0)
TOKENS = torch.randint(4, 50, (8, 10), generator=generator)
CLASSES = torch.arange(8) % 3
bert = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
t5 = {"vocab_size": 50, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
gpt2 = {"vocab_size": 50, "n_embd": 16, "n_layer": 1, "n_head": 2, "bos_token_id": 1, "eos_token_id": 2}
MODELS = {
    "GPT2LMHeadModel": (t.GPT2Config(**gpt2, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0), TOKENS),
    "BertForMaskedLM": (t.BertConfig(**bert, **none), TOKENS),
    "T5ForConditionalGeneration": (t.T5Config(**t5, decoder_start_token_id=0), TOKENS),
    "LlamaForSequenceClassification": (t.LlamaConfig(**bert, num_labels=3, pad_token_id=0), CLASSES),
}


def step(name: str, size: int, micro_batches: int) -> tuple[float, float]:
    """Loss and norm of the gradient that Trainer logs for one step over the same eight rows."""
    config, labels = MODELS[name]
    torch.manual_seed(0)
    trainer = t.Trainer(
        getattr(t, name)(config),
        t.TrainingArguments(
            "out",
            per_device_train_batch_size=size,
            gradient_accumulation_steps=micro_batches,
            max_steps=1,
            logging_steps=1,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=[{"input_ids": TOKENS[row], "labels": labels[row]} for row in range(8)],
        data_collator=t.default_data_collator,
    )
    trainer.log = lambda logs, *_: trainer.state.log_history.append(logs)
    trainer.train()
    first = trainer.state.log_history[0]
    return float(first["loss"]), float(first["grad_norm"])


for name in MODELS:
    whole, split = step(name, 8, 1), step(name, 2, 4)
    ratios = [round(part / all_, 3) for part, all_ in zip(split, whole)]
    print(f"{name}: one batch: loss {whole[0]:.3f}, gradient {whole[1]:.3f}; 4 micro-batches: {ratios[0]}, {ratios[1]} times that")
    assert ratios == ([1.0, 1.0] if name == "GPT2LMHeadModel" else [4.0, 4.0])
PYTHON
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 environment/bin/python shown.py
