"""`task.loss_chunk`: losses without the matrix of logits are those with it, to rounding, for every family; the same
bits under every strategy; and what it cannot be is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, GPT2LMHeadModel

from lockstep.data.batch import IGNORED, TARGETS, MicroBatch
from lockstep.data.job import Job
from lockstep.tasks.models import chunked_loss, storage_dtype
from support.harness import rank_0_of, run_on
from support.marks import long, needs
from support.messages import raises
from support.task_runs import make, trained

VOCABULARY = 97
LLAMA = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
LLAMA |= {"num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GPT2 = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 48, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
BART = {"d_model": 32, "dropout": 0.0, "pad_token_id": 0, "decoder_start_token_id": 0, "forced_eos_token_id": None}
BART |= {f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in [("layers", 2), ("ffn_dim", 64)]}
BART |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
T5 = {"num_layers": 2, "num_decoder_layers": 2, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_heads": 2}
T5 |= {"dropout_rate": 0.0, "decoder_start_token_id": 0}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", GPT2),  # tied
    "llama": ("llama", LLAMA),
    "qwen2, tied": ("qwen2", LLAMA | {"tie_word_embeddings": True}),
    "gpt-j": ("gptj", GPT2 | {"rotary_dim": 8}),  # its head has a bias
    "gemma 2": ("gemma2", LLAMA | {"final_logit_softcapping": 5.0}),  # caps its logits
    "cohere": ("cohere", LLAMA | {"logit_scale": 0.25}),
    "granite": ("granite", LLAMA | {"logits_scaling": 4.0}),
    "bert": ("bert", LLAMA | {"is_decoder": True, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}),
    "marian": ("marian", BART | {"decoder_vocab_size": VOCABULARY}),  # a bias that is a buffer
    "bart": ("bart", BART),
    "t5": ("t5", T5),  # scales what its head is given
    "t5, untied": ("t5", T5 | {"tie_word_embeddings": False}),
}


def model_of(family: str) -> Any:
    kind, entries = FAMILIES[family]
    config = AutoConfig.for_model(kind, vocab_size=VOCABULARY, **entries)
    config.use_cache = False
    torch.manual_seed(0)
    model = (AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM).from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
        for name, buffer in model.named_buffers():
            if name.endswith("final_logits_bias"):
                buffer.normal_()
    return model.train()


def batch_of(model: Any) -> tuple[dict[str, Tensor], Tensor]:
    """Three rows of eleven tokens, padded, of which some have no target."""
    draw = torch.Generator().manual_seed(1)
    ids, targets = (torch.randint(3, VOCABULARY, (3, 11), generator=draw) for _ in range(2))
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    targets[1, 6:], targets[2, :4] = IGNORED, IGNORED
    inputs = {"input_ids": ids, "attention_mask": mask}
    return inputs | ({"decoder_input_ids": ids.flip(1)} if model.config.is_encoder_decoder else {}), targets


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    (loss / 21).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_equal_those_of_all_logits(family: str, smoothing: float) -> None:
    model = model_of(family)
    inputs, targets = batch_of(model)
    logits = model(**inputs).logits.flatten(0, 1)
    whole = cross_entropy(logits, targets.flatten(), reduction="sum", label_smoothing=smoothing)
    wanted = gradients(model, whole)
    installed = chunked_loss.install(model, 4, smoothing)
    loss = installed(**inputs, **{TARGETS: targets}).loss
    torch.testing.assert_close(loss, whole, rtol=2e-6, atol=0)
    found = gradients(model, loss)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert (found[name] - gradient).norm() <= 2e-5 * (gradient.norm() + 1e-3), name

    model.eval()
    torch.testing.assert_close(installed(**inputs).logits.flatten(0, 1), logits)  # without targets: as ever
    with torch.no_grad():
        sums = chunked_loss.scored(installed(**inputs, **{TARGETS: targets}).logits, targets)
    plain = cross_entropy(logits, targets.flatten(), reduction="sum")
    assert float(sums["loss"]) == pytest.approx(plain.item(), rel=2e-6)
    right = (logits.argmax(1) == targets.flatten()) & (targets.flatten() >= 0)
    assert (float(sums["right"]), float(sums["targets"])) == (int(right.sum()), int((targets >= 0).sum()))


@pytest.mark.parametrize("family", ["gpt2", "marian"])
def test_bf16_is_not_further_from_float32_than_plain_bf16(family: str) -> None:
    """Both are compared with float32: the loss in chunks is not further from it."""
    model = model_of(family)
    inputs, targets = batch_of(model)
    exact = gradients(model, cross_entropy(model(**inputs).logits.flatten(0, 1), targets.flatten(), reduction="sum"))
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(**inputs).logits.float()
    whole = gradients(model, cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"))
    chunked_loss.install(model, 4)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**inputs, **{TARGETS: targets}).loss
    assert loss.dtype == torch.float32
    head = next(n for n, p in model.named_parameters() if p is model.get_output_embeddings().weight)
    near, far = (float((g[head] - exact[head]).norm()) for g in (gradients(model, loss), whole))
    assert 0 < near < 1.2 * far


class Largest(TorchDispatchMode):
    """The most numbers that a result had."""

    numel = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        for each in found if isinstance(found, tuple | list) else [found]:
            if isinstance(each, Tensor):
                self.numel = max(self.numel, each.numel())
        return found


def test_no_more_logits_than_a_chunk_has() -> None:
    config = AutoConfig.for_model("gpt2", vocab_size=5000, **GPT2)
    model = AutoModelForCausalLM.from_config(config).train()
    weights = 5000 * 32
    ids = torch.arange(3 * 40).view(3, 40)
    chunked_loss.install(model, 8)
    for targets, given, most in ((ids, {TARGETS: ids}, weights), (ids, {}, 120 * 5000)):
        with Largest() as seen:
            outputs = model(input_ids=ids, **given)
            (outputs.loss if given else cross_entropy(outputs.logits.flatten(0, 1), targets.flatten())).backward()
        assert seen.numel == most


def test_ignored_targets_do_not_go_through_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    linear = chunked_loss.linear
    monkeypatch.setattr(chunked_loss, "linear", lambda x, *rest: (rows.append(len(x)), linear(x, *rest))[1])
    model = model_of("llama")
    inputs, targets = batch_of(model)
    chunked_loss.install(model, 10)(**inputs, **{TARGETS: targets})
    assert rows == [10, 10, int((targets >= 0).sum()) - 20]


def test_no_target_at_all_has_the_gradient_zero() -> None:
    model = model_of("gpt2")
    inputs, targets = batch_of(model)
    blank = MicroBatch(0, inputs | {TARGETS: targets}, targets).blank()
    loss = chunked_loss.install(model, 4)(**blank.inputs).loss
    found = gradients(model, loss)
    assert float(loss) == 0
    assert found.keys() == dict(model.named_parameters()).keys()
    assert not any(g.any() for g in found.values())


def test_a_frozen_head_has_no_gradient_and_is_passed() -> None:
    model = model_of("llama")
    inputs, targets = batch_of(model)
    wanted = gradients(model, cross_entropy(model(**inputs).logits.flatten(0, 1), targets.flatten(), reduction="sum"))
    model.lm_head.weight.requires_grad_(False)
    found = gradients(model, chunked_loss.install(model, 4)(**inputs, **{TARGETS: targets}).loss)
    assert found.keys() == wanted.keys() - {"lm_head.weight"}
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-3, atol=1e-4)


def test_an_adapter_around_the_model() -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=2, fan_in_fan_out=True, target_modules=["c_attn"], lora_dropout=0.0)
    model = peft.get_peft_model(model_of("gpt2"), lora).train()
    inputs, targets = batch_of(model)
    wanted = gradients(model, cross_entropy(model(**inputs).logits.flatten(0, 1), targets.flatten(), reduction="sum"))
    found = gradients(model, chunked_loss.install(model, 4)(**inputs, **{TARGETS: targets}).loss)
    assert found.keys() == wanted.keys() != set()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-3, atol=1e-4)
    trained = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"], modules_to_save=["lm_head"])
    with raises("LS3094"):
        chunked_loss.install(peft.get_peft_model(model_of("gpt2"), trained), 4)


def test_a_frozen_head_kept_in_bfloat16_computes_in_float32() -> None:
    model = model_of("llama")
    head = model.lm_head.requires_grad_(False)
    head.weight.data = head.weight.data.bfloat16()
    storage_dtype._widen(head)
    inputs, targets = batch_of(model)
    whole = cross_entropy(model(**inputs).logits.flatten(0, 1), targets.flatten(), reduction="sum")
    wanted = gradients(model, whole)
    chunked_loss.install(model, 4)
    loss = model(**inputs, **{TARGETS: targets}).loss
    torch.testing.assert_close(loss, whole, rtol=2e-6, atol=0)
    for name, gradient in gradients(model, loss).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-3, atol=1e-4)
    with torch.no_grad():
        sums = chunked_loss.scored(model.eval()(**inputs, **{TARGETS: targets}).logits, targets)
    assert float(sums["loss"]) == pytest.approx(whole.item(), rel=2e-6)


def test_a_model_of_bfloat16_weights() -> None:
    model = model_of("marian").bfloat16()
    inputs, targets = batch_of(model)
    whole = cross_entropy(model(**inputs).logits.float().flatten(0, 1), targets.flatten(), reduction="sum")
    loss = chunked_loss.install(model, 4)(**inputs, **{TARGETS: targets}).loss
    loss.backward()
    assert loss.item() == pytest.approx(whole.item(), rel=2e-2)
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.bfloat16}


class Doubled(GPT2LMHeadModel):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        found = super().forward(*args, **kwargs)
        found.logits = 2 * found.logits
        return found


class Added(GPT2LMHeadModel):
    """A trained bias, of zeros so far."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.later = nn.Parameter(torch.zeros(config.vocab_size))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        found = super().forward(*args, **kwargs)
        found.logits = found.logits + self.later
        return found


@pytest.mark.parametrize("kind", [Doubled, Added])
def test_models_that_change_their_logits_are_refused(kind: Any) -> None:
    model = kind(AutoConfig.for_model("gpt2", vocab_size=VOCABULARY, **GPT2))
    with raises("LS3097", "gpt2") as caught:
        chunked_loss.install(model, 4)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("head", "kind"), [(None, "none"), (nn.Bilinear(2, 2, 2), "a torch.nn.modules.linear.Bilinear")]
)
def test_a_head_that_is_no_linear_layer_is_refused(head: Any, kind: str) -> None:
    model = GPT2LMHeadModel(AutoConfig.for_model("gpt2", vocab_size=VOCABULARY, **GPT2))
    model.get_output_embeddings = lambda: head
    with raises("LS3094", kind):
        chunked_loss.install(model, 4)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("task.loss_chunk=8", "strategy.name=fsdp2", "strategy.options.tensor_parallel=2"), ("LS3090",)),
        (("task.loss_chunk=8", "precision=fp16", "launch.device=cuda"), ("LS3091", "fp16")),
    ],
)
def test_refused_before_a_process_starts(overrides: tuple[str, ...], said: tuple[str, ...], tmp_path: Path) -> None:
    with raises(*said) as caught:
        chunked_loss.check(Job.of(make(tmp_path, "prompts", *overrides)))
    assert str(caught.value).startswith("task.loss_chunk: ")
    assert "\n" not in str(caught.value)


# Of the families whose loss is another: a head beside the linear one, a bias after it, a scale of its own.
@pytest.mark.parametrize(
    ("kind", "family", "config", "refused"),
    [
        ("masked", "mobilebert", "{}", True),
        ("masked", "esm", "{vocab_size: 400, position_embedding_type: absolute}", True),
        ("documents", "minicpm3", "{}", True),
        ("masked", "bert", "{}", False),
        ("documents", "gemma2", "{}", False),
        ("translation", "bart", "{}", False),
    ],
)
def test_layers_after_the_head_are_checked_before_a_process_starts(
    kind: str, family: str, config: str, refused: bool, tmp_path: Path
) -> None:
    run = make(tmp_path, kind, "task.loss_chunk=8", f"model.type={family}", f"model.config={config}")
    if refused:
        with raises("LS3097", str(family)):
            chunked_loss.check(Job.of(run))
    else:
        chunked_loss.check(Job.of(run))


@pytest.mark.parametrize("value", ["0", "-1", "all", "liger", "true"])
def test_invalid_chunk_sizes_are_refused(value: str, tmp_path: Path) -> None:
    with raises("LS1002", "task.loss_chunk"):
        make(tmp_path, "prompts", f"task.loss_chunk={value}")


# -- under every strategy ----------------------------------------------------------------------------------------------

CHUNK = "task.loss_chunk=7"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chunked")


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, dict[str, Any]]:
    runs = {"prompts": make(folder, "prompts", "strategy.name=single", CHUNK, "task.temperature=0")}
    runs["translation"] = make(folder, "translation", "strategy.name=single", CHUNK)
    return {kind: run_on(1, trained, run)[0] for kind, run in runs.items()}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "name", "ranks"),
    [
        ("prompts", "ddp", 2),
        ("prompts", "fsdp2", 3),
        ("translation", "allreduce", 3),
        ("translation", "fsdp2", 2),
        ("prompts", "pipeline", 2),
        ("translation", "pipeline", 3),
        ("prompts", "hf_accelerate", 2),
        ("prompts", "hf_trainer", 2),
    ],
)
def test_the_same_bits_under_every_strategy(kind: str, name: str, ranks: int, folder: Path, alone: dict) -> None:
    greedy = ["task.temperature=0"] if kind == "prompts" else []  # as a pipeline writes
    run = make(folder, kind, f"strategy.name={name}", CHUNK, *greedy)
    first = rank_0_of(ranks, trained, run, alike=("loss", "scores"))
    for key in ("digest", "loss", "norm", "scores", "samples"):
        assert first[key] == alone[kind][key], key


@pytest.mark.processes
def test_the_same_bits_in_bf16(folder: Path) -> None:
    """The head's weight, tied to both embeddings, has three uses and more."""
    runs = [make(folder, "translation", f"strategy.name={n}", CHUNK, "precision=bf16") for n in ("single", "fsdp2")]
    single, shards = (run_on(ranks, trained, run)[0] for ranks, run in zip((1, 2), runs, strict=True))
    for key in ("digest", "loss", "norm", "scores"):
        assert shards[key] == single[key], key


@pytest.mark.processes
def test_close_to_all_logits_and_not_the_same_bits(folder: Path, alone: dict) -> None:
    run = make(folder, "translation", "strategy.name=single")
    whole = run_on(1, trained, run)[0]
    assert alone["translation"]["loss"] == pytest.approx(whole["loss"], rel=1e-5)
    assert alone["translation"]["scores"]["loss"] == pytest.approx(whole["scores"]["loss"], rel=1e-4)
    assert alone["translation"]["scores"].keys() == whole["scores"].keys()
    assert alone["translation"]["digest"] != whole["digest"]


@pytest.mark.processes
@pytest.mark.parametrize("name", [long("zero1"), "zero3"])
def test_zero_agrees_to_rounding(name: str, folder: Path, alone: dict) -> None:
    needs("deepspeed")
    run = make(folder, "prompts", f"strategy.name={name}", CHUNK, "task.samples=0")
    found = run_on(2, trained, run)[0]
    assert found["loss"] == pytest.approx(alone["prompts"]["loss"], rel=1e-4)
    assert found["norm"] == pytest.approx(alone["prompts"]["norm"], rel=1e-4)
