#!/usr/bin/env bash
# transformers 5.24.0: `Trainer` divides the summed loss of `GPT2LMHeadModel` by all tokens of a step, including the first of each
# row, which is never predicted: losses, gradients and `eval_loss` are too small by (tokens of a row - 1) / tokens of a row. For
# rows of 4 tokens, a loss of 2.8 is shown as 2.1, and a perplexity of 16 as 8. `model(**batch).loss` is right.
# The mistake was mended in https://github.com/huggingface/transformers/pull/46204 for classes whose name holds "ForCausalLM";
# with `LlamaForCausalLM` the same rows are right.
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
WORDS = 16
gpt2 = {"vocab_size": WORDS, "n_embd": 16, "n_layer": 1, "n_head": 2, "bos_token_id": 1, "eos_token_id": 2}
none = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
llama = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": WORDS}
CONFIGS = {"LlamaForCausalLM": t.LlamaConfig(**llama), "GPT2LMHeadModel": t.GPT2Config(**gpt2, **none)}

for name, config in CONFIGS.items():
    for length in (2, 4, 16):
        tokens = torch.randint(0, WORDS, (8, length), generator=torch.Generator().manual_seed(0))
        torch.manual_seed(0)
        model = getattr(t, name)(config)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        gradient = torch.cat([each.grad.flatten() for each in model.parameters()]).norm().item()
        model.zero_grad()
        rows = [{"input_ids": row, "labels": row} for row in tokens]
        trainer = t.Trainer(
            model,
            t.TrainingArguments(
                "out",
                per_device_train_batch_size=8,
                max_steps=1,
                logging_steps=1,
                use_cpu=True,
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
            ),
            train_dataset=rows,
            eval_dataset=rows,
            data_collator=t.default_data_collator,
        )
        trainer.log = lambda logs, *_: trainer.state.log_history.append(logs)
        evaluated = trainer.evaluate()["eval_loss"] / loss.item()
        trainer.train()
        first = next(each for each in trainer.state.log_history if "loss" in each)
        ratios = [float(first["loss"]) / loss.item(), float(first["grad_norm"]) / gradient, evaluated]
        print(f"{name}, rows of {length}: Trainer's loss, gradient and eval_loss are", *(f"{each:.3f}" for each in ratios), end=" ")
        print("of the right ones")
        right = 1.0 if name == "LlamaForCausalLM" else (length - 1) / length
        assert all(abs(each - right) < 2e-3 for each in ratios)
PYTHON
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 environment/bin/python shown.py
