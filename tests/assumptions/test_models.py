"""Assumptions about tokenizers, safetensors and transformers: offsets, windows, files, drawing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn
from torch.nn import functional
from transformers import (
    CONFIG_MAPPING,
    AutoModelForMaskedLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    MarianConfig,
    MarianMTModel,
    PreTrainedTokenizerFast,
)

from support.assumed import rests_on_it

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
SPECIAL = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3}
WORDS = {**SPECIAL, "one": 4, "two": 5, "three": 6, "four": 7, "\u00e9t\u00e9": 8}


def tiny(**options: object) -> Any:
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, **{**SIZES, **options}))


def tokenizer() -> PreTrainedTokenizerFast:
    made = Tokenizer(models.WordLevel(WORDS, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **names)


@rests_on_it("src/lockstep/data/qa_features.py", "src/lockstep/data/annotated.py", "src/lockstep/plain/examples.py")
def test_offsets_count_characters() -> None:
    """Token offsets count characters of the text, not bytes; special tokens have (0, 0)."""
    encoded = tokenizer()("\u00e9t\u00e9 one", return_offsets_mapping=True)
    assert encoded["offset_mapping"] == [(0, 0), (0, 3), (4, 7), (0, 0)]


@rests_on_it("src/lockstep/data/qa_features.py", "src/lockstep/plain/examples.py")
def test_windows_overlap_by_the_stride() -> None:
    """Each overflowing window repeats `stride` tokens of the previous one, has the special tokens, and names its
    example."""
    encoded = tokenizer()(
        ["one two three four", "one"], truncation=True, max_length=5, stride=1, return_overflowing_tokens=True
    )
    assert encoded["input_ids"] == [[2, 4, 5, 6, 3], [2, 6, 7, 3], [2, 4, 3]]
    assert encoded["overflow_to_sample_mapping"] == [0, 0, 1]


@rests_on_it("src/lockstep/data/text_pairs.py", "src/lockstep/plain/examples.py")
def test_truncation_shortens_the_longer_of_a_pair_first() -> None:
    """Truncation of a pair shortens the longer text first; "only_second" shortens the second text alone."""
    made = tokenizer()
    assert made("one two three four", "one", truncation=True, max_length=6)["input_ids"] == [2, 4, 5, 3, 4, 3]
    cut = made("one", "one two three four", truncation="only_second", max_length=6)["input_ids"]
    assert cut == [2, 4, 3, 4, 5, 3]


@rests_on_it(
    "src/lockstep/data/annotated.py", "src/lockstep/tasks/token_classification.py", "src/lockstep/plain/examples.py"
)
def test_word_ids_are_none_for_special_tokens() -> None:
    """word_ids numbers the input words from 0, and is None for special tokens."""
    encoded = tokenizer()(["one", "two two"], is_split_into_words=True)
    assert encoded.word_ids() == [None, 0, 1, 1, None]


@rests_on_it(
    "src/lockstep/data/tokenizer.py",
    "src/lockstep/lab/import_config/loss_means.py",
    "src/lockstep/lab/import_config/model_defaults.py",
    "src/lockstep/plain/examples.py",
    "src/lockstep/tasks/models/token_rows.py",
)
def test_a_saved_tokenizer_gives_the_same_ids(tmp_path: Path) -> None:
    """A saved and reloaded tokenizer gives the same ids, and writes the same file again."""
    made = tokenizer()
    made.save_pretrained(tmp_path / "a")
    again = AutoTokenizer.from_pretrained(tmp_path / "a")
    again.save_pretrained(tmp_path / "b")
    assert again("one [SEP] five")["input_ids"] == made("one [SEP] five")["input_ids"] == [2, 4, 3, 1, 3]
    assert (tmp_path / "a" / "tokenizer.json").read_bytes() == (tmp_path / "b" / "tokenizer.json").read_bytes()


@rests_on_it("src/lockstep/data/tokenizer.py", "src/lockstep/data/arrow_cache.py")
def test_truncation_options_last_for_one_call() -> None:
    """Truncation and padding options of one tokenizer call do not affect the next call."""
    made = tokenizer()
    whole = made("one two three four")["input_ids"]
    made(["one two three four", "one"], truncation=True, max_length=3, padding=True)
    assert made("one two three four")["input_ids"] == whole


@rests_on_it(
    "src/lockstep/tasks/models/models.py",
    "src/lockstep/distributed/randomness.py",
    "src/lockstep/lab/import_config/model_defaults.py",
    "src/lockstep/plain/train.py",
    "src/lockstep/tasks/models/small_models.py",
)
def test_a_new_model_is_initialized_by_torchs_generator_alone() -> None:
    """A model created from a config has the same bits for the same torch.manual_seed."""
    drawn = []
    for _ in range(2):
        torch.manual_seed(3)
        drawn.append(tiny().state_dict())
    assert all(torch.equal(drawn[0][name], drawn[1][name]) for name in drawn[0])


@rests_on_it(
    "src/lockstep/tasks/models/models.py",
    "src/lockstep/training/export_check.py",
    "src/lockstep/data/tokenizer.py",
    "src/lockstep/tasks/image_classification.py",
    "src/lockstep/tasks/models/adapters.py",
)
def test_a_loaded_model_has_the_same_bits_and_is_in_eval(tmp_path: Path) -> None:
    """save_pretrained and from_pretrained keep every bit, and the loaded model is in eval mode."""
    model = tiny()
    model.save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert not loaded.training
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in model.state_dict().items())


@rests_on_it("src/lockstep/tasks/models/storage_dtype.py", "src/lockstep/tasks/models/models.py")
def test_a_narrow_file_is_widened_exactly(tmp_path: Path) -> None:
    """from_pretrained with dtype float32 converts the values of a bfloat16 file exactly."""
    model = tiny().bfloat16()
    model.save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert all(torch.equal(value.float(), loaded.state_dict()[name]) for name, value in model.state_dict().items())


@rests_on_it("src/lockstep/tasks/models/source_ties.py", "src/lockstep/checkpoint/export.py")
def test_a_tied_head_is_saved_once(tmp_path: Path) -> None:
    """save_pretrained writes a tied weight under one name, and from_pretrained ties it again."""
    from safetensors import safe_open

    tiny(tie_word_embeddings=True).save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert len(names & {"lm_head.weight", "model.embed_tokens.weight"}) == 1
    loaded = LlamaForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


@rests_on_it("src/lockstep/checkpoint/export.py", "src/lockstep/checkpoint/hub_push.py")
def test_an_older_single_file_is_read_before_newer_shards(tmp_path: Path) -> None:
    """If save_pretrained writes shards next to an older single file, it leaves that file, and from_pretrained reads it.
    If it writes a single file next to older shards, it deletes the shards but not their index, and from_pretrained
    reads the single file."""
    old, new = tiny(), tiny()
    old.save_pretrained(tmp_path)
    new.save_pretrained(tmp_path, max_shard_size="4KB")
    assert len([*tmp_path.glob("*.safetensors")]) > 2

    def read() -> torch.Tensor:
        return LlamaForCausalLM.from_pretrained(tmp_path).model.embed_tokens.weight

    assert torch.equal(read(), old.model.embed_tokens.weight)
    new.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.glob("*.safetensors*")} == {
        "model.safetensors",
        "model.safetensors.index.json",
    }
    assert torch.equal(read(), new.model.embed_tokens.weight)


@rests_on_it("src/lockstep/tasks/models/models.py", "src/lockstep/tasks/models/padding.py")
def test_padding_on_the_right_changes_nothing_before_it() -> None:
    """A causal model's logits at real tokens do not depend on padding to their right."""
    model = tiny().eval()
    ids = torch.tensor([[5, 6, 7, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 0, 0]])
    with torch.no_grad():
        padded, alone = model(ids, attention_mask=mask).logits[:, :3], model(ids[:, :3]).logits
    assert torch.allclose(padded, alone, atol=1e-6)


@rests_on_it("src/lockstep/tasks/models/inference.py")
def test_greedy_decoding_takes_the_likeliest_token() -> None:
    """generate with do_sample=False picks the argmax as each next token, and draws no random numbers."""
    torch.manual_seed(0)
    model = tiny().eval()
    ids = torch.tensor([[5, 6]])
    before = torch.get_rng_state()
    written = model.generate(ids, do_sample=False, max_new_tokens=4, eos_token_id=None, pad_token_id=0)
    assert torch.equal(before, torch.get_rng_state())
    with torch.no_grad():
        for _ in range(4):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(written, ids)


@rests_on_it("src/lockstep/tasks/models/inference.py")
def test_generation_options_default_to_the_models_config() -> None:
    """generate takes options that the caller omits from the model's generation_config; if that is empty, it decodes
    greedily."""
    torch.manual_seed(0)
    model = tiny().eval()
    ids, options = torch.tensor([[5, 6]]), {"max_new_tokens": 6, "pad_token_id": 0, "eos_token_id": None}
    model.generation_config = GenerationConfig()
    plain = model.generate(ids, do_sample=False, **options)[0, 2:].tolist()
    model.generation_config = GenerationConfig(suppress_tokens=plain)
    assert not {*model.generate(ids, do_sample=False, **options)[0, 2:].tolist()} & {*plain}


@rests_on_it("src/lockstep/tasks/models/inference.py")
def test_generation_needs_padding_on_the_left() -> None:
    """For a left-padded row with its mask, generate writes the same tokens as for the row alone; for a right-padded
    row, the new tokens follow the padding. The tokenizer's padding_side has no influence."""
    torch.manual_seed(0)
    model = tiny().eval()
    options = {"max_new_tokens": 6, "pad_token_id": 0, "eos_token_id": None, "do_sample": False}
    alone = model.generate(torch.tensor([[5, 6, 7]]), **options)[0, 3:]
    left, mask = torch.tensor([[0, 0, 5, 6, 7]]), torch.tensor([[0, 0, 1, 1, 1]])
    assert torch.equal(model.generate(left, attention_mask=mask, **options)[0, 5:], alone)
    right = model.generate(left.flip(1), attention_mask=mask.flip(1), **options)
    assert right[0, :5].tolist() == [7, 6, 5, 0, 0]


@rests_on_it("src/lockstep/checkpoint/export_hashes.py", "src/lockstep/checkpoint/shard_files.py")
def test_the_same_tensors_make_the_same_file(tmp_path: Path) -> None:
    """safetensors writes the same bytes for the same tensors, regardless of their order in the dict."""
    from safetensors.torch import save_file

    tensors = {"b": torch.ones(3), "a": torch.zeros(2, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "1")
    save_file(dict(sorted(tensors.items())), tmp_path / "2")
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()


@rests_on_it("src/lockstep/checkpoint/shard_files.py", "src/lockstep/training/reference_pass.py")
def test_a_truncated_safetensors_file_raises(tmp_path: Path) -> None:
    """safe_open raises SafetensorError for a truncated file."""
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import save_file

    save_file({"a": torch.ones(100)}, tmp_path / "whole")
    (tmp_path / "cut").write_bytes((tmp_path / "whole").read_bytes()[:-8])
    with pytest.raises(SafetensorError), safe_open(tmp_path / "cut", "pt"):
        pass


@rests_on_it("src/lockstep/tasks/models/config_checks.py", "src/lockstep/tasks/models/models.py")
def test_rotary_embeddings_that_depend_on_other_texts() -> None:
    """LongRoPE uses its long factors for a whole batch if one of its texts is longer than
    original_max_position_embeddings. Dynamic RoPE rotates a text longer than max_position_embeddings by the frequencies
    of the longest text so far, until a shorter text resets them. lockstep warns about the former, and refuses such
    lengths for the latter."""
    long = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "original_max_position_embeddings": 16}
    kinds: dict[str, Any] = {"longrope": (64, long), "dynamic": (16, {})}
    text = torch.arange(8)[None] % 7
    texts = [text, torch.arange(20)[None] % 7, torch.arange(40)[None] % 7]
    padded = functional.pad(text, (0, 32))
    mask = torch.ones(2, 40, dtype=torch.int64)
    mask[0, 8:] = 0
    made = {}
    for kind, (positions, more) in kinds.items():
        torch.manual_seed(0)
        rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, **more}
        shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = LlamaConfig(vocab_size=8, max_position_embeddings=positions, rope_parameters=rope, **shape)
        made[kind] = LlamaModel(config).eval()
    with torch.no_grad():
        alone = made["longrope"](text).last_hidden_state
        beside = made["longrope"](torch.cat([padded, texts[2]]), attention_mask=mask).last_hidden_state[:1, :8]
        assert (alone - beside).abs().max() > 1e-3
        before, longer, after, shorter, again = (made["dynamic"](texts[i]).last_hidden_state for i in (1, 2, 1, 0, 1))
    assert not torch.equal(before, after)
    assert torch.equal(before, again)
    assert longer.shape[1] + shorter.shape[1] == 48


@rests_on_it(
    "src/lockstep/tasks/models/source_ties.py",
    "src/lockstep/tasks/models/tie_entry.py",
    "src/lockstep/tasks/models/models.py",
    "src/lockstep/tasks/models/storage_dtype.py",
)
def test_tied_weights_depend_on_the_loaded_values(tmp_path: Path) -> None:
    """all_tied_weights_keys and get_expanded_tied_weights_keys(all_submodels=True) map a tied weight to its source.
    tie_weights(missing_keys=..., recompute_mapping=False) does not tie two loaded weights with different values; it
    ties equal ones, or one that is missing. from_pretrained unfreezes weights that a config freezes."""
    pair = ("lm_head.weight", "model.embed_tokens.weight")
    for other, missing, tied in ((1.0, set(), False), (0.0, set(), True), (1.0, {pair[0]}, True)):
        model = tiny(tie_word_embeddings=True)
        assert dict(model.all_tied_weights_keys) == dict([pair])
        assert dict(model.get_expanded_tied_weights_keys(all_submodels=True)) == dict([pair])
        model.lm_head.weight = nn.Parameter(model.model.embed_tokens.weight.detach() + other)
        model.tie_weights(missing_keys=missing, recompute_mapping=False)
        assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 8}
    marian = MarianMTModel(MarianConfig(vocab_size=32, pad_token_id=0, **sizes, **heads))
    marian.save_pretrained(tmp_path)
    name = "model.encoder.embed_positions.weight"
    frozen = [dict(each.named_parameters())[name] for each in (marian, MarianMTModel.from_pretrained(tmp_path))]
    assert [each.requires_grad for each in frozen] == [False, True]


@rests_on_it("src/lockstep/tasks/models/models.py")
def test_funnel_zeroes_the_padding_embedding_on_load(tmp_path: Path) -> None:
    """from_pretrained of a Funnel masked LM sets the padding token's embedding to zero, whatever the file holds."""
    sizes = {"block_sizes": [1], "d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 16, "pad_token_id": 0}
    model: Any = AutoModelForMaskedLM.from_config(CONFIG_MAPPING["funnel"](vocab_size=40, **sizes))
    with torch.no_grad():
        model.get_input_embeddings().weight[0] = 1.5
    model.save_pretrained(tmp_path)
    loaded: Any = AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert not loaded.get_input_embeddings().weight[0].any()


@rests_on_it("src/lockstep/checkpoint/export.py", "src/lockstep/checkpoint/hub_push.py")
def test_repository_ids_and_model_card_metadata() -> None:
    """validate_repo_id takes NAME and USER/NAME, and raises HFValidationError, a ValueError, for other strings.
    ModelCard raises ValueError, TypeError or YAMLError if its metadata is not a mapping or model-index is not a list;
    without metadata its data is empty. ModelCardData omits None. build_hf_headers puts the token after "Bearer".
    disable_progress_bars applies to all progress bars."""
    import yaml
    from huggingface_hub import ModelCard, ModelCardData
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        build_hf_headers,
        disable_progress_bars,
        enable_progress_bars,
        validate_repo_id,
    )

    for right in ("a", "a/b", "user/bert-base.v1_x"):
        validate_repo_id(right)
    for wrong in ("a//b", "a/b/c", "-a", "a b", "a" * 100, "./folder"):
        with pytest.raises(HFValidationError) as caught:
            validate_repo_id(wrong)
        assert isinstance(caught.value, ValueError)
    for text in ("---\na: [\n---\n", "---\n- a\n---\n", "---\nmodel-index: 3\n---\n"):
        with pytest.raises((ValueError, TypeError, yaml.YAMLError)):
            ModelCard(text)
    assert ModelCard("no head").data.to_dict() == {}
    assert ModelCardData(license=None, model_name="a", tags=["b"]).to_dict() == {"model_name": "a", "tags": ["b"]}
    assert build_hf_headers(token="hf_x")["authorization"] == "Bearer hf_x"
    try:
        disable_progress_bars()
        assert are_progress_bars_disabled()
    finally:
        enable_progress_bars()


@rests_on_it(
    "src/lockstep/strategies/engines/blocks.py",
    "src/lockstep/strategies/engines/accelerated_sharding.py",
    "src/lockstep/strategies/engines/layers.py",
    "src/lockstep/strategies/engines/zero_partition.py",
    "src/lockstep/strategies/engines/tensor_plans.py",
)
def test_attributes_of_model_classes() -> None:
    """supports_gradient_checkpointing is False for a model class that does not set it. get_input_embeddings raises
    NotImplementedError if the model's embeddings are unknown. A SigLIP vision model has its head unless vision_use_head
    is false. transformers.activations has activation modules that are shared within the process. A Conv1D with `nx`
    inputs and `nf` outputs has a weight [nx, nf]."""
    from transformers import (
        LlamaForCausalLM,
        PretrainedConfig,
        PreTrainedModel,
        SiglipVisionConfig,
        SiglipVisionModel,
        activations,
    )
    from transformers.pytorch_utils import Conv1D

    class Bare(PreTrainedModel):
        config_class = PretrainedConfig

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.layer = torch.nn.Linear(1, 1)

    assert (Bare.supports_gradient_checkpointing, LlamaForCausalLM.supports_gradient_checkpointing) == (False, True)
    with pytest.raises(NotImplementedError):
        Bare(PretrainedConfig()).get_input_embeddings()
    for entries in ({}, {"vision_use_head": False}):
        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
        config = SiglipVisionConfig(image_size=8, patch_size=4, **sizes, **entries)
        assert getattr(config, "vision_use_head", True) is (entries == {})
        assert any("head.probe" in name for name, _ in SiglipVisionModel(config).named_parameters()) is (entries == {})
    assert any(isinstance(value, torch.nn.Module) for value in vars(activations).values())
    layer = Conv1D(5, 3)
    assert (layer.nx, layer.nf, tuple(layer.weight.shape)) == (3, 5, (3, 5))
