"""Attention that sees a part of a text (windows, chunks), and causality, under `data.padding: none`: held against
transformers' own attention and masks, against masks written down token by token, and against an export that plain
transformers reads."""

import inspect
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import masking_utils

from lockstep.config.plugins import find
from lockstep.config.run import Run
from lockstep.distributed.world import World
from lockstep.tasks.models import heads, models, padding, unpadded
from lockstep.tasks.models.model_configs import ModelChoice
from lockstep.training.evaluation import evaluate
from support.family_configs import BERT, GROUPED, batch, gradients
from support.harness import build, build_with_feed, tiny
from support.messages import raises
from support.task_runs import make

pytestmark = pytest.mark.slow  # together a third of the time of tests without processes

WINDOW = 5  # tokens; below most of LENGTHS
HEADS_OF_16 = GROUPED | {"head_dim": 16}
TURNS = {"layer_types": ["sliding_attention", "full_attention"]}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {  # head, config but for its window
    "mistral": ("causal", GROUPED),
    "gemma3_text": ("causal", HEADS_OF_16 | TURNS),
    "olmo3": ("classification", GROUPED | TURNS),
    "phi3": ("causal", GROUPED),
    "cohere2": ("causal", GROUPED | TURNS),
    "llama4_text": (
        "causal",
        HEADS_OF_16
        | {"intermediate_size_mlp": 64, "num_local_experts": 2}
        | {"layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0]},
    ),
    "modernbert": ("classification", BERT | TURNS),
    "modernbert-decoder": ("causal", BERT | TURNS),
}
LENGTHS = {
    "unlike": (11, 4, 7),
    "alike": (6, 6, 6),
    "one": (9,),
    "one token each": (1, 1, 1),
    "one of one token": (1, 9),
    "long": (70, 66),
    "long and alike": (70, 70),
}
WINDOW_ENTRY = {"llama4_text": "attention_chunk_size", "modernbert": "local_attention"}


def config_of(family: str, window: int) -> Any:
    entry = WINDOW_ENTRY.get(family, "sliding_window")
    size = 2 * window if entry == "local_attention" else window  # to both sides
    more = {"vocab_size": 60, "pad_token_id": 1, "eos_token_id": 2, "bos_token_id": 3, "use_cache": False, entry: size}
    return transformers.CONFIG_MAPPING[family](**FAMILIES[family][1] | more)


def made(family: str, window: int, attention: str) -> nn.Module:
    torch.manual_seed(0)
    auto = getattr(transformers, heads.of(FAMILIES[family][0]).auto)
    model: nn.Module = auto.from_config(config_of(family, window), attn_implementation=attention).eval()
    if attention == unpadded.NAME:
        unpadded.install(model)
    return model


@pytest.mark.parametrize("window", [WINDOW, 100])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("family", FAMILIES)
def test_sliding_windows_match_transformers(family: str, lengths: tuple[int, ...], window: int) -> None:
    """Logits, gradients, and that no token before the last one knows the last one."""
    ids, mask = batch(lengths, 0)
    head = FAMILIES[family][0]
    real = slice(None) if head == "classification" else mask.bool()
    plain, laid = (made(family, window, way) for way in ("sdpa", unpadded.NAME))
    wanted, found = (model(input_ids=ids, attention_mask=mask).logits[real] for model in (plain, laid))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    of_plain, of_laid = gradients(plain, wanted), gradients(laid, found)
    largest = max(float(g.abs().max()) for g in of_plain)
    for one, other in zip(of_laid, of_plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=2e-5 * largest)
    if head == "causal":
        changed, ends = ids.clone(), mask.sum(1) - 1
        changed[torch.arange(len(ends)), ends] = 7
        before = torch.arange(ids.shape[1]) < ends[:, None]
        after = laid(input_ids=changed, attention_mask=mask).logits
        torch.testing.assert_close(
            after[before], laid(input_ids=ids, attention_mask=mask).logits[before], rtol=1e-5, atol=1e-6
        )


def test_windows_are_narrower_than_texts_in_these_tests() -> None:
    """The control: without its window a family computes something else."""
    ids, mask = batch(LENGTHS["alike"], 0)
    for family in FAMILIES:
        narrow, wide = (made(family, size, "sdpa")(input_ids=ids, attention_mask=mask).logits for size in (2, 100))
        assert not torch.allclose(narrow, wide, atol=1e-4), family


# -- every mask that transformers makes ------------------------------------------------------------------------------

ANSWERS = {  # whether query q of a text sees key k of it, as transformers documents the mask
    "create_causal_mask": lambda q, k: k <= q,
    "create_sliding_window_causal_mask": lambda q, k: q - WINDOW < k <= q,
    "create_chunked_causal_mask": lambda q, k: k <= q and q // WINDOW == k // WINDOW,
    "create_bidirectional_mask": lambda q, k: True,
    "create_bidirectional_sliding_window_mask": lambda q, k: abs(q - k) <= WINDOW,
}
NO_ATTENTION = {"create_recurrent_attention_mask", "create_masks_for_generate"}  # [B, T], and one of those above


def test_every_mask_of_transformers_is_known_here() -> None:
    functions = {name for name, made in vars(masking_utils).items() if inspect.isfunction(made)}
    made_here = {name for name in functions if name.startswith("create_")} - {"create_block_mask"}  # of flex attention
    assert made_here == ANSWERS.keys() | NO_ATTENTION


@pytest.mark.parametrize("positions", [False, True], ids=["", "positions"])
@pytest.mark.parametrize("short", [True, False], ids=["written out", "torch's"])
@pytest.mark.parametrize("lengths", [*LENGTHS.values(), (5, 5), (3, 3)], ids=[*LENGTHS, "window", "below window"])
@pytest.mark.parametrize("name", ANSWERS)
def test_masks_match_their_definition(
    name: str, lengths: tuple[int, ...], short: bool, positions: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention of texts laid end to end beside a softmax over the tokens that each token sees, one by one.
    `positions`: texts of one length that come with positions and without a mask, as packed blocks do."""
    if not short:
        monkeypatch.setattr(unpadded, "SHORT", {torch.float32: 0})
    create = getattr(masking_utils, name)
    takes_positions = "position_ids" in inspect.signature(create).parameters
    if positions and (len(set(lengths)) > 1 or not takes_positions):
        pytest.skip("a block's documents come without padding, in models that look back only")
    config = transformers.LlamaConfig(sliding_window=WINDOW, attention_chunk_size=WINDOW)
    config._attn_implementation = unpadded.NAME
    width, heads = max(lengths), 2
    _, real = batch(lengths, 0)
    more = {"past_key_values": None, "position_ids": torch.arange(width)[None].expand(len(lengths), -1)}
    given = create(
        config,
        torch.zeros(len(lengths), width, 4),
        None if positions else real,
        **(more if takes_positions else {}),
    )
    draw = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(len(lengths), heads, width, 8, generator=draw) for _ in range(3))
    module = nn.Module()
    module.is_causal = "bidirectional" not in name
    if isinstance(given, unpadded.RowMap):
        laid = [given.lay(x.transpose(1, 2)).transpose(1, 2) for x in (query, key, value)]
        found = given.take_apart(unpadded.attention(module, *laid, given)[0])  # [B, T, h, d]
    else:  # one text: as transformers has it
        assert len(lengths) == 1
        found = unpadded.attention(module, query, key, value, given)[0]
    for row, length in enumerate(lengths):
        sees = torch.tensor([[bool(ANSWERS[name](q, k)) for k in range(length)] for q in range(length)])
        scores = query[row, :, :length] @ key[row, :, :length].transpose(1, 2) / 8**0.5
        wanted = torch.softmax(scores.masked_fill(~sees, -torch.inf), -1) @ value[row, :, :length]
        torch.testing.assert_close(found[row, :length].transpose(0, 1), wanted, rtol=1e-4, atol=1e-5)


# -- the trial -------------------------------------------------------------------------------------------------------


def forgets(*args: Any, **kwargs: Any) -> Any:
    """A mask that knows the two plain kinds only: where a window's mask is left out, all see all."""
    found = unpadded.masked(*args, **kwargs)
    plain = (masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function)
    if isinstance(found, unpadded.RowMap) and found.padded_mask is None and kwargs["mask_function"] not in plain:
        found.causal, found.mask, found.bias = False, None, None
    return found


@pytest.mark.parametrize("family", ["mistral", "gemma3_text", "llama4_text", "modernbert-decoder"])
def test_the_trial_finds_a_missing_mask(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run, config = run_of(family, 4096), config_of(family, 4096)
    assert padding.trial(run.model, "causal", config) is None
    transformers.AttentionMaskInterface.register(unpadded.NAME, forgets)
    try:
        why = padding.trial(run.model, "causal", config)
    finally:
        transformers.AttentionMaskInterface.register(unpadded.NAME, unpadded.masked)
    assert why == "concatenated examples would attend to each other (texts of 9, 9, 9 tokens)"


def run_of(family: str, window: int) -> Run:
    return tiny(model={"type": family, "config": FAMILIES[family][1] | {"sliding_window": window}})


XLM = {"n_layers": 2, "n_heads": 2, "emb_dim": 32, "max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("family", "config", "instead"),
    [
        ("xlm", XLM, "set model.config.causal: true"),
        ("xlm", XLM | {"causal": True}, None),
        ("bert-generation", BERT, "set model.config.is_decoder: true"),
        ("bert-generation", BERT | {"is_decoder": True}, None),
        ("xlnet", {"n_layer": 2, "n_head": 2, "d_model": 32, "d_inner": 64}, "use a family that does not"),
        ("bert", BERT, None),
    ],
)
def test_a_language_model_that_reads_ahead_is_refused(
    tmp_path: Path, family: str, config: dict[str, Any], instead: str | None
) -> None:
    """Its loss would be that of copying."""
    for task, keys in (("documents", ["task.samples=0"]), ("preference", ["data.max_length=64"])):
        run = make(tmp_path, task, *keys)
        run = run.model_copy(update={"model": run.model.model_copy(update={"type": family, "config": config})})
        if instead is None:
            assert padding.foresight(run.model, "causal") is None
            continue
        with raises("LS3150", str(family), str(instead)):
            find("tasks", run.task.name)(run).prepare()


def test_logits_that_are_no_numbers_show_no_reading_ahead(tmp_path: Path) -> None:
    """DoRA divides by the norm of each row, and a fresh row of a padding token is 0."""
    adapter = {"type": "lora", "r": 2, "target_modules": ["lm_head"], "use_dora": True}
    keys = ["model.type=llama", 'model.config={"num_hidden_layers": 1, "tie_word_embeddings": true}']
    run = make(tmp_path, "documents", *keys)
    section = run.model.model_validate(run.model.model_dump() | {"adapter": adapter, "source": "x", "type": None})
    config = transformers.LlamaConfig(num_hidden_layers=1, tie_word_embeddings=True, pad_token_id=1)
    assert padding.tried_ahead(section, "causal", config) is None


@pytest.mark.parametrize("decodes", [False, True])
def test_a_decoder_that_reads_ahead_is_refused(tmp_path: Path, decodes: bool) -> None:
    """A saved model whose parts were put together by hand; its loss would be that of copying."""
    entries = {"is_decoder": decodes, "add_cross_attention": decodes}
    parts = {"encoder": {"model_type": "bert"} | BERT, "decoder": {"model_type": "bert"} | BERT | entries}
    transformers.EncoderDecoderConfig(**parts).save_pretrained(tmp_path / "model")
    source = {"source": str(tmp_path / "model"), "type": None, "config": {}}
    run = make(tmp_path, "translation", "task.bleu=false")
    run = run.model_copy(update={"model": run.model.model_copy(update=source)})
    if decodes:
        assert padding.foresight(run.model, "seq2seq") is None
        return
    with raises("LS3150", "encoder-decoder", "model.config.decoder: {is_decoder: true, add_cross_attention: true}"):
        padding.check_foresight(run.model, "seq2seq")


@pytest.mark.parametrize("task", ["documents", "preference"])
def test_a_language_model_of_an_encoders_family_looks_back_only(tmp_path: Path, task: str) -> None:
    """The likelihood of an answer is the product of what each token is given by those before it."""
    keys = () if task == "preference" else ("task.samples=0",)
    run = make(tmp_path, task, *keys, "data.max_length=64", "model.type=bert", f"model.config={json.dumps(BERT)}")
    model = build(run, World(run))[1].model.eval()
    ids = torch.tensor([[7, 8, 9, 10, 11, 12]])
    with torch.no_grad():
        one, other = (model(input_ids=torch.cat([ids[:, :5], last], 1)).logits for last in (ids[:, 5:], ids[:, :1]))
    assert torch.equal(one[:, :5], other[:, :5])
    assert not torch.equal(one[:, 5], other[:, 5])


def test_sliding_layers_without_a_window_are_refused(tmp_path: Path) -> None:
    """Qwen2 has none until it is switched on, and transformers' masks end in an error."""
    run = make(
        tmp_path, "documents", "task.samples=0", "model.type=qwen2", f"model.config={json.dumps(GROUPED | TURNS)}"
    )
    with raises("LS3141"):
        models.check(ModelChoice.of(run), "causal")
    windows = GROUPED | TURNS | {"use_sliding_window": True, "sliding_window": 4}
    models.check(
        ModelChoice.of(make(tmp_path, "documents", "model.type=qwen2", f"model.config={json.dumps(windows)}")), "causal"
    )


# -- a run -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def plain_loss(model: nn.Module, texts: list[tuple[Tensor, Tensor]]) -> float:
    """Return the loss of transformers alone, one text at a time: (ids [T], targets [T])."""
    told = [(model(input_ids=ids[None]).logits[0].double(), targets) for ids, targets in texts]
    total = sum(float(cross_entropy(logits, targets, reduction="sum")) for logits, targets in told)
    return total / sum(int((targets >= 0).sum()) for _, targets in texts)


@pytest.mark.parametrize("more", [(), ("task.attend_across_documents=false",)], ids=["", "apart"])
@pytest.mark.parametrize("window", [4, 100])
@pytest.mark.parametrize("way", ["none", "batch"])
def test_evaluation_matches_plain_transformers(tmp_path: Path, way: str, window: int, more: tuple[str, ...]) -> None:
    """Packed language modelling with windowed attention: trained here, read by transformers."""
    model = {"type": "mistral", "config": GROUPED | {"sliding_window": window}}
    run = make(tmp_path, "packed", "task.samples=0", f"data.padding={way}", "task.packing=true", *more)
    run = run.model_copy(update={"model": run.model.model_copy(update=model)})
    assert padding.unsupported_reason(ModelChoice.of(run), "causal") == (
        None if way == "none" else "data.padding is batch"
    )
    world = World(run)
    task, strategy, feed = build_with_feed(run, world)
    for step in range(8):
        strategy.train_step(feed.make(step), 1e-2)
    columns = task.splits["validation"]
    said = evaluate(world, task, strategy, columns)["loss"]
    task.write(tmp_path / "export", strategy.state.export() or {})
    strategy.close()
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export").eval()
    texts = []
    for row in range(len(columns)):
        ids, targets = (torch.from_numpy(columns.ragged(n).row(row).copy()).long() for n in ("input_ids", "targets"))
        starts = columns.ragged("starts").row(row).nonzero()[0].tolist() if more else []
        cuts = sorted({0, len(ids), *starts})
        texts += [(ids[a:b], targets[a:b]) for a, b in pairwise(cuts)]
    assert said == pytest.approx(plain_loss(other, texts), rel=1e-5)
