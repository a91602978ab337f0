"""Assumptions about results whose change no other test would notice: kernels, replaced gradients, statistics, masks,
and the row order of libraries that read files."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch
from torch import nn
from torch.nn import functional

from support.assumed import rests_on_it


@pytest.mark.parametrize("causal", [False, True])
@rests_on_it("src/lockstep/tasks/models/repeatable.py")
def test_attention_kernels_have_the_bits_of_autograd(causal: bool) -> None:
    """_scaled_dot_product_flash_attention_for_cpu and its backward give the bits of scaled_dot_product_attention."""
    draw = torch.Generator().manual_seed(0)
    parts = [torch.randn(2, 3, 17, 8, generator=draw, requires_grad=True) for _ in range(3)]
    slope = torch.randn(2, 3, 17, 8, generator=draw)
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.FLASH_ATTENTION):
        wanted = functional.scaled_dot_product_attention(*parts, is_causal=causal)
    gradients = torch.autograd.grad(wanted, parts, slope)
    with torch.no_grad():
        out, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*parts, 0.0, causal)
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        own = backward(slope, *parts, out, total, 0.0, causal)
    assert torch.equal(out, wanted)
    assert all(map(torch.equal, own, gradients))


@rests_on_it("src/lockstep/tasks/cross_entropy.py")
def test_log_softmax_of_some_rows_has_the_same_bits() -> None:
    """The kernels of log_softmax and nll_loss, run on some of the rows, give the bits of cross_entropy on all rows, in
    float32 and from bfloat16."""
    logits = torch.randn(37, 1003, generator=torch.Generator().manual_seed(0)).bfloat16()
    targets = torch.arange(37) * 27
    targets[5] = -100
    wanted = functional.cross_entropy(logits.float(), targets, reduction="none")
    logs = torch.empty(37, 1003)
    for part in (slice(0, 11), slice(11, 37)):
        torch.ops.aten._log_softmax.out(logits[part].float(), 1, False, out=logs[part])
    losses, _ = torch.ops.aten.nll_loss_forward(logs, targets, None, 0, -100)
    assert torch.equal(losses, wanted)
    assert losses[5] == 0


@pytest.mark.parametrize("reduction", ["none", "sum"])
@rests_on_it("src/lockstep/tasks/cross_entropy.py")
def test_log_softmax_backward_can_write_over_its_input(reduction: str) -> None:
    """nll_loss_backward and `_log_softmax_backward_data.out`, run on some of the rows and overwriting the
    log-probabilities that they read, give the bits of cross_entropy's gradient."""
    logits = torch.randn(37, 1003, generator=torch.Generator().manual_seed(0), requires_grad=True)
    targets, number = torch.arange(37) * 27, {"none": 0, "sum": 2}[reduction]
    targets[5] = -100
    above = torch.linspace(0.5, 2, 37) if reduction == "none" else torch.tensor(0.3)
    functional.cross_entropy(logits, targets, reduction=reduction).backward(above)
    logs = logits.detach().log_softmax(1)
    _, weight = torch.ops.aten.nll_loss_forward(logs, targets, None, number, -100)
    for part in (slice(0, 11), slice(11, 37)):
        each, rows = above[part] if above.dim() else above, logs[part]
        of_logs = torch.ops.aten.nll_loss_backward(each, rows, targets[part], None, number, -100, weight)
        torch.ops.aten._log_softmax_backward_data.out(of_logs, rows, 1, torch.float32, out=rows)
    assert logits.grad is not None
    assert torch.equal(logs, logits.grad)


@rests_on_it("src/lockstep/tasks/translation.py", "src/lockstep/plain/scores.py")
def test_translation_scores_are_computed_from_sums() -> None:
    """sacrebleu's `_extract_corpus_statistics` returns per sentence 10 integers for BLEU (two lengths, matches and
    counts for n-grams of 1 to 4 words) and 18 for chrF. `_compute_score_from_stats` of their sums, in any partition, is
    the score of the whole corpus. BLEU.TOKENIZERS names the tokenizers; one whose package is missing raises at once."""
    pytest.importorskip("sacrebleu")
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    assert {"13a", "char", "none", "zh", "ja-mecab"} <= {*BLEU.TOKENIZERS}
    if importlib.util.find_spec("MeCab") is None:
        with pytest.raises((ImportError, RuntimeError, OSError)):
            BLEU(tokenize="ja-mecab")
    written = ["the cat sat on the mat", "", "a dog, it barks!", "one two three four five"]
    references = ["the cat is on the mat", "nothing", "a dog: it barks", "one two three four six"]
    metrics: list[tuple[Any, int]] = [(BLEU(tokenize="13a", force=True), 10), (CHRF(), 18)]
    for metric, size in metrics:
        whole = np.array(metric._extract_corpus_statistics(written, [references]))
        assert (whole.shape, whole.dtype.kind) == ((4, size), "i")
        parts = [metric._extract_corpus_statistics(written[p], [references[p]]) for p in (slice(0, 1), slice(1, 4))]
        total = [int(number) for number in np.sum(np.concatenate(parts), axis=0)]
        expected = metric.corpus_score(written, [references]).score
        assert metric._compute_score_from_stats(total).score == expected > 0


LAPACK = {
    "linalg_cholesky_ex": lambda a: torch.linalg.cholesky(a),
    **({"cholesky": lambda a: torch.cholesky(a)} if hasattr(torch.ops.aten, "cholesky") else {}),
    "cholesky_inverse": lambda a: torch.cholesky_inverse(a),
    "cholesky_solve": lambda a: torch.cholesky_solve(a, a),
    "_linalg_det": lambda a: torch.linalg.det(a),
    "_linalg_slogdet": lambda a: torch.logdet(a),
    "linalg_eig": lambda a: torch.linalg.eigvals(a),
    "_linalg_eigh": lambda a: torch.linalg.eigvalsh(a),
    "_linalg_svd": lambda a: torch.linalg.cond(a),
    "linalg_householder_product": lambda a: torch.orgqr(a, a[0]),
    "linalg_inv_ex": lambda a: torch.linalg.inv(a),
    "linalg_ldl_factor_ex": lambda a: torch.linalg.ldl_factor(a),
    "linalg_lstsq": lambda a: torch.linalg.lstsq(a, a),
    "linalg_lu": lambda a: torch.linalg.lu(a),
    "linalg_lu_factor_ex": lambda a: torch.linalg.lu_factor(a),
    "linalg_lu_solve": lambda a: torch.lu_solve(a, *torch.linalg.lu_factor(a)),
    "linalg_qr": lambda a: torch.linalg.qr(a),
    "_linalg_solve_ex": lambda a: torch.linalg.solve(a, a),
    "geqrf": lambda a: torch.geqrf(a),
    "ormqr": lambda a: torch.ormqr(a, a[0], a),
    "triangular_solve": lambda a: torch.triangular_solve(a, a),
    "_fft_r2c": lambda a: torch.fft.rfft(a),
    "_fft_c2c": lambda a: torch.fft.fft(a + 0j),
    "_fft_c2r": lambda a: torch.fft.irfft(a + 0j),
    "_embedding_bag_forward_only": lambda a: functional.embedding_bag(torch.tensor([[0, 1]]), a),
    "addbmm": lambda a: torch.addbmm(a, a[None], a[None]),
    "exponential_": lambda a: torch.empty_like(a).exponential_(),
    "asin": lambda a: torch.asin(a),
    "acos": lambda a: torch.acos(a),
    "atan": lambda a: torch.atan(a),
    "erfc": lambda a: torch.erfc(a),
}


@pytest.mark.filterwarnings("ignore")
@rests_on_it("src/lockstep/distributed/portable.py")
def test_operations_that_call_lapack() -> None:
    """torch's functions that call MKL dispatch to operations of these names. A kernel registered for an operation on
    the CPU replaces torch's, also where another operation calls it. torch has all names that lockstep refuses, but
    `cholesky` only from 2.14 on."""
    from torch.utils._python_dispatch import TorchDispatchMode

    names: list[str] = []

    class Noted(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    square = torch.eye(3) + 1
    for name, function in LAPACK.items():
        names.clear()
        with Noted():
            function(square)
        assert name in names, f"{name}: {names}"
    others = "_addmm_activation _int_mm _scaled_mm _weight_int8pack_mm _weight_int4pack_mm_for_cpu to_mkldnn"
    others += " linalg_eigvals _linalg_eigvals _cholesky_solve_helper linalg_ldl_solve _embedding_bag"
    others += " _scaled_dot_product_flash_attention_for_cpu"
    assert [name for name in others.split() if not hasattr(torch.ops.aten, name)] == []
    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("_cholesky_solve_helper", lambda *operands: operands[0] + 7, "CPU")
        assert torch.equal(torch.cholesky_solve(square, square), square + 7)
    finally:
        library._destroy()
    assert not torch.equal(torch.cholesky_solve(square, square), square + 7)


WRITE_ONLY = {
    "copy_": lambda x: x.copy_(torch.arange(6.0).view(2, 3)),
    "fill_": lambda x: x.fill_(2),
    "zero_": lambda x: x.zero_(),
    "normal_": lambda x: x.normal_(),
    "uniform_": lambda x: x.uniform_(),
    "bernoulli_": lambda x: x.bernoulli_(0.5),
    "random_": lambda x: x.random_(),
    "exponential_": lambda x: x.exponential_(),
    "geometric_": lambda x: x.geometric_(0.5),
    "cauchy_": lambda x: x.cauchy_(),
    "log_normal_": lambda x: x.log_normal_(),
    "set_": lambda x: x.set_(torch.arange(6.0).view(2, 3)),
    "_foreach_copy_": lambda x: torch._foreach_copy_([x], [torch.arange(6.0).view(2, 3)]),
    "_foreach_zero_": lambda x: torch._foreach_zero_([x]),
}


@rests_on_it("packages/lockstep-trace/src/lockstep_trace/tracer/operations.py")
def test_operations_that_ignore_the_overwritten_values() -> None:
    """copy_, fill_, zero_, set_, operations that draw random numbers, _foreach_copy_ and _foreach_zero_ give the same
    result whatever the tensor held before. resize_ keeps the old values."""
    for name, write in WRITE_ONLY.items():
        assert hasattr(torch.ops.aten, name)
        results = []
        for before in (0.0, float("nan")):
            torch.manual_seed(0)
            tensor = torch.full((2, 3), before)
            write(tensor)
            results.append(tensor)
        assert torch.equal(*results), name
    assert torch.arange(4.0).resize_(2).tolist() == [0.0, 1.0]


@rests_on_it("packages/lockstep-trace/src/lockstep_trace/tracer/operations.py")
def test_an_attention_returns_its_output_first() -> None:
    """Operations whose names begin with _scaled_dot_product, _flash_attention, _efficient_attention or _cudnn_attention
    return the attention's output first; those with "backward" in their name return gradients."""
    begins = ("_scaled_dot_product", "_flash_attention_", "_efficient_attention_", "_cudnn_attention_")
    for name in ("_flash_attention_forward", "_efficient_attention_forward", "_scaled_dot_product_cudnn_attention"):
        assert name.startswith(begins)
        assert getattr(torch.ops.aten, name).default._schema.returns[0].name == "output"
    parts = [torch.randn(1, 1, 4, 4, requires_grad=True) for _ in range(3)]
    out, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*parts)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    gradients = kernel(torch.ones_like(out), *parts, out, total, 0.0, False)
    assert [each.shape for each in gradients] == [each.shape for each in parts]


@rests_on_it("packages/lockstep-trace/src/lockstep_trace/tracer/fingerprint.py")
def test_sums_of_integers_wrap_in_any_order() -> None:
    """Viewing floats as integers keeps their bits; int64 products and sums, index_add_ included, wrap modulo 2**64."""
    assert torch.tensor([-0.0, 1.0]).view(torch.int32).tolist() == [-(2**31), 0x3F800000]
    assert torch.tensor([1.0], dtype=torch.bfloat16).view(torch.int16).item() == 0x3F80
    numbers = torch.randint(-(2**63), 2**63 - 1, (1001,), generator=torch.Generator().manual_seed(0))
    weights = numbers.flip(0) | 1
    wanted = sum(a * b for a, b in zip(numbers.tolist(), weights.tolist(), strict=True)) % 2**64
    products = numbers * weights
    added = torch.zeros(2, dtype=torch.int64).index_add_(0, torch.arange(1001) % 2, products)
    assert [int(s) % 2**64 for s in (products.sum(), products.flip(0).sum(), added.sum())] == [wanted] * 3


@rests_on_it("packages/lockstep-trace/src/lockstep_trace/tracer/replay.py", "src/lockstep/tasks/models/chunked_loss.py")
def test_a_hook_on_a_result_replaces_its_gradient() -> None:
    """A register_hook hook on a result replaces the gradient there by its return value. autograd.grad does not touch
    .grad, and with allow_unused returns None for a weight that the result does not depend on."""
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    result = used * 3
    result.register_hook(lambda _: torch.full((2,), 5.0))
    gradient, none = torch.autograd.grad((result * 7).sum(), [used, unused], allow_unused=True)
    assert gradient.tolist() == [15.0, 15.0]
    assert none is None
    assert used.grad is None


@rests_on_it("src/lockstep/strategies/exact/step_totals.py")
def test_running_statistics_of_batch_norm() -> None:
    """In training, BatchNorm's running_mean and running_var become 0.9 times the old value plus 0.1 times the batch's
    value, with the unbiased batch variance. In eval mode they do not change."""
    values = torch.tensor([[1.0], [2.0], [6.0]])
    norm = nn.BatchNorm1d(1)
    norm(values)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert norm.running_mean.item() == pytest.approx(0.1 * 3)
    assert norm.running_var.item() == pytest.approx(0.9 + 0.1 * 7)
    before = norm.running_var.clone()
    norm.eval()(values)
    assert torch.equal(norm.running_var, before)


@rests_on_it("src/lockstep/tasks/models/unpadded.py", "src/lockstep/tasks/models/masks.py")
def test_sdpa_mask_is_none_without_padding() -> None:
    """transformers' sdpa_mask is None for causal rows without padding. With padding it is [B, 1, T, S], True where a
    token attends to another; the padding of one row masks nothing in other rows."""
    from transformers import masking_utils as masks

    sizes = {"batch_size": 2, "q_length": 3, "kv_length": 3}
    causal = masks.causal_mask_function
    assert masks.sdpa_mask(**sizes, mask_function=causal, attention_mask=None) is None
    real = torch.tensor([[True, True, False], [True, True, True]])
    mask = masks.sdpa_mask(**sizes, mask_function=causal, attention_mask=real)
    assert mask.shape == (2, 1, 3, 3)
    assert torch.equal(mask[:, 0], torch.ones(3, 3, dtype=torch.bool).tril() & real[:, None])


@pytest.mark.parametrize("padding", [True, False])
@rests_on_it("src/lockstep/tasks/models/models.py", "src/lockstep/plain/train.py")
def test_a_decoder_that_classifies_reads_the_last_token(padding: bool) -> None:
    """A classifier on a decoder reads the logits of the last token that is not pad_token_id, whatever the attention
    mask is."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForSequenceClassification(LlamaConfig(vocab_size=16, pad_token_id=0, num_labels=2, **sizes)).eval()
    ids = torch.tensor([[3, 4, 5]])
    alone = model(ids).logits
    longer = torch.tensor([[3, 4, 5, 0 if padding else 6]])
    logits = model(longer, attention_mask=torch.tensor([[1, 1, 1, 0]])).logits
    assert torch.allclose(logits, alone, atol=1e-6) is padding


@rests_on_it(
    "src/lockstep/strategies/engines/tensor_plans.py",
    "src/lockstep/training/source_weights.py",
    "src/lockstep/tasks/models/chunked_loss.py",
    "src/lockstep/tasks/models/config_checks.py",
    "src/lockstep/tasks/models/models.py",
    "src/lockstep/tasks/models/padding.py",
    "src/lockstep/tasks/models/small_models.py",
)
def test_draws_in_fork_rng_do_not_advance_the_generator() -> None:
    """Draws inside torch.random.fork_rng([]) do not advance torch's generator outside."""
    torch.manual_seed(0)
    wanted = torch.rand(3)
    torch.manual_seed(0)
    with torch.random.fork_rng([]):
        torch.manual_seed(7)
        torch.rand(5)
    assert torch.equal(torch.rand(3), wanted)


@pytest.mark.parametrize("builder", ["json", "csv", "parquet"])
@rests_on_it("src/lockstep/data/row_files.py")
def test_rows_of_files_are_in_the_order_of_the_files(builder: str, tmp_path: Path) -> None:
    """load_dataset reads data_files in the given order, not sorted by name."""
    import datasets
    import pyarrow.parquet

    files = [tmp_path / f"{name}.{builder}" for name in ("c", "a", "b")]
    for number, file in enumerate(files):
        if builder == "parquet":
            pyarrow.parquet.write_table(pa.table({"x": [number, number]}), file)
        else:
            file.write_text(f"x\n{number}\n{number}\n" if builder == "csv" else json.dumps({"x": number}) + "\n")
    rows = datasets.load_dataset(
        builder, data_files=[str(f) for f in files], split="train", cache_dir=str(tmp_path / "cache")
    )
    assert list(dict.fromkeys(rows["x"])) == [0, 1, 2]


@rests_on_it(
    "src/lockstep/data/raw_rows.py",
    "src/lockstep/data/stream.py",
    "src/lockstep/data/lm_documents.py",
    "src/lockstep/data/usable_rows.py",
)
def test_lengths_are_bytes_and_tables_are_in_order() -> None:
    """binary_length counts UTF-8 bytes, and is null for null. concat_tables and combine_chunks keep the row order, also
    for slices. numpy reads a slice's chunk from its offset."""
    lengths = pc.fill_null(pc.binary_length(pa.chunked_array([["é", None], ["abc"]])), 0).combine_chunks()
    assert np.from_dlpack(lengths).tolist() == [2, 0, 3]
    table = pa.table({"x": list(range(10))})
    whole = pa.concat_tables([table.slice(7), table.slice(2, 3)]).combine_chunks()
    assert whole.column("x").to_pylist() == [7, 8, 9, 2, 3, 4]
    assert np.from_dlpack(table.column("x").chunk(0).slice(4, 2)).tolist() == [4, 5]
