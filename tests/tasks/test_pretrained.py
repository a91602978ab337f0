"""Fine-tuning from a local folder: GPT-2 without a padding token, BERT with another head, and what is exported."""

import json
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    MarianConfig,
    MarianMTModel,
    PreTrainedTokenizerFast,
)

from lockstep.config.run import Run, load
from lockstep.data import builtin
from lockstep.data.job import Job
from lockstep.distributed.world import World
from lockstep.strategies.exact.training_state import ALIGNED, make_model
from lockstep.tasks.models import models as models_of
from lockstep.tasks.models.model_configs import ModelChoice
from lockstep.tasks.models.models import build
from lockstep.tasks.translation import Translation
from lockstep.training.data_loader import StepLoader
from support.command import CommandJob
from support.harness import TINY, digest, run_on, tiny
from support.harness import build as built
from support.messages import raises
from support.task_runs import TASKS, make


def saved(folder: Path, kind: str) -> None:
    """A tiny pretrained model and its tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    texts = builtin.emotion(1, train=200, validation=10, test=10)["train"]["text"]
    special = ["<|endoftext|>"] if kind == "gpt2" else ["[PAD]", "[CLS]"]
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=400, special_tokens=special))
    size = tokenizer.get_vocab_size()
    torch.manual_seed(0)
    if kind == "gpt2":
        GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=size, n_positions=64)).save_pretrained(
            folder
        )
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>").save_pretrained(folder)
    else:
        config = BertConfig(
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            vocab_size=size,
            max_position_embeddings=64,
            num_labels=9,
        )
        BertForSequenceClassification(config).save_pretrained(folder)
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", cls_token="[CLS]").save_pretrained(
            folder
        )


class _Words:
    """The little of a tokenizer that building a model asks for."""

    pad_token_id, bos_token_id, eos_token_id, sep_token_id = 0, 1, 1, 1

    def __len__(self) -> int:
        return 50

    def get_vocab(self) -> dict[str, int]:
        return {str(id_): id_ for id_ in range(50)}


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_a_local_folder_is_fine_tuned_and_exported(kind: str, tmp_path: Path, job: CommandJob) -> None:
    saved(tmp_path / "model", kind)
    before = (tmp_path / "model" / "model.safetensors").read_bytes()
    values = {
        "output": "out",
        "data": {"source": "builtin/emotion", "max_length": 48, "limit": 120},
        "model": {"source": "model"},
        "steps": 6,
        "batch_size": 16,
        "micro_batches": 2,
        "optim": {"learning_rate": 1e-2},
        "launch": {"processes": 1, "device": "cpu", "threads": 1},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    job.finish()
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    recorded = next(line for line in lines if line["split"] == "validation")

    export = tmp_path / "out" / "export"
    model = AutoModelForSequenceClassification.from_pretrained(export).eval()
    tokenizer = AutoTokenizer.from_pretrained(export)
    assert list(model.config.id2label.values()) == list(builtin.LABELS)
    assert model.config.pad_token_id == tokenizer.pad_token_id is not None
    rows = builtin.emotion(0, train=12_000)["validation"]
    texts, labels = rows["text"][:120], torch.tensor(rows["label"][:120])
    batch = tokenizer(texts, padding=True, truncation=True, max_length=48, return_tensors="pt")
    with torch.no_grad():
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    assert float((logits.argmax(-1) == labels).double().mean()) == recorded["accuracy"]
    assert float(torch.nn.functional.cross_entropy(logits, labels)) == pytest.approx(recorded["loss"], rel=1e-4)
    assert (export / "model.safetensors").read_bytes() != before


def test_weights_frozen_by_the_family_stay_frozen_with_pretrained_weights(tmp_path: Path) -> None:
    """The computed positions of Marian, which are in no export: `from_pretrained` lets go of them."""
    sizes = {"d_model": 16, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 32}
    sizes |= {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    tokens = {"vocab_size": 50, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    MarianMTModel(MarianConfig(**sizes, **tokens, forced_eos_token_id=None)).save_pretrained(tmp_path)
    theirs = MarianMTModel.from_pretrained(tmp_path)
    assert theirs.model.encoder.embed_positions.weight.requires_grad  # the control
    run = tiny(model={"source": str(tmp_path)})
    frozen = [
        {
            name
            for name, p in build(ModelChoice.of(run), "seq2seq", _Words(), empty).named_parameters()
            if not p.requires_grad
        }
        for empty in (False, True)
    ]
    assert frozen == [{"model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight"}] * 2


def steps_of(world: World, run: Run) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The norms of three steps, and what they made of weights and moments (on rank 0 all of it)."""
    task, strategy = built(run, world)
    feed = StepLoader(task, strategy.own_micro_batches(), world.device)
    norms = [float(strategy.train_step(feed.make(step), 1e-2).grad_norm) for step in range(3)]
    state = {name: tensor.clone() for name, tensor in strategy.state.state_dict().items()}
    strategy.close()
    return norms, state


@pytest.mark.slow
@pytest.mark.processes
def test_a_pretrained_marian_has_the_same_bits_at_two_processes(tmp_path: Path) -> None:
    """And its positions, which are computed, are what they were; ZeRO-3 to rounding."""
    run = make(tmp_path, "translation")
    first = Translation(run).opened(Job.of(run).with_data().data)
    first.model().save_pretrained(tmp_path / "model")
    first.tokenizer.save_pretrained(tmp_path / "model")
    values = {k: v for k, v in TINY.items() if k != "tokenizer"} | TASKS["translation"]
    values |= {"data": {"source": str(tmp_path / "translation"), "max_length": 32}}
    values |= {"model": {"source": str(tmp_path / "model")}, "micro_batches": 2}
    found = {}
    names = ["single", "allreduce", "ddp", "hf_accelerate", "hf_trainer", "fsdp2", "zero3"]
    for name in names if find_spec("deepspeed") else names[:-1]:
        run = load(None, [f"strategy.name={name}"], values)
        found[name] = run_on(1 if name == "single" else 2, steps_of, run)[0]
    norms, state = found.pop("single")
    for place in ("encoder", "decoder"):
        entry = f"model.model.{place}.embed_positions.weight"
        assert torch.equal(state[entry], first.model().state_dict()[entry.removeprefix("model.")])
    for name, (theirs, other) in found.items():
        if name == "zero3":
            assert theirs == pytest.approx(norms, rel=1e-4)
        else:
            assert (theirs, digest(other)) == (norms, digest(state)), name


@pytest.mark.parametrize("head", ["classification", "token_classification", "causal"])
def test_no_head_keeps_a_cache_in_training(head: str) -> None:
    assert build(ModelChoice.of(tiny()), head, _Words()).config.use_cache is False


class _Mapped:
    """A task whose weight begins in the middle of a file that is mapped into memory, as pretrained ones do."""

    def __init__(self) -> None:
        self.run = tiny()

    def model(self, empty: bool = False) -> torch.nn.Module:
        layer = torch.nn.Linear(8, 3)
        layer.weight.data = torch.empty(31)[7:].view(3, 8).copy_(layer.weight.data)
        return layer


def test_weights_begin_where_torch_puts_them() -> None:
    """A product with one row has other last bits elsewhere, so that they would depend on whether an engine copies."""
    task: Any = _Mapped()
    assert task.model().weight.data_ptr() % ALIGNED
    torch.manual_seed(0)
    before = task.model().weight.detach()
    torch.manual_seed(0)
    model = make_model(task)
    assert all(tensor.data_ptr() % ALIGNED == 0 for tensor in model.parameters())
    assert torch.equal(model.weight, before)


def test_a_padding_token_without_an_embedding_is_refused() -> None:
    """Without the refusal, torch raised an error in the first step."""
    tokenizer = SimpleNamespace(pad_token="[PAD]", pad_token_id=100)
    with raises("LS3145", "'[PAD]'", "100"):
        models_of._prepare(GPT2Config(vocab_size=100), tokenizer, pretrained=True)
    models_of._prepare(GPT2Config(vocab_size=101), tokenizer, pretrained=True)


def test_a_folder_that_holds_a_model_twice_is_refused(tmp_path: Path) -> None:
    """Shards saved over a single file: from_pretrained reads the old weights."""
    saved(tmp_path, "gpt2")
    run = tiny(model={"source": str(tmp_path)})
    models_of.local_or_id(run.model)
    model = GPT2LMHeadModel.from_pretrained(tmp_path)
    model.save_pretrained(tmp_path, max_shard_size="8KB")
    with raises("LS3480", str(tmp_path), "model.source", "model.safetensors", "files of model.safetensors.index.json"):
        models_of.local_or_id(run.model)
    with raises("LS3480", str(tmp_path), "the export"):
        models_of.exported_model("causal", tmp_path, tiny().model)
    for shard in tmp_path.glob("model-0*"):
        shard.unlink()
    models_of.local_or_id(run.model)  # an index alone names nothing that is there, and the single file is read
