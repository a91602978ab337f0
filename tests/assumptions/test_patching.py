"""Assumptions of the tracer about the functions that it replaces, and the arguments these receive."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest
import torch
from torch import nn

from support.assumed import rests_on_it


def noted(calls: list[Any], name: str, original: Any) -> Any:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append((name, len(args), sorted(kwargs)))
        return original(*args, **kwargs)

    return call


@rests_on_it(
    "packages/lockstep-trace/src/lockstep_trace/tracer/hooks.py",
    "packages/lockstep-trace/src/lockstep_trace/tracer/observers.py",
    "packages/lockstep-trace/src/lockstep_trace/tracer/operations.py",
    "packages/lockstep-trace/src/lockstep_trace/tracer/modes.py",
)
def test_functions_of_torch_are_looked_up_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replacements of these functions are called: nn.Module.__call__ for modules of every class, also inside
    Sequential; torch.autograd.backward by Tensor.backward, with tensor and gradient as positional arguments and
    `inputs` as keyword; Module.train by eval, for each submodule; zero_grad, state_dict and load_state_dict of
    Optimizer and Module; torch.nn.functional.kl_div by KLDivLoss; saved_tensors_hooks.__enter__ by subclasses;
    Subset.__init__; DataLoader.__iter__."""
    calls: list[Any] = []
    places: list[tuple[Any, str]] = [
        *((nn.Module, name) for name in ("__call__", "train", "zero_grad", "load_state_dict")),
        *((torch.optim.Optimizer, name) for name in ("__init__", "zero_grad", "state_dict", "load_state_dict")),
        *((torch.autograd, "backward"), (nn.functional, "kl_div")),
        *((torch.autograd.graph.saved_tensors_hooks, "__enter__"), (torch.utils.data.Subset, "__init__")),
        (torch.utils.data.DataLoader, "__iter__"),
    ]
    for holder, name in places:
        monkeypatch.setattr(holder, name, noted(calls, name, getattr(holder, name)))

    def names(call: Any) -> list[str]:
        calls.clear()
        call()
        return [name for name, *_ in calls]

    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    x = torch.ones(1, 2)
    assert names(lambda: model(x)) == ["__call__"] * 3
    loss = model(x).sum()
    assert names(loss.backward) == ["backward"]
    assert calls == [("backward", 4, ["inputs"])]  # the gradient follows the tensor
    assert names(model.eval) == ["train"] * 3
    assert names(model.zero_grad) == ["zero_grad"]
    assert names(lambda: model.load_state_dict(model.state_dict())) == ["load_state_dict"]
    assert names(lambda: torch.optim.AdamW(model.parameters())) == ["__init__"]
    optimizer = torch.optim.SGD(model.parameters())
    assert names(optimizer.zero_grad) == ["zero_grad"]
    assert names(lambda: optimizer.load_state_dict(optimizer.state_dict())) == ["state_dict", "load_state_dict"]
    assert names(lambda: nn.KLDivLoss(reduction="sum")(x, x)) == ["__call__", "kl_div"]

    class Own(torch.autograd.graph.saved_tensors_hooks):
        pass

    calls.clear()
    with Own(lambda t: t, lambda t: t):
        pass
    assert [name for name, *_ in calls] == ["__enter__"]
    subset = torch.utils.data.Subset(range(4), [1, 2])  # type: ignore[arg-type]
    assert names(lambda: list(torch.utils.data.DataLoader(subset))) == ["__iter__"]


@rests_on_it(
    "packages/lockstep-trace/src/lockstep_trace/tracer/hooks.py",
    "packages/lockstep-trace/src/lockstep_trace/tracer/recorder.py",
)
def test_gradient_scaler_and_clipping_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """GradScaler.step calls the instance's unscale_ if it was not called before, for optimizers without their own
    scaling; for fused ones it sets grad_scale and found_inf on the optimizer during step. is_enabled is False for
    enabled=False. `_scale` is None before the first scale(), then a tensor. torch.nn.utils and torch.nn.utils.clip_grad
    have the same clip_grad functions. They return a tensor or DTensor."""
    kind = torch.amp.GradScaler
    calls: list[Any] = []
    for name in ("scale", "unscale_", "step"):
        monkeypatch.setattr(kind, name, noted(calls, name, getattr(kind, name)))
    weight = nn.Parameter(torch.ones(2))
    seen: list[Any] = []
    for fused in (False, True):
        scaler = kind("cpu", init_scale=4.0)
        assert scaler._scale is None
        optimizer = torch.optim.SGD([weight], lr=0.1, fused=fused)

        def before(own: Any, *_: Any) -> None:
            found = getattr(own, "found_inf", None)
            seen.append([getattr(own, "grad_scale", None), None if found is None else found.item()])

        optimizer.register_step_pre_hook(before)
        scaler.scale(weight.sum()).backward()
        assert scaler._scale.item() == 4.0  # type: ignore[union-attr]
        scaler.step(optimizer)
        optimizer.zero_grad()
    assert [name for name, *_ in calls] == ["scale", "step", "unscale_", "scale", "step"]
    assert seen[0] == [None, None]
    assert seen[1] == [torch.tensor(4.0), 0.0]
    assert not hasattr(optimizer, "grad_scale")
    assert not kind("cpu", enabled=False).is_enabled()
    utils: Any = torch.nn.utils
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        assert getattr(utils, name) is getattr(utils.clip_grad, name)
    assert not hasattr(utils.clip_grad, "clip_grads_with_norm_")
    assert list(inspect.signature(utils.clip_grad_norm_).parameters)[:2] == ["parameters", "max_norm"]
    assert list(inspect.signature(utils.clip_grad_value_).parameters)[:2] == ["parameters", "clip_value"]
    assert list(inspect.signature(utils.clip_grads_with_norm_).parameters)[:2] == ["parameters", "max_norm"]


@rests_on_it("packages/lockstep-trace/src/lockstep_trace/tracer/observers.py")
def test_hooks_of_parameter_registration_and_checkpointing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook of register_module_parameter_registration_hook receives module, name and weight before the weight is in
    the module, and changes nothing if it returns None. checkpoint with use_reentrant=True calls
    torch.utils.checkpoint.check_backward_validity with the inputs, without gradients; use_reentrant=False does not."""
    from torch.nn.modules.module import register_module_parameter_registration_hook

    registered: list[Any] = []

    def hook(module: nn.Module, name: str, weight: Any) -> None:
        registered.append((name, name in module._parameters, weight is None))

    handle = register_module_parameter_registration_hook(hook)
    try:
        layer = nn.Linear(2, 2)
        layer.weight = nn.Parameter(torch.ones(2, 2))
        nn.Linear(2, 2, bias=False)
    finally:
        handle.remove()
    new = [("weight", False, False), ("bias", False, False)]
    assert registered == [*new, ("weight", True, False), ("weight", False, False)]
    assert torch.equal(layer.weight, torch.ones(2, 2))
    module: Any = torch.utils.checkpoint
    calls: list[Any] = []
    plain = module.check_backward_validity
    monkeypatch.setattr(
        module,
        "check_backward_validity",
        lambda inputs: calls.append((len(list(inputs)), torch.is_grad_enabled())) or plain(inputs),
    )
    x = torch.ones(2, requires_grad=True)
    for reentrant in (True, False):
        module.checkpoint(torch.exp, x, use_reentrant=reentrant).sum().backward()
    assert [number for number, _ in calls] == [1]


@rests_on_it(
    "packages/lockstep-trace/src/lockstep_trace/tracer/layouts.py",
    "packages/lockstep-trace/src/lockstep_trace/tracer/hooks.py",
    "packages/lockstep-trace/src/lockstep_trace/tracer/lifetimes.py",
)
def test_attributes_of_schedules_and_loaders() -> None:
    """A LambdaLR has lr_lambdas, base_lrs, last_epoch (0 at creation) and _last_lr. ReduceLROnPlateau.step takes
    metrics first. The lengths of schedules have these attribute names. CosineAnnealingLR and others have `step` in
    their own class or inherit LRScheduler's. A DataLoader has sampler, batch_sampler with `sampler`, drop_last,
    num_workers, multiprocessing_context (None) and dataset; attributes can be set on its iterator. load_state_dict with
    strict=False returns missing_keys and unexpected_keys; with strict=True it raises."""
    from torch.optim import lr_scheduler

    layer = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    schedule: Any = lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    assert (len(schedule.lr_lambdas), schedule.base_lrs, schedule.last_epoch, schedule._last_lr) == (1, [0.5], 0, [0.5])
    plateau = lr_scheduler.ReduceLROnPlateau
    assert list(inspect.signature(plateau.step).parameters)[1] == "metrics"
    assert "step" in vars(plateau)
    lengths: list[Any] = [
        lr_scheduler.CosineAnnealingLR(optimizer, 7).T_max,
        lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=7).total_steps,  # type: ignore[attr-defined]
        lr_scheduler.PolynomialLR(optimizer, 7).total_iters,
        lr_scheduler.LinearLR(optimizer, total_iters=7).total_iters,
    ]
    assert lengths == [7] * 4
    loader: Any = torch.utils.data.DataLoader(range(5), batch_size=2, shuffle=True)  # type: ignore[arg-type, var-annotated]
    assert loader.batch_sampler.sampler is loader.sampler
    assert (loader.drop_last, loader.num_workers, loader.multiprocessing_context) == (False, 0, None)
    assert (len(loader.dataset), type(loader.sampler).__name__, loader.sampler.replacement) == (
        5,
        "RandomSampler",
        False,
    )
    iterator = iter(loader)
    iterator.lockstep_name = "a"
    assert (len(loader), iterator.lockstep_name) == (3, "a")
    weighted = torch.utils.data.WeightedRandomSampler([0.5, 0.5], 3)
    assert weighted.num_samples == 3
    result = layer.load_state_dict({"other": torch.ones(1)}, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == (["weight", "bias"], ["other"])
    with pytest.raises(RuntimeError, match="other"):
        layer.load_state_dict({"other": torch.ones(1)})


@rests_on_it("packages/lockstep-trace/src/lockstep_trace/tracer/observers.py")
def test_loaders_prefer_getitems() -> None:
    """A DataLoader calls __getitems__ with the list of a batch's indices if the data set's class has it, as Subset
    does, and __getitem__ otherwise. get_worker_info is None in the main process, and has the data set as `dataset` in a
    worker."""

    class Rows(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> int:
            return index

    class Together(Rows):
        def __getitems__(self, indices: list[int]) -> list[int]:
            return [10 * i for i in indices]

    def read(rows: Any) -> list[list[int]]:
        return [batch.tolist() for batch in torch.utils.data.DataLoader(rows, batch_size=2)]

    assert read(Together()) == [[0, 10], [20]]
    assert read(torch.utils.data.Subset(Rows(), [2, 0])) == [[2, 0]]
    assert hasattr(torch.utils.data.Subset, "__getitems__")
    assert torch.utils.data.get_worker_info() is None
    fields = inspect.getsource(torch.utils.data._utils.worker._worker_loop)  # type: ignore[attr-defined]
    assert "dataset=dataset" in fields


@rests_on_it(
    "packages/lockstep-trace/src/lockstep_trace/tracer/evidence.py",
    "packages/lockstep-trace/src/lockstep_trace/tracer/checker.py",
)
def test_nodes_of_ctc_bce_and_embeddings() -> None:
    """A node CtcLoss holds targets, their lengths (a tuple or a tensor) and the blank. BinaryCrossEntropyWithLogits
    holds pos_weight, or None. Embedding holds padding_idx, if negative possibly plus 2**64, and the number of rows as
    `_saved_weight_sym_argsize_0`. A register_prehook hook on a node receives a tuple of the incoming gradients before
    the node runs, and changes nothing if it returns None. `_input_metadata` has the shape of the node's result."""
    logits = torch.randn(5, 2, 4, requires_grad=True)
    targets = torch.tensor([[1, 2], [3, 0]])
    lengths = torch.tensor([5, 5]), torch.tensor([2, 1])
    nodes: list[Any] = []
    for each in (lengths, tuple(part.tolist() for part in lengths)):
        loss = nn.functional.ctc_loss(logits.log_softmax(-1), targets, *each, blank=3, reduction="none")
        node: Any = loss.grad_fn
        while not type(node).__name__.startswith("CtcLoss"):
            node = node.next_functions[0][0]
        assert torch.equal(node._saved_targets, targets)
        assert torch.as_tensor(node._saved_target_lengths).tolist() == [2, 1]
        assert node._saved_blank == 3
    for weight in (None, torch.tensor([2.0])):
        x = torch.zeros(3, 1, requires_grad=True)
        binary: Any = nn.functional.binary_cross_entropy_with_logits(x, torch.ones(3, 1), pos_weight=weight).grad_fn
        assert (binary._saved_pos_weight is None) is (weight is None)
    for padding in (0, -1, None):
        table = nn.Embedding(7, 2, padding_idx=padding)
        result = table(torch.tensor([[0, 6, 3]]))
        node = result.grad_fn
        expected = {0: 0, -1: 6, None: -1}[padding]
        assert node._saved_padding_idx in (expected, expected % 2**64)
        assert node._saved_weight_sym_argsize_0 == 7
        assert tuple(node._input_metadata[0].shape) == (1, 3, 2)
        node.register_prehook(lambda gradients: nodes.append([g.shape for g in gradients]))
        result.sum().backward()
        assert table.weight.grad is not None
        assert table.weight.grad.sum() == 6 - 2 * (padding in (0, -1))
    assert nodes == [[torch.Size([1, 3, 2])]] * 3


@rests_on_it(
    "packages/lockstep-trace/src/lockstep_trace/tracer/operations.py",
    "packages/lockstep-trace/src/lockstep_trace/tracer/modes.py",
    "packages/lockstep-trace/src/lockstep_trace/tracer/evidence.py",
    "packages/lockstep-trace/src/lockstep_trace/tracer/rows.py",
)
def test_storage_references_batch_norms_and_result_order() -> None:
    """While a StorageWeakRef is held, no other storage gets the same cdata, also at the same address. A new batch norm
    has means of 0 and variances of 1, and None without running statistics. std_mean returns the standard deviation
    first, aminmax the minimum first. searchsorted with right=True counts values up to and including the given one. The
    counts of unique are in the order of its values. torch without CUDA raises if asked whether a stream is being
    captured."""
    from torch.multiprocessing.reductions import StorageWeakRef

    known: list[Any] = []
    for _ in range(50):
        known.append(StorageWeakRef(torch.empty(64).untyped_storage()))
    assert len({each.cdata for each in known}) == 50
    norm = nn.BatchNorm1d(2)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert (norm.running_mean.tolist(), norm.running_var.tolist()) == ([0.0, 0.0], [1.0, 1.0])
    assert nn.BatchNorm1d(2, track_running_stats=False).running_mean is None
    values = torch.tensor([1.0, 2.0, 6.0])
    deviation, mean = torch.std_mean(values)
    assert (mean.item(), deviation.item()) == (3.0, pytest.approx(7**0.5))
    assert [each.item() for each in values.aminmax()] == [1.0, 6.0]
    assert torch.searchsorted(torch.tensor([2, 5]), torch.tensor([1, 2, 4, 5]), right=True).tolist() == [0, 1, 1, 2]
    numbers, counts = torch.tensor([5, 1, 5]).unique(return_counts=True)
    assert (numbers.tolist(), counts.tolist()) == ([1, 5], [1, 2])
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError):
            torch.cuda.is_current_stream_capturing()
        assert not torch.cuda.is_initialized()
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        assert issubclass(kind, nn.RNNBase)
    recurrent: Any = [nn.LSTM(2, 2, batch_first=True), nn.MultiheadAttention(2, 1)]
    assert [each.batch_first for each in recurrent] == [True, False]
