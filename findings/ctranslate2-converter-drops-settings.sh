#!/usr/bin/env bash
# ctranslate2 4.8.5: its converter of transformers' models refuses what it does not know of some settings ("RoPE scaling type
# 'yarn' is not yet implemented"), and drops others without a word; the converted model then computes other logits:
# 1. Llama's "llama3" scaling of rotary positions (Llama 3.1 to 3.3), which it lists as supported: as if there were none;
# 2. Llama's `head_dim` where it is not hidden_size / heads, and its `hidden_act`;
# 3. Gemma 2's soft caps of attention and logits, sliding window, and `query_pre_attn_scalar` (also Gemma 3's) where it is not
#    the head's size, as in the 27B models; 4. Qwen2's sliding window;
# 5. `layer_norm_epsilon` of GPT-2 (also Bloom, Falcon), its `scale_attn_weights` and `scale_attn_by_inverse_layer_idx`.
# Without them, the same converted models agree with transformers to 1e-5.
# Run on 2026-11-30.
# Status 0: it still behaves so. Any other: it changed, or could not be installed.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/environment"
"$room/environment/bin/python" -m pip install -q torch==2.13.0 transformers==5.24.0 ctranslate2==4.8.5 numpy==2.4.6
cd "$room"
cat > shown.py <<'PYTHON'
import tempfile
from typing import Any

import ctranslate2
import numpy as np
import torch
import transformers as t
from tokenizers import Tokenizer, models, pre_tokenizers

t.logging.set_verbosity_error()
t.logging.disable_progress_bar()
special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
words = [f"word{i}" for i in range(60)]
inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*words, *special.values()])}, unk_token="<unk>"))
inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = t.PreTrainedTokenizerFast(tokenizer_object=inner, **special)
ids = torch.randint(0, 60, (1, 48), generator=torch.Generator().manual_seed(0))

size = {"vocab_size": 64, "bos_token_id": 60, "eos_token_id": 61, "pad_token_id": 63}
llama = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 96, **size}
gpt2 = {"n_embd": 64, "n_layer": 2, "n_head": 2, **size}
gemma = {**llama, "num_key_value_heads": 2, "head_dim": 32, "query_pre_attn_scalar": 32}
uncapped = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
rope = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def random(name: str, **options: Any) -> t.PreTrainedModel:
    torch.manual_seed(0)
    model = getattr(t, name)(getattr(t, name).config_class(**options)).eval()
    for each in model.parameters():
        if each.ndim > 1:
            torch.nn.init.normal_(each, std=0.2)
    return model


def logits(model: t.PreTrainedModel) -> np.ndarray:
    with torch.no_grad():
        return model(ids).logits[0, :, :60].numpy()


def converted(model: t.PreTrainedModel) -> np.ndarray:
    with tempfile.TemporaryDirectory() as source, tempfile.TemporaryDirectory() as target:
        model.save_pretrained(source)
        tokenizer.save_pretrained(source)
        ctranslate2.converters.TransformersConverter(source).convert(target, force=True)
        generator = ctranslate2.Generator(target)
        tokens = tokenizer.convert_ids_to_tokens(ids[0].tolist())
        return np.array(generator.forward_batch([tokens], return_log_probs=False))[0, :, :60]


def shown(name: str, base: dict[str, Any], changes: dict[str, Any], dropped: bool) -> None:
    model = random(name, **{**base, **changes})
    apart = np.abs(logits(model) - converted(model)).max()
    print(f"{name} {changes}: logits up to {np.abs(logits(model)).max():.1f}, converted ones differ by up to {apart:.1e}")
    assert apart > 0.03 if dropped else apart < 1e-4


shown("LlamaForCausalLM", llama, {}, False)
shown("LlamaForCausalLM", llama, {"rope_parameters": {**rope, "rope_type": "linear"}}, False)
scaled = {"rope_parameters": {**rope, "original_max_position_embeddings": 1024}}
shown("LlamaForCausalLM", llama, scaled, True)
unscaled = random("LlamaForCausalLM", **llama)
left = np.abs(converted(random("LlamaForCausalLM", **llama, **scaled)) - logits(unscaled)).max()
print(f"  from transformers' model without scaling, the converted one differs by {left:.1e}")
assert left < 1e-4
shown("LlamaForCausalLM", llama, {"head_dim": 16}, True)
shown("LlamaForCausalLM", llama, {"hidden_act": "gelu"}, True)
shown("Gemma2ForCausalLM", gemma, uncapped, False)
shown("Gemma2ForCausalLM", gemma, {}, True)
shown("Gemma2ForCausalLM", gemma, {**uncapped, "sliding_window": 8}, True)
shown("Gemma2ForCausalLM", gemma, {**uncapped, "query_pre_attn_scalar": 36}, True)
window = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
shown("Qwen2ForCausalLM", {**llama, "num_key_value_heads": 2}, {}, False)
shown("Qwen2ForCausalLM", {**llama, "num_key_value_heads": 2}, window, True)
shown("GPT2LMHeadModel", gpt2, {}, False)
shown("GPT2LMHeadModel", gpt2, {"activation_function": "relu"}, False)
shown("GPT2LMHeadModel", gpt2, {"layer_norm_epsilon": 0.1}, True)
shown("GPT2LMHeadModel", gpt2, {"scale_attn_weights": False}, True)
shown("GPT2LMHeadModel", gpt2, {"scale_attn_by_inverse_layer_idx": True}, True)
PYTHON
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 environment/bin/python shown.py
