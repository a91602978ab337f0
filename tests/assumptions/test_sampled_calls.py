"""Assumptions about library calls that had no test in a random sample of call sites."""

from __future__ import annotations

import os
import pickle
import socket
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch
import yaml
from torch import nn

from support.assumed import rests_on_it


@rests_on_it("src/lockstep/data/usable_rows.py")
def test_take_and_if_else_of_null() -> None:
    """pyarrow's take returns null for a null index, if_else for a null condition; comparisons with null are null.
    list_value_length is null for a null list, and list_flatten of a slice skips null lists."""
    texts = pa.array(["a", "b"])
    assert texts.take(pa.array(np.array([1, 0]), mask=np.array([False, True]))).to_pylist() == ["b", None]
    codes = pa.array([1, -1, None])
    known = pc.if_else(pc.greater_equal(codes, 0), codes, pa.scalar(None, codes.type))
    assert texts.take(known).to_pylist() == ["b", None, None]
    lists = pa.array([[9], [1, 2], None, [], [3]]).slice(1)
    assert pc.list_value_length(lists).to_pylist() == [2, None, 0, 1]
    assert pc.list_flatten(lists).to_pylist() == [1, 2, 3]


@rests_on_it("src/lockstep/data/stream.py", "src/lockstep/data/usable_rows.py")
def test_features_of_a_schema_keep_names_of_classes() -> None:
    """Features.from_arrow_schema reads ClassLabel and its names from the schema's metadata, also for nested columns.
    Without metadata, and by generate_from_arrow_type, features are Arrow types: integers, lists, structs."""
    import datasets
    from datasets.features.features import generate_from_arrow_type

    features = datasets.Features(label=datasets.ClassLabel(names=["x", "y"]), inner={"n": datasets.Value("int32")})
    assert datasets.Features.from_arrow_schema(features.arrow_schema) == features
    bare = datasets.Features.from_arrow_schema(features.arrow_schema.remove_metadata())
    assert bare == {"label": datasets.Value("int64"), "inner": {"n": datasets.Value("int32")}}
    listed: Any = generate_from_arrow_type(pa.list_(pa.string()))
    assert listed.feature == datasets.Value("string")


@rests_on_it("src/lockstep/data/tokenizer.py")
def test_a_character_tokenizer() -> None:
    """Split(Regex("[\\s\\S]"), "isolated") makes a token of each character, also of spaces, line breaks and characters
    of several bytes, and Fuse joins them again."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    text = "a \n\u00e9\U0001f600"
    tokenizer = Tokenizer(models.WordLevel({each: n for n, each in enumerate(text)}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    assert tokenizer.encode(text).tokens == [*text]
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


@rests_on_it("src/lockstep/data/order.py", "src/lockstep/lab/sweep/sweep_file.py")
def test_array_split_and_flow_style_yaml() -> None:
    """np.array_split gives the first parts one more element if the length is not divisible. yaml.safe_dump in flow
    style writes a list in one line, and a bare value followed by a line "..."."""
    assert [len(part) for part in np.array_split(np.arange(8), 3)] == [3, 3, 2]
    texts = [yaml.safe_dump(value, default_flow_style=True, width=10**6) for value in ([1, "no", 0.5], True, None)]
    assert texts == ["[1, 'no', 0.5]\n", "true\n...\n", "null\n...\n"]


@rests_on_it("src/lockstep/tasks/models/source_ties.py")
def test_torch_load_with_weights_only(tmp_path: Path) -> None:
    """torch.load with weights_only and mmap keeps every bit and shared storages, and raises UnpicklingError for a file
    that would call a function."""
    numbers = torch.tensor([float("nan"), -0.0, 1.5])
    torch.save({"a": numbers, "b": numbers[1:], "c": numbers.bfloat16()}, tmp_path / "a.bin")
    loaded = torch.load(tmp_path / "a.bin", map_location="cpu", weights_only=True, mmap=True)
    assert torch.equal(loaded["a"].view(torch.int32), numbers.view(torch.int32))
    assert loaded["b"].untyped_storage().data_ptr() == loaded["a"].untyped_storage().data_ptr()
    assert loaded["c"].dtype == torch.bfloat16
    torch.save({"a": nn.Linear(1, 1)}, tmp_path / "b.bin")
    with pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / "b.bin", weights_only=True)


@rests_on_it("src/lockstep/tasks/models/source_ties.py", "src/lockstep/tasks/models/source_files.py")
def test_names_in_a_file_are_renamed_as_from_pretrained_does() -> None:
    """get_model_conversion_mapping lists a model's WeightRenamings and WeightConverters. rename_source_key returns the
    name in the model, for names with or without prefix, and the converter's pattern, or None without a converter."""
    from transformers import BertConfig, BertForMaskedLM, MixtralConfig, MixtralForCausalLM
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}

    def renamed(model: Any, name: str) -> tuple[str, str | None]:
        transforms = get_model_conversion_mapping(model)
        both = [[each for each in transforms if isinstance(each, kind)] for kind in (WeightRenaming, WeightConverter)]
        return rename_source_key(name, *both, model.base_model_prefix, dict(model.state_dict()))

    with torch.device("meta"):
        bert = BertForMaskedLM(BertConfig(vocab_size=16, **sizes))
        mixtral = MixtralForCausalLM(
            MixtralConfig(vocab_size=16, num_key_value_heads=2, num_local_experts=2, head_dim=4, **sizes)
        )
    layer_norm = "bert.embeddings.LayerNorm.weight"
    for name in ("bert.embeddings.LayerNorm.gamma", "embeddings.LayerNorm.weight", layer_norm):
        assert renamed(bert, name) == (layer_norm, None)
    name, pattern = renamed(mixtral, "model.layers.0.block_sparse_moe.experts.0.w1.weight")
    assert name == "model.layers.0.mlp.experts.gate_up_proj"
    assert pattern is not None


@rests_on_it(
    "src/lockstep/tasks/models/head_padding.py",
    "src/lockstep/tasks/cross_entropy.py",
    "src/lockstep/strategies/engines/tensor_plans.py",
    "src/lockstep/tasks/models/unpadded.py",
    "src/lockstep/tasks/models/chunked_loss.py",
    "src/lockstep/tasks/models/quantized.py",
    "src/lockstep/tasks/models/repeatable.py",
    "src/lockstep/tasks/models/storage_dtype.py",
)
def test_torch_function_subclasses_and_matrix_products() -> None:
    """has_torch_function is true for a Tensor subclass with __torch_function__, and false for tensors and parameters.
    addmm and mm of [N, H] give the bits of transformers' Conv1D. set_deterministic_debug_mode accepts the value of
    get_deterministic_debug_mode."""
    from torch.overrides import has_torch_function, has_torch_function_unary
    from transformers.pytorch_utils import Conv1D

    class Own(torch.Tensor):
        pass

    plain: list[Any] = [torch.ones(1), nn.Parameter(torch.ones(1))]
    own: Any = torch.ones(1).as_subclass(Own)
    assert [has_torch_function_unary(each) for each in (*plain, own)] == [False, False, True]
    assert (has_torch_function((plain[0],)), has_torch_function((plain[0], own))) == (False, True)
    layer, inputs = Conv1D(5, 3), torch.randn(2, 7, 3, generator=torch.Generator().manual_seed(0))
    rows = torch.addmm(layer.bias, inputs.reshape(-1, 3), layer.weight)
    assert torch.equal(layer(inputs).reshape(-1, 5), rows)
    for mode in (1, 0):
        torch.set_deterministic_debug_mode(mode)
        assert torch.get_deterministic_debug_mode() == mode


@rests_on_it("src/lockstep/strategies/engines/blocks.py")
def test_the_compiler_has_the_options_of_compiled_blocks() -> None:
    """The configs of dynamo, inductor, functorch and fx have these options."""
    import torch._dynamo
    import torch._functorch.config
    import torch._inductor.config
    import torch.fx.experimental._config as fx

    names = {
        torch._dynamo.config: ("recompile_limit", "optimize_ddp", "specialize_float"),
        torch._inductor.config: ("compile_threads", "unsafe_marked_cacheable_functions"),
        torch._functorch.config: ("autograd_cache_allow_custom_autograd_functions",),
        fx: ("use_duck_shape",),
    }
    assert [name for config, some in names.items() for name in some if not hasattr(config, name)] == []


@rests_on_it(
    "src/lockstep/strategies/engines/blocks.py",
    "src/lockstep/strategies/engines/region.py",
    "packages/lockstep-trace/src/lockstep_trace/tracer/engines.py",
)
def test_compiler_stances_for_new_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """For input sizes that a compiled function's code does not accept, set_stance("eager_on_recompile") runs it eagerly
    and "fail_on_recompile" raises; for other sizes both run the code. A function that cannot be traced in full raises a
    TorchDynamoException, whose text ends before an empty line and "Set TORCH". torch.compiler.reset drops the code.
    inductor's default cache folder does not depend on TORCHINDUCTOR_CACHE_DIR; PyCodeCache lists its modules. dynamo's
    contexts are eval_frame's _TorchDynamoContext and OptimizeContext, whose __call__ takes the function; DisableContext
    is a subclass."""
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor.async_compile import shutdown_compile_workers
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    sizes: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        def code(*args: Any) -> Any:
            sizes.append(1)
            return graph(*args)

        return code

    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    torch.compiler.reset()
    compiled = torch.compile(double, fullgraph=True, dynamic=False, backend=backend)
    ones = torch.ones(3)
    compiled(ones)
    assert sizes == [1]
    for stance in ("eager_on_recompile", "fail_on_recompile"):
        with torch.compiler.set_stance(stance):
            compiled(ones)
    assert sizes == [1] * 3
    with torch.compiler.set_stance("eager_on_recompile"):
        assert compiled(torch.ones(4)).tolist() == [2.0] * 4
    with torch.compiler.set_stance("fail_on_recompile"), pytest.raises(RuntimeError, match="recompile"):
        compiled(torch.ones(4))
    assert sizes == [1] * 3

    def reads(x: torch.Tensor) -> torch.Tensor:
        return x if x.sum().item() > 2 else -x

    with pytest.raises(TorchDynamoException) as caught:
        torch.compile(reads, fullgraph=True, backend=backend)(ones)
    assert "\n\nSet TORCH" in str(caught.value)
    torch.compiler.reset()
    compiled(ones)
    assert sizes == [1] * 4
    torch.compiler.reset()
    before = default_cache_dir()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/elsewhere")
    assert default_cache_dir() == before
    assert isinstance(PyCodeCache.modules, list)
    assert callable(shutdown_compile_workers)
    frames: Any = sys.modules["torch._dynamo.eval_frame"]
    assert "__call__" in vars(frames._TorchDynamoContext)
    assert all(issubclass(each, frames._TorchDynamoContext) for each in (frames.OptimizeContext, frames.DisableContext))


@rests_on_it("src/lockstep/launchers/processes/surviving_ranks.py")
def test_a_failure_without_an_error_file_names_the_signal() -> None:
    """torch elastic's ProcessFailure accepts an empty error file, and has the exit code, the process, and a message
    that names the signal of a negative exit code."""
    from torch.distributed.elastic.multiprocessing.api import ProcessFailure

    failure = ProcessFailure(1, 4321, -9, os.devnull)
    assert (failure.local_rank, failure.pid, failure.exitcode) == (1, 4321, -9)
    assert failure.signal_name() == "SIGKILL"
    assert "SIGKILL" in str(failure.message)


@rests_on_it("src/lockstep/strategies/engines/accelerated.py")
def test_the_state_of_accelerate_is_shared_and_can_be_set() -> None:
    """All PartialStates share their attributes: distributed_type set on one is that of the next, until
    AcceleratorState._reset_state(reset_partial_state=True)."""
    accelerate = pytest.importorskip("accelerate")
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType

    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        accelerate.PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
        assert accelerate.PartialState().distributed_type == DistributedType.MULTI_GPU
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    assert accelerate.PartialState(cpu=True).distributed_type == DistributedType.NO
    AcceleratorState._reset_state(reset_partial_state=True)


@rests_on_it("src/lockstep/tasks/modules/dataset.py")
def test_loaders_call_a_batchs_pin_memory() -> None:
    """DataLoader's pinning thread calls the batch's own method pin_memory, and uses its result."""
    from torch.utils.data._utils.pin_memory import pin_memory

    class Batch:
        def pin_memory(self) -> str:
            return "pinned"

    assert pin_memory(Batch()) == "pinned"


@rests_on_it(
    "src/lockstep/launchers/torchrun.py",
    "src/lockstep/launchers/processes/elastic_agent.py",
    "src/lockstep/launchers/processes/elastic_rendezvous.py",
)
def test_errors_of_a_rendezvous() -> None:
    """RendezvousConnectionError and RendezvousStateError are RendezvousErrors but not TimeoutErrors. A store without a
    server raises ValueError, RuntimeError or TimeoutError."""
    from datetime import timedelta

    from torch.distributed import TCPStore
    from torch.distributed.elastic import rendezvous

    for kind in (rendezvous.RendezvousConnectionError, rendezvous.RendezvousStateError):
        assert issubclass(kind, rendezvous.RendezvousError)
        assert not issubclass(kind, TimeoutError)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises((ValueError, RuntimeError, TimeoutError)):
        TCPStore("127.0.0.1", port, None, is_master=False, timeout=timedelta(milliseconds=200))
