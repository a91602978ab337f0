"""Model families that an engine must treat specially: sharded, they have the bits of one process, or they are
refused."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
import torch
import transformers

from crossed import families as small
from lockstep.data import tokenizer
from lockstep.data.arrow_cache import Columns
from lockstep.data.job import Job, strategy_class
from lockstep.strategies.engines import layers
from lockstep.strategies.engines.side_effects import effects_of
from lockstep.strategies.pipeline import Pipeline
from lockstep.tasks import translation
from lockstep.tasks.classification import Classification
from lockstep.tasks.models import heads, model_configs, models
from lockstep.tasks.models.model_configs import ModelChoice
from support.fsdp2_runs import steps_of
from support.harness import run_on, tiny
from support.marks import long, needs
from support.messages import raises

BART = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
}
BERT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
T5 = {"num_layers": 2, "num_decoder_layers": 2, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_heads": 2}
XLNET = {"n_layer": 2, "n_head": 2, "d_model": 32, "d_inner": 64}
FUNNEL = {"block_sizes": [1, 1], "num_decoder_layers": 1, "n_head": 2, "d_head": 16, "d_model": 32, "d_inner": 64}
REFORMER = {"hidden_size": 32, "num_attention_heads": 2, "attention_head_size": 16, "feed_forward_size": 64}
REFORMER |= {"axial_pos_embds": False, "attn_layers": ["local", "local"], "is_decoder": True}
FAMILIES: dict[str, dict[str, Any]] = {
    "t5": T5,  # its default config has no decoder start token
    "mbart": BART,  # a module that must not be split contains another one
    "xlnet": XLNET,  # reading the limit of positions from its config raises
    "funnel": FUNNEL,  # its layers are lists within a list
    "squeezebert": BERT | {"embedding_size": 32},  # calls `forward` of its layers directly, so no hook runs
    "albert": BERT | {"embedding_size": 16},  # runs one layer twice
    "ibert": BERT,  # its forward replaces the buffers of its ranges
    "lilt": BERT | {"hidden_size": 48, "max_2d_position_embeddings": 300},  # looks large embeddings up twice
    "reformer": REFORMER,  # seeds its dropout from the operating system, and runs its layers again in backward
}


def both(**values: Any) -> list[dict[str, Any]]:
    runs = [tiny(f"strategy.name={name}", "steps=2", "micro_batches=3", **values) for name in ("single", "fsdp2")]
    return [run_on(ranks, steps_of, run)[0] for ranks, run in zip((1, 2), runs, strict=True)]


@pytest.mark.processes
@pytest.mark.parametrize("family", [long(name) if name in ("mbart", "ibert", "lilt") else name for name in FAMILIES])
def test_a_classifier_has_the_same_bits_in_shards(family: str) -> None:
    single, found = both(model={"type": family, "config": FAMILIES[family]})
    assert (found["digest"], found["norm"]) == (single["digest"], single["norm"])


@pytest.mark.processes
def test_a_tied_decoder_has_the_same_bits_in_shards() -> None:
    """BERT's embeddings, which must not be split, hold the tied weight of its decoder."""
    single, found = both(
        model={"type": "bert", "config": BERT | {"is_decoder": True}},
        task={"name": "language_modeling", "block_size": 16, "samples": 0},
    )
    assert (found["digest"], found["norm"]) == (single["digest"], single["norm"])


@pytest.mark.parametrize(("family", "value"), [("funnel", 2), ("modernbert-decoder", "two")])
def test_an_entry_that_a_config_does_not_take_is_refused(family: str, value: Any) -> None:
    with raises("LS3123", "model.config.num_hidden_layers", f"{value!r}"):
        model_configs.load_config(tiny(model={"type": family, "config": {"num_hidden_layers": value}}).model)


T5GEMMA = {
    part: BERT | {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64}
    for part in ("encoder", "decoder")
}


def config_of(family: str, entries: dict[str, Any]) -> Any:
    return model_configs.load_config(tiny(model={"type": family, "config": entries}).model)


def test_entries_of_a_nested_config_can_be_set() -> None:
    found = config_of("t5gemma", T5GEMMA | {"dropout_rate": 0.25})
    assert found.encoder.num_hidden_layers == 2
    assert len(found.encoder.layer_types) == 2  # derived from its number of layers
    assert found.decoder.cross_attention_hidden_size == 32  # derived from the encoder's
    assert found.decoder.dropout_rate == 0.25  # passed on from the outer config
    found = config_of("encoder-decoder", {"encoder": BERT, "decoder": {"model_type": "roberta"} | BERT})
    assert (found.encoder.model_type, found.decoder.model_type) == ("bert", "roberta")
    # as without an explicit decoder mapping
    assert (found.decoder.is_decoder, found.decoder.add_cross_attention) == (True, True)
    assert (found.encoder.hidden_size, found.decoder.hidden_size) == (32, 32)


@pytest.mark.parametrize(
    ("encoder", "said"),
    [
        ({"layers": 2}, ("LS3135", "model.config.encoder", "'layers'")),
        ({"hidden_size": "wide"}, ("LS3123", "model.config.encoder.hidden_size", "'wide'")),
        (2, ("LS3122", "model.config.encoder", "2")),
    ],
)
def test_unknown_entries_of_a_nested_config_are_refused(encoder: Any, said: tuple[str, ...]) -> None:
    with raises(*said):
        config_of("t5gemma", {"encoder": encoder})


SHARDS: list[tuple[str, dict[str, Any]]] = [
    ("fsdp2", {"gather": "micro_batch"}),
    ("hf_accelerate", {"fsdp": {}}),
    ("zero3", {}),
    ("hf_accelerate", {"deepspeed": {"zero_stage": 3}}),
]


def written_by(head: str, family: str, entries: dict[str, Any]) -> set[str]:
    """Return the names of trained weights that the forward of a small model writes to, in training or evaluation."""
    config = transformers.CONFIG_MAPPING[family](**small.config_of(family, dropout=False) | entries)
    config.architectures = config.architectures or []  # transformers iterates over it for a Funnel
    if hasattr(config, "vocab_size"):
        config.vocab_size, config.pad_token_id = 64, 1
    model = getattr(transformers, heads.of(head).auto).from_config(config).train()
    ids = torch.arange(24).view(2, 12) + 5
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    try:
        effects = effects_of(model, [lambda: model(**inputs)], ())
    except TypeError:  # the config has no entry of that name
        effects = effects_of(model, [lambda: model(ids)], ())
    return {name for name, _ in model.named_parameters()} & (effects.written | effects.evaluated)


@pytest.mark.long  # changes with transformers alone: .ci/newest runs it
@pytest.mark.processes  # a library starts ninja
@pytest.mark.parametrize("head", ["causal", "masked"])
def test_no_other_family_writes_to_its_weights(head: str) -> None:
    found, tried = set(), 0
    for family in small.known()[head]:
        try:
            found |= {family} if written_by(head, family, {}) else set()
            tried += 1
        except Exception:  # its forward needs other inputs than ids and a mask
            continue
    assert found == ({*layers.WRITES_WEIGHTS} if head == "causal" else set())
    assert tried > 0.9 * len(small.known()[head])


@pytest.mark.long
@pytest.mark.processes  # a library starts ninja
@pytest.mark.parametrize("head", ["causal", "masked", "classification", "token_classification", "seq2seq"])
def test_no_other_family_loads_weights_that_were_not_saved(head: str, tmp_path: Path) -> None:
    """Only transformers runs here: small models are saved with every weight changed, padding rows included, and loaded.
    Two differences are allowed: a padding row loaded as zero, which a classifier never trains, and Marian's positions,
    which it computes again."""
    found, tried, auto = set(), 0, getattr(transformers, heads.of(head).auto)
    for family in small.known()[head]:
        try:
            config = transformers.CONFIG_MAPPING[family](**small.config_of(family, False, 1))
            for part in model_configs.texts(config):
                part.vocab_size, part.pad_token_id, part.bos_token_id, part.eos_token_id = 64, 0, 1, 2
            model = auto.from_config(config)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.25)
            model.save_pretrained(tmp_path / family)
            loaded = auto.from_pretrained(tmp_path / family).state_dict()
        except Exception:  # config entries that contradict each other
            continue
        tried += 1
        found |= {family} if any(not torch.equal(t, loaded[name]) for name, t in model.state_dict().items()) else set()
        shutil.rmtree(tmp_path / family)
    harmless = {"classification": {"funnel"}, "token_classification": {"funnel"}, "seq2seq": {"marian"}}
    assert found == {family for of, family in models.ZEROED if of == head} | harmless.get(head, set())
    assert tried > 0.9 * len(small.known()[head])


@pytest.mark.processes  # a library starts ninja
@pytest.mark.parametrize(("name", "options"), SHARDS)
@pytest.mark.parametrize("family", layers.WRITES_WEIGHTS)
def test_sharding_is_refused_for_families_that_write_to_their_weights(
    family: str, name: str, options: dict[str, Any]
) -> None:
    if name == "zero3" or "deepspeed" in options:
        needs("deepspeed")
    entry = layers.WRITES_WEIGHTS[family]
    assert written_by("causal", family, {})
    task = {"name": "language_modeling", "block_size": 16, "samples": 0}

    def check(**entries: Any) -> None:
        run = tiny(task=task, model={"type": family, "config": entries}, strategy={"name": name, "options": options})
        strategy_class(run).check(Job.of(run, 2))

    with raises("LS4106", family, entry or "use"):
        check()
    if entry is not None:
        assert not written_by("causal", family, {entry: 0})
        check(**{entry: 0})


class Words:
    """The part of a tokenizer that `build` reads."""

    pad_token_id, bos_token_id, eos_token_id = 3, 4, 5

    def __len__(self) -> int:
        return 40

    def get_vocab(self) -> dict[str, int]:
        return {str(id_): id_ for id_ in range(40)}


def test_nested_configs_have_the_tokenizers_vocabulary(tmp_path: Path) -> None:
    words: Any = Words()
    model: Any = models.build(ModelChoice.of(tiny(model={"type": "t5gemma", "config": T5GEMMA})), "seq2seq", words)
    for part in (model.config.encoder, model.config.decoder):
        assert (part.vocab_size, part.pad_token_id, part.bos_token_id, part.eos_token_id) == (40, 3, 4, 5)
    assert model.config.decoder.use_cache is False
    words.bos_token_id = None
    model = models.build(
        ModelChoice.of(tiny(model={"type": "t5gemma", "config": T5GEMMA})), "classification", words, empty=True
    )
    assert model.config.decoder.bos_token_id == 3  # a start token for the decoder
    assert {embeddings.num_embeddings for embeddings in model.modules() if hasattr(embeddings, "num_embeddings")} == {
        40
    }
    model.config.save_pretrained(tmp_path)
    source = {"source": str(tmp_path), "config": {"decoder": {"attention_dropout": 0.5}}}
    again: Any = model_configs.load_config(tiny(model=source).model)
    assert (again.decoder.attention_dropout, again.encoder.attention_dropout) == (0.5, 0.0)
    assert again.decoder.hidden_size == 32


def test_entries_of_layers_that_differ_can_be_set() -> None:
    found = config_of("gemma4_text", {"head_dim": 16, "num_hidden_layers": 7}).to_dict()
    assert (found["head_dim"], found["num_hidden_layers"]) == (16, 7)
    assert [int(layer) for layer in found["per_layer_config"]] == [
        5,
        6,
    ]  # the last layer is changed to full attention


def test_positions_of_nested_configs_are_checked() -> None:
    with raises("LS3142", "max_length", "65", "64"):
        models.check(
            ModelChoice.of(tiny("data.max_length=65", model={"type": "t5gemma", "config": T5GEMMA})), "seq2seq"
        )


def test_a_pipeline_refuses_an_adapter() -> None:
    run = tiny("strategy.name=pipeline", "model.adapter={type: lora}", model={"source": "gpt2"})
    with raises("LS4243"):
        Pipeline.check(Job.of(run, 2))


def test_a_model_from_scratch_may_have_a_larger_vocabulary() -> None:
    def built(size: object) -> Any:
        config = {"n_layer": 1, "n_head": 2, "n_embd": 32, "vocab_size": size}
        words: Any = Words()
        return models.build(ModelChoice.of(tiny(model={"type": "gpt2", "config": config})), "causal", words, empty=True)

    assert built(64).get_input_embeddings().num_embeddings == 64
    with raises("LS2300", "39", "40"):
        built(39)


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path))

    def prepared(size: int) -> Path:
        model = {"type": "gpt2", "config": {"vocab_size": size}}
        run = tiny(model=model, tokenizer={"train": "bpe", "vocab_size": 300})
        return tokenizer.prepare(tokenizer.TokenizerChoice.of(run), iter([["some text", "another text"]]), "texts")

    assert prepared(300).is_dir()
    with raises("LS2300", "12"):
        prepared(12)


def test_texts_that_a_canine_cannot_read_are_refused() -> None:
    """Canine joins tokens in groups of four; transformers itself fails on a batch of fewer."""
    model = {"type": "canine", "config": {"downsampling_rate": 4} | {"num_hidden_layers": 1, "hidden_size": 24}}
    judge = transformers.CanineModel(transformers.CanineConfig(**model["config"]))
    judge(torch.ones(1, 4, dtype=torch.long))
    with pytest.raises(RuntimeError):
        judge(torch.ones(1, 3, dtype=torch.long))

    def read(model: dict[str, Any], *lengths: int) -> None:
        ids = pa.array([[1] * length for length in lengths], pa.list_(pa.int32()))
        Classification(tiny(model=model)).check_lengths("train", Columns(pa.record_batch({"input_ids": ids})))

    read(model, 4, 9)
    read({"type": "bert"}, 3, 9)
    with raises("LS3350", "1", "4"):
        read(model, 3, 9)


def test_an_fsmt_that_starts_from_padding_is_refused(tmp_path: Path) -> None:
    tokens = SimpleNamespace(pad_token_id=0, eos_token_id=2)
    for start, refused in ((2, False), (0, True)):
        transformers.FSMTConfig(decoder_start_token_id=start).save_pretrained(tmp_path)
        run = tiny(model={"source": str(tmp_path)})
        if refused:
            with raises("LS3379", "0"):
                translation.check_start_is_read(run.model, tokens)
        else:
            translation.check_start_is_read(run.model, tokens)


def test_a_decoder_with_two_tokens_to_start_from_is_refused(tmp_path: Path) -> None:
    """transformers trains a T5Gemma with one of them, and generates from the other."""
    config = transformers.CONFIG_MAPPING["t5gemma"](**T5GEMMA)
    for start, refused in ((config.decoder.bos_token_id, False), (config.decoder.bos_token_id + 1, True)):
        config.decoder_start_token_id = start
        config.save_pretrained(tmp_path)
        run = tiny(model={"source": str(tmp_path)})
        if refused:
            with raises("LS3380", "3", "2"):
                translation.check_start(run.model)
        else:
            translation.check_start(run.model)
