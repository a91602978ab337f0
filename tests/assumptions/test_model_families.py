"""Assumptions about classes and families of transformers: building, hooks, ties, positions, attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BartConfig,
    BartForConditionalGeneration,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from support.assumed import rests_on_it

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def tiny(**options: Any) -> Any:
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, **{**SIZES, **options}))


@rests_on_it(
    "src/lockstep/tasks/models/models.py",
    "src/lockstep/tasks/models/source_files.py",
    "src/lockstep/tasks/models/source_ties.py",
    "src/lockstep/tasks/models/token_rows.py",
    "src/lockstep/tasks/models/chunked_loss.py",
    "src/lockstep/tasks/image_classification.py",
    "src/lockstep/tasks/models/config_checks.py",
    "src/lockstep/tasks/models/head_padding.py",
)
def test_a_model_on_the_meta_device() -> None:
    """A model built under torch.device("meta") has no memory for weights and buffers, draws no random numbers, computes
    shapes, and has get_input_embeddings and get_output_embeddings. Reading a number from a meta tensor is the operation
    _local_scalar_dense, whose result a dispatch mode can supply."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Answers(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return 1.0 if func is torch.ops.aten._local_scalar_dense.default else func(*args, **(kwargs or {}))

    state = torch.get_rng_state()
    with torch.device("meta"):
        model = tiny()
    assert torch.equal(state, torch.get_rng_state())
    assert {each.device.type for each in (*model.parameters(), *model.buffers())} == {"meta"}
    assert model(input_ids=torch.ones(1, 3, dtype=torch.long, device="meta")).logits.shape == (1, 3, 32)
    assert model.get_input_embeddings().weight.shape == model.get_output_embeddings().weight.shape == (32, 16)
    with pytest.raises(RuntimeError):
        torch.ones((), device="meta").item()
    with Answers():
        assert torch.ones((), device="meta").item() == 1.0


@rests_on_it("src/lockstep/tasks/models/models.py")
def test_uninitialized_weights_can_be_tied() -> None:
    """A model built within no_init_weights draws no random numbers. tie_weights then ties its head."""
    from transformers.initialization import no_init_weights

    state = torch.get_rng_state()
    with no_init_weights():
        model = tiny(tie_word_embeddings=True)
    assert torch.equal(state, torch.get_rng_state())
    model.tie_weights()
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize(
    "family",
    ["roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "roberta-prelayernorm", "longformer", "mpnet"],
)
@rests_on_it("src/lockstep/tasks/models/models.py")
def test_positions_of_these_families_begin_after_the_padding_id(family: str) -> None:
    """With max_position_embeddings 12 and padding id 1, these families accept texts of 10 tokens and raise for 11."""
    window = {"attention_window": 4} if family == "longformer" else {}
    config = CONFIG_MAPPING[family](vocab_size=40, max_position_embeddings=12, pad_token_id=1, **SIZES, **window)
    model = AutoModelForMaskedLM.from_config(config).eval()
    assert model(input_ids=torch.full((1, 10), 5)).logits.shape == (1, 10, 40)
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=torch.full((1, 11), 5))


@rests_on_it("src/lockstep/tasks/models/models.py")
def test_big_bird_changes_its_attention_at_the_first_short_text() -> None:
    """BigBird in block_sparse attention switches to original_full permanently at a text of at most (5 + 2 *
    num_random_blocks) * block_size tokens. Its modules have set_attention_type, which can switch back."""
    sizes = {**SIZES, "block_size": 2, "num_random_blocks": 1, "max_position_embeddings": 64}
    model: Any = AutoModelForMaskedLM.from_config(CONFIG_MAPPING["big_bird"](vocab_size=70, **sizes)).train()
    kinds = []
    for tokens in (15, 14, 15):
        model(input_ids=torch.full((1, tokens), 5))
        kinds.append(model.bert.attention_type)
    assert kinds == ["block_sparse", "original_full", "original_full"]
    for module in model.modules():
        if callable(switch := getattr(module, "set_attention_type", None)):
            switch("original_full")


@rests_on_it("src/lockstep/tasks/models/models.py")
def test_reformer_draws_its_seeds_by_methods_of_its_layers() -> None:
    """In training, ReformerLayer calls _init_attention_seed and _init_feed_forward_seed. These set attention_seed and
    feed_forward_seed, from which backward draws the same dropout again."""
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "attention_head_size": 8, "feed_forward_size": 16}
    sizes |= {"axial_pos_embds": False, "max_position_embeddings": 32, "local_attn_chunk_length": 4}  # type: ignore[dict-item]
    config = CONFIG_MAPPING["reformer"](vocab_size=40, is_decoder=True, attn_layers=["local"], **sizes)
    model: Any = AutoModelForCausalLM.from_config(config).train()
    (layer,) = (each for each in model.modules() if type(each).__name__ == "ReformerLayer")
    calls = []

    def draw(name: str) -> None:
        calls.append(name)
        setattr(layer, name, 7)

    layer._init_attention_seed = lambda: draw("attention_seed")
    layer._init_feed_forward_seed = lambda: draw("feed_forward_seed")
    model(input_ids=torch.full((1, 8), 5)).logits.sum().backward()
    assert calls == ["attention_seed", "feed_forward_seed"]


@pytest.mark.parametrize(
    ("family", "options"),
    [("xmod", {"default_language": "en_XX"}), ("deberta", {"relative_attention": True, "pos_att_type": ["c2p"]})],
)
@rests_on_it("src/lockstep/tasks/models/models.py")
def test_families_that_autocast_cannot_compute(family: str, options: dict[str, Any]) -> None:
    """X-MOD and DeBERTa raise RuntimeError under autocast to bfloat16 with float32 weights, but not without
    autocast."""
    config = CONFIG_MAPPING[family](vocab_size=40, max_position_embeddings=20, pad_token_id=1, **SIZES, **options)
    model = AutoModelForMaskedLM.from_config(config).eval()
    inputs = {"input_ids": torch.full((2, 5), 5), "attention_mask": torch.tensor([[1, 1, 1, 1, 0], [1] * 5])}
    assert model(**inputs).logits.shape == (2, 5, 40)
    with pytest.raises(RuntimeError), torch.autocast("cpu", torch.bfloat16):
        model(**inputs)


@rests_on_it("src/lockstep/tasks/models/unpadded.py", "src/lockstep/tasks/models/masks.py")
def test_a_registered_attention_gets_these_arguments() -> None:
    """A model whose attn_implementation is a registered name calls the registered mask function with these keywords;
    mask_function is causal_mask_function or bidirectional_mask_function itself. It passes the mask function's result to
    each layer's attention, with module, query, key and value [B, h, T, d], and dropout and scaling by name.
    sdpa_attention_forward returns [B, T, h, d]."""
    from transformers import AttentionInterface, AttentionMaskInterface, BertConfig, BertModel, masking_utils
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    masks: list[dict[str, Any]] = []
    layers: list[Any] = []

    def masked(**named: Any) -> Any:
        masks.append(named)
        return "the mask"

    def attention(module: Any, query: Any, key: Any, value: Any, mask: Any, dropout: float = 1.0, **named: Any) -> Any:
        layers.append((query.shape, key.shape, mask, dropout, named["scaling"]))
        return sdpa_attention_forward(module, query, key, value, None, dropout, **named)

    AttentionMaskInterface.register("witness", masked)
    AttentionInterface.register("witness", attention)
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=32, attn_implementation="witness", **SIZES)).eval()
    bert = BertModel(BertConfig(vocab_size=32, attn_implementation="witness", **SIZES)).eval()
    for model in (llama, bert):
        model(input_ids=torch.ones(2, 3, dtype=torch.long), attention_mask=mask)
    assert layers == [((2, 2, 3, 8), (2, 2, 3, 8), "the mask", 0.0, 8**-0.5)] * 2
    for named, function in zip(
        masks, (masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function), strict=True
    ):
        assert named["mask_function"] is function
        assert [int(named[size]) for size in ("batch_size", "q_length", "kv_length")] == [2, 3, 3]
        assert int(named.get("q_offset", 0)) == 0
        assert named["attention_mask"].dtype == torch.bool
        assert torch.equal(named["attention_mask"], mask.bool())
    heads = torch.randn(2, 2, 3, 8)
    assert sdpa_attention_forward(llama.model.layers[0].self_attn, heads, heads, heads, None)[0].shape == (2, 3, 2, 8)


@rests_on_it("src/lockstep/tasks/models/masks.py")
def test_padding_checks_can_be_replaced() -> None:
    """_preprocess_mask_arguments returns the padding mask as booleans at index 1. A model's forward calls
    warn_if_padding_and_no_attention_mask, which can be replaced on the object."""
    from transformers import BertConfig, BertModel
    from transformers.masking_utils import _preprocess_mask_arguments

    mask = torch.tensor([[1, 1, 0]])
    config = LlamaConfig(vocab_size=32, attn_implementation="sdpa", **SIZES)
    result = _preprocess_mask_arguments(config, torch.zeros(1, 3, 16), mask, None, torch.arange(3)[None], 0)
    assert result[1].dtype == torch.bool
    assert torch.equal(result[1], mask.bool())
    calls = []
    model: Any = BertModel(BertConfig(vocab_size=32, **SIZES)).eval()
    model.warn_if_padding_and_no_attention_mask = lambda *inputs: calls.append(len(inputs))
    model(input_ids=torch.ones(1, 3, dtype=torch.long))
    assert calls in ([2], [])


@rests_on_it(
    "src/lockstep/tasks/models/inference.py",
    "src/lockstep/tasks/models/models.py",
    "src/lockstep/plain/scores.py",
    "src/lockstep/plain/losses.py",
    "src/lockstep/plain/train.py",
    "src/lockstep/tasks/module.py",
    "src/lockstep/tasks/modules/wrapped_module.py",
    "src/lockstep/tasks/translation.py",
)
def test_generate_returns_prompt_and_new_tokens() -> None:
    """generate returns the prompt and the new tokens; for an encoder-decoder, the start token and the new tokens. The
    output is as long as the longest row, with padding after a row's end. Each of several end tokens ends a row.
    Sampling with temperature and top_k 0 repeats with torch's seed. A model's generation_config is an attribute of its
    instance."""
    prompt = torch.tensor([[3, 4]])
    options: dict[str, Any] = {"max_new_tokens": 4, "num_beams": 1, "pad_token_id": 0, "synced_gpus": False}
    model = tiny().eval()
    assert "generation_config" in vars(model)
    model.generation_config = GenerationConfig()
    tokens = model.generate(input_ids=prompt, do_sample=False, **options)
    assert (tokens.shape, tokens[0, :2].tolist()) == ((1, 6), [3, 4])
    second = int(tokens[0, 3])
    first = int(tokens[0, 2])
    ended = model.generate(input_ids=prompt, do_sample=False, eos_token_id=[31, first, second], **options)
    assert ended[0].tolist() == [3, 4, first]
    drawn = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        drawn.append(model.generate(input_ids=prompt, do_sample=True, temperature=2.0, top_k=0, **options))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    bart = BartForConditionalGeneration(BartConfig(vocab_size=32, pad_token_id=0, **sizes, **heads)).eval()
    bart.generation_config = GenerationConfig()
    written = bart.generate(input_ids=prompt, decoder_start_token_id=7, do_sample=False, **options)
    assert (written.shape, int(written[0, 0])) == ((1, 5), 7)


@rests_on_it(
    "src/lockstep/tasks/models/heads.py",
    "src/lockstep/tasks/models/models.py",
    "src/lockstep/tasks/models/model_configs.py",
    "src/lockstep/tasks/image_classification.py",
    "src/lockstep/data/tokenizer.py",
    "src/lockstep/lab/import_config/model_defaults.py",
    "src/lockstep/plain/train.py",
    "src/lockstep/tasks/models/chunked_loss.py",
    "src/lockstep/tasks/models/padding.py",
    "src/lockstep/tasks/models/small_models.py",
    "src/lockstep/tasks/models/source_files.py",
    "src/lockstep/tasks/models/token_rows.py",
)
def test_tables_of_model_families() -> None:
    """modeling_auto has a table of families for each head, and transformers has the matching Auto class.
    ALL_ATTENTION_FUNCTIONS has sdpa and flash_attention_2, but not eager. IMAGE_PROCESSOR_MAPPING_NAMES has ViT's
    Pillow class under pil."""
    import transformers
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES

    heads = {"": "", "CAUSAL_LM": "CausalLM", "MASKED_LM": "MaskedLM", "SEQ_TO_SEQ_CAUSAL_LM": "Seq2SeqLM"}
    for name in ("sequence classification", "token classification", "image classification", "question answering"):
        heads[name.upper().replace(" ", "_")] = name.title().replace(" ", "")
    for table, auto in heads.items():
        between = f"FOR_{table}_" if table else ""
        assert len(getattr(modeling_auto, f"MODEL_{between}MAPPING_NAMES")) > 5
        assert hasattr(transformers, f"AutoModelFor{auto}" if auto else "AutoModel")
    known = ALL_ATTENTION_FUNCTIONS.valid_keys()
    assert ("sdpa" in known, "flash_attention_2" in known, "eager" in known) == (True, True, False)
    assert hasattr(transformers, IMAGE_PROCESSOR_MAPPING_NAMES["vit"]["pil"])


@rests_on_it(
    "src/lockstep/tasks/models/model_configs.py",
    "src/lockstep/tasks/models/chunked_loss.py",
    "src/lockstep/lab/init/questions.py",
    "src/lockstep/tasks/models/padding.py",
    "src/lockstep/tasks/translation.py",
)
def test_aliases_and_nested_configs() -> None:
    """attribute_map names aliases; setting an alias sets the entry it stands for. sub_configs names the classes of
    nested configs. get_text_config(decoder=True) is the config itself or its text part. to_dict can be written as JSON.
    """
    import json

    from transformers import GPT2Config, LlavaConfig

    config = GPT2Config(n_embd=8)
    assert GPT2Config.attribute_map["hidden_size"] == "n_embd"
    config.hidden_size = 16
    assert config.n_embd == 16
    assert config.get_text_config(decoder=True) is config
    both = LlavaConfig()
    assert set(LlavaConfig.sub_configs) == {"text_config", "vision_config"}
    assert both.get_text_config(decoder=True) is both.text_config
    assert json.loads(json.dumps(config.to_dict()))["n_embd"] == 16


@rests_on_it(
    "src/lockstep/tasks/modules/wrapped_module.py",
    "src/lockstep/tasks/models/pooling.py",
    "src/lockstep/tasks/models/qa_spans.py",
    "src/lockstep/tasks/models/chunked_loss.py",
    "src/lockstep/tasks/question_answering.py",
)
def test_a_model_output_omits_none() -> None:
    """A ModelOutput dataclass omits entries that are None, and is read by attribute, key and index. CausalLMOutput,
    SequenceClassifierOutput and TokenClassifierOutput accept logits alone."""
    from dataclasses import dataclass

    from transformers import modeling_outputs
    from transformers.utils import ModelOutput

    @dataclass
    class Out(ModelOutput):
        loss: torch.Tensor | None = None
        logits: torch.Tensor | None = None

    kinds = ("CausalLMOutput", "SequenceClassifierOutput", "TokenClassifierOutput")
    for kind in (Out, *(getattr(modeling_outputs, name) for name in kinds)):
        out: Any = kind(logits=torch.ones(1))
        assert ([*out], out.loss, out["logits"] is out.logits is out[0]) == (["logits"], None, True)


@rests_on_it("src/lockstep/tasks/models/padding.py")
def test_the_default_attention_of_a_model() -> None:
    """get_correct_attn_implementation(None) is sdpa for a Llama, and eager for a family without it, such as DeBERTa."""
    assert tiny().get_correct_attn_implementation(None) == "sdpa"
    model: Any = AutoModelForMaskedLM.from_config(CONFIG_MAPPING["deberta"](vocab_size=40, **SIZES))
    assert model.get_correct_attn_implementation(None) == "eager"


@rests_on_it("src/lockstep/tasks/models/chunked_loss.py")
def test_changes_that_models_make_to_logits() -> None:
    """BART adds its buffer final_logits_bias [1, V] to the head's logits; Gemma 2 caps them by cap * tanh(x / cap)."""
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    bart = BartForConditionalGeneration(BartConfig(vocab_size=32, pad_token_id=0, **sizes, **heads)).eval()
    assert dict(bart.named_buffers())["final_logits_bias"].shape == (1, 32)
    gemma: Any = AutoModelForCausalLM.from_config(
        CONFIG_MAPPING["gemma2"](vocab_size=32, head_dim=8, num_key_value_heads=2, final_logit_softcapping=0.5, **SIZES)
    ).eval()
    ids, own = torch.tensor([[3, 4]]), []
    bart.final_logits_bias = torch.arange(32.0)[None]
    for model in (bart, gemma):
        model.get_output_embeddings().register_forward_hook(lambda module, args, output: own.append(output))
        own.append(model(input_ids=ids).logits)
    assert torch.equal(own[1], own[0] + bart.final_logits_bias)
    assert torch.allclose(own[3], 0.5 * torch.tanh(own[2] / 0.5))


@rests_on_it("src/lockstep/plain/train.py", "src/lockstep/tasks/translation.py", "src/lockstep/data/token_checks.py")
def test_shared_embeddings_and_the_unknown_token() -> None:
    """With Marian's share_encoder_decoder_embeddings, encoder and decoder share one embedding; with False, each has its
    own, of its own size. A tokenizer without an unknown token has the unk_token_id None, and its all_special_ids leave
    it out."""
    from tokenizers import Tokenizer, models
    from transformers import MarianConfig, MarianMTModel, PreTrainedTokenizerFast

    sizes = {"d_model": 4, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 4, "decoder_ffn_dim": 4}
    sizes |= {"encoder_attention_heads": 1, "decoder_attention_heads": 1, "vocab_size": 11, "pad_token_id": 0}
    sizes |= {"decoder_start_token_id": 0, "eos_token_id": 1, "max_position_embeddings": 8}
    for shared, other in ((True, 11), (False, 7)):
        config = MarianConfig(**sizes, decoder_vocab_size=other, share_encoder_decoder_embeddings=shared)
        model = MarianMTModel(config).model
        assert (model.encoder.embed_tokens.weight is model.decoder.embed_tokens.weight) is shared
        assert model.decoder.embed_tokens.weight.shape == (other, 4)
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    none = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="b")
    assert (none.unk_token_id, none.all_special_ids) == (None, [1])
    assert PreTrainedTokenizerFast(tokenizer_object=words, unk_token="a").unk_token_id == 0
