"""Accelerate and Trainer as engines: compared with direct use of the libraries, and in Accelerate's other modes."""

import tempfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.config.run import Run
from lockstep.config.schedules import learning_rate
from lockstep.data.job import Job
from lockstep.data.job import strategy_class as class_of
from lockstep.distributed.world import World
from lockstep.strategies.engines import layers
from lockstep.strategies.exact import stepper
from lockstep.training.data_loader import StepLoader
from support.harness import build, build_with_feed, digest, run_on, tiny
from support.marks import long
from support.messages import raises

# Trainer draws dropout from one stream for a whole run, so the comparison turns dropout off.
CALM = ("model.config.resid_pdrop=0", "model.config.embd_pdrop=0", "model.config.attn_pdrop=0")
CONSTANT = ("optim.schedule=constant", "optim.warmup_steps=0", "steps=4", "batch_size=20")  # five full steps per epoch


def by_lockstep(world: World, run: Run) -> dict[str, torch.Tensor]:
    _, strategy, feed = build_with_feed(run, world)
    for step in range(4):
        strategy.train_step(feed.make(step), learning_rate(run.optim, step, feed.total))
    weights = {k: v.clone() for k, v in (strategy.state.export() or {}).items()}
    strategy.close()
    return weights


def by_trainer(world: World, run: Run, folder: str) -> dict[str, torch.Tensor]:
    """Run `Trainer.train()` with its own loop, sampler, clipping and optimizer on the same micro-batches."""
    from transformers import Trainer, TrainingArguments

    task = build(tiny("strategy.name=single", *CALM, *CONSTANT), world)[0]
    feed = StepLoader(task, range(run.micro_batches), world.device)
    micro_batches = [micro for step in range(4) for micro in feed.make(step).micro_batches]
    model = task.model()

    class Pieces(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return len(micro_batches)

        def __getitem__(self, place: int) -> dict[str, Any]:
            return {**micro_batches[place].inputs, "labels": micro_batches[place].targets}

    class InOrder(Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    with world.variables_for_engines():
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            max_steps=4,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=run.micro_batches,
            learning_rate=run.optim.learning_rate,
            lr_scheduler_type="constant",
            weight_decay=run.optim.weight_decay,
            max_grad_norm=run.optim.max_grad_norm or 0.0,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            remove_unused_columns=False,
        )
        trainer = InOrder(
            model,
            arguments,
            train_dataset=Pieces(),
            data_collator=lambda items: items[0],
            compute_loss_func=lambda outputs, labels, num_items_in_batch: (
                task.loss_sum(outputs, labels) / num_items_in_batch
            ),
            optimizers=(stepper.build(run.optim, model), None),
        )
    trainer.train()
    return {k: v.detach().clone() for k, v in model.state_dict().items()}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("clip", "apart"),
    [("null", 0.0), long("0.5", 1e-5)],  # Trainer computes the norm in float32, and AdamW amplifies the difference
)
def test_hf_trainer_has_the_results_of_trainer(clip: str, apart: float, tmp_path: Path) -> None:
    run = tiny("strategy.name=hf_trainer", "strategy.exact=false", f"optim.max_grad_norm={clip}", *CALM, *CONSTANT)
    ours = run_on(1, by_lockstep, run)[0]
    theirs = run_on(1, by_trainer, run, str(tmp_path))[0]
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        assert (ours[name] - weight).abs().max() <= apart, name
    other = run.model_copy(update={"seed": 1})  # control: another order of the examples
    assert any((a - theirs[k]).abs().max() > 1e-4 for k, a in run_on(1, by_lockstep, other)[0].items())


def in_temporary(world: World, run: Run, folder: str) -> list[str]:
    tempfile.tempdir = folder
    build(run, world)
    return [path.name for path in Path(folder).iterdir()]


@pytest.mark.processes
def test_a_killed_rank_leaves_no_trainer_folder(tmp_path: Path) -> None:
    run = tiny("strategy.name=hf_trainer")
    assert run_on(1, in_temporary, run, str(tmp_path)) == [[]]


@cache
def alone(*overrides: str) -> dict[str, torch.Tensor]:
    """Return the weights of one process."""
    run = tiny("strategy.name=single", *overrides, *CONSTANT)
    return run_on(1, by_lockstep, run)[0]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("hf_accelerate", "static_graph=true"),
        ("hf_accelerate", "bucket_cap_mb=1"),
        long("hf_trainer", "ddp_bucket_cap_mb=1"),
        ("hf_trainer", "ddp_static_graph=true"),
    ],
)
def test_options_pass_through(name: str, option: str) -> None:
    run = tiny(f"strategy.name={name}", f"strategy.options.{option}", *CONSTANT)
    assert digest(run_on(2, by_lockstep, run)[0]) == digest(alone())


@pytest.mark.processes
@pytest.mark.parametrize(
    "options", [{}, long({"reshard_after_forward": False}), {"transformer_cls_names_to_wrap": ["GPT2MLP"]}]
)
def test_fsdp2_through_accelerate_keeps_the_bits(options: dict) -> None:
    run = tiny(*CONSTANT, strategy={"name": "hf_accelerate", "options": {"fsdp": options}})
    assert digest(run_on(2, by_lockstep, run)[0]) == digest(alone())


@pytest.mark.processes
def test_fsdp2_through_accelerate_keeps_the_bits_in_bf16() -> None:
    """Control: Accelerate's own bf16, which gathers bf16 weights, gives different bits."""
    own, exact = (
        tiny("precision=bf16", *CONSTANT, strategy={"name": "hf_accelerate", "options": {"fsdp": {}}, "exact": each})
        for each in (False, True)
    )
    single = digest(alone("precision=bf16"))
    assert digest(run_on(2, by_lockstep, exact)[0]) == single
    assert digest(run_on(2, by_lockstep, own)[0]) != single


@pytest.mark.processes
def test_fsdp2_through_accelerate_takes_models_whose_embeddings_are_a_block() -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    bert = {"model": {"type": "bert", "config": sizes}, "tokenizer": {"train": "wordpiece", "vocab_size": 400}}
    run = tiny(*CONSTANT, strategy={"name": "hf_accelerate", "options": {"fsdp": {}}}, **bert)
    single = tiny("strategy.name=single", *CONSTANT, **bert)
    assert digest(run_on(2, by_lockstep, run)[0]) == digest(run_on(1, by_lockstep, single)[0])


@pytest.mark.processes
@pytest.mark.parametrize(("stage", "ranks"), [long(1, 1), long(1, 2), long(2, 1), (2, 2), (3, 1), (3, 2)])
def test_zero_through_accelerate_shards_as_zero(stage: int, ranks: int) -> None:
    sgd = ("optim.name=sgd", "optim.learning_rate=0.1", *CONSTANT)
    run = tiny(*sgd, strategy={"name": "hf_accelerate", "options": {"deepspeed": {"zero_stage": stage}}})
    ours = run_on(ranks, by_lockstep, run)[0]
    for name, weight in alone("optim.name=sgd", "optim.learning_rate=0.1").items():
        assert (ours[name] - weight).abs().max() <= 1e-6, name


@pytest.mark.parametrize(("family", "shared"), [("bart", True), ("marian", True), ("t5", True), ("gpt2", False)])
def test_shared_embeddings_are_refused_under_accelerates_fsdp2(family: str, shared: bool) -> None:
    """Accelerate's FSDP2 fails with a traceback when it shards such embeddings."""
    task = {"name": "language_modeling"} if family == "gpt2" else {"name": "translation", "source": "a", "target": "b"}
    sizes = {} if family in ("gpt2", "t5") else {"encoder_layers": 1, "decoder_layers": 1}
    values = {"task": task, "data": {"source": "rows.jsonl"}, "model": {"type": family, "config": sizes}}
    assert bool(layers.sharing_embeddings(Job.of(Run.model_validate(values)))) == shared


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "option", "code", "value"),
    [
        ("hf_accelerate", "bucket=1", "LS4200", "bucket"),
        ("hf_trainer", "learning_rate=1", "LS4210", "strategy.options.learning_rate: is set by other keys"),
        (
            "hf_trainer",
            "lerning_rate=1",
            "LS4210",
            "strategy.options.lerning_rate: is not a field of TrainingArguments",
        ),
        ("hf_accelerate", "fsdp={version: 1}", "LS4031", "strategy.options.fsdp: "),
        ("hf_accelerate", "fsdp=1", "LS4020", "strategy.options.fsdp: invalid value 1"),
        ("hf_accelerate", "deepspeed={zero_stage: 4}", "LS4034", "strategy.options.deepspeed.zero_stage: "),
        (
            "hf_accelerate",
            "deepspeed={zero_stage: 2, optimizer: {type: Lamb}}",
            "LS4131",
            "options.deepspeed.optimizer: ",
        ),
    ],
)
def test_unknown_options_are_refused(name: str, option: str, code: str, value: str) -> None:
    run = tiny(f"strategy.name={name}", f"strategy.options.{option}")
    with raises(code, value):
        class_of(run).check(Job.of(run, 2))


def test_an_engine_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "accelerate" else find_spec(name))
    run = tiny("strategy.name=hf_trainer")
    with raises("LS1120", "accelerate", "pip install 'lockstep-train[accelerate]'"):
        class_of(run).check(Job.of(run, 2))
