"""Assumptions about accelerate, TRL and Liger: signatures, private names, one process."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import nn

from support.assumed import rests_on_it


def accelerator(**options: object) -> object:
    accelerate = pytest.importorskip("accelerate")
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    return accelerate.Accelerator(cpu=True, **options)


@rests_on_it("src/lockstep/strategies/hf_accelerate.py", "src/lockstep/lab/import_config/loops.py")
def test_accelerate_divides_by_accumulation_steps() -> None:
    """Accelerator.backward divides the loss by gradient_accumulation_steps."""
    for steps in (1, 4):
        engine = accelerator(gradient_accumulation_steps=steps)
        layer = nn.Linear(1, 1, bias=False)
        model = engine.prepare(layer)  # type: ignore[attr-defined]
        engine.backward(model(torch.ones(1, 1)).sum())  # type: ignore[attr-defined]
        assert layer.weight.grad is not None
        assert layer.weight.grad.item() == 1 / steps


@rests_on_it("src/lockstep/strategies/engines/accelerated.py")
def test_accelerate_marks_what_it_prepared() -> None:
    """prepare sets `_is_accelerate_prepared`, and with mixed precision stores the model's own forward as
    `_original_forward`; both are in the module's __dict__."""
    layer = nn.Linear(1, 1)
    accelerator(mixed_precision="bf16").prepare(layer)  # type: ignore[attr-defined]
    assert "_is_accelerate_prepared" in vars(layer)
    assert "_original_forward" in vars(layer)


@rests_on_it("src/lockstep/strategies/engines/accelerated.py")
def test_accelerate_returns_float32_under_bf16() -> None:
    """A model prepared with mixed precision bf16 computes under autocast and returns float32."""
    seen = []

    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(torch.is_autocast_enabled("cpu"))
            y = self.layer(x)
            seen.append(y.dtype)
            return y

    output = accelerator(mixed_precision="bf16").prepare(Looks())(torch.ones(1, 2))  # type: ignore[attr-defined]
    assert seen == [True, torch.bfloat16]
    assert output.dtype == torch.float32


@rests_on_it("src/lockstep/strategies/hf_accelerate.py")
def test_an_optimizer_steps_when_gradients_are_synced() -> None:
    """A prepared optimizer ignores step() and zero_grad() during accumulation, until the last micro-batch."""
    engine = accelerator(gradient_accumulation_steps=2)
    layer = nn.Linear(1, 1, bias=False)
    model, optimizer = engine.prepare(layer, torch.optim.SGD(layer.parameters(), lr=1.0))  # type: ignore[attr-defined]
    before, moved = layer.weight.item(), []
    for _ in range(2):
        with engine.accumulate(model):  # type: ignore[attr-defined]
            engine.backward(model(torch.ones(1, 1)).sum())  # type: ignore[attr-defined]
            optimizer.step()
            optimizer.zero_grad()
        moved.append(round(before - layer.weight.item(), 5))
    assert moved == [0.0, 1.0]


@rests_on_it("src/lockstep/strategies/hf_accelerate.py")
def test_fields_of_the_ddp_options() -> None:
    """DistributedDataParallelKwargs has the fields that lockstep passes on or removes."""
    from dataclasses import fields

    accelerate = pytest.importorskip("accelerate")
    known = {field.name for field in fields(accelerate.DistributedDataParallelKwargs)}
    assert {"broadcast_buffers", "gradient_as_bucket_view", "find_unused_parameters", "bucket_cap_mb"} <= known
    assert {"static_graph", "dim", "comm_hook", "comm_wrapper", "comm_state_option"} <= known


@rests_on_it("packages/lockstep-trace/src/lockstep_trace/tracer/hooks.py")
def test_accelerate_shards_batches_in_turns() -> None:
    """BatchSamplerShard gives process r every n-th batch, and completes the last round with the first rows."""
    pytest.importorskip("accelerate")
    from accelerate.data_loader import BatchSamplerShard
    from torch.utils.data import BatchSampler

    shards = [list(BatchSamplerShard(BatchSampler(range(10), 4, False), 2, rank)) for rank in range(2)]
    assert shards == [[[0, 1, 2, 3], [8, 9, 0, 1]], [[4, 5, 6, 7], [2, 3, 4, 5]]]


@rests_on_it("packages/lockstep-trace/src/lockstep_trace/tracer/hooks.py")
def test_attributes_of_skipped_batches() -> None:
    """skip_first_batches returns a DataLoader whose batch_sampler has skip_batches (a number) and batch_sampler (the
    original one); for an iterable data set, the loader itself has skip_batches. A prepared loader has skip_batches 0
    and the original batch_sampler."""
    pytest.importorskip("accelerate")
    from accelerate.data_loader import prepare_data_loader, skip_first_batches
    from torch.utils.data import DataLoader, IterableDataset

    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(6))

    loader: Any = DataLoader(list(range(10)), batch_size=2)  # type: ignore[arg-type]
    later: Any = skip_first_batches(loader, 2)
    assert getattr(later, "skip_batches", 0) == 0
    assert later.batch_sampler.skip_batches == 2
    assert later.batch_sampler.batch_sampler is loader.batch_sampler
    assert [batch.tolist() for batch in later] == [[4, 5], [6, 7], [8, 9]]
    assert skip_first_batches(DataLoader(Stream(), batch_size=2), 1).skip_batches == 1
    prepared = prepare_data_loader(loader, num_processes=1, process_index=0, put_on_device=False)
    assert (prepared.skip_batches, prepared.batch_sampler is loader.batch_sampler) == (0, True)


@pytest.mark.long  # importing Lightning takes many seconds
@rests_on_it("packages/lockstep-trace/src/lockstep_trace/tracer/engines.py")
def test_callbacks_of_lightning_select_by_a_score() -> None:
    """ModelCheckpoint.check_monitor_top_k(trainer, current) and EarlyStopping._evaluate_stopping_criteria(current)
    receive the score. Both callbacks have `mode` and `monitor`, which is None for a ModelCheckpoint without a metric.
    """
    pytest.importorskip("lightning", reason="needs lightning")
    from lightning.pytorch.callbacks.early_stopping import EarlyStopping
    from lightning.pytorch.callbacks.model_checkpoint import ModelCheckpoint

    best, early = ModelCheckpoint(monitor="val_loss"), EarlyStopping("val_acc", mode="max")
    assert [(each.monitor, each.mode) for each in (best, early)] == [("val_loss", "min"), ("val_acc", "max")]
    assert ModelCheckpoint().monitor is None
    assert [*inspect.signature(best.check_monitor_top_k).parameters] == ["trainer", "current"]
    assert early._evaluate_stopping_criteria(torch.tensor(1.0))[0] is False


@rests_on_it("src/lockstep/lab/import_config/loops.py", "packages/lockstep-trace/src/lockstep_trace/rules/data.py")
def test_accelerate_drops_short_batches() -> None:
    """BatchSamplerShard drops a batch that is smaller than its sampler's batch_size unless it is the last one.
    lockstep's batches never pass through it."""
    pytest.importorskip("accelerate")
    from accelerate.data_loader import BatchSamplerShard
    from torch.utils.data import BatchSampler

    class Budget(BatchSampler):
        def __init__(self) -> None:
            self.sampler, self.batch_size, self.drop_last = range(7), 4, False

        def __iter__(self):  # type: ignore[no-untyped-def]
            yield from ([0, 1], [2], [3, 4, 5, 6], [])

        def __len__(self) -> int:
            return 4

    rows = [
        row for rank in range(2) for batch in BatchSamplerShard(Budget(), 2, rank, even_batches=False) for row in batch
    ]
    assert 0 not in rows


@pytest.mark.extras
@rests_on_it("src/lockstep/config/foreign_keys/trl.yaml", "src/lockstep/lab/import_config/trainer.py")
def test_trl_trains_in_bfloat16_by_default() -> None:
    """SFTConfig and DPOConfig enable bf16 by default, unlike transformers' TrainingArguments."""
    trl = pytest.importorskip("trl")
    from transformers import TrainingArguments

    assert "bf16" in inspect.signature(TrainingArguments).parameters
    for kind in (trl.SFTConfig, trl.DPOConfig):
        made = kind(output_dir="unused", use_cpu=True, report_to=[], bf16=None)
        assert made.bf16 is True


@pytest.mark.extras
@rests_on_it("src/lockstep/config/foreign_keys/trl.yaml", "src/lockstep/lab/import_config/trainer.py")
def test_defaults_of_trl() -> None:
    """TRL's configs have the defaults that lockstep assumes for fields missing in a file; no other default differs from
    TrainingArguments."""
    trl = pytest.importorskip("trl")
    from dataclasses import fields

    from transformers import TrainingArguments
    from trl.experimental.cpo import CPOConfig

    def usual(kind: type) -> dict[str, object]:
        return {field.name: field.default for field in fields(kind)}  # type: ignore[arg-type]

    rates = {trl.SFTConfig: 2e-5, trl.DPOConfig: 1e-6, CPOConfig: 1e-6, trl.RewardConfig: 1e-4}
    for kind, rate in rates.items():
        own, base = usual(kind), usual(TrainingArguments)
        assert own["learning_rate"] == rate
        assert own["max_length"] == 1024
        differing = {name for name in own.keys() & base.keys() if own[name] != base[name]}
        assert differing <= {"learning_rate", "bf16", "gradient_checkpointing", "logging_steps", "include_for_metrics"}
        assert own["gradient_checkpointing"] is True
    texts, pairs, simpo, reward = (usual(kind) for kind in rates)
    assert (texts["packing"], texts["packing_strategy"], texts["loss_type"]) == (False, "bfd", "nll")
    assert (texts["assistant_only_loss"], texts["completion_only_loss"]) == (False, None)
    assert (pairs["beta"], pairs["label_smoothing"]) == (0.1, 0.0)
    assert trl.DPOConfig(output_dir="", use_cpu=True, bf16=False, report_to=[]).loss_type == ["sigmoid"]
    assert (simpo["beta"], simpo["simpo_gamma"], simpo["cpo_alpha"], simpo["loss_type"]) == (0.1, 0.5, 1.0, "sigmoid")
    assert reward["center_rewards_coefficient"] is None
    model = usual(trl.ModelConfig)
    assert [model[name] for name in ("lora_r", "lora_alpha", "lora_dropout", "dtype")] == [16, 32, 0.05, "float32"]
    assert [model[name] for name in ("use_peft", "load_in_4bit", "bnb_4bit_quant_type")] == [False, False, "nf4"]


@pytest.mark.extras
@rests_on_it("src/lockstep/config/foreign_keys/trl.yaml", "src/lockstep/lab/import_config/trainer.py")
def test_packing_in_trl() -> None:
    """TRL's packing strategy bfd fills rows with whole texts and drops the part of a text beyond max_length; bfd_split
    keeps that part. Both return the texts' lengths. wrapped cuts one concatenated stream into rows and returns no
    lengths. From rows with lengths, the collator builds position_ids that restart at each text, no attention mask, and
    no label for the first token of a text."""
    trl = pytest.importorskip("trl")
    from datasets import Dataset
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    rows = Dataset.from_dict({"input_ids": [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10, 11]]})
    packed = {kind: trl.pack_dataset(rows, 4, strategy=kind) for kind in ("bfd", "bfd_split", "wrapped")}
    tokens = {kind: sorted(token for ids in rows["input_ids"] for token in ids) for kind, rows in packed.items()}
    assert tokens["bfd"] == [*range(1, 11)]
    assert tokens["bfd_split"] == tokens["wrapped"] == [*range(1, 12)]
    for kind in ("bfd", "bfd_split"):
        assert [sum(each) for each in packed[kind]["seq_lengths"]] == [len(ids) for ids in packed[kind]["input_ids"]]
    assert packed["wrapped"]["input_ids"][:2] == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert "seq_lengths" not in packed["wrapped"].column_names
    batch = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)(
        [{"input_ids": [1, 2, 3, 4], "seq_lengths": [3, 1]}]
    )
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0]]
    assert "attention_mask" not in batch
    assert batch["labels"].tolist() == [[-100, 2, 3, -100]]


LIGER = """
import json, torch
from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy as fused
found = []
for dtype in (torch.float32, torch.bfloat16):
    for with_bias, smoothing in ((False, 0.0), (True, 0.1)):
        torch.manual_seed(0)
        states, weight, bias = (torch.randn(*size).to(dtype).requires_grad_() for size in ((7, 16), (33, 16), (33,)))
        targets = torch.tensor([1, 2, -100, 4, 32, -100, 0])
        leaves = [states, weight, bias] if with_bias else [states, weight]
        options = {"label_smoothing": smoothing, "reduction": "sum", "softcap": None, "accum_dtype": torch.float32}
        loss = fused(states, weight, targets, bias if with_bias else None, **options)
        loss.backward()
        logits = torch.nn.functional.linear(states.float(), weight.float(), bias.float() if with_bias else None)
        exact = torch.nn.functional.cross_entropy(logits, targets, label_smoothing=smoothing, reduction="sum")
        grads = torch.autograd.grad(exact, leaves)
        off = [float((a.grad.float() - b.float()).abs().max() / b.float().abs().max()) for a, b in zip(leaves, grads)]
        found.append([float(abs(loss - exact) / exact), max(off), dtype == torch.bfloat16])
print(json.dumps(found))
"""


@pytest.mark.extras
@pytest.mark.processes
@rests_on_it("src/lockstep/tasks/models/chunked_loss.py")
def test_liger_sums_the_losses_of_a_head() -> None:
    """liger_fused_linear_cross_entropy returns the cross entropy summed over targets other than -100, with correct
    gradients, also with bias and label smoothing. Tested in Triton's interpreter on a CPU, which does not support
    softcap."""
    pytest.importorskip("liger_kernel", reason="needs the extra liger")
    pytest.importorskip("triton", reason="needs Triton")
    words = [sys.executable, "-c", LIGER]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=250)
    assert done.returncode == 0, done.stderr[-2000:]
    for loss, gradient, low in json.loads(done.stdout.splitlines()[-1]):
        assert loss < (0.02 if low else 1e-5)
        assert gradient < (0.02 if low else 1e-4)


@rests_on_it("src/lockstep/strategies/engines/accelerated_sharding.py")
def test_fields_of_the_fsdp_plugin() -> None:
    """FullyShardedDataParallelPlugin has the fields that lockstep does not pass on, and those that it sets itself."""
    accelerate = pytest.importorskip("accelerate")
    fields = {field.name for field in dataclasses.fields(accelerate.FullyShardedDataParallelPlugin)}
    assert fields >= {
        *("sharding_strategy", "use_orig_params", "sync_module_states", "backward_prefetch", "param_init_fn"),
        *("forward_prefetch", "limit_all_gathers", "state_dict_type", "state_dict_config", "fsdp_version"),
        *("optim_state_dict_config", "cpu_ram_efficient_loading", "auto_wrap_policy", "transformer_cls_names_to_wrap"),
    }


@rests_on_it("src/lockstep/strategies/engines/accelerated_sharding.py")
def test_accelerate_calls_get_input_embeddings() -> None:
    """Accelerate's FSDP2 calls the model's get_input_embeddings, at the latest from 1.15 on."""
    accelerate = pytest.importorskip("accelerate")
    from accelerate.utils import fsdp_utils

    asks = "get_input_embeddings" in inspect.getsource(fsdp_utils)
    assert asks or Version(accelerate.__version__) < Version("1.15")


@rests_on_it(
    "src/lockstep/strategies/hf_trainer.py",
    "src/lockstep/distributed/world.py",
    "src/lockstep/strategies/engines/accelerated_sharding.py",
    "packages/lockstep-trace/src/lockstep_trace/tracer/engines.py",
)
def test_attributes_that_trainer_and_accelerate_read() -> None:
    """TrainingArguments has these fields. Trainer takes compute_loss_func and optimizers, and its training_step enters
    the instance's compute_loss_context_manager. Accelerate passes the instance's `ddp_handler` to DDP, sets torch's
    threads if OMP_NUM_THREADS is not set, and accepts a process group's backend. After unset_hf_deepspeed_config,
    is_deepspeed_zero3_enabled is False."""
    accelerate = pytest.importorskip("accelerate")
    import dataclasses

    from transformers import Trainer, TrainingArguments
    from transformers.integrations import deepspeed

    known = {field.name for field in dataclasses.fields(TrainingArguments)}
    own = "ddp_bucket_cap_mb ddp_find_unused_parameters ddp_static_graph gradient_checkpointing torch_compile tf32"
    own += (
        " gradient_checkpointing_kwargs torch_compile_backend torch_compile_mode torch_empty_cache_steps bf16 use_cpu"
    )
    own += (
        " use_liger_kernel liger_kernel_config output_dir average_tokens_across_devices ddp_broadcast_buffers report_to"
    )
    own += " save_strategy disable_tqdm load_best_model_at_end metric_for_best_model greater_is_better"
    assert set(own.split()) <= known
    assert {"compute_loss_func", "optimizers"} <= inspect.signature(Trainer.__init__).parameters.keys()
    assert "with self.compute_loss_context_manager()" in inspect.getsource(Trainer.training_step)
    assert "self.ddp_handler" in inspect.getsource(accelerate.Accelerator.prepare_model)
    state = inspect.getsource(accelerate.PartialState)
    assert "OMP_NUM_THREADS" in state
    assert "torch.set_num_threads(" in state
    assert accelerate.InitProcessGroupKwargs(backend="gloo").backend == "gloo"
    deepspeed.unset_hf_deepspeed_config()
    assert not deepspeed.is_deepspeed_zero3_enabled()
