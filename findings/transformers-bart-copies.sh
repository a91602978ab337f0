#!/usr/bin/env bash
# transformers 5.24.0: `BartForCausalLM`, and so MBart, Blenderbot, Pegasus, BigBird-Pegasus, Marian, Mvp, PLBart, TrOCR and
# Whisper as `...ForCausalLM`, does not shift labels, unlike GPT-2's, Llama's, BERT's `...LMHeadModel` and the rest: with labels as
# `DataCollatorForLanguageModeling(mlm=False)` makes them, it learns to repeat the token that it reads. Seen on random tokens,
# whose loss cannot be below 2.77: it falls to 0, and every guess of the next token is the current one.
# The guide to causal language modeling trains any `AutoModelForCausalLM`, of which these are, with that collator.
# Reported in https://github.com/huggingface/transformers/issues/30105, closed.
# Run on 2026-11-30.
# Status 0: it still behaves so. Any other: it changed, or could not be installed.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/environment"
"$room/environment/bin/python" -m pip install -q torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 numpy==2.4.6
cd "$room"
cat > shown.py <<'PYTHON'
import math

import torch
import transformers as t

t.logging.set_verbosity_error()
WORDS = 20
bart = {"vocab_size": WORDS, "d_model": 32, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 64}
llama = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
rows = torch.randint(4, WORDS, (4096, 16), generator=torch.Generator().manual_seed(0))
best = math.log(WORDS - 4)


def collate(batch: list[dict]) -> dict[str, torch.Tensor]:
    tokens = torch.stack([row["input_ids"] for row in batch])
    return {"input_ids": tokens, "labels": tokens.clone()}


MODELS = (
    ("LlamaForCausalLM", t.LlamaConfig(vocab_size=WORDS, **llama)),
    ("BartForCausalLM", t.BartConfig(**bart)),
)
for name, config in MODELS:
    torch.manual_seed(0)
    trainer = t.Trainer(
        getattr(t, name)(config),
        t.TrainingArguments(
            "out",
            per_device_train_batch_size=32,
            learning_rate=1e-2,
            num_train_epochs=1,
            logging_steps=10,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            seed=0,
        ),
        train_dataset=[{"input_ids": row} for row in rows],
        data_collator=collate,
    )
    trainer.log = lambda logs, *_: trainer.state.log_history.append(logs)
    trainer.train()
    losses = [float(each["loss"]) for each in trainer.state.log_history if "loss" in each]
    text = torch.randint(4, WORDS, (1, 8), generator=torch.Generator().manual_seed(9))
    with torch.no_grad():
        guesses = trainer.model.eval()(text).logits[0].argmax(-1)
    copied = (guesses == text[0]).sum().item()
    print(f"{name}: loss {losses[0]:.2f}, at the end {losses[-1]:.2f} (random tokens: {best:.2f} at best)")
    print(f"  its guess of the next token repeats the current one at {copied} of 8 places")
    if name == "BartForCausalLM":
        assert losses[-1] < 1 and copied == 8
    else:
        assert losses[-1] > best - 0.1 and copied < 5
PYTHON
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 environment/bin/python shown.py
