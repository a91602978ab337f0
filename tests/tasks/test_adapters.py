"""Adapters: only their weights move, with the same bits on any number of processes; merged or alone when exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.cli import main
from lockstep.config.run import Run, RunError
from lockstep.data.job import Job
from lockstep.distributed.world import World
from lockstep.tasks.models import adapters
from lockstep.tasks.task import make_task
from lockstep.training.data_loader import StepLoader
from support.harness import build, digest, run_on
from support.marks import long
from support.messages import raises
from support.predictions import numbers
from support.task_runs import make

pytest.importorskip("peft")
KINDS = ["documents", "translation", "token_classification"]


def pretrained(folder: Path, kind: str) -> Path:
    """A model and its tokenizer, to train an adapter on."""
    run = make(folder, kind)
    task = make_task(Job.of(run).with_data())
    model = task.model()
    model.save_pretrained(folder / f"{kind}-model")
    task.tokenizer.save_pretrained(folder / f"{kind}-model")
    return folder / f"{kind}-model"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for kind in KINDS:
        pretrained(folder, kind)
    return folder


TARGETS = {"documents": ["c_attn"], "translation": ["q_proj", "v_proj"], "token_classification": ["query", "value"]}


def run_of(folder: Path, kind: str, *overrides: str) -> Run:
    adapter = {"type": "lora", "r": 4, "lora_dropout": 0.1, "target_modules": TARGETS[kind]}
    model = {"source": str(folder / f"{kind}-model"), "adapter": adapter}
    return make(folder, kind, f"model={json.dumps(model)}", "tokenizer={}", *overrides)


def trained(world: World, run: Run) -> dict[str, Any]:
    task, strategy = build(run, world)
    before = {k: v.clone() for k, v in strategy.state.state_dict().items() if k.startswith("model.")}
    feed = StepLoader(task, strategy.own_micro_batches(), world.device)
    results = [strategy.train_step(feed.make(t), 1e-2) for t in range(3)]
    state = strategy.state.state_dict()
    moved = [k for k in before if world.is_main and not torch.equal(before[k], state[k])]
    found = {"loss": [float(r.loss) for r in results], "norm": [float(r.grad_norm) for r in results], "moved": moved}
    strategy.close()
    return found | {
        "digest": digest(state) if world.is_main else None,
        "moments": [k for k in state if "exp_avg." in k],
    }


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, dict[str, Any]]:
    found = {}
    for kind in KINDS:
        run = run_of(folder, kind, "strategy.name=single")
        found[kind] = run_on(1, trained, run)[0]
    return found


@pytest.mark.processes
@pytest.mark.parametrize("kind", KINDS)
def test_only_the_adapter_moves(kind: str, alone: dict) -> None:
    moved = [key for key in alone[kind]["moved"] if "lora_" not in key]
    assert alone[kind]["moved"]
    assert all("modules_to_save" in key for key in moved)  # the new head of a classifier
    assert bool(moved) == (kind == "token_classification")
    moments = alone[kind]["moments"]
    assert moments
    assert all("lora_" in key or "modules_to_save" in key for key in moments)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "ranks", "kind"),
    [
        ("allreduce", 2, "translation"),
        ("ddp", 2, "token_classification"),
        ("ddp", 3, "documents"),
        *(long("ddp", 3, kind) for kind in KINDS[1:]),
        *(("fsdp2", 2, kind) for kind in KINDS),
        ("hf_accelerate", 2, "documents"),
    ],
)
def test_the_same_bits_under_every_strategy(kind: str, name: str, ranks: int, folder: Path, alone: dict) -> None:
    if name == "hf_accelerate":
        pytest.importorskip("accelerate")
    run = run_of(folder, kind, f"strategy.name={name}")
    first = run_on(ranks, trained, run)[0]
    assert {k: first[k] for k in ("loss", "norm", "digest")} == {k: alone[kind][k] for k in ("loss", "norm", "digest")}


@pytest.mark.processes
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("export", ["merged", "adapter"])
def test_adapter_exports(
    kind: str, export: str, folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = run_of(
        folder,
        kind,
        "launch.processes=1",
        "strategy.name=single",
        f"model.adapter.export={export}",
        f"output={tmp_path / 'out'}",
        "task.samples=0" if kind != "token_classification" else "track.every=1",
    )
    (tmp_path / "run.yaml").write_text(run.dump())
    assert main(["train", str(tmp_path / "run.yaml")]) == 0
    folder_of = tmp_path / "out" / "export"
    assert (folder_of / "adapter_config.json").is_file() == (export == "adapter")
    assert (folder_of / "model.safetensors").is_file() == (export == "merged")
    last = json.loads((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()[-1])
    capfd.readouterr()
    assert main(["evaluate", str(tmp_path / "out")]) == 0
    assert numbers(capfd.readouterr().out)["loss"][0] == pytest.approx(last["loss"], rel=1e-4)
    assert main(["predict", str(tmp_path / "out"), "the dog runs"]) == 0
    if export == "adapter":  # as peft's own users load it
        import transformers
        from peft import PeftModel

        auto = {"documents": "CausalLM", "translation": "Seq2SeqLM", "token_classification": "TokenClassification"}[
            kind
        ]
        base = getattr(transformers, f"AutoModelFor{auto}").from_pretrained(folder / f"{kind}-model")
        assert PeftModel.from_pretrained(base, folder_of)


BAD = {
    "no such kind": (["model.adapter.type=lorra"], ["model.adapter.type", "'lorra'", "lora"]),
    "no such option": (["model.adapter.rr=4"], ["model.adapter", "'rr'", "did you mean 'r'"]),
    "no such export": (["model.adapter.export=zip"], ["model.adapter.export", "merged, adapter"]),
    "from scratch": (["model={type: gpt2, adapter: {r: 4}}", "tokenizer={train: bpe}"], ["set model.source"]),
    "tokens in bfloat16": (["model.adapter.trainable_token_indices=[1, 2]"], ["model.dtype=float32"]),
    "no such token": (
        ["model.adapter.trainable_token_indices=[1, 99999]", "model.dtype=float32"],
        ["model.adapter.trainable_token_indices: 99999", "has rows 0 to "],
    ),
    "no such modules": (["model.adapter.target_modules=[nowhere]"], ["model.adapter", "nowhere"]),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_adapters_are_refused_with_one_message(case: str, folder: Path) -> None:
    overrides, wanted = BAD[case]
    run = run_of(folder, "documents", *overrides)
    with pytest.raises(RunError) as caught:
        Job.of(run).with_data()
    for part in wanted:
        assert part in str(caught.value)


def test_missing_peft_is_named_with_its_install_command(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep.tasks.models import adapters

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with raises("LS3070"):
        adapters.check(run_of(folder, "documents").model)


@pytest.mark.parametrize("ensure", [False, True])
@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_an_adapter_of_a_tied_weight_is_merged_once(target: str, ensure: bool) -> None:
    """merge_and_unload alone merges into the weight that both share (tests/assumptions/test_peft.py)."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    from lockstep.tasks.models import storage_dtype

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    base = LlamaForCausalLM(LlamaConfig(vocab_size=32, num_key_value_heads=2, tie_word_embeddings=True, **sizes))
    lora = LoraConfig(r=2, target_modules=[target], init_lora_weights=False, ensure_weight_tying=ensure)
    model: Any = get_peft_model(base, lora).eval()
    ids = torch.arange(8)[None]
    before = model(ids).logits
    assert torch.allclose(before, storage_dtype.merged(model, low=False)(ids).logits, rtol=1e-4, atol=1e-4)


def test_a_tied_head_that_peft_would_not_load_is_refused_before_training(folder: Path) -> None:
    """A merged export is accepted, and so is an embedding that peft knows (tests/assumptions/test_peft.py)."""
    from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

    from lockstep.tasks.models import adapters

    gpt2 = GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    llama = LlamaConfig(vocab_size=32, tie_word_embeddings=True, **sizes)
    adapter = "model.adapter={type: lora, r: 2, target_modules: [lm_head], ensure_weight_tying: true}"
    run = run_of(folder, "documents", adapter, "model.adapter.export=adapter")
    with raises("LS3413"):
        adapters.wrap(run.model, AutoModelForCausalLM.from_config(gpt2), "causal")
    adapters.wrap(run.model, AutoModelForCausalLM.from_config(llama), "causal")
    adapters.wrap(run_of(folder, "documents", adapter).model, AutoModelForCausalLM.from_config(gpt2), "causal")


class Attends(torch.nn.Module):
    """An attention of torch, which reads `out_proj.weight` without calling `out_proj`."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.last = torch.nn.MultiheadAttention(8, 2, batch_first=True), torch.nn.Linear(8, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.attention(inputs, inputs, inputs, need_weights=False)[0])


@pytest.mark.parametrize(
    ("targets", "refused"),
    [
        *[("[out_proj, last]", True), ("all-linear", False), ("[last]", False), ("[attention]", False)],
        *[("all-linear, exclude_modules: [last]", None), ("all-linear, exclude_modules: '.*last'", None)],
    ],
)
def test_an_adapter_that_is_never_computed_is_refused(targets: str, refused: bool | None, folder: Path) -> None:
    """peft accepts them all; all-linear leaves such a layer out, so that nothing is left of it without the other layer
    (None). With the others each weight of the adapter gets a gradient."""
    section = run_of(folder, "documents", f"model.adapter={{type: lora, r: 2, target_modules: {targets}}}").model
    if refused is None:
        with raises("LS3076", "target_modules"):
            adapters.wrap(section, Attends(), "image_classification")
        return
    if refused:
        with raises("LS3414", "model.adapter", "attention.out_proj"):
            adapters.wrap(section, Attends(), "image_classification")
        return
    model = adapters.wrap(section, Attends(), "image_classification")
    model(torch.randn(2, 3, 8)).sum().backward()
    assert [name for name, weight in model.named_parameters() if weight.requires_grad and weight.grad is None] == []


def test_all_linear_leaves_the_head_whole(folder: Path) -> None:
    """peft would put an adapter on a head that is drawn at random and stays frozen."""
    run = run_of(
        folder, "token_classification", 'model.adapter={"type": "lora", "r": 4, "target_modules": "all-linear"}'
    )
    model = make_task(Job.of(run).with_data()).model()
    moving = [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert [name for name in moving if "classifier" in name and "lora" in name] == []
    assert any("classifier.modules_to_save" in name for name in moving)
    assert any("lora_A" in name for name in moving)


@pytest.mark.parametrize(
    ("family", "kind", "head", "saved"),
    [
        ("Bert", "QuestionAnswering", "question_answering", ["qa_outputs"]),
        ("Roberta", "SequenceClassification", "classification", ["classifier"]),
        ("DistilBert", "SequenceClassification", "classification", ["pre_classifier", "classifier"]),
    ],
)
def test_all_linear_leaves_heads_of_all_kinds_whole(
    family: str, kind: str, head: str, saved: list[str], folder: Path
) -> None:
    """peft matches the ends of names, so it also trains pre_classifier whole."""
    import transformers

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = getattr(transformers, f"{family}For{kind}")(
        getattr(transformers, f"{family}Config")(vocab_size=30, **sizes)
    )
    run = run_of(
        folder, "token_classification", 'model.adapter={"type": "lora", "r": 4, "target_modules": "all-linear"}'
    )
    moving = [name for name, weight in adapters.wrap(run.model, model, head).named_parameters() if weight.requires_grad]
    whole = [name for name in moving if "modules_to_save" in name]
    assert {name.split(".modules_to_save")[0].rsplit(".", 1)[-1] for name in whole} == set(saved)
    assert [name for name in whole if "lora" in name] == []
    assert any("lora_A" in name for name in moving)
