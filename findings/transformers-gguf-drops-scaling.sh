#!/usr/bin/env bash
# transformers 5.24.0: `from_pretrained(gguf_file=...)` of a Llama drops how the file scales rotary positions: the keys
# `rope.scaling.type` and `.factor` ("linear", "yarn"), and the tensor `rope_freqs.weight`, in which llama.cpp's converter writes
# the "llama3" scaling of Llama 3.1 to 3.3. The loaded config has `rope_type` "default", no warning is shown, and the logits are
# those of a model without scaling. Base, epsilon and size of heads are read; the documentation says of no key that it is not.
# Run on 2026-11-30.
# Status 0: it still behaves so. Any other: it changed, or could not be installed.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/environment"
"$room/environment/bin/python" -m pip install -q torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 gguf==0.19.0 \
    sentencepiece==0.2.3 numpy==2.4.6
cd "$room"
cat > shown.py <<'PYTHON'
from typing import Any

import gguf
import numpy as np
import torch
import transformers as t
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

t.logging.disable_progress_bar()
SIZE = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
}
FACTOR, ORIGINAL = 4.0, 64
types = {"linear": gguf.RopeScalingType.LINEAR, "yarn": gguf.RopeScalingType.YARN}
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": FACTOR},
    "yarn": {"factor": FACTOR, "original_max_position_embeddings": ORIGINAL},
    "llama3": {
        "factor": FACTOR,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
}


def built(kind: str) -> t.LlamaForCausalLM:
    rope = {"rope_type": kind, "rope_theta": 10000.0, **SETTINGS[kind]}
    torch.manual_seed(0)
    model = t.LlamaForCausalLM(t.LlamaConfig(**SIZE, rope_parameters=rope)).eval()
    for each in model.parameters():
        if each.ndim > 1:
            torch.nn.init.normal_(each, std=0.2)
    return model


def written(model: t.LlamaForCausalLM, kind: str) -> str:
    """The model as a file of the layout that llama.cpp's converter writes."""
    path, config = f"{kind}.gguf", model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    if kind in types:
        writer.add_rope_scaling_type(types[kind])
        writer.add_rope_scaling_factor(FACTOR)
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(ORIGINAL)
    if kind == "llama3":
        plain = ROPE_INIT_FUNCTIONS[kind](config, "cpu")[0]
        dimension = config.hidden_size // config.num_attention_heads
        unscaled = 10000.0 ** -(torch.arange(0, dimension, 2) / dimension)
        writer.add_tensor("rope_freqs.weight", (unscaled / plain).float().numpy())
    tokens = [f"word{i}" for i in range(config.vocab_size - 3)] + ["<unk>", "<s>", "</s>"]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types([1] * len(tokens))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        array, heads = tensor.numpy(), config.num_attention_heads
        if "q_proj" in name or "k_proj" in name:
            array = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


ids = torch.randint(0, 64, (1, 48), generator=torch.Generator().manual_seed(0))
unscaled = built("default")
for kind in SETTINGS:
    model = built(kind)
    loaded = t.LlamaForCausalLM.from_pretrained(".", gguf_file=written(model, kind), dtype=torch.float32).eval()
    with torch.no_grad():
        logits, after, plain = (each(ids).logits for each in (model, loaded, unscaled))
    off, left = (logits - after).abs().max().item(), (plain - after).abs().max().item()
    print(f"{kind}: logits up to {logits.abs().max().item():.1f}; loaded from GGUF they differ by {off:.1e}, ", end="")
    print(f"from those without scaling by {left:.1e}; rope_type {loaded.config.rope_parameters['rope_type']!r}")
    assert loaded.config.rope_parameters["rope_type"] == "default"
    assert left < 1e-4 and (off < 1e-4 if kind == "default" else off > 0.5)
PYTHON
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 environment/bin/python shown.py
