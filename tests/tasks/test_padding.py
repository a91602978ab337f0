"""`data.padding: none`: what models compute of texts laid end to end is what they compute of padded ones, but for
rounding; families of which that is not so are found out and padded."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn

from lockstep.config.run import Run, load
from lockstep.data.job import Job, arithmetic_of
from lockstep.distributed.torch_internals import may_attend_by_cudnn
from lockstep.distributed.world import World
from lockstep.tasks.models import heads, model_configs, models, padding, unpadded
from lockstep.tasks.models.inference import Decoding, by_transformers
from lockstep.tasks.models.model_configs import ModelChoice
from lockstep.tasks.task import make_task
from lockstep.training import summary
from lockstep.training.data_loader import StepLoader
from support.family_configs import BERT, GROUPED, batch, gradients
from support.harness import build_with_feed, digest, run_on, tiny
from support.messages import raises
from support.task_runs import MARIAN, make

pytestmark = pytest.mark.slow  # together a third of the time of tests without processes

MARIAN_CONFIG = MARIAN["config"] | {"max_position_embeddings": 64, "decoder_vocab_size": 60}
DEBERTA = BERT | {"pooler_hidden_size": 32}
T5 = {"num_layers": 2, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_heads": 2}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("token_classification", BERT),
    "roberta": ("classification", BERT),
    "distilbert": ("classification", {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64}),
    "gpt2": ("causal", {"n_embd": 32, "n_layer": 2, "n_head": 2}),
    "llama": ("causal", GROUPED),
    "qwen2": ("classification", GROUPED),
    "qwen3": (
        "causal",
        GROUPED | {"head_dim": 8, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "bart": ("seq2seq", {k: v for k, v in MARIAN_CONFIG.items() if "vocab" not in k}),
    "marian": ("seq2seq", MARIAN_CONFIG),
}
LENGTHS = {"unlike": (11, 4, 7), "alike": (6, 6, 6), "one": (9,)}


def run_of(family: str, **values: Any) -> Run:
    return tiny(model={"type": family, "config": FAMILIES[family][1]}, **values)


def made(family: str, attention: str | None) -> nn.Module:
    """Build a model with fixed weights and dropout off, without the trials of `padding`."""
    head, entries = FAMILIES[family]
    config = transformers.CONFIG_MAPPING[family](**entries)
    config.update({"vocab_size": 60, "pad_token_id": 1, "eos_token_id": 2, "bos_token_id": 3, "use_cache": False})
    config.decoder_start_token_id = 3
    torch.manual_seed(0)
    auto = getattr(transformers, heads.of(head).auto)
    model: nn.Module = auto.from_config(config, attn_implementation=attention).eval()
    if attention is not None:
        unpadded.install(model)
    return model


def inputs_of(family: str, lengths: tuple[int, ...]) -> tuple[dict[str, Tensor], Tensor | slice]:
    """The inputs, and which of the logits are of real tokens."""
    ids, mask = batch(lengths, 0)
    inputs, head = {"input_ids": ids, "attention_mask": mask}, FAMILIES[family][0]
    if head == "seq2seq":
        read, mask = batch(lengths[::-1], 1)
        inputs |= {"decoder_input_ids": read, "decoder_attention_mask": mask}
    return inputs, slice(None) if head == "classification" else mask.bool()


@pytest.mark.parametrize("written_out", [True, False], ids=["written out", "torch's"])
@pytest.mark.parametrize("alike", LENGTHS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_numbers_as_with_padding(
    family: str, alike: str, written_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not written_out:
        monkeypatch.setattr(unpadded, "SHORT", {torch.float32: 0})
    inputs, real = inputs_of(family, LENGTHS[alike])
    plain, laid = made(family, None), made(family, unpadded.NAME)
    shapes: list[tuple[int, ...]] = []

    def look(block: nn.Module, args: Any, kwargs: Any) -> None:
        shapes.append(tuple((args[0] if args else kwargs["hidden_states"]).shape))

    for block in (block for stack in unpadded.stacks(laid) for block in stack):
        block.register_forward_pre_hook(look, with_kwargs=True)
    wanted, found = plain(**inputs).logits, laid(**inputs).logits
    assert found.shape == wanted.shape
    assert set(shapes) == {(1, sum(LENGTHS[alike]), 32)}  # nothing but real tokens
    torch.testing.assert_close(found[real], wanted[real], rtol=1e-4, atol=1e-5)
    of_plain, of_laid = gradients(plain, wanted[real]), gradients(laid, found[real])
    largest = max(float(g.abs().max()) for g in of_plain)
    assert largest > 0.01
    for one, other in zip(of_laid, of_plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5 * largest)


@pytest.mark.parametrize("family", ["bert", "llama", "marian"])
def test_bf16_is_not_further_from_float32_than_plain_bf16(family: str) -> None:
    inputs, real = inputs_of(family, LENGTHS["unlike"])
    with torch.autocast("cpu", torch.bfloat16):
        wanted, found = (made(family, way)(**inputs).logits[real].float() for way in (None, unpadded.NAME))
    exact = made(family, None)(**inputs).logits[real]
    assert (found - exact).norm() < 1.2 * (wanted - exact).norm()


def test_padding_on_the_left_and_texts_of_nothing() -> None:
    """Nothing depends on where a row's tokens are; a row without any is padded as ever."""
    ids, mask = batch((11, 4, 7), 0)
    for model in (made("bert", None), made("bert", unpadded.NAME)):
        right = model(input_ids=ids, attention_mask=mask, position_ids=torch.arange(11)[None].expand(3, -1)).logits[
            1, :4
        ]
        rolled = {"input_ids": ids.roll(7, 1), "attention_mask": mask.roll(7, 1)}
        rolled["position_ids"] = torch.arange(11).roll(7)[None].expand(3, -1)
        rolled = {k: v[1:2].expand(2, -1) if k == "position_ids" else v[1:2].repeat(2, 1) for k, v in rolled.items()}
        torch.testing.assert_close(model(**rolled).logits[0, 7:], right, rtol=1e-4, atol=1e-5)
    mask[2] = 0
    plain, laid = (made("llama", way)(input_ids=ids, attention_mask=mask).logits for way in (None, unpadded.NAME))
    assert torch.equal(laid[:2][mask[:2].bool()], plain[:2][mask[:2].bool()])


def test_generation_with_a_cache_equals_plain_transformers() -> None:
    """The generated text equals that of plain transformers, for prompts of any length."""
    ids, mask = batch((11, 4, 7), 0)
    how = Decoding(6, 1, None)
    plain, laid = (
        by_transformers(made("llama", way), {"input_ids": ids, "attention_mask": mask}, how)
        for way in ("sdpa", unpadded.NAME)
    )
    assert torch.equal(plain, laid)


# -- which families --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_families_that_run_without_padding(family: str) -> None:
    assert padding.unsupported_reason(ModelChoice.of(run_of(family)), FAMILIES[family][0]) is None


@pytest.mark.parametrize(
    ("family", "head", "config", "why"),
    [
        ("t5", "seq2seq", T5, "a position bias"),
        ("deberta", "classification", DEBERTA, "does not support torch's attention"),
        (
            "gpt_oss",
            "causal",
            GROUPED | {"num_local_experts": 2, "num_experts_per_tok": 1},
            "does not support torch's attention",
        ),
        ("bart", "seq2seq", FAMILIES["bart"][1] | {"encoder_layerdrop": 0.2}, "model.config.encoder_layerdrop"),
        ("lfm2", "causal", GROUPED | {"num_hidden_layers": 4, "layer_types": ["full_attention", "conv"] * 2}, "layers"),
    ],
)
def test_families_that_need_padding(family: str, head: str, config: dict[str, Any], why: str) -> None:
    run = tiny(model={"type": family, "config": config})
    assert why in str(padding.unsupported_reason(ModelChoice.of(run), head))
    assert not any(block._forward_pre_hooks for stack in unpadded.stacks(made_by(run, head)) for block in stack)


def made_by(run: Run, head: str) -> nn.Module:
    class Tokens:
        pad_token_id, bos_token_id, eos_token_id, sep_token_id = 1, 3, 2, 2

        def __len__(self) -> int:
            return 60

        def get_vocab(self) -> dict[str, int]:
            return {str(id_): id_ for id_ in range(60)}

    return models.build(ModelChoice.of(run), head, Tokens(), empty=True)


def test_layers_that_mix_texts_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: attention that sees its neighbours' texts."""

    def leaking(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, *args: Any, **kwargs: Any) -> Any:
        found, none = unpadded.attention(module, query, key, value, mask, *args, **kwargs)
        return (found + 0.01 * found.roll(1, 1) if isinstance(mask, unpadded.RowMap) else found), none

    transformers.AttentionInterface.register(unpadded.NAME, leaking)
    try:
        why = padding.trial(run_of("bert").model, "classification", model_configs.load_config(run_of("bert").model))
    finally:
        transformers.AttentionInterface.register(unpadded.NAME, unpadded.attention)
    assert why == "concatenated examples would attend to each other"


@pytest.mark.parametrize(
    ("key", "why"),
    [("data.padding=batch", "data.padding is batch"), ("model.attention=eager", "model.attention: eager")],
)
def test_run_file_options_that_need_padding_are_explained(key: str, why: str) -> None:
    assert why in str(padding.unsupported_reason(ModelChoice.of(tiny(key)), "classification"))
    model = made_by(tiny(key), "classification")
    assert not any(block._forward_pre_hooks for stack in unpadded.stacks(model) for block in stack)


def test_a_wrong_value_names_the_key() -> None:
    with raises("LS1002", "data.padding"):
        tiny("data.padding=longest")


def test_families_that_need_padding_are_reported(tmp_path: Path) -> None:
    run = load(None, [], tiny().model_dump() | {"model": {"type": "deberta", "config": DEBERTA}, "steps": 2})
    task = make_task(Job.of(run).with_data())
    told = summary.padding(task)["padding"]
    assert told.startswith("computed, as with data.padding=batch: transformers does not support")
    feed = StepLoader(task, [], torch.device("cpu"))
    assert feed.make(0).padded > feed.make(0).tokens
    can = tiny()
    task = make_task(Job.of(can).with_data())
    assert summary.padding(task) == {}
    laid = StepLoader(task, [], torch.device("cpu")).make(0)
    assert laid.padded == laid.tokens < laid.padded_by_chance


def test_padding_is_part_of_the_arithmetic() -> None:
    assert arithmetic_of(tiny())["data.padding"] == "none"


# -- steps -----------------------------------------------------------------------------------------------------------


def two_steps(world: World, run: Run) -> tuple[str, list[float], list[float]]:
    _, strategy, feed = build_with_feed(run, world)
    results = [strategy.train_step(feed.make(step), 1e-2) for step in range(2)]
    found = digest(strategy.state.state_dict()), [float(r.loss) for r in results], [float(r.grad_norm) for r in results]
    strategy.close()
    return found


def translating(tmp_path: Path, *overrides: str) -> Run:
    return make(tmp_path, "translation", "task.samples=0", "task.bleu=false", "micro_batches=3", *overrides)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_steps_without_dropout_equal_those_of_padded_ones(tmp_path: Path, precision: str) -> None:
    still = ["strategy.name=single", "model.config.dropout=0", f"precision={precision}"]
    runs = [translating(tmp_path, *still, f"data.padding={way}") for way in ("none", "batch")]
    (laid, *laid_numbers), (padded, *padded_numbers) = (two_steps(World(run), run) for run in runs)
    assert laid_numbers[0] == pytest.approx(padded_numbers[0], rel=1e-5 if precision == "fp32" else 1e-2)
    assert laid_numbers[1] == pytest.approx(padded_numbers[1], rel=1e-4 if precision == "fp32" else 3e-2)
    assert laid != padded  # not the same computation


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "options"),
    [("ddp", ()), ("fsdp2", ()), ("pipeline", ("strategy.options.stages=2",))],
)
def test_an_encoder_and_a_decoder_have_the_bits_of_one_process(
    tmp_path: Path, name: str, options: tuple[str, ...]
) -> None:
    """With dropout. A pipeline sends padded hidden states, and each stage removes the padding."""
    one, several = (translating(tmp_path, f"strategy.name={n}", *o) for n, o in (("single", ()), (name, options)))
    assert padding.unsupported_reason(ModelChoice.of(one), "seq2seq") is None
    found = run_on(2, two_steps, several)[0]
    assert found == two_steps(World(one), one)


# -- texts that share a block ----------------------------------------------------------------------------------------


ROBERTA = [f"model.{key}={value}" for key, value in (("type", "roberta"), ("config", BERT))]


def reading(tmp_path: Path, *overrides: str) -> Any:
    run = make(tmp_path, "packed", "task.samples=0", *overrides)
    return make_task(Job.of(run).with_data())


@pytest.mark.parametrize("way", ["none", "batch"])
def test_texts_in_one_block_do_not_attend_to_each_other(tmp_path: Path, way: str) -> None:
    task = reading(tmp_path, "task.packing=true", "task.attend_across_documents=false", f"data.padding={way}")
    model, columns = task.model().eval(), task.splits["train"]
    rows = np.arange(min(4, len(columns)))
    micro = task.collate(columns, rows, 0)
    logits = model(**micro.inputs).logits.detach()
    texts = 0
    for i, row in enumerate(rows):
        ids, starts = (torch.from_numpy(columns.ragged(name).row(row)).long() for name in ("input_ids", "starts"))
        cuts = [*starts.nonzero().flatten().tolist(), len(ids)]
        for a, b in zip(sorted({0, *cuts[:-1]}), cuts if cuts[0] else cuts[1:], strict=True):
            alone = model(input_ids=ids[None, a:b]).logits[0].detach()
            torch.testing.assert_close(logits[i, a:b], alone, rtol=1e-4, atol=1e-5)
            texts += 1
            assert b == len(ids) or micro.targets[i, b - 1] == -100  # nothing of this text tells what the next one is
    assert texts > 2 * len(rows)
    crossing = reading(tmp_path, "task.packing=true", f"data.padding={way}")
    micro = crossing.collate(crossing.splits["train"], rows, 0)
    assert not torch.allclose(model(**micro.inputs).logits[:, -1].detach(), logits[:, -1])  # the control


def test_attend_across_documents_needs_packing_and_a_family_without_padding(tmp_path: Path) -> None:
    with raises("LS3053"):
        reading(tmp_path, "task.packing=false", "task.attend_across_documents=false")
    with raises("LS3055") as caught:
        reading(
            tmp_path,
            "task.packing=true",
            "task.attend_across_documents=false",
            "model.type=roberta",
            "model.config=" + "{}",
        )
    assert "\n" not in str(caught.value)


def test_kernels_whose_bits_need_not_repeat_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that prefers cuDNN's attention, or that does not say what it prefers."""
    from torch.nn.attention import varlen

    device = torch.device("cuda", 0)
    assert not may_attend_by_cudnn(device)
    monkeypatch.setattr(varlen, "_should_use_cudnn", lambda index: index == 0)
    assert may_attend_by_cudnn(device)
    assert not may_attend_by_cudnn(torch.device("cuda", 1))
    monkeypatch.delattr(varlen, "_should_use_cudnn")
    assert may_attend_by_cudnn(device)


def test_an_answer_of_code_that_was_replaced_meanwhile_is_not_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules that are imported after an upgrade do not fit those before it; their answer would be kept for good."""
    answers = iter(("first", "second"))

    def trial(*arguments: Any) -> str:
        return next(answers)

    monkeypatch.setattr(padding, "_WHEN_IMPORTED", ["the hash of another version"])
    run = tiny()
    config = model_configs.load_config(run.model)
    assert [padding.kept_trial(run.model, "causal", config, trial) for _ in range(2)] == ["first", "second"]
